// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/detail/panel_reduction.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <limits>

namespace kvtrim::detail {

/// The score of a column from its units, reduced over the queries of `heads` query heads.
[[nodiscard]] inline float exact_column(const WindowParams& params,
                                        std::uint64_t units,
                                        std::uint64_t heads) noexcept {
  if (heads == 0) { return std::numeric_limits<float>::quiet_NaN(); }
  return exact_mean(units, params.group == Reduction::mean ? static_cast<std::int64_t>(heads) : 1);
}

/// What `PanelReduction` does, in units: no result depends on the order of the queries of a head, nor on that of heads.
class ExactPanel {
 public:
  /// \param votes  rows of each query head, at least 1
  ExactPanel(const WindowParams& params, std::int32_t votes) noexcept
      : params_(params), votes_(votes), head_end_(votes) {}

  /// Adds the probabilities of query `q`.
  void add(std::int32_t q, const Panel& x) noexcept {
    while (q >= head_end_) {
      close_head();
      head_end_ += votes_;
    }
    ++votes_seen_;
    alignas(64) float p[panel_rows];
    store_panel(x, p);
    if (params_.rows == Reduction::max) {
      for (std::int32_t i = 0; i < panel_rows; ++i) {
        rows_[i] = std::max(rows_[i], exact_units(p[i]));
      }
    } else {
      for (std::int32_t i = 0; i < panel_rows; ++i) { rows_[i] += exact_units(p[i]); }
    }
  }
  /// Writes the units of `count` rows, and begins again.
  ///
  /// \returns the heads that voted
  std::int32_t finish(std::uint64_t* units, std::int32_t count) noexcept {
    close_head();
    std::copy_n(heads_, count, units);
    std::fill(std::begin(heads_), std::end(heads_), 0);
    head_end_ = votes_;
    const std::int32_t heads = heads_seen_;
    heads_seen_ = 0;
    return heads;
  }
  /// Writes scores instead.
  void finish(float* scores, std::int32_t count) noexcept {
    std::uint64_t units[panel_rows];
    const auto heads = static_cast<std::uint64_t>(finish(units, count));
    for (std::int32_t i = 0; i < count; ++i) { scores[i] = exact_column(params_, units[i], heads); }
  }

 private:
  void close_head() noexcept {
    if (votes_seen_ == 0) { return; }
    if (params_.rows == Reduction::mean) {
      // To the nearest, halves up: a head's mean is within half a unit, whatever the other heads are.
      const auto n = static_cast<std::uint64_t>(votes_seen_);
      if ((n & (n - 1)) == 0) {  // most windows: 64-bit divisions would take a tenth of the time
        const auto shift = static_cast<unsigned>(std::countr_zero(n));
        for (std::uint64_t& x : rows_) { x = (x + n / 2) >> shift; }
      } else {
        for (std::uint64_t& x : rows_) { x = (x + n / 2) / n; }
      }
    }
    for (std::int32_t i = 0; i < panel_rows; ++i) {
      heads_[i] =
          params_.group == Reduction::max ? std::max(heads_[i], rows_[i]) : heads_[i] + rows_[i];
    }
    std::fill(std::begin(rows_), std::end(rows_), 0);
    ++heads_seen_;
    votes_seen_ = 0;
  }

  const WindowParams& params_;
  std::int32_t votes_;
  std::int32_t head_end_;
  std::int32_t votes_seen_ = 0;
  std::int32_t heads_seen_ = 0;
  alignas(64) std::uint64_t rows_[panel_rows] = {};
  alignas(64) std::uint64_t heads_[panel_rows] = {};
};

}  // namespace kvtrim::detail
