// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/decorators.hpp>

#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/page_accumulate.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::MethodWorld;

namespace {

template <class Scores>
std::vector<float> scores_of(const Scores& scores,
                             MethodWorld& world,
                             std::int32_t l,
                             std::int32_t h) {
  const typename ScorerOf<Scores>::type scorer(scores);
  const CacheView view = world.view();
  const Observation obs = world.observation();
  REQUIRE(scorer.check(view, obs) == Status::ok);
  std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
  std::vector<float> out(
      static_cast<std::size_t>(view.live_rows(SequenceId{0}, LayerId{l}, HeadId{h})));
  scorer.score({view, SequenceId{0}, LayerId{l}, HeadId{h}}, obs, scratch, out);
  return out;
}

}  // namespace

TEST_CASE("decorators: names say what is decorated, defaults are the method's", "[decorators]") {
  STATIC_REQUIRE(TopRows<PerLayer<KeyDiffParams>>::name == "per_layer<keydiff>");
  STATIC_REQUIRE(TopRows<ValueNorm<KeyNormParams>>::name == "value_norm<keynorm>");
  STATIC_REQUIRE(TopRows<OutputNorm<PerLayer<RandomParams>>>::name ==
                 "output_norm<per_layer<random>>");
  STATIC_REQUIRE(TopRows<ValueNorm<TovaParams>>().params().recent == 1);
  STATIC_REQUIRE(PerLayer<KeyDiffParams>::title == "kvtrim::PerLayer of kvtrim::KeyDiff");
}

TEST_CASE("decorators: an epsilon out of range is named", "[decorators][edge]") {
  using Value = TopRows<ValueNorm<RandomParams>>;
  using Output = TopRows<OutputNorm<RandomParams>>;
  CHECK_NOTHROW(Value({.scores = {.epsilon = 0}}));
  CHECK_NOTHROW(Value({.scores = {.epsilon = 2}}));
  CHECK_THROWS_WITH(Value({.scores = {.epsilon = -0.5F}}),
                    ContainsSubstring("kvtrim::ValueNorm of kvtrim::Random: epsilon -0.5"));
  CHECK_THROWS_WITH(Output({.scores = {.epsilon = -1}}), ContainsSubstring("epsilon -1"));
  CHECK_THROWS_AS(Output({.scores = {.epsilon = std::nanf("")}}), std::invalid_argument);
  CHECK_THROWS_AS(Output({.scores = {.epsilon = std::numeric_limits<float>::infinity()}}),
                  std::invalid_argument);
  CHECK_THROWS_WITH(Value({.budget = 3, .sinks = 2, .recent = 2}),
                    ContainsSubstring("kvtrim::ValueNorm of kvtrim::Random: budget 3"));
}

TEST_CASE("decorators: SnapKV's scores can be decorated, and what is wrong with them is named",
          "[decorators][edge]") {
  using Snap = TopRows<ValueNorm<WindowParams>>;
  STATIC_REQUIRE(Snap().params().recent == 32);
  STATIC_REQUIRE(Snap::name == "value_norm<window>");
  const auto make = [](std::int32_t window, std::int32_t kernel, std::int64_t recent) {
    return Snap({.budget = 50,
                 .recent = recent,
                 .scores = {.scores = {.window = window, .kernel = kernel}}});
  };
  CHECK_NOTHROW(make(8, 5, 8));
  CHECK_NOTHROW(make(8, 5, 9));
  CHECK_THROWS_WITH(make(8, 5, 7),
                    ContainsSubstring("kvtrim::ValueNorm of kvtrim::Window: recent 7") &&
                        ContainsSubstring("must be at least 8"));
  CHECK_THROWS_WITH(make(0, 5, 7), ContainsSubstring("scores.window 0"));
  CHECK_THROWS_WITH(make(4, 6, 7), ContainsSubstring("scores.kernel 6"));
  // A window whose own columns have scores needs no protection.
  CHECK_NOTHROW(
      Snap({.budget = 50, .recent = 0, .scores = {.scores = {.window = 8, .own_columns = true}}}));
}

TEST_CASE("decorators: PageSelector refuses decorated parameters out of range",
          "[decorators][edge]") {
  using Pages = PageSelector<ValueNorm<PerLayer<WindowParams>>>;
  const auto make = [](float epsilon, std::int32_t kernel) {
    Pages::Params p;
    p.scores.epsilon = epsilon;
    p.scores.scores.scores.kernel = kernel;
    return Pages(p);
  };
  CHECK_NOTHROW(make(0, 5));
  CHECK_THROWS_WITH(make(-1, 5), ContainsSubstring("kvtrim::PageSelector: epsilon -1"));
  CHECK_THROWS_WITH(make(0, 4),
                    ContainsSubstring("kvtrim::PageSelector: scores.kernel 4 must be odd"));
}

TEST_CASE("decorators: TopRows<ValueNorm<WindowParams>> keeps the best of SnapKV times the values",
          "[decorators]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  const WindowParams window{.window = 4, .kernel = 3};
  std::vector<std::vector<std::int32_t>> expected;
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) {
      auto scores = scores_of(window, world, l, h);
      for (std::size_t r = 0; r < 40; ++r) {
        double square = 0;
        for (const float x : world.value(0, l, h, static_cast<std::int32_t>(r))) {
          square += static_cast<double>(x) * static_cast<double>(x);
        }
        scores[r] = r >= 36 ? 1e9F : scores[r] * static_cast<float>(std::sqrt(square));
      }
      expected.push_back(test::best(scores, 13));
    }
  }
  const TopRows<ValueNorm<WindowParams>> policy(
      {.budget = 13, .recent = 4, .scores = {.scores = window}});
  REQUIRE(world.evict(policy, world.observation()).status == Status::ok);
  CHECK(world.kept(0) == expected);
}

TEST_CASE("decorators: TopRows<PerLayer<...>> keeps the best of the layer's mean in all heads",
          "[decorators]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  std::vector<std::vector<std::int32_t>> expected;
  for (std::int32_t l = 0; l < 2; ++l) {
    auto mean = scores_of(KeyDiffParams{}, world, l, 0);
    const auto other = scores_of(KeyDiffParams{}, world, l, 1);
    for (std::size_t r = 0; r < 40; ++r) { mean[r] = (mean[r] + other[r]) / 2; }
    for (std::int32_t h = 0; h < 2; ++h) { expected.push_back(test::best(mean, 13)); }
  }
  const TopRows<PerLayer<KeyDiffParams>> policy({.budget = 13});
  REQUIRE(world.evict(policy, world.observation()).status == Status::ok);
  CHECK(world.kept(0) == expected);
}

TEST_CASE("decorators: PageSelector<ValueNorm<...>> keeps the pages of the rescaled scores",
          "[decorators][pages]") {
  for (const TableScope scope : {TableScope::head, TableScope::layer}) {
    MethodWorld world({.scope = scope});
    REQUIRE(world.append(0, 40) == Status::ok);
    using Pages = PageSelector<ValueNorm<KeyDiffParams>>;
    Pages::Params p;
    p.scores.epsilon = 1;  // cosines are at least -1
    p.pages.norm = HeadNorm::none;
    p.pages.heads = Reduction::max;
    p.budget = 16;
    p.sinks = 0;
    p.window = 0;
    std::vector<std::vector<std::int32_t>> expected;
    for (std::int32_t l = 0; l < 2; ++l) {
      std::vector<std::vector<float>> heads;
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto scores = scores_of(ValueNorm<KeyDiffParams>{{}, 1.0F}, world, l, h);
        auto& pages = heads.emplace_back(10, 0.0F);
        for (std::size_t r = 0; r < 40; ++r) { pages[r / 4] = std::max(pages[r / 4], scores[r]); }
      }
      if (scope == TableScope::layer) {
        for (std::size_t i = 0; i < 10; ++i) {
          heads[0][i] = heads[1][i] = std::max(heads[0][i], heads[1][i]);
        }
      }
      for (const auto& pages : heads) {
        auto& rows = expected.emplace_back();
        for (const std::int32_t page : test::best(pages, 4)) {
          for (std::int32_t i = 0; i < 4; ++i) { rows.push_back(4 * page + i); }
        }
      }
    }
    const Pages policy(p);
    REQUIRE(world.evict(policy, world.observation()).bytes_moved == 0);
    CHECK(world.kept(0) == expected);
    CHECK(world.rows_belong_to_their_positions());
  }
}

TEST_CASE("decorators: what a decorator needs and does not get is a bad observation",
          "[decorators][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  const TopRows<OutputNorm<KeyDiffParams>> policy({.budget = 13});
  CHECK(world.evict(policy, {}).status == Status::bad_observation);
  CHECK(world.kept(0)[0].size() == 40);
  CHECK(world.evict(policy, world.observation()).status == Status::ok);
}

TEST_CASE(
    "decorators: ready-made scores are decorated too, not taken instead of the decorated ones",
    "[decorators]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  std::vector<float> given(2 * 2 * 40);
  for (std::size_t i = 0; i < given.size(); ++i) { given[i] = static_cast<float>(i * 7919 % 101); }
  Observation obs = world.observation();
  obs.scores = SequencePlane::dense(given.data(), 2, 2, 40);
  std::vector<std::vector<std::int32_t>> expected;
  for (std::size_t l = 0; l < 2; ++l) {
    std::vector<float> mean(40);
    for (std::size_t r = 0; r < 40; ++r) {
      mean[r] = (given[(l * 2) * 40 + r] + given[(l * 2 + 1) * 40 + r]) / 2;
    }
    for (int h = 0; h < 2; ++h) { expected.push_back(test::best(mean, 13)); }
  }
  const TopRows<PerLayer<ExternalParams>> policy({.budget = 13});
  REQUIRE(world.evict(policy, obs).status == Status::ok);
  CHECK(world.kept(0) == expected);
}

TEST_CASE("output_norm_params: epsilon is 1e-4F unless given, the scores are the method's own",
          "[output_norm]") {
  using P = OutputNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 1e-4F);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}

TEST_CASE("output_norm_params: check speaks for epsilon and for the scores inside",
          "[output_norm][edge]") {
  using P = OutputNorm<OutputNorm<WindowParams>>;
  CHECK_NOTHROW(P{}.check("x"));
  P p;
  p.epsilon = -2;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: epsilon -2"));
  p = {};
  p.scores.epsilon = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("epsilon inf"));
  p = {};
  p.scores.scores.window = 0;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: scores.window 0"));
}

TEST_CASE("per_layer_params: the mean over the KV heads unless told otherwise", "[per_layer]") {
  using P = PerLayer<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.heads == Reduction::mean);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
  STATIC_REQUIRE(std::is_same_v<decltype(PerLayer<KeyDiffParams>{}.scores), KeyDiffParams>);
}

TEST_CASE("value_norm_params: epsilon is 0 unless given, the scores are the method's own",
          "[value_norm]") {
  using P = ValueNorm<WindowParams>;
  STATIC_REQUIRE(std::is_aggregate_v<P>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<P>);
  STATIC_REQUIRE(P{}.epsilon == 0);
  STATIC_REQUIRE(P{}.scores.window == WindowParams{}.window);
}

TEST_CASE("value_norm_params: check speaks for epsilon and for the scores inside",
          "[value_norm][edge]") {
  using P = ValueNorm<ValueNorm<WindowParams>>;
  CHECK_NOTHROW(P{}.check("x"));
  P p;
  p.epsilon = -2;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: epsilon -2"));
  p = {};
  p.scores.epsilon = std::numeric_limits<float>::infinity();
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("epsilon inf"));
  p = {};
  p.scores.scores.window = 0;
  CHECK_THROWS_WITH(p.check("x"), ContainsSubstring("x: scores.window 0"));
}
