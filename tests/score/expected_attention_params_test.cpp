// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/expected_attention_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

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
