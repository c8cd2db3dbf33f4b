// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores that need one row and no other: scoring a few new rows costs no more than those rows.

#include <kvtrim/core/arena.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim::detail {

/// Takes the `block` of `score_each_row`.
[[nodiscard]] inline std::span<float> take_row_block(Arena& arena, std::int32_t dim) noexcept {
  return arena.take<float>(static_cast<std::int64_t>(block_rows) * dim);
}

/// Bytes it takes.
[[nodiscard]] inline std::size_t row_block_bytes(std::int32_t dim) noexcept {
  return Arena::bytes_for([&](Arena& arena) { return take_row_block(arena, dim); });
}

/// out[r - first] = f(row r) for the live rows r in [first, first + out.size()); NaN if the row is not finite, 0 for a
/// hole.
template <class F>
void score_each_row(const HeadRef& head,
                    Side side,
                    std::int32_t first,
                    std::span<float> block,
                    std::span<float> out,
                    F&& f) noexcept {
  const LiveRows rows(head);
  const std::int32_t end = first + static_cast<std::int32_t>(out.size());
  std::fill(out.begin(), out.end(), 0.0F);
  const auto score = [&](std::int32_t i, const float* row, bool finite) {
    out[static_cast<std::size_t>(rows.row(i) - first)] =
        finite ? f(row) : std::numeric_limits<float>::quiet_NaN();
  };
  for_each_row(head, side, rows.before(first), rows.before(end), block, score);
}

/// Euclidean norm. No finite row overflows: if the range of a float is not enough, the sum is taken in double (always
/// doing so took three times as long).
[[nodiscard]] inline float norm_of(const float* x, std::int32_t dim) noexcept {
  const Eigen::Map<const Eigen::ArrayXf> row(x, dim);
  const float sum = row.square().sum();
  return sum > 1e-30F && sum < 1e30F
             ? std::sqrt(sum)
             : static_cast<float>(std::sqrt(row.cast<double>().square().sum()));
}

/// out[r - first] = sign * norm of row r of one side, for the live rows from `first` on.
///
/// \param scratch  [row_block_bytes of the side's head dim]
inline void score_norms(const HeadRef& head,
                        Side side,
                        float sign,
                        std::int32_t first,
                        std::span<std::byte> scratch,
                        std::span<float> out) noexcept {
  const std::int32_t dim = dim_of(head.view, side);
  Arena arena(scratch);
  const auto block = take_row_block(arena, dim);
  KVTRIM_ASSERT(arena.ok());
  score_each_row(
      head, side, first, block, out, [&](const float* row) { return sign * norm_of(row, dim); });
}

}  // namespace kvtrim::detail
