// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by its share of the squared norms of the keys, and of the values, around it: a cheap substitute for
/// leverage scores.
///
/// Rows are cut into windows of `window` in position order, from the first live row on; a share is a squared norm
/// divided by the sum over the window. Scores are divided by their sum.
///
/// \par Shapes
/// keys and values [live rows, head_dim]; scores [live rows], at least 0, with sum 1
/// \par Ties
/// none broken here. NaN: a key or value that is not finite scores NaN and takes no part. A window of zeros has shares
/// of 0; if all scores are 0, they stay 0
/// \par Complexity
/// O(live rows * head dims) time, one read of keys and values; no allocation
/// \par Source
/// Sengupta et al., 2025, arXiv:2509.15038, as kvpress computes it; differs: no random projection, windows of zeros
class CurScorer {
 public:
  /// \pre `params.window >= 0`
  explicit constexpr CurScorer(const CurParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return Arena::bytes_for([&](Arena& arena) {
      return Layout{arena, std::max(shape.head_dim, shape.value_dim), shape.max_rows};
    });
  }
  /// `bad_observation` if what the form needs is not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    const bool keys = params_.form == CurForm::values || readable(view.k);
    const bool values = params_.form == CurForm::keys || readable(view.v);
    return keys && values ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation&,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const LiveRows rows(head);
    Arena arena(scratch);
    const std::int32_t dim = std::max(head.view.k.head_dim, head.view.v.head_dim);
    const Layout mem{arena, dim, rows.count()};
    KVTRIM_ASSERT(arena.ok());
    std::fill(out.begin(), out.end(), 0.0F);
    rows.order(mem.order);
    if (params_.form != CurForm::values) { shares(head, detail::Side::keys, mem, mem.keys); }
    if (params_.form != CurForm::keys) { shares(head, detail::Side::values, mem, mem.values); }
    double total = 0;
    for (const std::int32_t i : mem.order) {
      double& x = mem.keys[index(i)];
      const double y = mem.values[index(i)];
      x = params_.form == CurForm::product   ? x * y
          : params_.form == CurForm::average ? (x + y) / 2
          : params_.form == CurForm::keys    ? x
                                             : y;
      total += std::isnan(x) ? 0.0 : x;
    }
    for (std::int32_t i = 0; i < rows.count(); ++i) {
      out[index(rows.row(i))] =
          static_cast<float>(total > 0 ? mem.keys[index(i)] / total : mem.keys[index(i)]);
    }
  }

 private:
  struct Layout {
    Arena& arena;
    std::int32_t dim;
    std::int32_t rows;
    std::span<float> block = detail::take_block(arena, dim);
    std::span<double> keys = arena.take<double>(rows);  // shares
    std::span<double> values = arena.take<double>(rows);
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  void shares(const HeadRef& head,
              detail::Side side,
              const Layout& mem,
              std::span<double> out) const noexcept {
    const std::int32_t dim = detail::plane_of(head.view, side).head_dim;
    const auto measure = [&](std::int32_t i, const float* row, bool finite) {
      const Eigen::Map<const Eigen::ArrayXf> x(row, dim);
      out[index(i)] =
          finite ? x.cast<double>().square().sum() : std::numeric_limits<double>::quiet_NaN();
    };
    detail::for_each_row(head, side, 0, mem.rows, mem.block, measure);
    const std::size_t live = mem.order.size();
    const std::size_t window =
        params_.window > 0 ? index(params_.window) : std::max<std::size_t>(1, live);
    for (std::size_t begin = 0; begin < live; begin += window) {
      const auto members = mem.order.subspan(begin, std::min(window, live - begin));
      double sum = 0;
      for (const std::int32_t i : members) {
        sum += std::isnan(out[index(i)]) ? 0.0 : out[index(i)];
      }
      for (const std::int32_t i : members) {
        if (sum > 0) { out[index(i)] /= sum; }
      }
    }
  }

  CurParams params_;
};
static_assert(Scorer<CurScorer>);

/// `CurParams` are scored by `CurScorer`.
CurScorer scorer_of(ScoreTag<CurParams>);

}  // namespace kvtrim
