// SPDX-License-Identifier: Apache-2.0
#pragma once

// From scores of rows to scores of pages. A page stays or goes as a whole, so what counts is whether something in it
// matters: by default the maximum, not the mean.

#include <kvtrim/core/exact_sum.hpp>
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

/// Adds page scores of one KV head to those of the heads before it, in floats.
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

/// What the page scores of one KV head take from all its rows. Where these lie on several ranks, each makes its own of them
/// and reduces it: first `largest` and `lowest` by maximum, then `units`, which `add_units` fills, by sum.
///
/// With exact sums, the norm has the same bits for any order and any parts of the rows; relative to double it is within
/// rows * 2^-41 + 2^-23, as the largest magnitude counts as 1.
struct HeadRows {
  std::uint64_t largest = 0;  ///< order key of the largest magnitude
  std::uint64_t lowest = 0;   ///< 2^32 - 1 - order key of the lowest score, if that is below 0
  std::uint64_t units = 0;    ///< of the magnitudes relative to the largest
  double total = 0;  ///< sum of the magnitudes, in the order of rows, where sums are not exact

  /// Of some rows, without `units`. NaN and infinite scores take no part: they would make all others equal.
  [[nodiscard]] static HeadRows of(const PageScoreParams& params,
                                   std::span<const float> rows) noexcept {
    HeadRows all;
    float floor = 0;
    for (const float x : rows) {
      if (!finite(x)) { continue; }
      // Magnitudes, as some scores are negative (KeyDiff's).
      if (params.sums == Sums::exact) {
        all.largest = std::max<std::uint64_t>(all.largest, order_key(std::abs(x)));
      } else {
        all.total += std::abs(static_cast<double>(x));
      }
      floor = std::min(floor, x);
    }
    all.lowest = floor < 0 ? 0xFFFF'FFFFU - order_key(floor) : 0;
    return all;
  }
  /// Adds the units of some rows, once `largest` is that of all.
  void add_units(std::span<const float> rows) noexcept {
    const float most = magnitude();
    for (const float x : rows) {
      if (finite(x) && most > 0) { units += exact_units(std::abs(x) / most); }
    }
  }
  /// What NaN and -inf count as: 0, or the lowest score if that is less.
  [[nodiscard]] float floor() const noexcept {
    return lowest == 0 ? 0.0F : score_of_key(0xFFFF'FFFFU - static_cast<std::uint32_t>(lowest));
  }
  /// What page scores are multiplied with.
  [[nodiscard]] double factor(const PageScoreParams& params) const noexcept {
    if (params.norm != HeadNorm::sum) { return 1.0; }
    if (params.sums == Sums::exact) {
      return units > 0 ? exact_one / (static_cast<double>(magnitude()) * static_cast<double>(units))
                       : 1.0;
    }
    return total > 0 ? 1.0 / total : 1.0;
  }

 private:
  static bool finite(float x) noexcept {
    const std::uint32_t key = order_key(x);
    return key != 0 && key != order_key(std::numeric_limits<float>::infinity());
  }
  [[nodiscard]] float magnitude() const noexcept {
    return largest == 0 ? 0.0F : score_of_key(static_cast<std::uint32_t>(largest));
  }
};

/// Reduces the scores of one KV head's rows to scores of its pages.
///
/// \param rows        [rows] scores in table order; NaN and -inf count as 0, or as the head's lowest score if that is less
/// \param first_row   slot of row 0 in the first page
/// \param page_size   rows per page
/// \param all         of all rows of the head, also those of other ranks
/// \param scratch     [page_size]; may be the rows themselves, which are then overwritten
/// \param[out] pages  [pages] each rounded once: the sum of its best rows, from the best down, over their number, times
///   `HeadRows::factor`, all in double
/// \par Complexity
/// O(rows) (O(rows log page_size) unless `max`); no allocation
/// \par Source
/// own rule, measured in bench/README.md
inline void page_scores(const PageScoreParams& params,
                        std::span<const float> rows,
                        std::int32_t first_row,
                        std::int32_t page_size,
                        const HeadRows& all,
                        std::span<float> scratch,
                        std::span<float> pages) noexcept {
  const auto count = static_cast<std::int32_t>(rows.size());
  const float floor = all.floor();
  const double norm = all.factor(params);
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

/// The same where all rows of the head are at hand.
inline void page_scores(const PageScoreParams& params,
                        std::span<const float> rows,
                        std::int32_t first_row,
                        std::int32_t page_size,
                        std::span<float> scratch,
                        std::span<float> pages) noexcept {
  HeadRows all = HeadRows::of(params, rows);
  if (params.norm == HeadNorm::sum && params.sums == Sums::exact) { all.add_units(rows); }
  page_scores(params, rows, first_row, page_size, all, scratch, pages);
}

}  // namespace kvtrim
