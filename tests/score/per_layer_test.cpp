// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

using namespace score_test;

namespace {

template <class Scores>
PerLayerScorer<Scores> layered(const Scores& scores, Reduction heads = Reduction::mean) {
  return PerLayerScorer<Scores>({scores, heads});
}

}  // namespace

TEST_CASE("per_layer: mean, sum and maximum of what the heads give, the same for every head",
          "[per_layer]") {
  static_assert(LayerScorer<PerLayerScorer<KeyNormParams>>);
  static_assert(!LayerScorer<KeyNormScorer>);
  for (const std::int32_t kv_heads : {1, 2, 5}) {
    MethodWorld world({.kv_heads = kv_heads, .group = 1, .sequences = 2});
    REQUIRE(world.append(0, 5) == Status::ok);
    REQUIRE(world.append(1, 50) == Status::ok);
    const Observation obs = world.observation();
    for (const Reduction how : {Reduction::mean, Reduction::sum, Reduction::max}) {
      for (std::int32_t l = 0; l < 2; ++l) {
        std::vector<double> expected;
        for (std::int32_t r = 0; r < 50; ++r) {
          std::vector<double> heads;
          for (std::int32_t h = 0; h < kv_heads; ++h) {
            heads.push_back(-norm_of(world.key(1, l, h, r)));
          }
          expected.push_back(reduce(how, heads));
        }
        const auto first = scores_in(layered(KeyNormParams{}, how), world.view(), obs, 1, l, 0);
        CHECK(error_of(first, expected) < 1e-6);
        for (std::int32_t h = 1; h < kv_heads; ++h) {
          CHECK(bits_of(scores_in(layered(KeyNormParams{}, how), world.view(), obs, 1, l, h)) ==
                bits_of(first));
        }
      }
    }
  }
}

TEST_CASE("per_layer: no bit depends on page size, page place, batch, thread or old scratch",
          "[per_layer][property]") {
  check_bits(layered(KeyDiffParams{}));
  check_bits(layered(WindowParams{.window = 4}, Reduction::max));
  check_hole(layered(KeyDiffParams{}));
  check_scratch(layered(WindowParams{}));
}

TEST_CASE(
    "per_layer: exact scores are added exactly: any order and any parts of the heads, and NaN",
    "[per_layer][property][nan]") {
  const WindowParams token{.window = 4, .kernel = 3, .sums = Sums::exact};
  check_bits(layered(token));
  check_hole(layered(token));
  check_scratch(layered(token));
  MethodWorld world({.kv_heads = 5, .group = 2});
  REQUIRE(world.append(0, 60) == Status::ok);
  Observation obs = world.observation();
  for (const bool fault : {false, true}) {
    if (fault) {  // one row of one head
      const CacheView view = world.view();
      const std::vector<float> bad(8, nan_f);
      store_row(view.k, view.key(SequenceId{0}, LayerId{0}, HeadId{3}, 11), bad.data());
    }
    std::vector<float> floating =
        scores_in(layered(WindowParams{.window = 4, .kernel = 3}), world.view(), obs, 0, 0, 0);
    const auto got = scores_in(layered(token), world.view(), obs, 0, 0, 0);
    CHECK(error_of(got, {floating.begin(), floating.end()}, Sums::exact) < 1e-6);
    CHECK(is_nan(got[11]) == fault);
    for (const std::size_t ranks : {1U, 2U, 3U}) {
      std::vector<std::vector<std::uint64_t>> units(ranks, std::vector<std::uint64_t>(60, 0));
      for (const std::int32_t h : shuffled(5, static_cast<std::uint32_t>(ranks))) {
        add_scores(scores_in(WindowScorer(token), world.view(), obs, 0, 0, h),
                   units[static_cast<std::size_t>(h) % ranks]);
      }
      std::vector<float> all;
      for (std::size_t r = 0; r < 60; ++r) {
        std::uint64_t sum = 0;
        for (const auto& rank : units) { sum += rank[r]; }
        all.push_back(exact_score_mean(sum, 5));
      }
      CHECK(bits_of(all) == bits_of(got));
    }
  }
}

TEST_CASE("per_layer: exact scores that may be above 1 are refused unless the maximum is taken",
          "[per_layer][edge]") {
  WindowParams token{.rows = Reduction::sum, .sums = Sums::exact};
  const auto text_of = [](const auto& params) -> std::string {
    try {
      params.check("who");
    } catch (const std::invalid_argument& e) { return e.what(); }
    return "";
  };
  const std::string text =
      "who: scores of heads are added exactly as probabilities, but those of window may be above "
      "1; reduce queries and query heads by mean or max, or heads by max";
  CHECK(text_of(PerLayer<WindowParams>{token}) == text);
  CHECK(text_of(PerLayer<WindowParams>{token, Reduction::sum}) == text);
  CHECK(text_of(PerLayer<WindowParams>{token, Reduction::max}).empty());
  token.sums = Sums::floating;
  CHECK(text_of(PerLayer<WindowParams>{token}).empty());
  token = {.group = Reduction::max, .sums = Sums::exact};
  CHECK(text_of(PerLayer<WindowParams>{token}).empty());
  CHECK(text_of(PerLayer<PerLayer<WindowParams>>{{token, Reduction::sum}}) ==
        "who: scores of heads are added exactly as probabilities, but those of "
        "per_layer<window> may be above 1; reduce queries and query heads by mean or max, or "
        "heads by max");
}

TEST_CASE("per_layer: a row that is NaN in one head is NaN", "[per_layer][nan]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 6) == Status::ok);
  for (const Reduction how : {Reduction::mean, Reduction::sum, Reduction::max}) {
    std::vector<float> scores{1, nan_f, 2, 3, -inf_f, nan_f, 5, 1, nan_f, 0, 1, inf_f};
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 1, 2, 6);
    obs.scores.layer_stride = 0;
    const auto got = scores_in(layered(ExternalParams{}, how), world.view(), obs, 0, 0, 1);
    for (const std::size_t r : {1U, 2U, 5U}) { CHECK(std::isnan(got[r])); }
    CHECK(got[0] == (how == Reduction::mean ? 3.0F : how == Reduction::sum ? 6.0F : 5.0F));
    CHECK(got[4] == (how == Reduction::max ? 1.0F : -inf_f));
  }
}

TEST_CASE("per_layer: heads that hold different tokens are a bad observation",
          "[per_layer][edge]") {
  const auto scorer = layered(KeyNormParams{});
  MethodWorld world({.sequences = 2, .scope = TableScope::head});
  REQUIRE(world.append(0, 12) == Status::ok);
  REQUIRE(world.append(1, 12) == Status::ok);
  const CacheView view = world.view();
  CHECK(scorer.check(view, {}) == Status::ok);
  const auto table = [&](std::int32_t s, std::int32_t l, std::int32_t h) -> SequenceState& {
    return view.states[s * view.tables_per_sequence() + view.table_of(LayerId{l}, HeadId{h})];
  };
  table(1, 1, 1).live_rows = 11;
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  table(1, 1, 1).append_row = 11;  // a hole in one head only
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  table(1, 1, 0) = table(1, 1, 1);
  CHECK(scorer.check(view, {}) == Status::ok);
  Position& position = view.positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{1}, 4);
  position = Position{40};
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  position = Position{4};
  CHECK(scorer.check(view, {}) == Status::ok);
  // A length that no table can hold is for the plan to refuse: no position is read by it.
  for (std::int32_t h = 0; h < 2; ++h) { table(0, 0, h).live_rows = 1 << 30; }
  static_cast<void>(scorer.check(view, {}));
}

TEST_CASE("per_layer: what the inner scorer refuses is refused", "[per_layer][edge]") {
  MethodWorld world({});
  CHECK(layered(WindowParams{}).check(world.view(), {}) == Status::bad_observation);
}
