// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/value_norm_params.hpp>
#include <kvtrim/score/window_params.hpp>

#include "catch.hpp"

#include <limits>
#include <type_traits>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("value_norm_params: epsilon is 0 unless given, the scores are the method's own",
          "[value_norm]") {
  using P = ValueNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 0);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}

TEST_CASE("value_norm_params: check speaks for epsilon and for the scores inside",
          "[value_norm][edge]") {
  using P = ValueNorm<ValueNorm<WindowParams>>;
  CHECK_NOTHROW(P{}.check("x"));
  P p;
  p.epsilon = -2;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: epsilon -2"));
  p = {};
  p.scores.epsilon = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("epsilon inf"));
  p = {};
  p.scores.scores.window = 0;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: scores.window 0"));
}
