// SPDX-License-Identifier: Apache-2.0
#pragma once

// The queries of a head lean to one side of the space. Which side is known before any prompt: a filter, one vector per KV
// head, from a calibration set (the authors publish filters for some models).

#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <cstdint>
#include <span>

namespace kvtrim {

/// Scores a row by minus the projection of its key onto the filter of its KV head, `Observation::filters`.
///
/// \par Shapes
/// keys [live rows, head_dim]; filters [layers, KV heads, head_dim], fp32; scores [live rows]
/// \par Ties
/// none broken here. NaN: a key that is not finite scores NaN; with a filter that is not finite, all rows of its head do
/// \par Complexity
/// O(live rows * head_dim) time, one read of the keys; no allocation. Row-local
/// \par Source
/// Godey et al., 2025, arXiv:2503.02812, with the sign of the published filters (kvpress's QFilterPress)
class QFilterScorer : public detail::RowByRow<QFilterScorer> {
 public:
  explicit constexpr QFilterScorer(QFilterParams) noexcept {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return Arena::bytes_for([&](Arena& arena) { return Layout{arena, shape.head_dim}; });
  }
  /// `bad_observation` without filters, if the filters' dim is not that of the keys, or if the keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const bool fits = obs.filters && obs.filters.dim == view.k.head_dim;
    return fits && readable(view.k) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row from `first` on, as many as `out` has elements; a hole's is 0.
  void score_rows(const HeadRef& head,
                  const Observation& obs,
                  std::int32_t first,
                  std::span<std::byte> scratch,
                  std::span<float> out) const noexcept {
    const std::int32_t dim = head.view.k.head_dim;
    Arena arena(scratch);
    const Layout mem{arena, dim};
    KVTRIM_ASSERT(arena.ok());
    Eigen::Map<Eigen::ArrayXd> filter(mem.filter.data(), dim);
    filter =
        Eigen::Map<const Eigen::ArrayXf>(obs.filters.of(head.layer, head.head), dim).cast<double>();
    detail::score_each_row(head, detail::Side::keys, first, mem.block, out, [&](const float* row) {
      const Eigen::Map<const Eigen::ArrayXf> key(row, dim);
      return -static_cast<float>((key.cast<double>() * filter).sum());
    });
  }

 private:
  struct Layout {
    Arena& arena;
    std::int32_t dim;
    std::span<float> block = detail::take_block(arena, dim);
    std::span<double> filter = arena.take<double>(dim);
  };
};
static_assert(RowLocalScorer<QFilterScorer>);

/// `QFilterParams` are scored by `QFilterScorer`.
QFilterScorer scorer_of(ScoreTag<QFilterParams>);

}  // namespace kvtrim
