// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys or values of one KV head, row by row, for scores that need no product, and scores that need one row and no other:
// scoring a few new rows costs no more than those rows. A row's sums must be taken over Eigen expressions that have no
// memory behind them: those start at their first element whatever its address.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/score/row_local.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim::detail {

/// Whether keys or values are meant.
enum class Side : std::uint8_t { keys, values };

/// Rows converted at a time.
inline constexpr std::int32_t block_rows = 64;

/// The plane of one side.
[[nodiscard]] inline const Plane& plane_of(const CacheView& view, Side side) noexcept {
  return side == Side::keys ? view.k : view.v;
}

/// Takes the `block` of the functions below.
[[nodiscard]] inline std::span<float> take_block(Arena& arena, std::int32_t dim) noexcept {
  return arena.take<float>(std::int64_t{block_rows} * dim);
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
  const Plane& plane = plane_of(head.view, side);
  const std::int32_t dim = plane.head_dim;
  const LiveRows rows(head);
  std::int32_t next = rows.before(begin);  // of table row `begin`
  const auto add = [&](const Run& run) {
    const PageId page = side == Side::keys ? run.k_page : run.v_page;
    const std::int32_t last = std::min(run.count, end - next);
    for (std::int32_t first = std::max(0, begin - next); first < last; first += block_rows) {
      const std::int32_t n = std::min(block_rows, last - first);
      const Slot slot{raw(run.slot) + first};
      load_rows(plane, head.layer, page, head.head, slot, n, block.data());
      for (std::int32_t i = 0; i < n; ++i) {
        const float* const row = block.data() + static_cast<std::ptrdiff_t>(i) * dim;
        f(next + first + i, row, finite(row, dim));
      }
    }
    next += run.count;
  };
  for_each_run(head, add, begin, rows.row(end));
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

/// Scores a row by its Euclidean norm, times `Sign`.
template <Side Which, int Sign>
class NormScorer : public RowByRow<NormScorer<Which, Sign>> {
 public:
  constexpr NormScorer() noexcept = default;

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    const std::int32_t dim = Which == Side::keys ? shape.head_dim : shape.value_dim;
    return Arena::bytes_for([&](Arena& arena) { return take_block(arena, dim); });
  }
  /// `bad_observation` if the rows are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    return readable(plane_of(view, Which)) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row from `first` on, as many as `out` has elements; a hole's is 0.
  void score_rows(const HeadRef& head,
                  const Observation&,
                  std::int32_t first,
                  std::span<std::byte> scratch,
                  std::span<float> out) const noexcept {
    Arena arena(scratch);
    const std::int32_t dim = plane_of(head.view, Which).head_dim;
    const auto block = take_block(arena, dim);
    KVTRIM_ASSERT(arena.ok());
    const auto score = [&](const float* row) { return Sign * norm(row, dim); };
    score_each_row(head, Which, first, block, out, score);
  }

 private:
  // No finite row overflows: if the range of a float is not enough, the sum is taken in double (always doing so took three
  // times as long).
  [[nodiscard]] static float norm(const float* x, std::int32_t dim) noexcept {
    const Eigen::Map<const Eigen::ArrayXf> row(x, dim);
    const float sum = row.square().sum();
    return sum > 1e-30F && sum < 1e30F
               ? std::sqrt(sum)
               : static_cast<float>(std::sqrt(row.cast<double>().square().sum()));
  }
};

}  // namespace kvtrim::detail
