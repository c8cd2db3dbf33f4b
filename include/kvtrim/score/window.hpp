// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention of the prompt's last queries over all live keys. With the engine's LSE, a tile is done once it has been
// multiplied; without it, the exponentials of one KV head stay in the scratch (4 bytes per query and key) and are divided
// when the sums are known: a second product takes twice the time.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/detail/panel_reduction.hpp>
#include <kvtrim/score/detail/window_layout.hpp>
#include <kvtrim/score/detail/window_queries.hpp>
#include <kvtrim/score/exact_window.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by the attention that the last `window` queries pay to it: reduced over those queries, then over the query
/// heads of its KV head, then pooled over its neighbours.
///
/// With `Sums::exact` the scores do not depend on the order of rows, queries or heads, nor on how many ranks hold them
/// (`ExactWindow`).
///
/// Softmax runs over all live keys, causal by position inside the window; the window's own columns are then cut and
/// score 0 (they are meant to be protected), unless `own_columns` asks for their scores.
///
/// \par Shapes
/// queries [query heads, at most window rows, head_dim], fp32; scores [live rows]
/// \par Ties
/// none broken here. NaN: a key that is not finite takes no part and scores NaN; a query that is not finite, or whose LSE
/// is not, has no vote; without an LSE, nor has a query that sees no live row or whose logits overflow; without any vote
/// all scores are NaN
/// \par Complexity
/// O(query rows * live rows * head_dim) time; no allocation
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV); differs: rows are averaged by default, as kvpress and Ada-KV do, and the
/// query heads of a group are reduced, so that there is one set per KV head
class WindowScorer {
 public:
  /// \pre `params.window >= 1 && params.kernel` is odd
  explicit constexpr WindowScorer(const WindowParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::window_bytes<Layout>(shape, params_.window, params_.sums);
  }

  /// `bad_observation` without queries (no rows need no data), with heads that do not fit, or where keys are not readable;
  /// with exact sums, also if one would have more addends than `exact_addends`: live rows, or queries of a group.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const Status status = detail::check_window_queries(view, obs.queries);
    return status == Status::ok && params_.sums == Sums::exact
               ? detail::check_exact_window(params_, view, obs.queries)
               : status;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const QueryBlock& block = obs.queries;
    const LiveRows rows(head);
    std::fill(out.begin(), out.end(), 0.0F);
    if (rows.count() <= params_.unscored()) { return; }  // all columns belong to the window
    if (params_.sums == Sums::exact) {
      ExactWindow(params_, head, block, scratch).score(out);
      return;
    }
    Arena arena(scratch);
    const Layout mem = detail::window_layout(arena, params_, head, block);
    KVTRIM_ASSERT(arena.ok());
    detail::load_voters(mem, head, block);
    const detail::LogitScale scaled(detail::scale_of(block, mem.head_dim), block.soft_cap);
    if (block.lse != nullptr) {
      attend_with_lse(head, scaled, mem);
    } else {
      attend_with_sums(head, scaled, mem);
    }
    mem.pool_columns(params_, rows, out);
  }

 private:
  using Packet = detail::Packet;
  using Layout = detail::WindowLayout;

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }
  static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

  void attend_with_lse(const HeadRef& head,
                       detail::LogitScale scaled,
                       const Layout& mem) const noexcept {
    detail::PanelReduction reduction(params_, std::max(1, mem.votes));
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem.tiles, count);
      const bool masked = mem.needs_mask(count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        mem.for_each_query(row, [&](std::int32_t q, float* values) {
          const Packet lse = detail::pset1<Packet>(mem.lse[index(q)]);
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = detail::pexp(detail::psub(scaled(values + p * detail::packet_floats), lse));
          }
          if (masked) {
            detail::store_panel(x, values);
            mem.mask(values, row, count, q, 0.0F);
            detail::load_panel(values, x);
          }
          reduction.add(q, x);
        });
        const std::int32_t rows = std::min(detail::panel_rows, count - row);
        reduction.finish(mem.raw_scores.data() + first + row, rows);
        for (std::int32_t i = 0; i < rows; ++i) {
          if (mem.tiles.bad[index(row + i)] != 0) {
            mem.raw_scores[index(first + row + i)] = not_a_number;
          }
        }
      }
    });
  }

  void attend_with_sums(const HeadRef& head,
                        detail::LogitScale scaled,
                        const Layout& mem) const noexcept {
    constexpr float lowest = -1e30F;
    std::fill(mem.maxima.begin(), mem.maxima.end(), lowest);
    std::fill(mem.sums.begin(), mem.sums.end(), 0.0);
    std::fill(mem.lanes.begin(), mem.lanes.end(), 0.0F);
    const auto references_of = [&](std::int32_t panel) {
      return mem.references.data() + static_cast<std::ptrdiff_t>(panel) * mem.padded;
    };
    const auto lanes_of = [&](std::int32_t q) { return mem.lanes.data() + mem.lane(q); };
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem.tiles, count);
      const bool masked = mem.needs_mask(count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        const std::int32_t panel = (first + row) / detail::panel_rows;
        const bool any_hidden = masked || row + detail::panel_rows > count;
        mem.for_each_query(row, [&](std::int32_t q, float* values) {
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = scaled(values + p * detail::packet_floats);
          }
          if (any_hidden) {
            detail::store_panel(x, values);
            mem.mask(values, row, count, q, lowest);
            detail::load_panel(values, x);
          }
          Packet highest = x[0];
          for (const Packet& y : x) { highest = detail::pmax(highest, y); }
          // A new maximum is rare: the sums so far are rescaled, stored exponentials keep their reference.
          float reference = mem.maxima[index(q)];
          if (const float maximum = detail::predux_max(highest); maximum > reference) {
            const float shrink = std::exp(reference - maximum);
            mem.sums[index(q)] *= static_cast<double>(shrink);
            detail::pstore(
                lanes_of(q),
                detail::pmul(detail::pload<Packet>(lanes_of(q)), detail::pset1<Packet>(shrink)));
            mem.maxima[index(q)] = reference = maximum;
          }
          references_of(panel)[q] = reference;
          for (Packet& y : x) {
            y = detail::pexp(detail::psub(y, detail::pset1<Packet>(reference)));
          }
          float* const to = mem.exponentials_of(panel, q);
          detail::store_panel(x, to);
          if (any_hidden) {
            mem.mask(to, row, count, q, 0.0F);
            detail::load_panel(to, x);
          }
          Packet sum = detail::pload<Packet>(lanes_of(q));
          for (const Packet& y : x) { sum = detail::padd(sum, y); }
          detail::pstore(lanes_of(q), sum);
        });
      }
      // Only short sums are plain fp32.
      for (std::int32_t q = 0; q < mem.used; ++q) {
        mem.sums[index(q)] +=
            static_cast<double>(detail::predux(detail::pload<Packet>(lanes_of(q))));
        detail::pstore(lanes_of(q), detail::pset1<Packet>(0.0F));
      }
      // Which rows are not finite is known only while the tile is loaded.
      for (std::int32_t t = 0; t < count; ++t) {
        mem.raw_scores[index(first + t)] = mem.tiles.bad[index(t)] != 0 ? not_a_number : 0.0F;
      }
    });
    // No live row seen, or logits that overflow: no vote, because dividing would make every row NaN.
    for (std::int32_t q = 0; q < mem.used; ++q) {
      const double sum = mem.sums[index(q)];
      if (!(sum > 0 && sum < std::numeric_limits<double>::infinity())) {
        mem.has_vote[index(q)] = 0;
      }
    }
    detail::PanelReduction reduction(params_, std::max(1, mem.votes));
    for (std::int32_t first = 0; first < mem.rows; first += detail::panel_rows) {
      const std::int32_t panel = first / detail::panel_rows;
      for (std::int32_t q = 0; q < mem.used; ++q) {
        if (mem.has_vote[index(q)] == 0) { continue; }
        const float reference = references_of(panel)[q];
        const float maximum = mem.maxima[index(q)];
        const float shrink = reference == maximum ? 1.0F : std::exp(reference - maximum);
        const auto factor = static_cast<float>(static_cast<double>(shrink) / mem.sums[index(q)]);
        detail::Panel x;
        detail::load_panel(mem.exponentials_of(panel, q), x);
        for (Packet& y : x) { y = detail::pmul(y, detail::pset1<Packet>(factor)); }
        reduction.add(q, x);
      }
      const std::int32_t rows = std::min(detail::panel_rows, mem.rows - first);
      alignas(64) float scores[detail::panel_rows];
      reduction.finish(scores, rows);
      for (std::int32_t i = 0; i < rows; ++i) {
        float& score = mem.raw_scores[index(first + i)];
        score = is_nan(score) ? not_a_number : scores[i];
      }
    }
  }

  WindowParams params_;
};
static_assert(Scorer<WindowScorer>);

/// `WindowParams` are scored by `WindowScorer`.
WindowScorer scorer_of(ScoreTag<WindowParams>);

}  // namespace kvtrim
