// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/output_norm_params.hpp>
#include <kvtrim/score/window_params.hpp>

#include "catch.hpp"

#include <limits>
#include <type_traits>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("output_norm_params: epsilon is 1e-4F unless given, the scores are the method's own",
          "[output_norm]") {
  using P = OutputNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 1e-4F);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}

TEST_CASE("output_norm_params: check speaks for epsilon and for the scores inside",
          "[output_norm][edge]") {
  using P = OutputNorm<OutputNorm<WindowParams>>;
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
