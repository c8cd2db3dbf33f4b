// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/tova_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("tova_params: there is nothing to set", "[tova]") {
  STATIC_REQUIRE(std::is_empty_v<TovaParams>);
  STATIC_REQUIRE(std::is_aggregate_v<TovaParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<TovaParams>);
}
