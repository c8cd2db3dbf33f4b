// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of one KV head one by one, keys or values, for scores that need no product. A row's sums must be taken over
// Eigen expressions without memory behind them: those start at their first element whatever its address.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/detail/key_tile.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim::detail {

/// Which rows are meant.
enum class Side : std::uint8_t { keys, values };

/// Rows that are converted at once.
inline constexpr std::int32_t block_rows = 64;

/// Head dim of one side.
[[nodiscard]] inline std::int32_t dim_of(const CacheView& view, Side side) noexcept {
  return side == Side::keys ? view.k.head_dim : view.v.head_dim;
}

/// Calls f(i, row, finite) for each live row of (sequence, layer, KV head): i = 0..live-1 in logical order, a hole left
/// out. Only rows from .. to - 1 are looked at, and i counts from the first live one of them.
///
/// \param block  [block_rows * head dim]
template <class F>
void for_each_row(const CacheView& view,
                  SequenceId s,
                  LayerId l,
                  HeadId h,
                  Side side,
                  std::span<float> block,
                  F&& f,
                  std::int32_t from = 0,
                  std::int32_t to = std::numeric_limits<std::int32_t>::max()) noexcept {
  const Plane& plane = side == Side::keys ? view.k : view.v;
  const std::int32_t dim = plane.head_dim;
  std::int32_t next = 0;
  const auto add = [&](const Run& run) {
    const PageId page = side == Side::keys ? run.k_page : run.v_page;
    for (std::int32_t begin = 0; begin < run.count; begin += block_rows) {
      const std::int32_t n = std::min(block_rows, run.count - begin);
      load_rows(plane, plane.row(l, page, h, Slot{raw(run.slot) + begin}), n, block.data());
      for (std::int32_t i = 0; i < n; ++i) {
        const float* const row = block.data() + static_cast<std::ptrdiff_t>(i) * dim;
        f(next++, row, finite(row, dim));
      }
    }
  };
  for_each_run(view, s, l, h, add, from, to);
}

}  // namespace kvtrim::detail
