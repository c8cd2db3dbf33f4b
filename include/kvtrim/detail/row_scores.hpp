// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores that need one row and no other. Sums are Eigen expressions without memory behind them: those start at their
// first element whatever its address, so that a row scores the same in every place of a tile.

#include <kvtrim/detail/key_tile.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim::detail {

/// out[r - first] = f(key of row r) for the live rows r of [first, first + out.size()); NaN where the key is not finite,
/// 0 for a hole.
template <class F>
void score_each_row(const CacheView& view,
                    SequenceId s,
                    LayerId l,
                    HeadId h,
                    std::int32_t first,
                    const TileScratch& tiles,
                    std::span<float> out,
                    F&& f) noexcept {
  const std::int32_t dim = view.k.head_dim;
  const std::int32_t hole = view.state(s, l, h).append_row;
  std::fill(out.begin(), out.end(), 0.0F);
  const auto score = [&](std::int32_t begin, std::int32_t count) {
    for (std::int32_t t = 0; t < count; ++t) {
      const std::int32_t i = begin + t;
      const bool behind_hole = hole >= first && first + i >= hole;
      out[static_cast<std::size_t>(i + (behind_hole ? 1 : 0))] =
          tiles.bad[static_cast<std::size_t>(t)] != 0
              ? std::numeric_limits<float>::quiet_NaN()
              : f(tiles.tile.data() + static_cast<std::ptrdiff_t>(t) * dim);
    }
  };
  for_each_key_tile(
      view, s, l, h, tiles, score, first, first + static_cast<std::int32_t>(out.size()));
}

/// Euclidean norm, summed in double: no finite row overflows.
[[nodiscard]] inline float norm_of(const float* x, std::int32_t dim) noexcept {
  const Eigen::Map<const Eigen::ArrayXf> row(x, dim);
  return static_cast<float>(std::sqrt(row.cast<double>().square().sum()));
}

/// Bytes that `TileScratch` takes for rows of at most `dim` features.
[[nodiscard]] inline std::size_t tile_scratch_bytes(std::int32_t dim) noexcept {
  return largest_need(std::max(1, dim), [](std::int32_t d) {
    Arena arena;
    static_cast<void>(TileScratch::take(arena, d));
    return arena.bytes();
  });
}

}  // namespace kvtrim::detail
