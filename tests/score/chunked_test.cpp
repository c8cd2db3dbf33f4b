// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/chunked.hpp>

#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "kv_fixture.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

using OfGiven = ChunkedScorer<ExternalParams>;
static_assert(LayerScorer<OfGiven>);
static_assert(LayerScorer<ChunkedScorer<WindowParams>>);

constexpr std::int32_t row_capacity = 128;

// Token scores [kv head][row] for every sequence alike.
struct Given {
  Given(std::int32_t heads, std::int32_t rows, std::uint32_t seed) : kv_heads(heads) {
    std::mt19937 rng(seed);
    scores.assign(at(heads * row_capacity), nan_f);
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t r = 0; r < rows; ++r) {
        of(h, r) = static_cast<float>(static_cast<std::int32_t>(rng() % 2001) - 1000) / 64;
      }
    }
  }
  float& of(std::int32_t h, std::int32_t r) { return scores[at(h * row_capacity + r)]; }
  Observation observation() {
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 1, kv_heads, row_capacity);
    obs.scores.sequence_stride = 0;
    return obs;
  }
  std::int32_t kv_heads;
  std::vector<float> scores;
};

// Means over chunks, summed over the heads; `positions` by row.
std::vector<double> reference(Given& g,
                              const std::vector<std::int32_t>& positions,
                              std::int32_t chunk) {
  std::vector<double> out;
  for (const std::int32_t mine : positions) {
    double sum = 0;
    std::int32_t count = 0;
    for (std::size_t r = 0; r < positions.size(); ++r) {
      if (positions[r] / chunk != mine / chunk) { continue; }
      ++count;
      for (std::int32_t h = 0; h < g.kv_heads; ++h) {
        sum += static_cast<double>(g.of(h, static_cast<std::int32_t>(r)));
      }
    }
    out.push_back(sum / count);
  }
  return out;
}

std::vector<std::int32_t> counted(std::int32_t n) {
  std::vector<std::int32_t> out(at(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

std::vector<float> scores_of(KvCache& c, std::int32_t chunk, Given& g, std::int32_t h = 0) {
  return score_test::scores_of(
      OfGiven({{}, chunk}), c.view(), c.sequence(), HeadId{h}, g.observation());
}

}  // namespace

TEST_CASE("chunked: a chunk's mean over its rows and KV heads is the score of each of its rows",
          "[chunked]") {
  for (const std::int32_t tokens : {1, 19, 20, 21, 67}) {
    const KvData d = make_kv(3, 4, 4, tokens, 1);
    KvCache c(d, {.others = 1});
    Given g(3, tokens, static_cast<std::uint32_t>(tokens));
    for (const std::int32_t chunk : {1, 7, 20, 100}) {
      for (std::int32_t h = 0; h < 3; ++h) {
        INFO("tokens " << tokens << ", chunk " << chunk << ", head " << h);
        CHECK(error_of(scores_of(c, chunk, g, h), reference(g, counted(tokens), chunk)) < 1e-6);
      }
    }
  }
}

TEST_CASE("chunked: chunks follow positions, whatever is left of them and wherever it lies",
          "[chunked][edge]") {
  const KvData d = make_kv(2, 4, 4, 40, 2);
  KvCache c(d);
  CacheView view = c.view();
  auto positions = counted(40);
  for (std::int32_t r = 0; r < 40; ++r) { positions[at(r)] = r * 5 / 2 + (r > 20 ? 31 : 0); }
  for (std::int32_t h = 0; h < 2; ++h) {
    for (std::int32_t r = 0; r < 40; ++r) {
      view.positions.at<Position>(c.sequence(), LayerId{0}, HeadId{h}, r) =
          Position{positions[at(r)]};
    }
  }
  Given g(2, 40, 3);
  CHECK(error_of(scores_of(c, 20, g), reference(g, positions, 20)) < 1e-6);

  const auto order = shuffled(40, 4);
  KvCache mixed(d, {.order = order});
  CHECK(error_of(scores_of(mixed, 7, g), reference(g, order, 7)) < 1e-6);
}

TEST_CASE("chunked: a hole is in no chunk and scores 0", "[chunked][edge]") {
  const KvData d = make_kv(2, 4, 4, 30, 5);
  KvCache c(d);
  c.view().states[0].append_row = 8;
  c.view().states[0].live_rows = 29;
  Given g(2, 30, 6);
  Given rest(2, 0, 0);
  std::vector<std::int32_t> positions;
  for (std::int32_t r = 0; r < 30; ++r) {
    if (r == 8) { continue; }
    for (std::int32_t h = 0; h < 2; ++h) {
      rest.of(h, static_cast<std::int32_t>(positions.size())) = g.of(h, r);
    }
    positions.push_back(r);
  }
  auto expected = reference(rest, positions, 5);
  expected.insert(expected.begin() + 8, 0.0);
  CHECK(error_of(scores_of(c, 5, g), expected) < 1e-6);
}

TEST_CASE("chunked: one row that scores NaN in one head makes its chunk NaN, no other",
          "[chunked][nan]") {
  const KvData d = make_kv(2, 4, 4, 40, 7);
  KvCache c(d);
  Given g(2, 40, 8);
  g.of(1, 13) = nan_f;
  const auto got = scores_of(c, 10, g);
  for (std::int32_t r = 0; r < 40; ++r) { CHECK(std::isnan(got[at(r)]) == (r / 10 == 1)); }
}

TEST_CASE("chunked: no bit depends on page size, page place, batch or old scratch",
          "[chunked][property]") {
  const KvData d = make_kv(2, 16, 4, 250, 9);
  std::vector<std::uint32_t> expected;
  for_each_place(d, [&](KvCache& c) {
    const auto got = bits_of(score_test::scores_of(ChunkedScorer<KeyDiffParams>({}),
                                                   c.view(),
                                                   c.sequence(),
                                                   HeadId{1},
                                                   {},
                                                   expected.empty() ? 0x7F : 0));
    if (expected.empty()) { expected = got; }
    CHECK(got == expected);
  });
}

TEST_CASE("chunked: heads that hold different rows, or nothing to score, are refused",
          "[chunked][edge]") {
  const KvData d = make_kv(2, 4, 4, 12, 10);
  KvCache c(d, {.scope = TableScope::head});
  CacheView view = c.view();
  Given g(2, 12, 11);
  const OfGiven scorer({});
  CHECK(scorer.check(view, g.observation()) == Status::ok);
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  Position& moved = view.positions.at<Position>(c.sequence(), LayerId{0}, HeadId{1}, 11);
  moved = Position{12};
  CHECK(scorer.check(view, g.observation()) == Status::bad_observation);
  moved = Position{11};
  view.states[1].live_rows = 11;
  CHECK(scorer.check(view, g.observation()) == Status::bad_observation);
}

TEST_CASE("chunked: scratch_bytes holds the token score's and is no less for more rows",
          "[chunked]") {
  PlanShape shape;
  shape.max_rows = 100;
  shape.head_dim = 16;
  const ChunkedScorer<KeyDiffParams> scorer({});
  const std::size_t less = scorer.scratch_bytes(shape);
  CHECK(less > KeyDiffScorer(KeyDiffParams{}).scratch_bytes(shape));
  shape.max_rows = 200;
  CHECK(scorer.scratch_bytes(shape) > less);
}
