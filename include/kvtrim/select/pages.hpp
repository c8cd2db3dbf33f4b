// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/select/protection.hpp>
#include <kvtrim/select/top_k.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// One table's rows on its pages.
struct PageSpan {
  std::int32_t live = 0;       ///< live rows, in position order
  std::int32_t first_row = 0;  ///< rows of left padding before them
  std::int32_t page_size = 1;  ///< rows per page

  /// Pages in use.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t pages() const noexcept {
    return live == 0 ? 0 : pages_for(live + first_row, page_size);
  }
  /// First row of page `p`.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t begin(std::int32_t p) const noexcept {
    return std::max(0, p * page_size - first_row);
  }
  /// One past the last row of page `p`.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t end(std::int32_t p) const noexcept {
    return std::clamp((p + 1) * page_size - first_row, 0, live);
  }
};

/// Chooses the pages that stay: those with a protected row, a partly filled one at either end, and the best of the others
/// that fit the budget.
///
/// \param scores      [pages] higher is kept
/// \param keep        rows that may stay
/// \param keys        [pages] scratch
/// \param picked      [pages] scratch
/// \param[out] stays  [pages] 1 where a page stays
/// \returns `ok`; `over_budget` if the protected pages alone have more rows than `keep`: then they stay and nothing else
/// \par Ties
/// the lower page is kept. NaN: lowest
/// \par Complexity
/// O(pages); no allocation. The number of rows that stay is the largest that whole pages allow without exceeding `keep`
inline Status choose_pages(const PageSpan& span,
                           std::span<const float> scores,
                           std::int32_t keep,
                           const Protection& protection,
                           std::span<std::uint32_t> keys,
                           std::span<std::int32_t> picked,
                           std::span<std::uint8_t> stays) noexcept {
  const std::int32_t pages = span.pages();
  const CandidateRange range = candidates(protection, span.live);
  const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };
  const auto fixed = [&](std::int32_t p) {
    return span.begin(p) < range.begin || span.end(p) > range.end ||
           span.end(p) - span.begin(p) < span.page_size;
  };
  std::int32_t rows = 0;
  std::int32_t competing = 0;
  for (std::int32_t p = 0; p < pages; ++p) {
    stays[at(p)] = fixed(p) ? 1 : 0;
    if (fixed(p)) {
      rows += span.end(p) - span.begin(p);
    } else {
      keys[at(competing++)] = order_key(scores[at(p)]);
    }
  }
  const std::int32_t room = std::clamp((keep - rows) / span.page_size, 0, competing);
  top_k(keys.first(at(competing)), picked.first(at(room)));
  std::int32_t candidate = 0;
  std::int32_t next = 0;
  for (std::int32_t p = 0; p < pages; ++p) {
    if (stays[at(p)] != 0) { continue; }
    if (next < room && picked[at(next)] == candidate) {
      stays[at(p)] = 1;
      ++next;
    }
    ++candidate;
  }
  return rows > keep ? Status::over_budget : Status::ok;
}

}  // namespace kvtrim
