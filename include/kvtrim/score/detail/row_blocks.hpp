// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys or values of one KV head, row by row, for scores that need no product. A row's sums must be taken over Eigen
// expressions that have no memory behind them: those start at their first element whatever its address.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

/// Whether keys or values are meant.
enum class Side : std::uint8_t { keys, values };

/// Rows converted at a time.
inline constexpr std::int32_t block_rows = 64;

/// Head dim of one side.
[[nodiscard]] inline std::int32_t dim_of(const CacheView& view, Side side) noexcept {
  return side == Side::keys ? view.k.head_dim : view.v.head_dim;
}

/// Calls f(i, row, finite) for the live rows i of [begin, end) of one KV head in logical order, a hole left out. Other
/// rows are not read.
///
/// \param block  [block_rows * head dim]
template <class F>
void for_each_row(const HeadRef& head,
                  Side side,
                  std::int32_t begin,
                  std::int32_t end,
                  std::span<float> block,
                  F&& f) noexcept {
  const Plane& plane = side == Side::keys ? head.view.k : head.view.v;
  const std::int32_t dim = plane.head_dim;
  const LiveRows rows(head);
  std::int32_t next = rows.before(begin);  // of table row `begin`
  const auto add = [&](const Run& run) {
    const PageId page = side == Side::keys ? run.k_page : run.v_page;
    const std::int32_t last = std::min(run.count, end - next);
    for (std::int32_t first = std::max(0, begin - next); first < last; first += block_rows) {
      const std::int32_t n = std::min(block_rows, last - first);
      load_rows(plane,
                plane.row(head.layer, page, head.head, Slot{raw(run.slot) + first}),
                n,
                block.data());
      for (std::int32_t i = 0; i < n; ++i) {
        const float* const row = block.data() + static_cast<std::ptrdiff_t>(i) * dim;
        f(next + first + i, row, finite(row, dim));
      }
    }
    next += run.count;
  };
  for_each_run(head, add, begin, rows.row(end));
}

/// The same for all live rows.
template <class F>
void for_each_row(const HeadRef& head, Side side, std::span<float> block, F&& f) noexcept {
  for_each_row(head, side, 0, head.live_rows(), block, f);
}

}  // namespace kvtrim::detail
