// SPDX-License-Identifier: Apache-2.0
// What a Recorder costs: one layer of a step recorded for a policy, compared with the calls by hand that it replaces, on the
// same data. It checks a step before it writes anything, and hands out work by KV head instead of by layer.

#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

// The last `rows` queries of each sequence, which lie one after the other: [tokens, heads, dim].
struct Step {
  Step(const Shape& shape, std::int32_t rows) : rows_of_each(rows) {
    const std::int32_t total = shape.sequences * rows;
    queries = normal_numbers(
        static_cast<std::size_t>(total) * static_cast<std::size_t>(shape.query_heads * shape.dim),
        5,
        1.0F / std::sqrt(static_cast<float>(shape.dim)));
    lse.assign(static_cast<std::size_t>(total * shape.query_heads),
               std::log(static_cast<float>(shape.tokens)) + 0.5F);
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      firsts.push_back(s * rows);
      for (std::int32_t i = 0; i < rows; ++i) {
        positions.push_back(Position{shape.tokens - rows + i});
      }
    }
    block.data = queries.data();
    block.query_heads = shape.query_heads;
    block.rows = rows;
    block.row_firsts = firsts.data();
    block.head_stride = shape.dim;
    block.row_stride = static_cast<std::int64_t>(shape.query_heads) * shape.dim;
    block.positions = positions.data();
    block.lse = lse.data();
    block.lse_head_stride = total;
    block.scale = 1.0F;
  }
  std::int32_t rows_of_each;
  std::vector<float> queries, lse;
  std::vector<Position> positions;
  std::vector<std::int32_t> firsts;
  QueryBlock block;
};

void record(benchmark::State& state, const Shape& shape, std::int32_t rows, const Needs& needs) {
  EngineCache cache(shape, {.values = false, .scores = true});
  const CacheView view = cache.view();
  const Step data(shape, rows);
  Recorder recorder(needs,
                    {.sequences = shape.sequences,
                     .query_heads = shape.query_heads,
                     .kv_heads = shape.kv_heads,
                     .head_dim = shape.dim,
                     .lse = needs.accumulate.has_value()});
  std::optional<QueryRing> ring;
  std::optional<QueryMoments> moments;
  if (needs.window > 0) {
    ring.emplace(QueryRing::Params{.sequences = shape.sequences,
                                   .query_heads = shape.query_heads,
                                   .head_dim = shape.dim,
                                   .window = needs.window});
  }
  if (needs.moments) {
    moments.emplace(QueryMoments::Params{.sequences = shape.sequences,
                                         .query_heads = shape.query_heads,
                                         .head_dim = shape.dim,
                                         .sinks = needs.moments->sinks});
  }
  std::vector<std::byte> scratch(column_sums_scratch_bytes(shape.dim));
  const auto prepare = [&] {  // the step is recorded again, over the same rows of the ring
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      recorder.truncate(s, Position{shape.tokens - rows});
      if (ring) { ring->truncate(SequenceId{s}, Position{shape.tokens - rows}); }
    }
  };
  const auto op = [&] {
    const LayerStep step{.queries = data.block, .unrotated = data.block};
    if (recorder.record(view, step) != Status::ok) { std::abort(); }
  };
  const auto by_hand = [&] {
    for (std::int32_t s = 0; s < shape.sequences; ++s) {
      const SequenceId id{s};
      if (ring) {
        ring->push(
            id,
            LayerId{0},
            rows,
            data.queries.data() + data.firsts[static_cast<std::size_t>(s)] * data.block.row_stride,
            data.positions.data() + data.firsts[static_cast<std::size_t>(s)]);
      }
      if (moments) { moments->accumulate(id, LayerId{0}, data.block, LayerId{0}); }
      for (std::int32_t h = 0; needs.accumulate && h < shape.kv_heads; ++h) {
        accumulate_column_sums(
            *needs.accumulate, {view, id, LayerId{0}, HeadId{h}}, data.block, LayerId{0}, scratch);
      }
    }
  };
  report(state,
         interleave(prepare, op, by_hand),
         {.items = static_cast<double>(shape.sequences) * rows,
          .bytes = static_cast<double>(data.queries.size() * sizeof(float))});
  state.counters["workspace_bytes"] =
      static_cast<double>(Recorder::bytes(needs, recorder.params()));
}

const bool registered = [] {
  struct Line {
    std::string policy;
    Needs needs;
  };
  const Line lines[] = {{"snapkv", needs(SnapKVSelector<>{})},
                        {"h2o", needs(HeavyHitter<>{})},
                        {"expected", needs(ExpectedAttention{})}};
  for (const Line& each : lines) {
    for (const std::int32_t rows : {256, 1}) {  // a chunk of a prompt; a decode step of a batch
      Shape shape;
      shape.tokens = 2048;
      shape.sequences = rows == 1 ? 16 : 1;
      line("observe/record/" + each.policy + (rows == 1 ? "/decode" : "/chunk") + shape.axes(),
           [=, needs = each.needs](benchmark::State& state) { record(state, shape, rows, needs); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
