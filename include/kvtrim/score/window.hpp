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
#include <kvtrim/score/detail/window_queries.hpp>
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
    return detail::window_bytes<Layout>(shape, params_.window);
  }

  /// `bad_observation` without queries (no rows need no data), with heads that do not fit, or where keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    return detail::check_window_queries(view, obs.queries);
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const QueryBlock& block = obs.queries;
    const LiveRows rows(head);
    const std::int32_t given = block.count(head.sequence);
    const std::int32_t votes = std::min(given, params_.window);
    std::fill(out.begin(), out.end(), 0.0F);
    if (rows.count() <= params_.unscored()) { return; }  // all columns belong to the window
    Arena arena(scratch);
    const std::int32_t group = block.query_heads / head.view.kv_heads;
    const Layout mem{arena, rows.count(), group, votes, head.view.k.head_dim};
    KVTRIM_ASSERT(arena.ok());

    const std::int32_t next = head.state().next_position;
    for (std::int32_t i = 0; i < votes; ++i) {
      mem.query_positions[index(i)] = block.position(head.sequence, given - votes + i, next);
    }
    const auto lse = block.lse != nullptr ? mem.lse : std::span<float>{};
    detail::load_window_queries(head, block, votes, mem.queries, lse, mem.has_vote);
    const detail::LogitScale scaled(detail::scale_of(block, mem.head_dim), block.soft_cap);
    if (block.lse != nullptr) {
      attend_with_lse(head, scaled, mem);
    } else {
      attend_with_sums(head, scaled, mem);
    }
    pool_columns(rows, mem, out);
  }

 private:
  using Packet = detail::Packet;
  static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

  struct Layout {
    Arena& arena;
    std::int32_t rows;
    std::int32_t group;  // query heads of the KV head
    std::int32_t votes;  // queries of each
    std::int32_t head_dim;
    std::int32_t used = group * votes;
    std::int32_t padded = detail::padded_queries(group * std::max(1, votes));
    std::int64_t panel_queries = static_cast<std::int64_t>(detail::panels_of(rows)) * padded;
    detail::TileScratch tiles{arena, head_dim};
    std::span<float> queries = arena.take<float>(static_cast<std::int64_t>(padded) * head_dim);
    std::span<float> maxima = arena.take<float>(padded);
    std::span<float> lane_sums =
        arena.take<float>(static_cast<std::int64_t>(padded) * detail::packet_floats);
    std::span<double> sums = arena.take<double>(padded);
    std::span<float> lse = arena.take<float>(padded);
    std::span<std::uint8_t> has_vote = arena.take<std::uint8_t>(padded);
    std::span<Position> query_positions = arena.take<Position>(votes);
    std::span<float> raw_scores = arena.take<float>(rows);
    std::span<float> pooled = arena.take<float>(rows);
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
    // Last, so that a call with an LSE does not touch them: [panels, padded] what a panel's exponentials are relative to,
    // and [panels, padded, panel_rows] those themselves.
    std::span<float> references = arena.take<float>(panel_queries);
    std::span<float> exponentials = arena.take<float>(panel_queries * detail::panel_rows);
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  // Whether there is a query that must not see some row of the tile.
  static bool needs_mask(const Layout& mem, std::int32_t count) noexcept {
    bool any = false;
    Position newest{-1};
    for (std::int32_t t = 0; t < count; ++t) {
      newest = std::max(newest, mem.tiles.positions[index(t)]);
      any = any || mem.tiles.bad[index(t)] != 0;
    }
    for (const Position query : mem.query_positions) { any = any || query < newest; }
    return any;
  }
  // Masks what the query must not see among the panel's rows first .. first + panel_rows of the tile.
  static void mask(float* values,
                   const Layout& mem,
                   std::int32_t first,
                   std::int32_t count,
                   Position query,
                   float value) noexcept {
    for (std::int32_t i = 0; i < detail::panel_rows; ++i) {
      const std::int32_t t = first + i;
      if (t >= count || mem.tiles.bad[index(t)] != 0 || mem.tiles.positions[index(t)] > query) {
        values[i] = value;
      }
    }
  }

  void attend_with_lse(const HeadRef& head,
                       detail::LogitScale scaled,
                       const Layout& mem) const noexcept {
    detail::PanelReduction reduction(params_, std::max(1, mem.votes));
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem.tiles, count);
      const bool masked = needs_mask(mem, count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        for_each_query(mem, row, [&](std::int32_t q, float* values) {
          const Packet lse = detail::pset1<Packet>(mem.lse[index(q)]);
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = detail::pexp(detail::psub(scaled(values + p * detail::packet_floats), lse));
          }
          if (masked) {
            detail::store_panel(x, values);
            mask(values, mem, row, count, mem.query_positions[index(q % mem.votes)], 0.0F);
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
    std::fill(mem.lane_sums.begin(), mem.lane_sums.end(), 0.0F);
    const auto exponentials_of = [&](std::int32_t panel, std::int32_t q) {
      return mem.exponentials.data() +
             (static_cast<std::ptrdiff_t>(panel) * mem.padded + q) * detail::panel_rows;
    };
    const auto references_of = [&](std::int32_t panel) {
      return mem.references.data() + static_cast<std::ptrdiff_t>(panel) * mem.padded;
    };
    const auto lanes_of = [&](std::int32_t q) {
      return mem.lane_sums.data() + static_cast<std::ptrdiff_t>(q) * detail::packet_floats;
    };
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem.tiles, count);
      const bool masked = needs_mask(mem, count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        const std::int32_t panel = (first + row) / detail::panel_rows;
        const bool any_hidden = masked || row + detail::panel_rows > count;
        for_each_query(mem, row, [&](std::int32_t q, float* values) {
          const Position position = mem.query_positions[index(q % mem.votes)];
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = scaled(values + p * detail::packet_floats);
          }
          if (any_hidden) {
            detail::store_panel(x, values);
            mask(values, mem, row, count, position, lowest);
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
          float* const to = exponentials_of(panel, q);
          detail::store_panel(x, to);
          if (any_hidden) {
            mask(to, mem, row, count, position, 0.0F);
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
        detail::load_panel(exponentials_of(panel, q), x);
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

  // Calls f(q, logits [panel_rows]) for each query with a vote, with the panel of the packed tile that starts at `row`.
  template <class F>
  static void for_each_query(const Layout& mem, std::int32_t row, F&& f) noexcept {
    detail::for_each_logit_block(
        mem.tiles, row, mem.queries.data(), 0, mem.used, [&](std::int32_t begin, float* logits) {
          const std::int32_t end = std::min(begin + detail::block_queries, mem.used);
          for (std::int32_t q = begin; q < end; ++q) {
            if (mem.has_vote[index(q)] == 0) { continue; }
            f(q, logits + static_cast<std::ptrdiff_t>(q - begin) * detail::panel_rows);
          }
        });
  }

  // raw_scores in logical order -> pooled in position order -> out by row.
  void pool_columns(const LiveRows& rows, const Layout& mem, std::span<float> out) const noexcept {
    const std::int32_t live = rows.count();
    const std::int32_t scored = std::max(0, live - params_.unscored());
    const auto columns = index(params_.columns == PoolColumns::all_columns ? live : scored);
    std::span<const float> scores = mem.raw_scores;
    if (!rows.ordered()) {
      rows.order(mem.order);
      // `exponentials` is free again.
      const auto sorted = mem.exponentials.first(index(live));
      for (std::int32_t rank = 0; rank < live; ++rank) {
        sorted[index(rank)] = mem.raw_scores[index(mem.order[index(rank)])];
      }
      scores = sorted;
    }
    pool(scores.first(columns), params_.pooling, params_.kernel, mem.pooled.first(columns));
    for (std::int32_t rank = 0; rank < scored; ++rank) {
      const std::int32_t i = rows.ordered() ? rank : mem.order[index(rank)];
      out[index(rows.row(i))] = mem.pooled[index(rank)];
    }
  }

  WindowParams params_;
};
static_assert(Scorer<WindowScorer>);

/// `WindowParams` are scored by `WindowScorer`.
WindowScorer scorer_of(ScoreTag<WindowParams>);

}  // namespace kvtrim
