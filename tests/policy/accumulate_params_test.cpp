// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/accumulate_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("accumulate_params: the defaults are the paper's plain sums", "[accumulate]") {
  constexpr AccumulateParams p;
  STATIC_REQUIRE(p.decay == 1.0F);
  STATIC_REQUIRE(!p.squared);
  STATIC_REQUIRE(!p.age_normalised);
  STATIC_REQUIRE(std::is_trivially_copyable_v<AccumulateParams>);
  STATIC_REQUIRE(std::is_aggregate_v<AccumulateParams>);
}
