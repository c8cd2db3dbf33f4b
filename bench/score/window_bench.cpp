// SPDX-License-Identifier: Apache-2.0
// Scores by the prompt's last 32 queries, all KV heads of a layer, compared with Eigen's product and one exponential per score.

#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/score/window.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"
#include "../product.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

constexpr std::int32_t window = 32;

// The exact form computes its denominators.
enum class Denominator : std::uint8_t { lse, computed, exact };

void score(benchmark::State& state, const Shape& shape, Denominator form, std::int32_t threads) {
  const std::int32_t items = shape.sequences * shape.kv_heads;
  const std::int32_t rows = shape.group() * window;
  EngineCache cache(shape, {.values = false});
  const CacheView view = cache.view();
  const float scale = 1.0F / std::sqrt(static_cast<float>(shape.dim));
  const std::size_t count = static_cast<std::size_t>(shape.sequences) *
                            static_cast<std::size_t>(shape.query_heads) * window;
  const std::vector<float> queries =
      normal_numbers(count * static_cast<std::size_t>(shape.dim), 3, scale);
  const std::vector<float> lse(count, std::log(static_cast<float>(shape.tokens)) + 0.5F);

  Observation obs;
  obs.queries = {.data = queries.data(), .query_heads = shape.query_heads, .rows = window};
  obs.queries.row_stride = shape.dim;
  obs.queries.head_stride = static_cast<std::int64_t>(window) * shape.dim;
  obs.queries.sequence_stride = shape.query_heads * obs.queries.head_stride;
  obs.queries.scale = 1.0F;
  if (form == Denominator::lse) {
    obs.queries.lse = lse.data();
    obs.queries.lse_head_stride = window;
    obs.queries.lse_sequence_stride = static_cast<std::int64_t>(shape.query_heads) * window;
  }
  WindowParams params;
  params.sums = form == Denominator::exact ? Sums::exact : Sums::floating;
  const WindowScorer scorer(params);
  const Threads executor{threads};
  std::vector<std::vector<std::byte>> scratch(
      static_cast<std::size_t>(threads),
      std::vector<std::byte>(scorer.scratch_bytes(plan_shape(view, obs))));
  std::vector<float> scores(static_cast<std::size_t>(items) *
                            static_cast<std::size_t>(shape.tokens));

  const std::vector<float> keys = cache.contiguous_keys();
  ProductAndExp bound(keys, queries, items, shape.tokens, rows, shape.dim, threads);
  const auto op = [&] {
    executor.for_each(items, [&](std::int64_t i, std::int32_t w) {
      scorer.score({view,
                    SequenceId{static_cast<std::int32_t>(i) / shape.kv_heads},
                    LayerId{0},
                    HeadId{static_cast<std::int32_t>(i) % shape.kv_heads}},
                   obs,
                   scratch[static_cast<std::size_t>(w)],
                   std::span(scores).subspan(
                       static_cast<std::size_t>(i) * static_cast<std::size_t>(shape.tokens),
                       static_cast<std::size_t>(shape.tokens)));
    });
  };
  report(state,
         interleave(op, bound, threads > 1 ? Clock::wall : Clock::thread),
         {.items = static_cast<double>(items) * shape.tokens,
          .bytes = cache.key_bytes(),
          .flops = bound.flops()});
  state.counters["bound_tile"] = bound.tile();
  state.counters["workspace_bytes"] = static_cast<double>(scratch.front().size());
}

void lines(const Shape& shape, std::int32_t threads = 1, bool exact = false) {
  for (const Denominator form : {Denominator::lse, Denominator::computed, Denominator::exact}) {
    if (form == Denominator::exact && !exact) { continue; }
    const std::string name = std::string("score/window/") +
                             (form == Denominator::lse        ? "lse"
                              : form == Denominator::computed ? "computed"
                                                              : "exact") +
                             shape.axes() +
                             (threads > 1 ? "/threads:" + std::to_string(threads) : "");
    line(name, [=](benchmark::State& state) { score(state, shape, form, threads); });
  }
}

const bool registered = [] {
  const Shape base;
  lines(base, 1, true);
  lines(base, 2);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    Shape s = base;
    s.dtype = dtype;
    lines(s);
  }
  for (const std::int32_t tokens : {1024, 4096, 131'072}) {
    Shape s = base;
    s.tokens = tokens;
    lines(s);
  }
  for (const std::int32_t page_size : {32, 128}) {
    Shape s = base;
    s.page_size = page_size;
    lines(s);
  }
  {
    Shape s = base;
    s.query_heads = 64;
    lines(s);
    s.query_heads = 9;
    s.kv_heads = 3;
    s.dim = 64;
    lines(s, 1, true);
  }
  for (const std::int32_t sequences : {16, 64}) {
    Shape s = base;
    s.tokens = 1024;
    s.sequences = sequences;
    lines(s);
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
