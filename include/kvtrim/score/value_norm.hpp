// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention says how much of a value is taken; the value's length says how much there is to take.

#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/score/detail/rescale.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

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
class ValueNormFactor : public detail::NormScorer<detail::Side::values, 1> {};
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
using ValueNormScorer = detail::RescaledScorer<ValueNorm, Scores, ValueNormFactor>;
static_assert(Scorer<ValueNormScorer<detail::ScorerArchetype>>);

/// `ValueNorm<Scores>` are scored by `ValueNormScorer<Scores>`.
template <class Scores>
ValueNormScorer<Scores> scorer_of(ScoreTag<ValueNorm<Scores>>);

}  // namespace kvtrim
