// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/rkv_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("rkv_params: the paper's values, and the code's by name", "[rkv]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<RKVParams>);
  constexpr RKVParams paper;
  STATIC_REQUIRE(paper.window == 8);
  STATIC_REQUIRE(paper.kernel == 7);
  STATIC_REQUIRE(paper.lambda == 0.1F);
  STATIC_REQUIRE(paper.threshold == 0.5F);
  STATIC_REQUIRE(paper.group == RKVGroup::probabilities);
  constexpr RKVParams code = RKVParams::authors_code();
  STATIC_REQUIRE(code.window == 8);
  STATIC_REQUIRE(code.kernel == 7);
  STATIC_REQUIRE(code.lambda == 0.07F);
  STATIC_REQUIRE(code.group == RKVGroup::logits);
}
