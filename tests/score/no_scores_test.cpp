// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/no_scores.hpp>
#include <kvtrim/score/scorer.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("no_scores: is empty, and what policies by position alone return", "[no_scores]") {
  STATIC_REQUIRE(std::is_empty_v<NoScores>);
  STATIC_REQUIRE(std::is_same_v<decltype(StreamingSink().scorer()), NoScores>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<NoScores>::type, NoScorer>);
  STATIC_REQUIRE(!Scorer<NoScores>);
}
