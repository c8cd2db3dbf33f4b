// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/q_filter.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

const QFilterScorer scorer(QFilterParams{});

// Minus filter . key; MethodWorld's filters are its numbers of kind 3.
std::vector<double> reference(const MethodWorld& w,
                              std::int32_t s,
                              std::int32_t l,
                              std::int32_t h) {
  const auto filter = MethodWorld::numbers(3, 0, l, h, 0, w.setup().dim);
  std::vector<double> out;
  const std::int32_t tokens =
      const_cast<MethodWorld&>(w).cache().live_rows(SequenceId{s}, LayerId{l}, HeadId{h});
  for (std::int32_t p = 0; p < tokens; ++p) {
    const auto key = w.key(s, l, h, p);
    double dot = 0;
    for (std::size_t d = 0; d < key.size(); ++d) {
      dot += static_cast<double>(key[d]) * static_cast<double>(filter[d]);
    }
    out.push_back(-dot);
  }
  return out;
}

}  // namespace

TEST_CASE("q_filter: equals a double reference for every size and dtype", "[q_filter]") {
  check_reference(scorer, 1e-6, reference);
}

TEST_CASE("q_filter: no bit depends on page size, page place, batch, thread or old scratch",
          "[q_filter][property]") {
  check_bits(scorer);
  check_ranges(scorer);
  check_hole(scorer);
  check_scratch(scorer);
}

TEST_CASE("q_filter: without filters, or with filters of another dim, the observation is bad",
          "[q_filter][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 4) == Status::ok);
  Observation obs = world.observation();
  CHECK(scorer.check(world.view(), obs) == Status::ok);
  obs.filters.dim = 7;
  CHECK(scorer.check(world.view(), obs) == Status::bad_observation);
  obs.filters.dim = 9;
  CHECK(scorer.check(world.view(), obs) == Status::bad_observation);
  obs.filters = {};
  CHECK(scorer.check(world.view(), obs) == Status::bad_observation);
  obs = world.observation();
  CacheView view = world.view();
  view.k.dtype = DType::i8;
  CHECK(scorer.check(view, obs) == Status::bad_observation);
}

TEST_CASE(
    "q_filter: a key that is not finite is NaN alone, a filter that is not makes its head NaN",
    "[q_filter][nan]") {
  MethodWorld world({.bad = {4, 11}});
  REQUIRE(world.append(0, 20) == Status::ok);
  Observation obs = world.observation();
  const auto some = scores_in(scorer, world.view(), obs, 0, 1, 1);
  for (std::int32_t r = 0; r < 20; ++r) { CHECK(std::isnan(some[at(r)]) == (r == 4 || r == 11)); }
  std::vector<float> filters(at(2 * 2 * 8), 1.0F);
  filters[at((1 * 2 + 1) * 8 + 3)] = nan_f;
  obs.filters.data = filters.data();
  for (const float x : scores_in(scorer, world.view(), obs, 0, 1, 1)) { CHECK(std::isnan(x)); }
  CHECK(!std::isnan(scores_in(scorer, world.view(), obs, 0, 1, 0)[0]));
}
