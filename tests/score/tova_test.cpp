// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/tova.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

using namespace score_test;

namespace {

const TovaScorer scorer(TovaParams{});

// Mean over all query heads of the softmax row of the last query, over all keys.
std::vector<double> reference(const MethodWorld& w, std::int32_t s, std::int32_t l, std::int32_t) {
  const MethodSetup& setup = w.setup();
  const std::int32_t tokens =
      const_cast<MethodWorld&>(w).cache().live_rows(SequenceId{s}, LayerId{l}, HeadId{0});
  std::vector<double> out(at(tokens), 0.0);
  const std::int32_t heads = setup.kv_heads * setup.group;
  for (std::int32_t head = 0; head < heads; ++head) {
    const auto query = w.query(s, l, head, tokens - 1);
    std::vector<double> row;
    for (std::int32_t p = 0; p < tokens; ++p) {
      const auto key = w.key(s, l, head / setup.group, p);
      double dot = 0;
      for (std::size_t d = 0; d < key.size(); ++d) {
        dot += static_cast<double>(key[d]) * static_cast<double>(query[d]);
      }
      row.push_back(std::exp(dot / std::sqrt(static_cast<double>(setup.dim))));
    }
    const double sum = std::accumulate(row.begin(), row.end(), 0.0);
    for (std::size_t p = 0; p < row.size(); ++p) { out[p] += row[p] / sum / heads; }
  }
  return out;
}

}  // namespace

TEST_CASE("tova: equals a double reference for every size and dtype, the last row included",
          "[tova]") {
  static_assert(LayerScorer<TovaScorer>);
  check_reference(scorer, 5e-6, reference);
}

TEST_CASE("tova: no bit depends on page size, page place, batch, thread or old scratch",
          "[tova][property]") {
  check_bits(scorer);
  check_hole(scorer);
  check_scratch(scorer);
}

TEST_CASE("tova: probabilities add up to 1", "[tova][property]") {
  MethodWorld world({.max_rows = 300});
  REQUIRE(world.append(0, 300) == Status::ok);
  const auto x = scores_in(scorer, world.view(), world.observation(), 0, 1, 0);
  CHECK(std::abs(std::accumulate(x.begin(), x.end(), 0.0) - 1) < 1e-5);
}

TEST_CASE("tova: a key that is not finite in one head makes its row NaN, the others stay finite",
          "[tova][nan]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 20) == Status::ok);
  std::memcpy(world.view().key(SequenceId{0}, LayerId{0}, HeadId{1}, 6), &nan_f, 4);
  const auto x = scores_in(scorer, world.view(), world.observation(), 0, 0, 0);
  for (std::int32_t r = 0; r < 20; ++r) { CHECK(std::isnan(x[at(r)]) == (r == 6)); }
}

TEST_CASE("tova: no queries, or heads that are not a multiple, are a bad observation",
          "[tova][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 20) == Status::ok);
  CHECK(scorer.check(world.view(), {}) == Status::bad_observation);
  Observation obs = world.observation();
  obs.queries.query_heads = 5;
  CHECK(scorer.check(world.view(), obs) == Status::bad_observation);
}
