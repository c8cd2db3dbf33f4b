// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything that can be wrong with what a Recorder is given in a step, before anything is written.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/observe/layer_step.hpp>
#include <kvtrim/policy/needs.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace kvtrim::detail {

[[nodiscard]] inline RecordFault bad_step(std::string_view what,
                                          std::int64_t value,
                                          std::int64_t expected,
                                          std::int32_t sequence = -1) noexcept {
  return {Status::bad_observation, what, sequence, value, expected};
}

/// Whether slots and layers [first, first + layers) are there; 0 layers: all from `first` on.
[[nodiscard]] inline RecordFault check_range(const RecorderParams& p,
                                             std::span<const std::int32_t> slots,
                                             LayerId first,
                                             std::int32_t layers) noexcept {
  if (raw(first) < 0 || raw(first) >= p.layers) { return bad_step("layer", raw(first), p.layers); }
  if (layers < 0 || layers > p.layers - raw(first)) {
    return bad_step("layers", layers, p.layers - raw(first));
  }
  const auto count = static_cast<std::int64_t>(slots.size());
  if (count > p.sequences) { return bad_step("sequences", count, p.sequences); }
  for (const std::int32_t slot : slots) {
    if (slot < 0 || slot >= p.sequences) { return bad_step("slot", slot, p.sequences); }
  }
  return {};
}

/// What of a step does not depend on its sequences.
[[nodiscard]] inline RecordFault check_step(const CacheView& view,
                                            const LayerStep& step,
                                            const Needs& needs,
                                            const RecorderParams& p,
                                            std::int32_t workers) noexcept {
  const QueryBlock& q = step.queries;
  const std::int32_t layer = raw(step.layer);
  if (layer < 0 || layer >= p.layers) { return bad_step("layer", layer, p.layers); }
  const std::int32_t view_layer = raw(step.layer_of(view));
  if (view_layer < 0 || view_layer >= view.layers) {
    return bad_step("view layer", view_layer, view.layers);
  }
  if (view.kv_heads != p.kv_heads) { return bad_step("kv_heads", view.kv_heads, p.kv_heads); }
  const bool keys = readable(view.k);
  if (keys && view.k.head_dim != p.head_dim) {
    return bad_step("head_dim", view.k.head_dim, p.head_dim);
  }
  if (q.query_heads != p.query_heads) {
    return bad_step("query_heads", q.query_heads, p.query_heads);
  }
  const auto slots = static_cast<std::int64_t>(step.sequences.size());
  if (slots != 0 && slots != view.sequences) { return bad_step("slots", slots, view.sequences); }
  if (workers > p.workers) {
    return {Status::workspace_too_small, "workers", -1, workers, p.workers};
  }
  const bool sums = needs.accumulate.has_value();
  const bool from_lse = sums && step.probabilities.data == nullptr;
  if ((needs.window > 0 || from_lse) && q.data == nullptr) { return bad_step("queries", 0, 1); }
  if (from_lse && !p.lse) { return bad_step("probabilities", 0, 1); }
  if (q.lse == nullptr && (from_lse || (needs.window > 0 && p.lse))) {
    return bad_step("lse", 0, 1);
  }
  if (from_lse && !keys) { return bad_step("dtype", static_cast<std::int64_t>(view.k.dtype), 0); }
  if (sums && (!view.score_sums || !view.score_compensations)) {
    return bad_step("score planes", view.score_sums || view.score_compensations ? 1 : 0, 2);
  }
  bool several = false;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    several = several || q.count(SequenceId{s}) > 1;
  }
  if (from_lse && several && !knows_positions(view)) { return bad_step("row positions", 0, 1); }
  const QueryBlock& before = step.unrotated;
  if (needs.moments && (before.data == nullptr || before.query_heads != p.query_heads)) {
    return bad_step("unrotated", before.query_heads, p.query_heads);
  }
  return {};
}

/// What of a step depends on the sequence `i` alone, which has rows.
[[nodiscard]] inline RecordFault check_sequence(const CacheView& view,
                                                const LayerStep& step,
                                                const Needs& needs,
                                                std::int32_t i) noexcept {
  const SequenceId s{i};
  const std::int32_t rows = step.queries.count(s);
  if (needs.moments && step.unrotated.count(s) != rows) {
    return bad_step("unrotated rows", step.unrotated.count(s), rows, i);
  }
  const std::int64_t addends = std::int64_t{rows} * (step.queries.query_heads / view.kv_heads);
  if (needs.accumulate && needs.accumulate->sums == Sums::exact && !exact_sum_holds(addends)) {
    return bad_step("exact addends", addends, exact_addends, i);
  }
  for (std::int32_t h = 0; needs.accumulate && h < view.kv_heads; ++h) {
    const std::int32_t hole = view.state(s, step.layer_of(view), HeadId{h}).append_row;
    if (hole >= 0) { return bad_step("append_row", hole, -1, i); }
  }
  return {};
}

/// Whether positions follow those of the window, whose last one is `last` (-1: it is empty): without positions without a
/// gap, otherwise ascending.
[[nodiscard]] inline RecordFault check_positions(const QueryBlock& q,
                                                 std::int32_t i,
                                                 std::int32_t next_position,
                                                 Position last) noexcept {
  const SequenceId s{i};
  std::int32_t expected = raw(last) + 1;
  if (q.positions == nullptr) {
    const std::int32_t first = raw(q.position(s, 0, next_position));
    const bool follows = raw(last) < 0 || first == expected;
    return first >= 0 && follows ? RecordFault{} : bad_step("positions", first, expected, i);
  }
  for (std::int32_t r = 0; r < q.count(s); ++r) {
    const std::int32_t position = raw(q.position(s, r, next_position));
    if (position < expected) { return bad_step("positions", position, expected, i); }
    expected = position + 1;
  }
  return {};
}

}  // namespace kvtrim::detail
