// SPDX-License-Identifier: Apache-2.0
// The page drop of a sliding window of 1,024 rows: plan, apply and commit, for tables that are due. Compared with a memmove of
// the table's entries, which is all that must happen. 0 bytes of keys and values move; per-row planes, if the engine keeps
// any, close up with the table.

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

void drop(benchmark::State& state, std::int32_t sequences, std::int32_t layers, Planes planes) {
  Shape shape;
  shape.sequences = sequences;
  shape.dim = 16;  // keys and values are not looked at
  shape.tokens = 4 + 1024 + 32;
  shape.tokens = (shape.tokens + 15) / 16 * 16;
  EngineCache cache(shape, {.values = false, .positions = planes != Planes::none});
  CacheView view = cache.view();
  view.layers = layers;  // of one table; there is memory for one layer, none of which is touched
  if (planes == Planes::common) { view.positions.head_stride = view.positions.layer_stride = 0; }
  const StreamingSink policy;
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
  if (last.status != Status::ok || last.bytes_moved != 0 || last.released_pages < sequences) {
    state.SkipWithError("no page was dropped");
    return;
  }
  report(state, p, {.items = static_cast<double>(sequences) * layers});
  state.counters["ns_a_layer"] = p.op / sequences / layers * 1e9;  // and sequence
}

void add(std::int32_t sequences, std::int32_t layers, Planes planes) {
  const char* const name = planes == Planes::none     ? "none"
                           : planes == Planes::common ? "common"
                                                      : "per_head";
  line(std::string("policy/streaming_sink/pages/planes:") + name + "/recent:1024/page:16/layers:" +
           std::to_string(layers) + "/sequences:" + std::to_string(sequences),
       [=](benchmark::State& state) { drop(state, sequences, layers, planes); });
}

const bool registered = [] {
  for (const std::int32_t sequences : {1, 16, 64}) { add(sequences, 1, Planes::none); }
  for (const std::int32_t layers : {8, 32}) { add(16, layers, Planes::none); }
  add(16, 1, Planes::common);
  add(16, 32, Planes::common);
  add(16, 1, Planes::per_head);
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
