// SPDX-License-Identifier: Apache-2.0
// The page drop of a sliding window: plan, apply and commit, for tables that are due, and for tables that are not (`idle`), as
// most are at most steps. Compared with a memmove of the table's entries, which is all that must happen. 0 bytes of keys and
// values move; per-row planes, if the engine keeps any, close up with the table.

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

enum class Planes : std::uint8_t { none, common, per_head };

struct Case {
  std::int32_t sequences = 1;
  std::int32_t layers = 1;
  Planes planes = Planes::none;
  std::int32_t recent = 1024;
  bool due = true;
};

void drop(benchmark::State& state, const Case& x) {
  const auto [sequences, layers, planes, recent, due] = x;
  Shape shape;
  shape.sequences = sequences;
  shape.dim = 16;  // keys and values are not looked at
  shape.tokens = 4 + recent + 32;
  shape.tokens = (shape.tokens + 15) / 16 * 16;
  EngineCache cache(shape, {.values = false, .positions = planes != Planes::none});
  CacheView view = cache.view();
  view.layers = layers;  // of one table; there is memory for one layer, none of which is touched
  if (planes == Planes::common) { view.positions.head_stride = view.positions.layer_stride = 0; }
  const StreamingSink policy({.recent = due ? recent : shape.tokens});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  std::vector<PageId> freed(static_cast<std::size_t>(view.pages));
  Report last;
  const auto op = [&] {
    const PlanRef made = plan(policy, view, {}, workspace);
    if (apply(made, view) != Status::ok) { return; }
    DenseTables sink(view, cache.ids(), nullptr, nullptr, freed);
    last = commit(made, view, sink);
  };
  const auto bound = [&] {
    for (std::int32_t s = 0; s < sequences; ++s) {
      std::int32_t* const row = cache.ids() + s * view.table.row_stride;
      std::memmove(row + 1, row + 3, static_cast<std::size_t>(view.table.max_pages - 3) * 4);
    }
  };
  const Pairs p = interleave([&] { cache.reset(); }, op, bound);
  const bool right = due ? last.released_pages >= sequences : last.released_pages == 0;
  if (last.status != Status::ok || last.bytes_moved != 0 || !right) {
    state.SkipWithError(due ? "no page was dropped" : "a page was dropped");
    return;
  }
  report(state, p, {.items = static_cast<double>(sequences) * layers});
  state.counters["ns_a_layer"] = p.op / sequences / layers * 1e9;  // and sequence
}

void add(const Case& x) {
  const char* const name = x.planes == Planes::none     ? "none"
                           : x.planes == Planes::common ? "common"
                                                        : "per_head";
  line(std::string("policy/streaming_sink/") + (x.due ? "pages" : "idle") + "/planes:" + name +
           "/recent:" + std::to_string(x.recent) + "/page:16/layers:" + std::to_string(x.layers) +
           "/sequences:" + std::to_string(x.sequences),
       [=](benchmark::State& state) { drop(state, x); });
}

const bool registered = [] {
  for (const std::int32_t sequences : {1, 16, 64}) { add({.sequences = sequences}); }
  for (const std::int32_t layers : {8, 32}) { add({.sequences = 16, .layers = layers}); }
  add({.sequences = 16, .planes = Planes::common});
  add({.sequences = 16, .layers = 32, .planes = Planes::common});
  add({.sequences = 16, .planes = Planes::per_head});
  for (const bool due : {true, false}) {
    for (const std::int32_t recent : {1024, 32'768}) {
      add({.sequences = 32, .recent = recent, .due = due});
    }
  }
  for (const std::int32_t layers : {1, 32}) {  // the states of all tables are looked at: 1 and 64
    add({.sequences = 1, .layers = layers, .due = false});
    add({.sequences = 64, .layers = layers, .due = false});
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
