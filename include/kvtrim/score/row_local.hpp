// SPDX-License-Identifier: Apache-2.0
#pragma once

// While a sequence grows, a score that depends on its own row alone is computed once, in the step that appends the row,
// and then moves with it. Not all scores are like that, and no trick makes them so: KeyDiff's mean key, a softmax's
// denominator (SnapKV, TOVA) and ExpectedAttention's future positions change with every row, so those are recomputed.

#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// A scorer whose score of a row depends on that row alone.
///
/// | expression                                     | returns | meaning                               |
/// |------------------------------------------------|---------|---------------------------------------|
/// | `s.score_rows(head, obs, first, scratch, out)` | `void`  | `out[i]` for row first + i, if live   |
///
/// `noexcept`. Semantics the compiler cannot check: the result for a row is that of `score` bit for bit, whatever `first`
/// and the row's index are.
template <class S>
concept RowLocalScorer = Scorer<S> && requires(const S& s,
                                               const HeadRef& head,
                                               const Observation& obs,
                                               std::int32_t first,
                                               std::span<std::byte> scratch,
                                               std::span<float> out) {
  { s.score_rows(head, obs, first, scratch, out) } noexcept -> std::same_as<void>;
};

namespace detail {
/// Base of scorer `S`: scores all rows by its `score_rows`.
template <class S>
class RowByRow {
 public:
  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    static_cast<const S&>(*this).score_rows(head, obs, 0, scratch, out);
  }

 private:
  constexpr RowByRow() noexcept = default;
  friend S;  // no other class can be put where an S is meant
};
}  // namespace detail

/// Working space of `score_new_rows` for up to `rows` new rows.
///
/// \par Source
/// none
template <class Scores>
  requires RowLocalScorer<detail::ScorerFor<Scores>>
[[nodiscard]] std::size_t score_new_rows_bytes(const Scores& scores,
                                               const PlanShape& shape,
                                               std::int32_t rows) noexcept {
  return Arena::bytes_for(
             [&](Arena& arena) { return arena.take<float>(std::min(rows, shape.max_rows)); }) +
         detail::ScorerFor<Scores>(scores).scratch_bytes(shape);
}

/// Scores the newest `rows` rows of a sequence, in all layers and KV heads, into a plane that moves with the rows:
/// `view.score_sums` (`PagedCache::Params::scores`) or one of `view.more_planes`. Call it in each step that appended rows,
/// before rows are evicted; then plan with that plane as `Observation::scores`.
///
/// Equals rescoring all rows, bit for bit, however many rows came and went, as long as their keys and values stay
/// unchanged: if keys are rotated again (`PositionMode::in_cache`, `sinks_follow`), a score is that of the row at the time
/// it was appended.
///
/// \param scores   of a row-local scorer, such as `KeyNormParams`
/// \param rows     rows appended since the last call; if more than are live, all are scored
/// \param plane    fp32
/// \param scratch  [score_new_rows_bytes(scores, plan_shape(view, obs), rows)]
/// \returns `ok`; `bad_observation` (also without a plane) or `workspace_too_small`: nothing was written
/// \par Ties
/// none broken here. NaN: as the scorer
/// \par Complexity
/// the scorer's for the new rows; plus O(live rows) reads of positions in the step after a slot was overwritten, since the
/// first new row is then not at the end; no allocation
/// \par Source
/// none
template <class Scores>
  requires RowLocalScorer<detail::ScorerFor<Scores>>
Status score_new_rows(const Scores& scores,
                      const CacheView& view,
                      SequenceId s,
                      std::int32_t rows,
                      const Observation& obs,
                      const SequencePlane& plane,
                      std::span<std::byte> scratch) noexcept {
  const detail::ScorerFor<Scores> scorer(scores);
  if (!plane || plane.element_bytes != 4) { return Status::bad_observation; }
  if (const Status status = scorer.check(view, obs); status != Status::ok) { return status; }
  const PlanShape shape = plan_shape(view, obs);
  if (scratch.size() < score_new_rows_bytes(scores, shape, rows)) {
    return Status::workspace_too_small;
  }
  Arena arena(scratch);
  const auto out = arena.take<float>(std::min(rows, shape.max_rows));
  const auto rest = arena.rest();
  KVTRIM_ASSERT(arena.ok());
  for (std::int32_t i = 0; i < view.layers * view.kv_heads; ++i) {
    const LayerId l{i / view.kv_heads};
    const HeadId h{i % view.kv_heads};
    const HeadRef head{view, s, l, h};
    const auto write = [&](std::int32_t first, std::int32_t count) {
      const auto some = out.first(static_cast<std::size_t>(count));
      scorer.score_rows(head, obs, first, rest, some);
      for (std::int32_t r = 0; r < count; ++r) {
        plane.at<float>(s, l, h, first + r) = some[static_cast<std::size_t>(r)];
      }
    };
    const std::int32_t live = head.live_rows();
    const std::int32_t count = std::min(rows, live);
    const std::int32_t first = live - count;
    if (count < 1) { continue; }
    const Position oldest{head.state().next_position - rows};
    const bool in_order = !view.knows_positions(s, head.table());  // no hole was ever filled
    if (first == 0 || in_order || head.position(first) >= oldest) {
      write(first, count);
      continue;
    }
    // The first new row fills a hole.
    write(first + 1, count - 1);
    for (std::int32_t r = 0; r <= first; ++r) {
      if (head.position(r) >= oldest) { write(r, 1); }
    }
  }
  return Status::ok;
}

}  // namespace kvtrim
