// SPDX-License-Identifier: Apache-2.0
#pragma once

// RoPE turns a key but keeps its length, so rotated keys and keys before RoPE get the same score.

#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

namespace kvtrim {

/// Scores a row by minus the length of its key: short keys tend to get the most attention.
///
/// \par Shapes
/// keys [live rows, head_dim]; scores [live rows], at most 0
/// \par Ties
/// none broken here. NaN: a key that is not finite scores NaN; a key of norm 0 scores highest
/// \par Complexity
/// O(live rows * head_dim) time, one read of the keys; no allocation. Row-local
/// \par Source
/// Devoto et al., 2024, arXiv:2406.11430, as written
class KeyNormScorer : public detail::NormScorer<detail::Side::keys, -1> {
 public:
  explicit constexpr KeyNormScorer(KeyNormParams) noexcept {}
};
static_assert(RowLocalScorer<KeyNormScorer>);

/// `KeyNormParams` are scored by `KeyNormScorer`.
KeyNormScorer scorer_of(ScoreTag<KeyNormParams>);

}  // namespace kvtrim
