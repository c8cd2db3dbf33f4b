// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/value_norm_params.hpp>
#include <kvtrim/score/window_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("value_norm_params: epsilon is 0 unless given, the scores are the method's own",
          "[value_norm]") {
  using P = ValueNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 0);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}
