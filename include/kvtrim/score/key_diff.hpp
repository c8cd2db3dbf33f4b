// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys that point where all the others point carry little information of their own. No query is needed, so the score is
// available before a question is known.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by minus the cosine between its key and the mean of all normalised keys of its KV head.
///
/// \par Shapes
/// keys [live rows, head_dim]; scores [live rows], within -1 and 1
/// \par Ties
/// none broken here. NaN: a key that is not finite takes no part and scores NaN; a key of norm 0 scores 0
/// \par Complexity
/// O(live rows * head_dim) time, two reads of the keys; no allocation
/// \par Source
/// Park et al., 2025, arXiv:2504.15364 (KeyDiff), as written
class KeyDiffScorer {
 public:
  explicit constexpr KeyDiffScorer(KeyDiffParams) noexcept {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::largest_need(shape.head_dim, [&](Arena& arena, std::int32_t dim) {
      return Layout{arena, dim, shape.max_rows};
    });
  }
  /// `bad_observation` if the keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    return readable(view.k) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation&,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const std::int32_t dim = head.view.k.head_dim;
    const LiveRows rows(head);
    Arena arena(scratch);
    const Layout mem{arena, dim, rows.count()};
    KVTRIM_ASSERT(arena.ok());
    std::fill(out.begin(), out.end(), 0.0F);
    Eigen::Map<Eigen::ArrayXd> anchor(mem.anchor.data(), dim);
    anchor.setZero();
    const auto key = [&](std::int32_t t) {
      return Eigen::Map<const Eigen::ArrayXf>(mem.tiles.row(t), dim);
    };
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      for (std::int32_t t = 0; t < count; ++t) {
        const bool bad = mem.tiles.bad[static_cast<std::size_t>(t)] != 0;
        const float norm =
            bad ? std::numeric_limits<float>::quiet_NaN() : std::sqrt(key(t).square().sum());
        mem.norms[static_cast<std::size_t>(first + t)] = norm;
        if (norm > 0) { anchor += (key(t) / norm).cast<double>(); }
      }
    });
    const double length = std::sqrt(anchor.square().sum());
    Eigen::Map<Eigen::ArrayXf> direction(mem.direction.data(), dim);
    if (length > 0) { anchor /= length; }
    direction = anchor.cast<float>();
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      for (std::int32_t t = 0; t < count; ++t) {
        const std::int32_t i = first + t;
        const float norm = mem.norms[static_cast<std::size_t>(i)];
        out[static_cast<std::size_t>(rows.row(i))] =
            norm == 0 ? 0.0F : -(key(t) * direction).sum() / norm;
      }
    });
  }

 private:
  struct Layout {
    Arena& arena;
    std::int32_t head_dim;
    std::int32_t rows;
    detail::TileScratch tiles{arena, head_dim};
    std::span<double> anchor = arena.take<double>(head_dim);
    std::span<float> direction = arena.take<float>(head_dim);
    std::span<float> norms = arena.take<float>(rows);
  };
};
static_assert(Scorer<KeyDiffScorer>);

/// `KeyDiffParams` are scored by `KeyDiffScorer`.
KeyDiffScorer scorer_of(ScoreTag<KeyDiffParams>);

}  // namespace kvtrim
