// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/q_filter_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("q_filter_params: there is nothing to set", "[q_filter]") {
  STATIC_REQUIRE(std::is_empty_v<QFilterParams>);
  STATIC_REQUIRE(std::is_aggregate_v<QFilterParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<QFilterParams>);
}
