// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/external_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("external_params: there is nothing to set", "[external]") {
  STATIC_REQUIRE(std::is_empty_v<ExternalParams>);
  STATIC_REQUIRE(std::is_aggregate_v<ExternalParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<ExternalParams>);
}
