// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scores of `WindowScorer` for engines that show the softmax but not the queries: the same reductions, on probabilities
// that attention has computed.

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/detail/exact_panel.hpp>
#include <kvtrim/score/detail/panel_reduction.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Softmax probabilities of the last queries of a sequence: fp32, [query heads of one KV head, queries, live rows].
struct WindowProbabilities {
  const float* data = nullptr;   ///< head 0 of the group, query 0, row 0
  std::int32_t group = 1;        ///< query heads of the KV head
  std::int32_t votes = 1;        ///< queries; the last of them is the sequence's last row
  std::int64_t head_stride = 0;  ///< floats between query heads
  std::int64_t vote_stride = 0;  ///< floats between queries
};

/// Scores the rows of one KV head as `WindowScorer` does: reduced over the queries, then over the query heads, then pooled
/// over neighbouring rows. Pass the result to `plan` as `Observation::scores`.
///
/// \param probabilities  0 where a query does not see a row
/// \param scratch        [rows]
/// \param[out] scores    [rows] by row, which is position order; 0 for the window's own rows unless `params.own_columns`
/// \pre `probabilities.votes` is at least 1 and at most `params.window`; `scratch` and `scores` are of one size
/// \par Ties
/// none broken here. NaN: a row whose probabilities hold one scores NaN, and so do its neighbours with `Pooling::average`;
/// with exact sums a NaN counts as 0
/// \par Complexity
/// O(group * votes * rows) time; no allocation
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV), as `WindowScorer`
inline void score_window(const WindowParams& params,
                         const WindowProbabilities& probabilities,
                         std::span<float> scratch,
                         std::span<float> scores) noexcept {
  const auto rows = static_cast<std::int32_t>(scores.size());
  KVTRIM_ASSERT(probabilities.votes >= 1 && probabilities.votes <= params.window &&
                scratch.size() == scores.size());
  std::fill(scores.begin(), scores.end(), 0.0F);
  const std::int32_t scored = std::max(0, rows - params.unscored());
  if (scored == 0) { return; }
  const auto reduce = [&](auto&& reduction) {
    for (std::int32_t first = 0; first < rows; first += detail::panel_rows) {
      const std::int32_t count = std::min(detail::panel_rows, rows - first);
      for (std::int32_t q = 0; q < probabilities.group * probabilities.votes; ++q) {
        const float* const from = probabilities.data +
                                  q / probabilities.votes * probabilities.head_stride +
                                  q % probabilities.votes * probabilities.vote_stride + first;
        alignas(64) float values[detail::panel_rows] = {};
        std::copy_n(from, count, values);
        detail::Panel x;
        detail::load_panel(values, x);
        reduction.add(q, x);
      }
      reduction.finish(scratch.data() + first, count);
    }
  };
  if (params.sums == Sums::exact) {
    reduce(detail::ExactPanel(params, probabilities.votes));
  } else {
    reduce(detail::PanelReduction(params, probabilities.votes));
  }
  const auto columns =
      static_cast<std::size_t>(params.columns == PoolColumns::all_columns ? rows : scored);
  pool(scratch.first(columns), params.pooling, params.kernel, scores.first(columns));
  std::fill(scores.begin() + scored, scores.end(), 0.0F);
}

}  // namespace kvtrim
