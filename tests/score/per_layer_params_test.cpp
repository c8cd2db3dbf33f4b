// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/key_diff_params.hpp>
#include <kvtrim/score/per_layer_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("per_layer_params: the mean over the KV heads unless told otherwise", "[per_layer]") {
  using P = PerLayer<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.heads == Reduction::mean);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
  STATIC_REQUIRE(std::is_same_v<decltype(PerLayer<KeyDiffParams>{}.scores), KeyDiffParams>);
}
