// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/budget/rows.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;
using kvtrim::test::for_each_value;

namespace {

PagedCache::Params small(std::int32_t pages, std::int32_t page_size) {
  return {.pages = pages, .page_size = page_size, .kv_heads = 2, .key_dim = 4, .value_dim = 2};
}

// A prompt of n tokens with its queries, evicted by the policy's own scores: 4 query heads on 2 KV heads.
struct Prompt {
  Prompt(std::int32_t n, std::int32_t window, std::int32_t page_size)
      : t(small(80 / page_size + 1, page_size)), s(t.filled(n)) {
    QueryRing::Params p;
    p.query_heads = 4;
    p.head_dim = 4;
    p.window = window;
    ring.emplace(p);
    const Queries q = make_queries(0, n, 4, 4);
    ring->push(s, {}, n, q.data.data(), q.positions.data());
  }
  Outcome evict(const SnapKVSelector<>& policy) {
    Input in;
    in.queries = ring->queries(s);
    return fault::evict(policy, t, s, in);
  }
  TestCache t;
  SequenceId s;
  std::optional<QueryRing> ring;
};

}  // namespace

TEST_CASE("B022 sinks 32 and window 8 take prompts of 1 to 64 tokens", "[short][fault]") {
  // The prompts of 33..39 tokens, whose window reaches into the sinks, are those that threw.
  for (const std::int32_t page_size : {32, 4}) {
    for (const std::int64_t budget : {40, 44}) {
      const SnapKVSelector policy({.window = 8, .budget = budget, .sinks = 32});
      for (std::int32_t n = 1; n <= 64; ++n) {
        INFO("prompt " << n << ", budget " << budget);
        Prompt prompt(n, 8, page_size);
        const Outcome out = prompt.evict(policy);
        CHECK(out.report.status == Status::ok);
        const auto keep = std::min(n, static_cast<std::int32_t>(budget));
        for (const std::int32_t h : {0, 1}) {
          const Rows kept = prompt.t.positions(prompt.s, 0, h);
          REQUIRE(static_cast<std::int32_t>(kept.size()) == keep);
          CHECK(Rows(kept.begin(), kept.begin() + std::min(n, 32)) == range(0, std::min(n, 32)));
          const std::int32_t last = std::min(n, 8);
          CHECK(Rows(kept.end() - last, kept.end()) == range(n - last, n));
        }
        CHECK(out.report.evicted_rows == 2 * (n - keep));
      }
    }
  }
}

TEST_CASE("B022 a window of 8 takes prompts of 1 to 7 tokens", "[short][fault]") {
  for (std::int32_t n = 1; n <= 7; ++n) {
    Prompt prompt(n, 8, 4);
    const Outcome out = prompt.evict(SnapKVSelector({.window = 8, .budget = 8}));
    CHECK(out.report.status == Status::ok);
    CHECK(out.report.evicted_rows == 0);
    CHECK(prompt.t.positions(prompt.s) == range(0, n));
  }
}

TEST_CASE("B023 a fraction removed never rounds a prompt down to nothing", "[short][fault]") {
  CHECK(rows_kept(2, 0.6) == 1);
  CHECK(rows_kept(10, 0.9) == 1);
  CHECK(rows_kept(1000, 0.9) == 100);
  // The truncations of the fault are there under the name of the project they come from, for comparison.
  CHECK(kvpress_rows(2, 0.6) == 0);
  CHECK(kvpress_rows(10, 0.9) == 0);
  CHECK(kvpress_rows(1000, 0.9) == 99);
  for (std::int32_t n = 1; n <= 70; ++n) {
    CHECK(rows_kept(n, 1.0) == 1);
    CHECK(rows_kept(n, 0.999) == 1);
    CHECK(rows_kept(n, 0.0) == n);
  }

  // Nothing at all is kept only if the caller itself says 0.
  for (const std::int32_t n : {1, 2, 10}) {
    TestCache t(small(8, 4));
    const SequenceId s = t.filled(n);
    Input in;
    in.score = scores_of({});
    in.budgets = {rows_kept(n, 1.0)};
    const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy({.heavy = 4, .recent = 0});
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) == 1);
    in.budgets = {0};
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) == 0);
    CHECK(t.cache.pool().in_use() == 0);
  }
}

TEST_CASE("B026 a window above the budget is refused with both numbers", "[short][fault]") {
  CHECK_THAT(thrown_by([] { SnapKVSelector({.window = 15, .budget = 8}); }),
             ContainsSubstring("budget 8") && ContainsSubstring("window 15"));
  CHECK_THAT(thrown_by([] { SnapKVSelector({.window = 6, .budget = 8, .sinks = 3}); }),
             ContainsSubstring("budget 8") && ContainsSubstring("sinks 3"));
  CHECK_NOTHROW(SnapKVSelector({.window = 6, .budget = 8, .sinks = 2}));
  Prompt prompt(6, 4, 4);
  const Outcome out = prompt.evict(SnapKVSelector({.window = 4, .budget = 8}));
  CHECK(out.report.status == Status::ok);
  CHECK(out.report.evicted_rows == 0);
  CHECK(prompt.t.positions(prompt.s) == range(0, 6));
}

TEST_CASE("B027 prompts up to the budget keep all, the first above it keeps the budget",
          "[short][fault]") {
  const SnapKVSelector policy({.window = 8, .budget = 16, .kernel = 5});
  for (const std::int32_t n : {0, 1, 5, 8, 9, 16, 17}) {
    INFO("prompt " << n);
    Prompt prompt(n, 8, 4);
    CHECK(prompt.evict(policy).report.status == Status::ok);
    for (const std::int32_t h : {0, 1}) {
      const Rows kept = prompt.t.positions(prompt.s, 0, h);
      if (n <= 16) {
        CHECK(kept == range(0, n));
      } else {
        CHECK(kept.size() == 16);
        CHECK(Rows(kept.end() - 8, kept.end()) == range(9, 17));
      }
    }
  }
}

TEST_CASE("B029 a window beyond the cache is legal and keeps all", "[short][fault]") {
  const StreamingSink wide({.sinks = 4, .recent = 4096, .capacity = 1151});
  const StreamingSink wider({.sinks = 4, .recent = 5000, .capacity = 1151});
  CHECK(wide.params().recent == 1147);
  CHECK(wide.params().recent == wider.params().recent);  // one and the same window
  for_each_value<SinkForm::pages, SinkForm::exact>([&](auto form) {
    TestCache t({.pages = 1151, .page_size = 1, .kv_heads = 1, .key_dim = 1, .value_dim = 1});
    const SequenceId s = t.filled(1151);
    for (const std::int64_t capacity : {std::int64_t{0}, std::int64_t{1151}}) {
      const StreamingSink<form> policy({.sinks = 4, .recent = 4096, .capacity = capacity});
      const Outcome out = evict(policy, t, s);
      CHECK(out.report.status == Status::ok);
      CHECK(out.report.evicted_rows == 0);
      CHECK(t.cache.live_rows(s) == 1151);
    }
  });
}

TEST_CASE("B030 a chunk longer than the window leaves sinks and window, and no more",
          "[short][fault]") {
  // Attend, then evict: the chunk of 20 is attended in full, with the 12 rows before it.
  for (const Removal way : {Removal::automatic, Removal::stable_pack, Removal::fill_holes}) {
    TestCache t(small(8, 4));
    const SequenceId s = t.filled(12);
    const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 8});
    Input in;
    in.options.removal = way;
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    REQUIRE(t.append(s, 20) == Status::ok);
    CHECK(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) == 12);
    CHECK(t.positions(s) == Rows{0, 1, 2, 3} + range(24, 32));
    CHECK(t.positions(s, 0, 1) == Rows{0, 1, 2, 3} + range(24, 32));

    // Cutting first is not possible for such a chunk, and says so.
    CHECK(policy.max_chunk() == 8);
    CHECK(evict(policy.make_room(9), t, s, in).report.status == Status::chunk_too_long);
    CHECK(t.cache.live_rows(s) == 12);
  }
}
