// SPDX-License-Identifier: Apache-2.0
#pragma once

// RoPE turns a key but keeps its length, so rotated keys and keys before RoPE get the same score.

#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/score/detail/row_scores.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include <cstdint>
#include <span>

namespace kvtrim {

/// Scores a row by minus the length of its key: short keys tend to get the most attention.
///
/// \par Shapes
/// keys [live rows, head_dim]; scores [live rows], at most 0
/// \par Ties
/// none broken here. NaN: a key that is not finite scores NaN; a key of norm 0 scores highest
/// \par Complexity
/// O(live rows * head_dim) time, one read of the keys; no allocation. Row-local. The score of a row does not change by a
/// bit with page size, page placement, batch, thread or the row's index
/// \par Source
/// Devoto et al., 2024, arXiv:2406.11430, as written
class KeyNormScorer : public detail::RowByRow<KeyNormScorer> {
 public:
  explicit constexpr KeyNormScorer(KeyNormParams) noexcept {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::row_block_bytes(shape.head_dim);
  }
  /// `bad_observation` if the keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    return readable(view.k) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row from `first` on, as many as `out` has elements; a hole's is 0.
  void score_rows(const HeadRef& head,
                  const Observation&,
                  std::int32_t first,
                  std::span<std::byte> scratch,
                  std::span<float> out) const noexcept {
    detail::score_norms(head, detail::Side::keys, -1.0F, first, scratch, out);
  }
};
static_assert(RowLocalScorer<KeyNormScorer>);

/// `KeyNormParams` are scored by `KeyNormScorer`.
template <>
struct ScorerOf<KeyNormParams> {
  using type = KeyNormScorer;
};

}  // namespace kvtrim
