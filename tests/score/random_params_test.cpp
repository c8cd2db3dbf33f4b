// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/random_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("random_params: the seed is 0 unless given", "[random]") {
  STATIC_REQUIRE(std::is_aggregate_v<RandomParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<RandomParams>);
  STATIC_REQUIRE(RandomParams{}.seed == 0);
}
