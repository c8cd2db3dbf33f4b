// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/output_norm_params.hpp>
#include <kvtrim/score/window_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("output_norm_params: epsilon is 1e-4F unless given, the scores are the method's own",
          "[output_norm]") {
  using P = OutputNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 1e-4F);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}
