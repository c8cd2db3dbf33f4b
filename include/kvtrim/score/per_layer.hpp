// SPDX-License-Identifier: Apache-2.0
#pragma once

// Row r must be the same token in all heads of the layer. It is, as long as no policy with one set per head has cut the
// sequence; this is checked, not assumed.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

namespace kvtrim {

namespace detail {
/// Whether the KV heads of each layer hold the same tokens in the same rows, so that one set of scores can serve them all.
///
/// \par Complexity
/// O(1) per head if heads share their positions, O(rows) otherwise
[[nodiscard]] inline bool heads_hold_same_rows(const CacheView& view) noexcept {
  const auto same = [](const HeadRef& head, const HeadRef& like) {
    const LiveRows rows(head);
    const LiveRows others(like);
    if (rows.extent() != others.extent() || rows.hole() != others.hole()) { return false; }
    if (!head.view.positions || head.view.positions.head_stride == 0) { return true; }
    for (std::int32_t r = 0; r < rows.extent(); ++r) {
      if (r != rows.hole() && head.position(r) != like.position(r)) { return false; }
    }
    return true;
  };
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 1; h < view.kv_heads; ++h) {
        if (!same({view, SequenceId{s}, LayerId{l}, HeadId{h}},
                  {view, SequenceId{s}, LayerId{l}, HeadId{0}})) {
          return false;
        }
      }
    }
  }
  return true;
}
}  // namespace detail

/// Adds the scores of one KV head to the units of a layer's rows; a NaN stays one. Units of at most `exact_scores` heads, of
/// one rank or reduced by sum over several, become scores by `exact_score_mean`.
///
/// \param scores         [rows] at most 1
/// \param[in,out] units  [rows] zeros before the first head
inline void add_scores(std::span<const float> scores, std::span<std::uint64_t> units) noexcept {
  for (std::size_t r = 0; r < scores.size(); ++r) { units[r] += exact_score_units(scores[r]); }
}

/// Scores a row by the mean (or sum, or maximum) of its scores in the KV heads of its layer.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer
/// \par Shapes
/// scores [live rows], the same for every KV head
/// \par Ties
/// none broken here. NaN: a row that is NaN in one head is NaN
/// \par Complexity
/// the scorer's, times the number of KV heads; no allocation. With exact scores the sum over the heads is exact, too: the
/// same bits in any order of heads, and for heads that lie on several ranks (`add_scores`)
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104 (TOVA), which averages over all heads; as a decorator: own
template <class Scores>
class PerLayerScorer {
 public:
  using Inner = typename ScorerOf<Scores>::type;
  static constexpr bool reads_given_scores = kvtrim::reads_given_scores<Inner>;
  static constexpr bool common_to_layer = true;

  explicit constexpr PerLayerScorer(const PerLayer<Scores>& params) noexcept
      : inner_(params.scores),
        heads_(params.heads),
        exact_(params.sums() == Sums::exact && params.heads != Reduction::max) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return Arena::bytes_for([&](Arena& arena) {
             const auto units = take_units(arena, shape.max_rows);
             return std::pair(units, arena.take<float>(exact_ ? 0 : shape.max_rows));
           }) +
           inner_.scratch_bytes(shape);
  }
  /// `bad_observation` if the scorer says so, if the KV heads of a layer hold different tokens, or if they are more than
  /// `exact_scores` and are added up exactly.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    if (const Status status = inner_.check(view, obs); status != Status::ok) { return status; }
    const bool fits = !exact_ || view.kv_heads <= exact_scores;
    return fits && detail::heads_hold_same_rows(view) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row of the layer; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    Arena arena(scratch);
    const auto rows = static_cast<std::int64_t>(out.size());
    const auto units = take_units(arena, rows);
    const auto one = arena.take<float>(exact_ ? 0 : rows);
    const auto rest = arena.rest();
    KVTRIM_ASSERT(arena.ok());
    const auto& [view, s, l, asked] = head;
    if (exact_) {
      std::fill(units.begin(), units.end(), 0);
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        inner_.score({view, s, l, HeadId{h}}, obs, rest, out);
        add_scores(out, units);
      }
      for (std::size_t r = 0; r < out.size(); ++r) {
        out[r] = exact_score_mean(units[r], heads_ == Reduction::mean ? view.kv_heads : 1);
      }
      return;
    }
    inner_.score({view, s, l, HeadId{0}}, obs, rest, out);
    for (std::int32_t h = 1; h < view.kv_heads; ++h) {
      inner_.score({view, s, l, HeadId{h}}, obs, rest, one);
      for (std::size_t r = 0; r < out.size(); ++r) { out[r] = joined(out[r], one[r]); }
    }
    if (heads_ == Reduction::mean) {
      for (float& x : out) { x /= static_cast<float>(view.kv_heads); }
    }
  }

 private:
  [[nodiscard]] std::span<std::uint64_t> take_units(Arena& arena,
                                                    std::int64_t rows) const noexcept {
    return arena.take<std::uint64_t>(exact_ ? rows : 0);
  }
  [[nodiscard]] float joined(float a, float b) const noexcept {
    if (heads_ != Reduction::max) { return a + b; }
    if (is_nan(a) || is_nan(b)) { return std::numeric_limits<float>::quiet_NaN(); }
    return std::max(a, b);
  }

  Inner inner_;
  Reduction heads_;
  bool exact_;  // they are added up in units
};
static_assert(LayerScorer<PerLayerScorer<detail::ScorerArchetype>>);

/// `PerLayer<Scores>` are scored by `PerLayerScorer<Scores>`.
template <class Scores>
PerLayerScorer<Scores> scorer_of(ScoreTag<PerLayer<Scores>>);

}  // namespace kvtrim
