// SPDX-License-Identifier: Apache-2.0
#include "score_fixture.hpp"

#include <kvtrim/score/window.hpp>
#include <kvtrim/score/window_probabilities.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace score_test;

namespace {

// The probabilities of a KV head as an engine holds them, with gaps between heads and between queries.
struct Shown {
  std::int32_t rows, votes;
  std::vector<float> data;
  WindowProbabilities probabilities;

  Shown(const Probabilities3& p, std::int32_t row_count, std::int32_t vote_count)
      : rows(row_count), votes(vote_count) {
    const std::int64_t vote_stride = rows + 3, head_stride = votes * vote_stride + 5;
    data.assign(p.size() * at(head_stride), 77.0F);
    for (std::size_t g = 0; g < p.size(); ++g) {
      for (std::size_t i = 0; i < at(votes); ++i) {
        std::transform(p[g][i].begin(),
                       p[g][i].end(),
                       data.begin() + static_cast<std::ptrdiff_t>(g) * head_stride +
                           static_cast<std::ptrdiff_t>(i) * vote_stride,
                       [](double x) { return static_cast<float>(x); });
      }
    }
    probabilities = {
        data.data(), static_cast<std::int32_t>(p.size()), votes, head_stride, vote_stride};
  }
  std::vector<float> score(const WindowParams& params) const {
    std::vector<float> scratch(at(rows)), out(at(rows), 99.0F);
    score_window(params, probabilities, scratch, out);
    return out;
  }
};

}  // namespace

TEST_CASE(
    "window_probabilities: every reduction and pooling equals a double reference and WindowScorer",
    "[window_probabilities][property]") {
  constexpr Reduction reductions[] = {Reduction::mean, Reduction::sum, Reduction::max};
  constexpr std::int32_t window = 7;
  std::int32_t compared = 0;
  for (const std::int32_t group : {1, 3, 8}) {
    for (const std::int32_t tokens : {5, 7, 8, 21, 60, 101}) {
      const Data d = make_data(2, group, 16, tokens, static_cast<std::uint32_t>(tokens + group));
      const std::int32_t first = std::max(0, tokens - window);
      const Head p = head_of(d, 1, first, tokens - first);
      const Probabilities3 probabilities = probabilities_of(p);
      const Shown shown(probabilities, tokens, tokens - first);
      TestCache cache(d);
      Queries queries(d, first, tokens - first, LseForm::natural);
      Observation obs;
      obs.queries = queries.block;
      for (const Reduction rows : reductions) {
        for (const Reduction heads : reductions) {
          for (const Pooling pooling : {Pooling::average, Pooling::max}) {
            for (const PoolColumns columns : {PoolColumns::candidates, PoolColumns::all_columns}) {
              const WindowParams params{window, 5, rows, heads, pooling, columns};
              const std::vector<float> got = shown.score(params);
              CHECK(error_of(got, window_scores(p, probabilities, params)) < 1e-5);
              const std::vector<float> scorer = score_test::scores_of(
                  WindowScorer(params), cache.view(), cache.sequence(), HeadId{1}, obs);
              for (std::size_t r = 0; r < got.size(); ++r) {
                CHECK(static_cast<double>(got[r]) ==
                      Catch::Approx(static_cast<double>(scorer[r])).margin(1e-5));
              }
              ++compared;
            }
          }
        }
      }
    }
  }
  CHECK(compared == 3 * 6 * 36);
}

TEST_CASE(
    "window_probabilities: the window's own rows score only if asked for, and NaN stays in its row",
    "[window_probabilities][nan]") {
  const Data d = make_data(1, 2, 8, 12, 3);
  const Probabilities3 probabilities = probabilities_of(head_of(d, 0, 8, 4));
  Shown shown(probabilities, 12, 4);
  WindowParams params{.window = 4, .kernel = 1, .rows = Reduction::max};
  std::vector<float> scores = shown.score(params);
  CHECK(std::count(scores.begin(), scores.end(), 0.0F) == 4);
  params.own_columns = true;
  scores = shown.score(params);
  CHECK(std::count(scores.begin(), scores.end(), 0.0F) == 0);
  shown.data[2] = nan_f;
  scores = shown.score({.window = 4, .kernel = 1});
  for (std::size_t r = 0; r < 12; ++r) { CHECK(std::isnan(scores[r]) == (r == 2)); }
}
