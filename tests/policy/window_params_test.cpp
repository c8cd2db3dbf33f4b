// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/window_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("window_params: the defaults are those of the design", "[window]") {
  constexpr WindowParams p;
  STATIC_REQUIRE(p.window == 32);
  STATIC_REQUIRE(p.kernel == 5);
  STATIC_REQUIRE(p.rows == Reduction::mean);
  STATIC_REQUIRE(p.group == Reduction::mean);
  STATIC_REQUIRE(p.pooling == Pooling::average);
  STATIC_REQUIRE(p.columns == PoolColumns::candidates);
  STATIC_REQUIRE(std::is_trivially_copyable_v<WindowParams>);
  STATIC_REQUIRE(std::is_aggregate_v<WindowParams>);
}
