// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Scores a row by the mean of any token score over the live rows of its chunk, summed over the KV heads of the layer.
///
/// The result is one set for all KV heads, since they all get the same scores. Chunks are cut by position, not by row: a row
/// is in the same chunk after an eviction as before it. All rows of a chunk have the same score, so a budget that cuts a
/// chunk keeps its lower positions.
///
/// \tparam Scores  parameters of the token score
/// \par Shapes
/// scores [live rows], equal in all KV heads
/// \par Ties
/// none broken here. NaN: a row that scores NaN in any KV head makes its whole chunk NaN
/// \par Complexity
/// as the token score, for each KV head, plus O(KV heads * live rows); no allocation. Sums are taken in double; in
/// units with exact scores, so that rows and heads may come in any order
/// \par Source
/// Liu et al., 2025, arXiv:2502.00299, as kvpress computes it; differs: chunks stay where they are after an eviction
template <class Scores>
class ChunkedScorer {
 public:
  using Token = typename ScorerOf<Scores>::type;
  static constexpr bool common_to_layer = true;
  static constexpr bool reads_given_scores = kvtrim::reads_given_scores<Token>;

  /// \pre `params.chunk >= 1`
  explicit constexpr ChunkedScorer(const Chunked<Scores>& params) noexcept
      : token_(params.scores), chunk_(params.chunk), exact_(params.sums() == Sums::exact) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    const auto take = [&](Arena& arena) { return Layout{arena, shape.max_rows, exact_}; };
    return Arena::bytes_for(take) + token_.scratch_bytes(shape);
  }

  /// What the token score says; `bad_observation` where the KV heads of a layer hold different positions, which
  /// cannot share one set, or where a chunk's rows in all of them are more than `exact_scores` and are added up exactly.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const Status status = token_.check(view, obs);
    if (status != Status::ok) { return status; }
    const bool fits = !exact_ || std::int64_t{chunk_} * view.kv_heads <= exact_scores;
    return fits && knows_positions(view) && detail::heads_hold_same_rows(view)
               ? Status::ok
               : Status::bad_observation;
  }

  /// Writes the score of each live row, the same for every KV head; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const auto& [view, s, l, asked] = head;
    const HeadRef first{view, s, l, HeadId{0}};
    const LiveRows rows(first);
    const std::int32_t live = rows.count();
    Arena arena(scratch);
    const Layout mem{arena, live, exact_};
    const auto rest = arena.rest();
    KVTRIM_ASSERT(arena.ok());
    std::fill(mem.sums.begin(), mem.sums.end(), 0.0);
    std::fill(mem.units.begin(), mem.units.end(), 0);
    // A token score that is already common to the layer is not added up again.
    const std::int32_t heads = LayerScorer<Token> ? 1 : view.kv_heads;
    for (std::int32_t h = 0; h < heads; ++h) {
      token_.score({view, s, l, HeadId{h}}, obs, rest, out);
      for (std::int32_t i = 0; i < live; ++i) {
        const float x = out[index(rows.row(i))];
        if (exact_) {
          mem.units[index(i)] += exact_score_units(x);
        } else {
          mem.sums[index(i)] += static_cast<double>(x);
        }
      }
    }
    std::fill(out.begin(), out.end(), 0.0F);
    rows.order(mem.order);
    const auto row_of = [&](std::int32_t rank) { return rows.row(mem.order[index(rank)]); };
    const auto chunk_of = [&](std::int32_t rank) {
      return raw(first.position(row_of(rank))) / chunk_;
    };
    for (std::int32_t begin = 0, end = 0; begin < live; begin = end) {
      double sum = 0;
      std::uint64_t units = 0;
      const std::int32_t chunk = chunk_of(begin);
      for (end = begin; end < live && chunk_of(end) == chunk; ++end) {
        if (exact_) {
          units += mem.units[index(mem.order[index(end)])];
        } else {
          sum += mem.sums[index(mem.order[index(end)])];
        }
      }
      const float mean =
          exact_ ? exact_score_mean(units, end - begin) : static_cast<float>(sum / (end - begin));
      for (std::int32_t rank = begin; rank < end; ++rank) { out[index(row_of(rank))] = mean; }
    }
  }

 private:
  struct Layout {
    Arena& arena;
    std::int32_t rows;
    bool exact;
    std::span<double> sums = arena.take<double>(exact ? 0 : rows);  // over the KV heads
    std::span<std::uint64_t> units = arena.take<std::uint64_t>(exact ? rows : 0);
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  Token token_;
  std::int32_t chunk_;
  bool exact_;
};

/// `Chunked<Scores>` are scored by `ChunkedScorer<Scores>`.
template <class Scores>
ChunkedScorer<Scores> scorer_of(ScoreTag<Chunked<Scores>>);

}  // namespace kvtrim
