// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row has three numbers: its row in the table, its index among the live rows (a hole is skipped), and its rank by
// position.

#include <kvtrim/cache/cache_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

/// Table row of live index `i` in a table with a hole at row `hole` (-1: none).
[[nodiscard]] constexpr std::int32_t row_of(std::int32_t i, std::int32_t hole) noexcept {
  return i + (hole >= 0 && i >= hole ? 1 : 0);
}

/// Writes the live indices of (sequence, layer, KV head) in the order of their positions.
///
/// \param[out] order  [live rows]
/// \par Complexity
/// O(rows), O(rows log rows) where they are out of order; no allocation
inline void order_rows(const CacheView& view,
                       SequenceId s,
                       LayerId l,
                       HeadId h,
                       std::span<std::int32_t> order) noexcept {
  const SequenceState state = view.state(s, l, h);
  std::int32_t i = 0;
  for (std::int32_t& x : order) { x = i++; }
  if (state.ordered) { return; }
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return view.position(s, l, h, row_of(a, state.append_row)) <
           view.position(s, l, h, row_of(b, state.append_row));
  });
}

}  // namespace kvtrim::detail
