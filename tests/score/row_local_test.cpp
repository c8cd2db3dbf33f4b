// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace score_test;

namespace {

template <class Scores>
Status score_new(const Scores& scores, MethodWorld& world, std::int32_t s, std::int32_t rows) {
  const CacheView view = world.view();
  const Observation obs = world.observation();
  std::vector<std::byte> scratch(score_new_rows_bytes(scores, plan_shape(view, obs), rows));
  return score_new_rows(scores, view, SequenceId{s}, rows, obs, view.score_sums, scratch);
}

// The plane's bits of the live rows of a head, and those of scoring all rows anew.
template <class Scores>
void check_plane(const Scores& scores, MethodWorld& world, std::int32_t s) {
  const typename ScorerOf<Scores>::type scorer(scores);
  const CacheView view = world.view();
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) {
      auto full = scores_in(scorer, view, world.observation(), s, l, h);
      std::vector<float> plane(full.size());
      for (std::size_t r = 0; r < full.size(); ++r) {
        plane[r] = view.score_sums.at<float>(
            SequenceId{s}, LayerId{l}, HeadId{h}, static_cast<std::int32_t>(r));
      }
      const std::int32_t hole = view.state(SequenceId{s}, LayerId{l}, HeadId{h}).append_row;
      if (hole >= 0) { plane[at(hole)] = full[at(hole)]; }
      REQUIRE(bits_of(plane) == bits_of(full));
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("row_local: scores made once per row equal recomputed ones, over many evictions",
                   "[row_local][property]",
                   KeyNormParams,
                   QFilterParams,
                   RandomParams,
                   ValueNorm<KeyNormParams>) {
  static_assert(RowLocalScorer<typename ScorerOf<TestType>::type>);
  const TestType scores{};
  for (const TableScope scope : {TableScope::group, TableScope::head}) {
    for (const Removal removal :
         {Removal::stable_pack, Removal::overwrite_slot, Removal::fill_holes}) {
      const MethodSetup setup{.page_size = 3, .sequences = 2, .scope = scope};
      MethodWorld carried(setup);
      MethodWorld anew(setup);
      test::Random random(7);
      for (std::int32_t step = 0; step < 60; ++step) {
        for (std::int32_t s = 0; s < 2; ++s) {
          const std::int32_t n = step == 0 ? 20 + 9 * s : step % 7 == 0 ? random.below(4) : 1;
          REQUIRE(carried.append(s, n) == Status::ok);
          REQUIRE(anew.append(s, n) == Status::ok);
          REQUIRE(score_new(scores, carried, s, n) == Status::ok);
          check_plane(scores, carried, s);
        }
        Observation obs;
        obs.scores = carried.view().score_sums;
        REQUIRE(carried.evict(External({.budget = 17, .recent = 1}), obs, {.removal = removal})
                    .status == Status::ok);
        REQUIRE(anew.evict(TopRows<TestType>({.budget = 17, .recent = 1}),
                           anew.observation(),
                           {.removal = removal})
                    .status == Status::ok);
        for (std::int32_t s = 0; s < 2; ++s) {
          REQUIRE(carried.kept(s) == anew.kept(s));
          check_plane(scores, carried, s);
        }
      }
    }
  }
}

TEST_CASE("row_local: rows that are not new keep what the plane holds", "[row_local]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 20) == Status::ok);
  const SequencePlane plane = world.view().score_sums;
  for (std::int32_t r = 0; r < 20; ++r) {
    plane.at<float>(SequenceId{0}, LayerId{1}, HeadId{0}, r) = 77;
  }
  REQUIRE(score_new(KeyNormParams{}, world, 0, 3) == Status::ok);
  for (std::int32_t r = 0; r < 20; ++r) {
    CHECK((plane.at<float>(SequenceId{0}, LayerId{1}, HeadId{0}, r) == 77) == (r < 17));
  }
  REQUIRE(score_new(KeyNormParams{}, world, 0, 0) == Status::ok);     // none are new
  REQUIRE(score_new(KeyNormParams{}, world, 0, 1000) == Status::ok);  // all are
  check_plane(KeyNormParams{}, world, 0);
  CHECK(plane.at<float>(SequenceId{0}, LayerId{1}, HeadId{0}, 0) < 0);
}

TEST_CASE("row_local: scores of a fork are its own", "[row_local]") {
  MethodWorld world({.sequences = 2});
  REQUIRE(world.append(0, 21) == Status::ok);
  REQUIRE(score_new(KeyNormParams{}, world, 0, 21) == Status::ok);
  world.cache().destroy(SequenceId{1});
  REQUIRE(world.cache().try_fork(SequenceId{0}) == SequenceId{1});
  REQUIRE(world.append(1, 2) == Status::ok);
  REQUIRE(score_new(KeyNormParams{}, world, 1, 2) == Status::ok);
  check_plane(KeyNormParams{}, world, 0);
  check_plane(KeyNormParams{}, world, 1);
}

TEST_CASE("row_local: no plane, a plane of another type, too little memory: nothing is written",
          "[row_local][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 20) == Status::ok);
  const CacheView view = world.view();
  const Observation obs = world.observation();
  const QFilterParams scores;
  std::vector<std::byte> scratch(score_new_rows_bytes(scores, plan_shape(view, obs), 20));
  const auto run = [&](const SequencePlane& plane, std::size_t bytes, const Observation& o) {
    return score_new_rows(
        scores, view, SequenceId{0}, 20, o, plane, std::span(scratch).first(bytes));
  };
  const float before = view.score_sums.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, 19);
  CHECK(run({}, scratch.size(), obs) == Status::bad_observation);
  SequencePlane wide = view.score_sums;
  wide.element_bytes = 8;
  CHECK(run(wide, scratch.size(), obs) == Status::bad_observation);
  CHECK(run(view.score_sums, scratch.size(), {}) == Status::bad_observation);  // no filters
  CHECK(run(view.score_sums, scratch.size() - 1, obs) == Status::workspace_too_small);
  CHECK(view.score_sums.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, 19) == before);
  CHECK(run(view.score_sums, scratch.size(), obs) == Status::ok);
  CHECK(view.score_sums.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, 19) != before);
}

TEST_CASE("row_local: a scorer that depends on other rows is not row-local", "[row_local]") {
  STATIC_REQUIRE(!RowLocalScorer<KeyDiffScorer>);
  STATIC_REQUIRE(!RowLocalScorer<WindowScorer>);
  STATIC_REQUIRE(!RowLocalScorer<TovaScorer>);
  STATIC_REQUIRE(!RowLocalScorer<AccumulatedScorer>);
}
