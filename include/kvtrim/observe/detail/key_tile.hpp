// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys of one KV head as fp32 tiles in logical order, converted on load, with zeros after the last row: what is done with
// a tile does not depend on where a row lies in a page or in a batch.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/arena.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvtrim::detail {

/// Floats per tile, unless its row count is at its minimum.
inline constexpr std::int32_t tile_floats = 30'720;

/// Rows per tile: a multiple of every panel height of a product (8, 12, 24, 48); 240 up to head_dim 128.
[[nodiscard]] constexpr std::int32_t tile_rows(std::int32_t head_dim) noexcept {
  const std::int32_t fitting = tile_floats / (head_dim < 1 ? 1 : head_dim) / 48 * 48;
  return fitting < 48 ? 48 : fitting > 240 ? 240 : fitting;
}

/// Bytes of what `take(arena, dim)` takes, for the worst of all head dims up to `head_dim`, if it grows with the dim as long
/// as the tile height stays the same.
template <class Take>
[[nodiscard]] std::size_t largest_need(std::int32_t head_dim, const Take& take) noexcept {
  const auto need = [&](std::int32_t dim) {
    return Arena::bytes_for([&](Arena& arena) { return take(arena, dim); });
  };
  const std::int32_t largest = std::max(1, head_dim);
  std::size_t most = need(largest);
  for (std::int32_t rows = tile_rows(largest); rows < 240; rows += 48) {
    most = std::max(most, need(tile_floats / (rows + 48)));  // the last dim with taller tiles
  }
  return most;
}

/// Memory of the tiles of one work item, taken from an arena.
struct TileScratch {
  Arena& arena;
  std::int32_t head_dim;
  std::int32_t rows = tile_rows(head_dim);
  std::int64_t floats = static_cast<std::int64_t>(rows) * head_dim;
  std::span<float> tile = arena.take<float>(floats);  // [rows, head_dim]
  std::span<Position> positions = arena.take<Position>(rows);
  std::span<std::uint8_t> bad = arena.take<std::uint8_t>(rows);  // the key is not finite
  std::span<float> packed_keys = arena.take<float>(floats);      // as products read them

  /// Row `t` of the tile.
  [[nodiscard]] float* row(std::int32_t t) const noexcept {
    return tile.data() + static_cast<std::ptrdiff_t>(t) * head_dim;
  }
};

/// Whether all of x[0..n) are finite.
[[nodiscard]] inline bool finite(const float* x, std::int32_t n) noexcept {
  std::uint32_t worst = 0;
  for (std::int32_t i = 0; i < n; ++i) {
    worst = std::max(worst, std::bit_cast<std::uint32_t>(x[i]) & 0x7F80'0000U);
  }
  return worst != 0x7F80'0000U;
}

/// Reads `count` rows from a slot of a page on as floats, [count, head_dim]; quantised ones are widened.
///
/// Against bf16, a window score of fp8, int8, q8_0, q4_0, q4_1 or q5_1 keys takes 0.97 to 1.09 of the time, KeyDiff 0.94 to 1.64.
inline void load_rows(const Plane& plane,
                      LayerId l,
                      PageId p,
                      HeadId h,
                      Slot s,
                      std::int32_t count,
                      float* out) noexcept {
  KVTRIM_COUNT(rows_read, count);
  const std::int64_t dim = plane.head_dim;
  const std::byte* const from = plane.row(l, p, h, s);
  if (!readable(plane.dtype)) {
    for (std::int32_t i = 0; i < count; ++i) {
      const float scale = plane.scale(l, p, h, Slot{raw(s) + i});
      widen_row(plane, from + i * plane.token_stride, scale, out + i * dim);
    }
    return;
  }
  if (!plane.contiguous_rows()) {
    for (std::int32_t i = 0; i < count; ++i) {
      load_row(plane, from + i * plane.token_stride, out + i * dim);
    }
    return;
  }
  // Rows without gaps between them form one block.
  const bool block = plane.token_stride == plane.row_bytes();
  const std::int64_t pieces = block ? 1 : count;
  const std::int64_t length = block ? count * dim : dim;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::byte* const source = from + i * plane.token_stride;
    float* const target = out + i * length;
    if (plane.dtype == DType::f32) {
      std::memcpy(target, source, static_cast<std::size_t>(length) * sizeof(float));
    } else if (plane.dtype == DType::f16) {
      Eigen::Map<Eigen::ArrayXf>(target, length) =
          Eigen::Map<const Eigen::Array<Eigen::half, Eigen::Dynamic, 1>>(
              reinterpret_cast<const Eigen::half*>(source), length)
              .cast<float>();
    } else {
      for (std::int64_t j = 0; j < length; ++j) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, source + j * 2, sizeof bits);
        target[j] = bf16_to_float(bits);
      }
    }
  }
}

/// Calls f(first, count) for each tile of the keys of one KV head: `scratch.tile` then holds the live
/// rows first .. first + count - 1 (a hole is skipped), followed by zeros; rows that are not finite are zeros too.
template <class F>
void for_each_key_tile(const HeadRef& head, const TileScratch& scratch, F&& f) noexcept {
  const Plane& keys = head.view.k;
  const std::int32_t dim = keys.head_dim;
  std::int32_t filled = 0;
  std::int32_t first = 0;
  const auto flush = [&] {
    std::fill(scratch.row(filled), scratch.row(scratch.rows), 0.0F);
    for (std::int32_t i = 0; i < filled; ++i) {
      float* const row = scratch.row(i);
      const bool bad = !finite(row, dim);
      scratch.bad[static_cast<std::size_t>(i)] = bad ? 1 : 0;
      if (bad) { std::fill_n(row, dim, 0.0F); }
    }
    f(first, filled);
    first += filled;
    filled = 0;
  };
  for_each_run(head, [&](Run run) {
    while (run.count > 0) {
      const std::int32_t n = std::min(run.count, scratch.rows - filled);
      load_rows(keys, head.layer, run.k_page, head.head, run.slot, n, scratch.row(filled));
      for (std::int32_t i = 0; i < n; ++i) {
        scratch.positions[static_cast<std::size_t>(filled + i)] = head.position(run.row + i);
      }
      filled += n;
      run.row += n;
      run.slot = Slot{raw(run.slot) + n};
      run.count -= n;
      if (filled == scratch.rows) { flush(); }
    }
  });
  if (filled > 0) { flush(); }
}

}  // namespace kvtrim::detail
