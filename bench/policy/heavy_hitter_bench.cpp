// SPDX-License-Identifier: Apache-2.0
// What H2O adds to a decode step of one layer, compared with that step's attention over the same cache: accumulation of the
// probabilities that attention has anyway, the search for the victim, its slot, the tables. The ratio is a share of attention.

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../attention.hpp"
#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvtrim_bench {
namespace {

enum class Sums : std::uint8_t { engine, recomputed };

template <HeavyMode Mode>
struct Step {
  using H = HeavyHitter<AccumulateParams, Mode>;

  Step(const Shape& shape, std::int32_t spare, std::int32_t interval)
      : cache(shape, {.positions = true, .scores = true, .spare_rows = spare}),
        attention(shape, shape.tokens + spare),
        policy({.heavy = shape.tokens / 2,
                .recent = shape.tokens - shape.tokens / 2,
                .interval = interval,
                .removal = interval > 1 ? Removal::fill_holes : Removal::overwrite_slot}),
        freed(64),
        workspace(plan_workspace_bytes(policy, shape_of(shape, spare))),
        scratch(column_sums_scratch_bytes(shape.dim)),
        lse(static_cast<std::size_t>(shape.query_heads), 10.0F) {}

  PlanShape shape_of(const Shape& shape, std::int32_t spare) {
    PlanShape s = plan_shape(cache.view());
    s.max_rows = shape.tokens + spare;
    return s;
  }
  // Attention and accumulation, head by head, as an engine that calls it inside the step: seconds of each.
  struct Seconds {
    double op = 0;
    double attention = 0;
  };
  Seconds attend(Sums sums) {
    Seconds t;
    for (std::int32_t h = 0; h < cache.shape().kv_heads; ++h) {
      t.attention += seconds_of([&] { attention.one_head(cache.view(), HeadId{h}); }, clock());
      t.op += seconds_of([&] { accumulate(h, sums); }, clock());
    }
    return t;
  }
  void accumulate(std::int32_t h, Sums sums) {
    const CacheView view = cache.view();
    const std::int32_t group = cache.shape().group();
    if (sums == Sums::engine) {
      accumulate_probabilities(policy.scorer(),
                               {view, SequenceId{0}, LayerId{0}, HeadId{h}},
                               {attention.probabilities(h * group), group, attention.max_rows()});
      return;
    }
    QueryBlock block{
        .data = attention.queries().data(), .query_heads = cache.shape().query_heads, .rows = 1};
    block.row_stride = block.head_stride = cache.shape().dim;
    block.lse = lse.data();
    block.lse_head_stride = 1;
    accumulate_column_sums(
        policy.scorer(), {view, SequenceId{0}, LayerId{0}, HeadId{h}}, block, LayerId{0}, scratch);
  }
  // Reading the thread's clock sometimes takes a microsecond: too long for short steps, which are rarely interrupted.
  [[nodiscard]] Clock clock() const {
    return cache.shape().tokens <= 1024 ? Clock::wall : Clock::thread;
  }
  Report evict() {
    const CacheView view = cache.view();
    const PlanRef made = plan(policy, view, {}, workspace);
    Report report;
    report.status = apply(made, view);
    if (report.status != Status::ok) { return report; }
    DenseTables sink(view, cache.ids(), nullptr, nullptr, freed);
    return commit(made, view, sink);
  }

  EngineCache cache;
  DecodeAttention attention;
  H policy;
  std::vector<PageId> freed;
  std::vector<std::byte> workspace;
  std::vector<std::byte> scratch;
  std::vector<float> lse;
};

// One row is added, one row goes.
template <HeavyMode Mode>
void each_step(benchmark::State& state, const Shape& shape, Sums sums) {
  Step<Mode> step(shape, 1, 1);
  Report last;
  const Pairs p = collect([&] {
    step.cache.append();
    const auto t = step.attend(sums);
    return std::pair(t.op + seconds_of([&] { last = step.evict(); }, step.clock()), t.attention);
  });
  if (last.status != Status::ok || last.evicted_rows != shape.kv_heads) {
    state.SkipWithError("a step did not evict one row per head");
    return;
  }
  report(state, p, {.items = static_cast<double>(shape.tokens) * shape.kv_heads});
}

// Sums at each step, a cut every `interval` steps; the cut's time is spread over them.
void at_intervals(benchmark::State& state, const Shape& shape, std::int32_t interval) {
  Step<HeavyMode::real_drop> step(shape, interval, interval);
  Report idle;
  const Pairs p = collect([&] {
    const auto t = step.attend(Sums::engine);
    return std::pair(t.op + seconds_of([&] { idle = step.evict(); }, step.clock()), t.attention);
  });
  std::vector<double> cuts;
  Report last;
  for (int i = 0; i < 7; ++i) {
    for (std::int32_t r = 0; r < interval; ++r) { step.cache.append(); }
    step.attend(Sums::engine);
    cuts.push_back(seconds_of([&] { last = step.evict(); }, step.clock()));
  }
  if (idle.evicted_rows != 0 || last.evicted_rows != interval * shape.kv_heads) {
    state.SkipWithError("cuts did not come when they should");
    return;
  }
  Pairs shared = p;
  const double cut = quantile(cuts, 0.5) / interval;
  shared.op += cut;
  shared.ratio += cut / p.bound;
  report(state, shared, {.items = static_cast<double>(shape.tokens) * shape.kv_heads});
  state.counters["cut_ms"] = cut * interval * 1e3;
}

const bool registered = [] {
  for (const std::int32_t rows : {1024, 4096, 8192, 32'768}) {
    Shape shape;
    shape.tokens = rows;
    const std::string axes = shape.axes();
    line("policy/heavy_hitter/promote" + axes, [=](benchmark::State& state) {
      each_step<HeavyMode::promote>(state, shape, Sums::engine);
    });
    line("policy/heavy_hitter/real_drop" + axes + "/interval:1", [=](benchmark::State& state) {
      each_step<HeavyMode::real_drop>(state, shape, Sums::engine);
    });
    line("policy/heavy_hitter/real_drop" + axes + "/interval:128",
         [=](benchmark::State& state) { at_intervals(state, shape, 128); });
    line("policy/heavy_hitter/promote/recomputed" + axes, [=](benchmark::State& state) {
      each_step<HeavyMode::promote>(state, shape, Sums::recomputed);
    });
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
