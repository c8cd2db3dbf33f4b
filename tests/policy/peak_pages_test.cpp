// SPDX-License-Identifier: Apache-2.0
// That no run of any policy has more pages is a law (laws_test.cpp); here are the numbers.
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/peak_pages.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

using Catch::Matchers::ContainsSubstring;
using namespace kvtrim;
using test::MethodWorld;

namespace {

constexpr PeakOptions each_step{.cuts = CutTimes::each_step};
constexpr PeakOptions each_chunk{.cuts = CutTimes::each_chunk};

// What a run has at most, in all tables; `budget` is given at run time, unless it is negative.
template <Policy P>
PeakPages seen_in(const P& policy,
                  std::int32_t prompt,
                  std::int32_t new_tokens,
                  std::int32_t chunk,
                  const PeakOptions& options,
                  TableScope scope = TableScope::group) {
  MethodWorld world({.max_rows = 256, .scope = scope});
  PeakPages seen;
  const auto append = [&](std::int32_t n, std::int64_t& most) {
    REQUIRE(world.append(0, n) == Status::ok);
    most = std::max<std::int64_t>(most, world.cache().pool().in_use());
  };
  const auto cut = [&] {
    Observation obs = world.observation();
    if (options.budget >= 0) { obs.budgets = &options.budget, obs.budget_rows = {0, 0, 0}; }
    REQUIRE(usable(world.evict(policy, obs).status));
  };
  for (std::int32_t row = 0; row < prompt; row += chunk) {
    if (row > 0 && options.cuts == CutTimes::each_chunk) { cut(); }
    append(std::min(chunk, prompt - row), seen.prompt);
  }
  cut();
  seen.running = world.cache().pool().in_use();
  for (std::int32_t step = 0; step < new_tokens; ++step) {
    append(1, seen.running);
    if (options.cuts != CutTimes::after_prompt) { cut(); }
  }
  return seen;
}

}  // namespace

// A pool of 8 full streams of 2,048 + 128 tokens: 64 streams with a running budget of 14 pages.
static_assert(peak_pages(Full{}, 2048, 128, 16, 128) == PeakPages{128, 136});
static_assert(peak_pages(PageSelector<>({.budget = 14 * 16}), 2048, 128, 16, 128, each_step) ==
              PeakPages{128, 15});
static_assert(63 * 15 + 128 <= 8 * 136);
static_assert(peak_pages(SnapKVSelector<>({.budget = 102}), 2048, 128, 16, 128) ==
              PeakPages{128, 15});
static_assert(peak_pages(Full{}, 0, 0, 16, 1) == PeakPages{0, 0});

TEST_CASE("peak_pages: StreamingSink's is its max_pages at most, and what a run has",
          "[peak_pages][property]") {
  for (const std::int32_t recent : {1, 7, 8, 12, 13}) {
    for (const std::int32_t chunk : {1, 3, 8}) {
      const StreamingSink<> policy({.sinks = 3, .recent = recent});
      const PeakPages most = peak_pages(policy, 40, 60, 4, chunk, each_chunk);
      CHECK(most == seen_in(policy, 40, 60, chunk, each_chunk));
      CHECK(most.prompt <= policy.max_pages(4, chunk));
      CHECK(most.running <= policy.max_pages(4, 1));
    }
  }
  const StreamingSink<> hard({.sinks = 3, .recent = 20, .hard_budget = 18});
  CHECK(peak_pages(hard, 40, 60, 4, 5, each_step) == seen_in(hard, 40, 60, 5, each_step));
}

TEST_CASE("peak_pages: a budget without protected rows that fit, given at run time",
          "[peak_pages][edge]") {
  for (const std::int32_t budget : {0, 3, 11, 40}) {
    PeakOptions options = each_step;
    options.budget = budget;
    const SnapKVSelector<> snapkv({.window = 6, .budget = 20, .sinks = 2});
    CHECK(peak_pages(snapkv, 50, 30, 4, 7, options) == seen_in(snapkv, 50, 30, 7, options));
    PageSelector<>::Params p{.budget = 24};
    p.sinks = 2, p.window = 5;
    const PageSelector<> page(p);
    CHECK(peak_pages(page, 50, 30, 4, 7, options) == seen_in(page, 50, 30, 7, options));
    const StreamingSink<> sinks({.sinks = 5, .recent = 9});
    CHECK(peak_pages(sinks, 50, 30, 4, 7, options) == seen_in(sinks, 50, 30, 7, options));
  }
}

TEST_CASE("peak_pages: rows above the budget until an interval is full count", "[peak_pages]") {
  const HeavyHitter<> policy({.heavy = 6, .recent = 6, .interval = 9});
  CHECK(peak_pages(policy, 50, 40, 4, 7, each_step) == PeakPages{13, 6});
  CHECK(seen_in(policy, 50, 40, 7, each_step) == PeakPages{13, 6});
}

TEST_CASE("peak_pages: a slot that waits to be overwritten keeps its page", "[peak_pages][edge]") {
  const HeavyHitter<> policy({.heavy = 6, .recent = 6});
  CHECK(peak_pages(policy, 13, 0, 4, 13) == PeakPages{4, 4});
  CHECK(seen_in(policy, 13, 0, 13, {}) == PeakPages{4, 4});
  CHECK(peak_pages(policy, 14, 0, 4, 14) == PeakPages{4, 3});
  CHECK(seen_in(policy, 14, 0, 14, {}) == PeakPages{4, 3});
}

TEST_CASE("peak_pages: a policy without a budget grows with its tokens", "[peak_pages]") {
  const RecursiveLagKV policy({.sinks = 2, .lag = 8, .keep = 3});
  for (const PeakOptions& options : {PeakOptions{}, each_step, each_chunk}) {
    for (const std::int32_t prompt : {5, 33, 80}) {
      CHECK(peak_pages(policy, prompt, 90, 4, 11, options) ==
            seen_in(policy, prompt, 90, 11, options));
    }
  }
}

TEST_CASE("peak_pages: heads that share a budget need at most a page each above their average",
          "[peak_pages]") {
  for (const AdaptiveForm form :
       {AdaptiveForm::safeguard, AdaptiveForm::floor, AdaptiveForm::floor_rounded}) {
    for (const AdaptiveOver over : {AdaptiveOver::heads_of_layer, AdaptiveOver::all_heads}) {
      const AdaKV<KeyNorm> policy(
          {.inner = {.budget = 13, .sinks = 1, .recent = 2}, .form = form, .over = over});
      for (const PeakOptions& options : {PeakOptions{}, each_step, each_chunk}) {
        const PeakPages most = peak_pages(policy, 50, 40, 4, 7, options);
        const PeakPages seen = seen_in(policy, 50, 40, 7, options, TableScope::head);
        CHECK(seen.prompt <= 4 * most.prompt);
        CHECK(seen.running <= 4 * most.running);
        CHECK(4 * most.running <= seen.running + 8);
      }
    }
  }
}

TEST_CASE("peak_pages: of layers with different budgets the average, in every form",
          "[peak_pages]") {
  for (const PyramidForm form :
       {PyramidForm::exact, PyramidForm::kvpress, PyramidForm::kvcache_factory}) {
    const PyramidKV policy({.snapkv = {.window = 4, .budget = 20}, .beta = 5, .form = form});
    PeakOptions options = each_step;
    options.layers = 2;
    const PeakPages most = peak_pages(policy, 90, 30, 4, 7, options);
    const PeakPages seen = seen_in(policy, 90, 30, 7, options, TableScope::layer);
    CHECK(seen.prompt == 2 * most.prompt);
    CHECK(most.running == (seen.running + 1) / 2);
  }
}

TEST_CASE("peak_pages: lengths that cannot be are refused with their numbers",
          "[peak_pages][fault]") {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  CHECK_THROWS_WITH(peak_pages(Full{}, most, 1, 16, 1),
                    ContainsSubstring("prompt + new_tokens 2147483648 must be at most 2147483647"));
  CHECK_THROWS_WITH(peak_pages(Full{}, -1, 0, 16, 1),
                    ContainsSubstring("prompt -1 must be at least 0"));
  CHECK_THROWS_WITH(peak_pages(Full{}, 1, std::numeric_limits<std::int64_t>::max(), 16, 1),
                    ContainsSubstring("new_tokens 9223372036854775807 must be at most 2147483647"));
  CHECK_THROWS_WITH(peak_pages(Full{}, 1, 1, 0, 1), ContainsSubstring("page_size 0"));
  CHECK_THROWS_WITH(peak_pages(Full{}, 1, 1, 16, 0), ContainsSubstring("chunk 0"));
  CHECK_THROWS_WITH(peak_pages(Full{}, 1, 1, 16, 1, {.layers = 0}), ContainsSubstring("layers 0"));
  CHECK(peak_pages(Full{}, most, 0, 16, 1).most() == 134'217'728);
}
