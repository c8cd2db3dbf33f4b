// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention says how much of a value is taken; the value's length says how much there is to take.

#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/score/detail/rescale.hpp>
#include <kvtrim/score/detail/row_scores.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Scores a row by the length of its value: the factor of `ValueNorm`.
///
/// \par Shapes
/// values [live rows, value_dim]; scores [live rows], at least 0
/// \par Ties
/// none broken here. NaN: a value that is not finite scores NaN
/// \par Complexity
/// O(live rows * value_dim) time, one read of the values; no allocation. Row-local
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636
class ValueNormFactor : public detail::RowByRow<ValueNormFactor> {
 public:
  constexpr ValueNormFactor() noexcept = default;

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::row_block_bytes(shape.value_dim);
  }
  /// `bad_observation` if the values are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    return readable(view.v) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row from `first` on, as many as `out` has elements; a hole's is 0.
  void score_rows(const HeadRef& head,
                  const Observation&,
                  std::int32_t first,
                  std::span<std::byte> scratch,
                  std::span<float> out) const noexcept {
    detail::score_norms(head, detail::Side::values, 1.0F, first, scratch, out);
  }
};
static_assert(RowLocalScorer<ValueNormFactor>);

/// Scores a row by (its score + epsilon) * the length of its value. Row-local if the scorer is.
///
/// Meant for scores of at least 0, as attention gives them: with negative scores (KeyNorm's, half of KeyDiff's), the
/// longer value makes the score lower.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer
/// \par Shapes
/// values [live rows, value_dim]; scores [live rows]
/// \par Ties
/// none broken here. NaN: where the score is, and where the value is not finite
/// \par Complexity
/// the scorer's, and O(live rows * value_dim); no allocation
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636; as a decorator: own
template <class Scores>
class ValueNormScorer : public detail::RescaledScorer<Scores, ValueNormFactor> {
 public:
  explicit constexpr ValueNormScorer(const ValueNorm<Scores>& params) noexcept
      : detail::RescaledScorer<Scores, ValueNormFactor>(params.scores, params.epsilon) {}
};
static_assert(Scorer<ValueNormScorer<detail::ScorerArchetype>>);

/// `ValueNorm<Scores>` are scored by `ValueNormScorer<Scores>`.
template <class Scores>
struct ScorerOf<ValueNorm<Scores>> {
  using type = ValueNormScorer<Scores>;
};

}  // namespace kvtrim
