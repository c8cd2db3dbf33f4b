// SPDX-License-Identifier: Apache-2.0
#pragma once

// A window of one query whose own column is scored too, averaged over all heads of the layer. Every new query changes
// every score, so there is nothing to carry over from step to step.

#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/score/window.hpp>

namespace kvtrim {

/// Scores a row by the attention that the last query pays to it, the mean over all query heads of the layer.
///
/// \par Shapes
/// queries [query heads, at least 1 row, head_dim], fp32: the last one votes; scores [live rows], one set per layer
/// \par Ties
/// none broken here. NaN: a row whose key is not finite in one head scores NaN; if the queries of a whole group have no
/// vote (`WindowScorer`), all rows do
/// \par Complexity
/// O(query heads * live rows * head_dim) time; no allocation
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104 (TOVA), as written
class TovaScorer : public PerLayerScorer<WindowParams> {
 public:
  explicit constexpr TovaScorer(const TovaParams& params) noexcept
      : PerLayerScorer<WindowParams>(
            {.scores = {.window = 1, .kernel = 1, .own_columns = true, .sums = params.sums}}) {}
};
static_assert(LayerScorer<TovaScorer>);

/// `TovaParams` are scored by `TovaScorer`.
TovaScorer scorer_of(ScoreTag<TovaParams>);

}  // namespace kvtrim
