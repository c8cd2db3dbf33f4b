// SPDX-License-Identifier: Apache-2.0
// What fixed workloads cost, counted rather than timed: keys read, floating-point operations of products, bytes moved,
// pages released, allocations. A change that makes the library do more work changes a number here, on every machine: row
// counts are multiples of every register block, and what is moved does not depend on a rounded score.
#define KVTRIM_COUNTS

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#  define KVTRIM_TEST_SANITIZED
#elif defined(__has_feature)
#  if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
      __has_feature(memory_sanitizer)
#    define KVTRIM_TEST_SANITIZED
#  endif
#endif

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

using namespace kvtrim;
using test::ByScore;

namespace {

std::atomic<std::int64_t> allocations{0};

}  // namespace

#if !defined(KVTRIM_TEST_SANITIZED)  // a sanitizer has its own, and pairs each new with its delete
namespace {

void* counted(std::size_t bytes) {
  ++allocations;
  void* const p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) { throw std::bad_alloc(); }
  return p;
}

}  // namespace

void* operator new(std::size_t n) {
  return counted(n);
}
void* operator new[](std::size_t n) {
  return counted(n);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}
#endif

namespace {

constexpr std::int32_t rows = 960;
constexpr std::int32_t kv_heads = 2;
constexpr std::int32_t query_heads = 8;
constexpr std::int32_t dim = 16;
constexpr std::int32_t window = 32;
constexpr std::int64_t row_bytes = 2 * dim * 4;  // key and value, f32

struct Cost {
  std::int64_t rows_read = 0, flops = 0, bytes_moved = 0, evicted = 0, released = 0, allocated = 0;
  friend bool operator==(const Cost&, const Cost&) = default;
};
std::ostream& operator<<(std::ostream& out, const Cost& c) {
  return out << "{rows_read " << c.rows_read << ", flops " << c.flops << ", bytes_moved "
             << c.bytes_moved << ", evicted " << c.evicted << ", released " << c.released
             << ", allocated " << c.allocated << "}";
}

// One layer of 960 rows in pages of 16, and the queries of its last 32.
struct Layer {
  Layer()
      : cache({.pages = 80,
               .page_size = 16,
               .kv_heads = kv_heads,
               .key_dim = dim,
               .max_sequences = 1,
               .max_rows = rows + 16,
               .scores = true}) {
    static_cast<void>(cache.try_create());
    append(rows);
    test::Random random(11);
    queries.resize(query_heads * window * dim);
    for (float& x : queries) { x = random.uniform(); }
    lse.assign(query_heads * window, 8.0F);
  }
  void append(std::int32_t n) {
    test::Random random(7);
    std::vector<float> data(static_cast<std::size_t>(n) * kv_heads * dim);
    for (float& x : data) { x = random.uniform(); }
    if (cache.try_extend(SequenceId{0}, n) != Status::ok) { throw std::bad_alloc(); }
    REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {data.data()}, {data.data()}) ==
            kvtrim::Status::ok);
  }
  Observation window_queries(bool with_lse) const {
    Observation obs;
    obs.queries = {.data = queries.data(), .query_heads = query_heads, .rows = window};
    obs.queries.row_stride = dim;
    obs.queries.head_stride = window * dim;
    if (with_lse) {
      obs.queries.lse = lse.data();
      obs.queries.lse_head_stride = window;
    }
    return obs;
  }
  template <Policy P>
  Cost evict(const P& policy, const Observation& obs = {}, const PlanOptions& options = {}) {
    const CacheView view = cache.view();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    Report report;
    Cost cost =
        cost_of([&] { report = kvtrim::evict(policy, cache, view, obs, workspace, options); });
    REQUIRE(report.status == Status::ok);
    cost.bytes_moved = report.bytes_moved;
    cost.evicted = report.evicted_rows;
    cost.released = report.released_pages;
    return cost;
  }
  template <class F>
  static Cost cost_of(F&& f) {
    detail::work_counts = {};
    const std::int64_t before = allocations;
    f();
    return {.rows_read = detail::work_counts.rows_read,
            .flops = detail::work_counts.product_flops,
            .allocated = allocations - before};
  }

  PagedCache cache;
  std::vector<float> queries, lse;
};

// Scores that are a permutation: no tie, no rounding.
std::vector<float> shuffled_scores() {
  std::vector<float> scores(kv_heads * rows);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = static_cast<float>(i * 7 % rows + i / rows);
  }
  return scores;
}

}  // namespace

TEST_CASE("counts: a window score reads each key once and multiplies once, with and without LSE",
          "[counts]") {
  // 2 * 16 features * 960 rows * 4 heads * 32 queries, for 2 KV heads; 45 of 60 pages go.
  for (const bool with_lse : {true, false}) {
    Layer layer;
    Cost cost = layer.evict(SnapKVSelector({.window = window, .budget = 240}),
                            layer.window_queries(with_lse));
    CHECK(cost.bytes_moved <= 2 * 240 * row_bytes);  // which rows stay is for another test
    cost.bytes_moved = 0;
    CHECK(cost == Cost{.rows_read = 1920, .flops = 7'864'320, .evicted = 1440, .released = 45});
  }
}

TEST_CASE("counts: page policies score as rows do, and move nothing", "[counts]") {
  Layer layer;
  const PageSelector<> policy({.budget = 240});
  CHECK(layer.evict(policy, layer.window_queries(true)) ==
        Cost{.rows_read = 1920, .flops = 3'932'160, .evicted = 1440, .released = 45});
}

TEST_CASE("counts: KeyDiff reads the keys twice and multiplies nothing", "[counts]") {
  Layer layer;
  const PageSelector<KeyDiffParams> policy({.budget = 240});
  CHECK(layer.evict(policy) == Cost{.rows_read = 3840, .evicted = 1440, .released = 45});
}

TEST_CASE("counts: each way of removal moves what it must and nothing else", "[counts]") {
  struct Case {
    Removal removal;
    std::int64_t rows_moved;
  };
  std::vector<float> scores = shuffled_scores();
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, kv_heads, rows);
  for (const Case c : {Case{Removal::stable_pack, 480}, Case{Removal::fill_holes, 410}}) {
    Layer layer;
    CHECK(layer.evict(ByScore{.keep = 240, .way = c.removal}, obs) ==
          Cost{.bytes_moved = c.rows_moved * row_bytes, .evicted = 1440, .released = 45});
  }
}

TEST_CASE("counts: a sliding window in pages moves no byte and reads no key", "[counts]") {
  Layer layer;
  const StreamingSink policy({.sinks = 4, .recent = 256});
  CHECK(layer.evict(policy) == Cost{.evicted = 2 * 43 * 16, .released = 43});
  layer.append(16);
  CHECK(layer.evict(policy) == Cost{.evicted = 2 * 16, .released = 1});
}

TEST_CASE("counts: a decode step of H2O moves at most one row per head and reads no key",
          "[counts]") {
  Layer layer;
  const HeavyHitter<AccumulateParams, HeavyMode::promote> policy(
      {.heavy = rows / 2, .recent = rows / 2});
  layer.append(1);
  const CacheView view = layer.cache.view();
  const std::vector<float> probabilities(query_heads * (rows + 1), 1.0F / (rows + 1));
  const Cost sums = Layer::cost_of([&] {
    for (std::int32_t h = 0; h < kv_heads; ++h) {
      accumulate_probabilities(policy.scorer(),
                               {view, SequenceId{0}, LayerId{0}, HeadId{h}},
                               {probabilities.data(), query_heads / kv_heads, rows + 1});
    }
  });
  CHECK(sums == Cost{});
  const Cost cost = layer.evict(policy);
  CHECK(cost.bytes_moved <= kv_heads * row_bytes);
  CHECK(cost.rows_read == 0);
  CHECK(cost.evicted == kv_heads);
  CHECK(cost.released == 0);  // the hole takes the next row
  CHECK(cost.allocated == 0);
}

TEST_CASE("counts: column sums of one query read each key once", "[counts]") {
  Layer layer;
  const CacheView view = layer.cache.view();
  QueryBlock block = layer.window_queries(true).queries;
  block.rows = 1;
  std::vector<std::byte> scratch(column_sums_scratch_bytes(dim));
  const Cost cost = Layer::cost_of([&] {
    accumulate_column_sums(
        {}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, block, LayerId{0}, scratch);
  });
  // 2 * 16 features * 960 rows * 4 heads
  CHECK(cost == Cost{.rows_read = 960, .flops = 122'880});
}

TEST_CASE("counts: a prompt's column sums skip most of the future", "[counts]") {
  Layer layer;
  const CacheView view = layer.cache.view();
  const std::vector<float> queries(4 * rows * dim, 0.1F);
  const std::vector<float> lse(4 * rows, 8.0F);
  QueryBlock block{.data = queries.data(), .query_heads = 8, .rows = rows};
  block.row_stride = dim;
  block.head_stride = 0;  // the same queries for all heads
  block.lse = lse.data();
  std::vector<std::byte> scratch(column_sums_scratch_bytes(dim));
  const Cost cost = Layer::cost_of([&] {
    accumulate_column_sums(
        {}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, block, LayerId{0}, scratch);
  });
  const double all = 2.0 * dim * rows * rows * 4;
  CHECK(cost.rows_read == rows);
  CHECK(static_cast<double>(cost.flops) < 0.55 * all);
  CHECK(static_cast<double>(cost.flops) >= 0.5 * all);
  CHECK(cost.allocated == 0);
}

TEST_CASE("B132 a plan of which nothing comes looks at no entry, no key and no head, at any length",
          "[counts][fault]") {
  // Work in place of time: a table whose entries name no page is refused as soon as one is looked at.
  const Layer queries;
  for (const std::int32_t live : {512, 32'768}) {
    PagedCache cache({.pages = live / 16,
                      .page_size = 16,
                      .kv_heads = kv_heads,
                      .key_dim = dim,
                      .scores = true});
    const SequenceId s = cache.try_create().value();
    REQUIRE(cache.try_extend(s, live) == Status::ok);
    REQUIRE(cache.written(s, {}) == Status::ok);
    CacheView view = cache.view();
    const std::vector<std::int32_t> no_pages(static_cast<std::size_t>(live / 16), -7);
    view.table.ids = no_pages.data();
    const auto due = [&](const auto& policy, const Observation& obs) {
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
      Status status = Status::ok;
      std::int64_t evicted = 0;
      const Cost cost = Layer::cost_of([&] {
        const PlanRef made = plan(policy, view, obs, workspace);
        status = made.status();
        evicted = made.evicted_rows();
      });
      CHECK(cost == Cost{});
      CHECK(evicted == 0);
      return status;
    };
    CHECK(due(StreamingSink({.sinks = 4, .recent = live}), {}) == Status::ok);
    CHECK(due(HeavyHitter({.heavy = live / 2, .recent = live / 2}), {}) == Status::ok);
    CHECK(due(SnapKVSelector({.budget = live}), queries.window_queries(true)) == Status::ok);
    // One row less, and the first entry is looked at.
    CHECK(due(StreamingSink({.sinks = 4, .recent = live - 32}), {}) == Status::page_out_of_range);
  }
}

TEST_CASE("B137 the cost of a score grows as its header says: twice the rows, twice the work",
          "[counts][fault]") {
  // Counted, not timed. R-KV's comparison of all pairs is the one score whose header says O(rows^2).
  const auto cost_at = [](const auto& policy, std::int32_t live) {
    PagedCache cache({.pages = live / 16, .page_size = 16, .kv_heads = kv_heads, .key_dim = dim});
    const SequenceId s = cache.try_create().value();
    const std::vector<float> zeros(static_cast<std::size_t>(live) * kv_heads * dim);
    REQUIRE(cache.try_extend(s, live) == Status::ok);
    REQUIRE(cache.write(s, {}, {zeros.data()}, {zeros.data()}) == Status::ok);
    const Layer queries;
    const Observation obs = queries.window_queries(false);
    const CacheView view = cache.view();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    return Layer::cost_of([&] { REQUIRE(usable(plan(policy, view, obs, workspace).status())); });
  };
  const auto grows = [&](const auto& policy) {
    const Cost one = cost_at(policy, 16'128);
    const Cost two = cost_at(policy, 2 * 16'128);
    CHECK(one.rows_read >= kv_heads * 16'128);
    CHECK(static_cast<double>(two.rows_read) < 2.5 * static_cast<double>(one.rows_read));
    CHECK(static_cast<double>(two.flops) <= 2.5 * static_cast<double>(one.flops));
    CHECK(two.allocated == 0);
    return one;
  };
  const Cost snapkv = grows(SnapKVSelector({.window = window, .budget = 1024}));
  CHECK(snapkv.rows_read == kv_heads * 16'128);  // one read, one product
  CHECK(snapkv.flops >= std::int64_t{2} * dim * 16'128 * query_heads * window);
  CHECK(snapkv.flops <= std::int64_t{2} * dim * (16'128 + 480) * query_heads * window);
  grows(PageSelector<KeyDiffParams>({.budget = 1024}));
}
