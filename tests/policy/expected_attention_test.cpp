// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/expected_attention.hpp>

#include "catch.hpp"

#include <limits>
#include <string>
#include <type_traits>

using namespace kvtrim;

namespace {
ExpectedAttention with(const ExpectedAttentionParams& scores) {
  ExpectedAttention::Params p;
  p.scores = scores;
  return ExpectedAttention(p);
}
}  // namespace

TEST_CASE("expected_attention: four sinks and no window are protected", "[expected_attention]") {
  const ExpectedAttention policy;
  CHECK(ExpectedAttention::name == "expected");
  DemandInput in;
  in.live = 3000;
  const Demand demand = policy.demand(in);
  CHECK(demand.keep == 1024);
  CHECK(demand.protection.sinks == 4);
  CHECK(demand.protection.recent == 0);
}

TEST_CASE("expected_attention: parameters out of range are refused by name and value",
          "[expected_attention][edge]") {
  ExpectedAttentionParams p;
  p.sinks = -1;
  CHECK_THROWS_WITH(
      with(p),
      "kvtrim::ExpectedAttention: scores.sinks -1 must be at least 0 (scores.sinks -1, "
      "scores.future 512)");
  p = {};
  p.future = 0;
  CHECK_THROWS_WITH(
      with(p),
      "kvtrim::ExpectedAttention: scores.future 0 must be at least 1 (scores.sinks 4, "
      "scores.future 0)");
  for (const float bad :
       {-0.5F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    p = {};
    p.epsilon = bad;
    CHECK_THROWS_AS(with(p), std::invalid_argument);
    p = {};
    p.scale = bad;
    CHECK_THROWS_AS(with(p), std::invalid_argument);
  }
  p = {};
  p.epsilon = -0.5F;
  CHECK_THROWS_WITH(with(p),
                    "kvtrim::ExpectedAttention: scores.epsilon -0.5 must be at least 0 and finite");
  p = {};
  p.rope.kind = RopeKind::alibi;
  p.rope.dim = 3;
  CHECK_THROWS_WITH(with(p),
                    "kvtrim::ExpectedAttention: scores.rope.kind 3 must be 0 (fixed frequencies), "
                    "scores.rope.dim 3 even and at least 0, scores.rope.offset 0 at least 0");
  ExpectedAttention::Params few;
  few.budget = 3;
  CHECK_THROWS_WITH(ExpectedAttention(few),
                    "kvtrim::ExpectedAttention: budget 3 must be at least sinks 4 + "
                    "recent 0");
}

TEST_CASE("expected_attention_params: the defaults are kvpress's", "[expected_attention]") {
  STATIC_REQUIRE(std::is_aggregate_v<ExpectedAttentionParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<ExpectedAttentionParams>);
  constexpr ExpectedAttentionParams p;
  STATIC_REQUIRE(p.sinks == 4);
  STATIC_REQUIRE(p.future == 512);
  STATIC_REQUIRE(p.epsilon == 0);
  STATIC_REQUIRE(p.covariance);
  STATIC_REQUIRE(p.value_norm);
  STATIC_REQUIRE(p.rope.dim == 0);
}
