// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/accumulated.hpp>

#include <kvtrim/observe/accumulate.hpp>

#include "catch.hpp"
#include "score_fixture.hpp"

#include <cstdint>
#include <vector>

using namespace score_test;

TEST_CASE("accumulated: age normalisation divides by the queries that saw the row",
          "[accumulated]") {
  PagedCache cache({.pages = 1, .page_size = 4, .key_dim = 1, .scores = true});
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_extend(SequenceId{0}, 4) == Status::ok);
  const CacheView view = cache.view();
  const std::vector<float> p{8.0F, 6.0F, 4.0F, 3.0F};
  accumulate_probabilities({}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, {p.data(), 1, 0});
  const auto totals_of = [&](const AccumulateParams& params) {
    return scores_of(AccumulatedScorer(params), view, SequenceId{0}, HeadId{0}, {});
  };
  CHECK(totals_of({.age_normalised = true}) == std::vector<float>{2.0F, 2.0F, 2.0F, 3.0F});
  CHECK(totals_of({}) == p);
  // By position, not by row; rows at or beyond the next position (an engine's padding) are not divided by 0.
  view.states[0].next_position = 12;
  const std::int32_t positions[] = {4, 0, 11, 12};
  for (std::int32_t r = 0; r < 4; ++r) {
    view.positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = Position{positions[r]};
  }
  CHECK(totals_of({.age_normalised = true}) == std::vector<float>{1.0F, 0.5F, 4.0F, 3.0F});
}

TEST_CASE("accumulated: without score planes there is nothing to rank by", "[accumulated][edge]") {
  PagedCache without({.pages = 1, .page_size = 4, .key_dim = 1});
  const AccumulatedScorer scorer({});
  CHECK(scorer.check(without.view(), {}) == Status::bad_observation);
  PagedCache with({.pages = 1, .page_size = 4, .key_dim = 1, .scores = true});
  CHECK(scorer.check(with.view(), {}) == Status::ok);
  CHECK(scorer.scratch_bytes({}) == 0);
}
