// SPDX-License-Identifier: Apache-2.0
#pragma once

// From scores of rows to scores of pages. A page stays or goes as a whole, so what counts is whether something in it
// matters: by default the maximum, not the mean.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/policy/page_selector.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Adds page scores of one KV head to those of the heads before it.
///
/// \param head        [pages]
/// \param[in,out] sum [pages]
inline void add_page_scores(const PageScoreParams& params,
                            std::span<const float> head,
                            std::span<float> sum) noexcept {
  for (std::size_t p = 0; p < sum.size(); ++p) {
    sum[p] = params.heads == Reduction::max ? std::max(sum[p], head[p]) : sum[p] + head[p];
  }
}

/// Reduces the scores of one KV head's rows to scores of its pages.
///
/// \param rows        [rows] scores in table order; NaN and -inf count as 0, or as the head's lowest score if that is less
/// \param first_row   slot of row 0 in the first page
/// \param page_size   rows per page
/// \param scratch     [page_size]; may be the rows themselves, which are then overwritten
/// \param[out] pages  [pages]
/// \par Complexity
/// O(rows) (O(rows log page_size) unless `max`); no allocation
/// \par Source
/// own rule, measured in bench/README.md
inline void page_scores(const PageScoreParams& params,
                        std::span<const float> rows,
                        std::int32_t first_row,
                        std::int32_t page_size,
                        std::span<float> scratch,
                        std::span<float> pages) noexcept {
  const auto count = static_cast<std::int32_t>(rows.size());
  // Magnitudes, as some scores are negative (KeyDiff's); infinite or NaN scores would make all others equal.
  double total = 0;
  float floor = 0;
  for (const float x : rows) {
    if (order_key(x) == 0 || order_key(x) == order_key(std::numeric_limits<float>::infinity())) {
      continue;
    }
    total += std::abs(static_cast<double>(x));
    floor = std::min(floor, x);
  }
  const double norm = params.norm == HeadNorm::sum && total > 0 ? 1.0 / total : 1.0;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const auto index = static_cast<std::int32_t>(p);
    const std::int32_t begin = std::max(0, index * page_size - first_row);
    const std::int32_t end = std::min(count, (index + 1) * page_size - first_row);
    const std::int32_t n = std::max(0, end - begin);
    const auto best = scratch.first(static_cast<std::size_t>(n));
    for (std::int32_t i = 0; i < n; ++i) {
      const float x = rows[static_cast<std::size_t>(begin + i)];
      best[static_cast<std::size_t>(i)] = order_key(x) == 0 ? floor : x;
    }
    double score = 0;
    if (n > 0 && params.reduction == PageReduction::max) {
      score = static_cast<double>(*std::max_element(best.begin(), best.end()));
    } else if (n > 0) {
      const std::int32_t m =
          params.reduction == PageReduction::mean ? n : std::min(n, params.top_m);
      std::sort(best.begin(), best.end(), [](float a, float b) { return a > b; });
      for (std::int32_t i = 0; i < m; ++i) {
        score += static_cast<double>(best[static_cast<std::size_t>(i)]);
      }
      score /= m;
    }
    pages[p] = static_cast<float>(score * norm);
  }
}

}  // namespace kvtrim
