// SPDX-License-Identifier: Apache-2.0
#pragma once

// What both forms of window scores share: the working space of one KV head, which queries see which rows, and the way
// from columns to the scores of rows.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/packet.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/detail/window_queries.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

/// Working space of the window scores of one KV head.
struct WindowLayout {
  Arena& arena;
  std::int32_t rows;
  std::int32_t group;  // query heads of the KV head
  std::int32_t votes;  // queries of each
  std::int32_t head_dim;
  Sums form;
  std::int32_t used = group * votes;
  std::int32_t padded = padded_queries(group * std::max(1, votes));
  std::int64_t panel_queries = static_cast<std::int64_t>(panels_of(rows)) * padded;
  std::int32_t floating =
      form == Sums::floating ? padded : 0;  // queries with what only that form needs
  std::int32_t exact = form == Sums::exact ? padded : 0;
  TileScratch tiles{arena, head_dim};
  std::span<float> queries = arena.take<float>(static_cast<std::int64_t>(padded) * head_dim);
  std::span<float> maxima = arena.take<float>(floating);
  // Of each lane: sums so far, or the largest so far.
  std::span<float> lanes = arena.take<float>(static_cast<std::int64_t>(padded) * packet_floats);
  std::span<double> sums = arena.take<double>(floating);
  std::span<float> lane_faults =
      arena.take<float>(static_cast<std::int64_t>(exact) * packet_floats);
  std::span<std::uint64_t> keys = arena.take<std::uint64_t>(exact);   // of the maxima
  std::span<std::uint64_t> units = arena.take<std::uint64_t>(exact);  // of the exponentials' sums
  std::span<float> factors = arena.take<float>(exact);
  std::span<std::uint64_t> row_units =  // of each row's probabilities, then the heads that voted
      arena.take<std::uint64_t>(form == Sums::exact ? std::int64_t{rows} + 1 : 0);
  std::span<float> lse = arena.take<float>(padded);
  std::span<std::uint8_t> has_vote = arena.take<std::uint8_t>(padded);
  std::span<Position> query_positions = arena.take<Position>(votes);
  std::span<float> raw_scores = arena.take<float>(rows);
  std::span<float> pooled = arena.take<float>(rows);
  std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
  // Last, so that a call with an LSE does not touch them: [panels, padded] what a panel's exponentials are relative to,
  // and [panels, padded, panel_rows] those themselves, which are logits first in the exact form.
  std::span<float> references = arena.take<float>(floating == 0 ? 0 : panel_queries);
  std::span<float> exponentials = arena.take<float>(panel_queries * panel_rows);

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  /// Of one panel and query: [panel_rows].
  [[nodiscard]] float* exponentials_of(std::int32_t panel, std::int32_t q) const noexcept {
    return exponentials.data() + (static_cast<std::ptrdiff_t>(panel) * padded + q) * panel_rows;
  }
  /// Where the lanes of a query lie.
  [[nodiscard]] std::ptrdiff_t lane(std::int32_t q) const noexcept {
    return static_cast<std::ptrdiff_t>(q) * packet_floats;
  }
  /// Whether there is a query that must not see some of the tile's first `count` rows.
  [[nodiscard]] bool needs_mask(std::int32_t count) const noexcept {
    bool any = false;
    Position newest{-1};
    for (std::int32_t t = 0; t < count; ++t) {
      newest = std::max(newest, tiles.positions[index(t)]);
      any = any || tiles.bad[index(t)] != 0;
    }
    for (const Position query : query_positions) { any = any || query < newest; }
    return any;
  }
  /// Overwrites what query `q` must not see among the panel's rows first .. first + panel_rows of the tile.
  void mask(float* values,
            std::int32_t first,
            std::int32_t count,
            std::int32_t q,
            float value) const noexcept {
    const Position query = query_positions[index(q % votes)];
    for (std::int32_t i = 0; i < panel_rows; ++i) {
      const std::int32_t t = first + i;
      if (t >= count || tiles.bad[index(t)] != 0 || tiles.positions[index(t)] > query) {
        values[i] = value;
      }
    }
  }
  /// Calls f(q, logits [panel_rows]) for each query with a vote, with the panel of the packed tile that starts at `row`.
  template <class F>
  void for_each_query(std::int32_t row, F&& f) const noexcept {
    for_each_logit_block(
        tiles, row, queries.data(), 0, used, [&](std::int32_t begin, float* logits) {
          const std::int32_t end = std::min(begin + block_queries, used);
          for (std::int32_t q = begin; q < end; ++q) {
            if (has_vote[index(q)] == 0) { continue; }
            f(q, logits + static_cast<std::ptrdiff_t>(q - begin) * panel_rows);
          }
        });
  }

  /// raw_scores in logical order -> pooled in position order -> out by row.
  void pool_columns(const WindowParams& params,
                    const LiveRows& live_rows,
                    std::span<float> out) const noexcept {
    const std::int32_t live = live_rows.count();
    const std::int32_t scored = std::max(0, live - params.unscored());
    const auto columns = index(params.columns == PoolColumns::all_columns ? live : scored);
    std::span<const float> scores = raw_scores;
    if (!live_rows.ordered()) {
      live_rows.order(order);
      // `exponentials` is free again.
      const auto sorted = exponentials.first(index(live));
      for (std::int32_t rank = 0; rank < live; ++rank) {
        sorted[index(rank)] = raw_scores[index(order[index(rank)])];
      }
      scores = sorted;
    }
    pool(scores.first(columns), params.pooling, params.kernel, pooled.first(columns));
    for (std::int32_t rank = 0; rank < scored; ++rank) {
      const std::int32_t i = live_rows.ordered() ? rank : order[index(rank)];
      out[index(live_rows.row(i))] = pooled[index(rank)];
    }
  }
};

/// The space of the scores of one KV head, of which `scratch` is large enough.
[[nodiscard]] inline WindowLayout window_layout(Arena& arena,
                                                const WindowParams& params,
                                                const HeadRef& head,
                                                const QueryBlock& block) noexcept {
  return {arena,
          LiveRows(head).count(),
          block.query_heads / head.view.kv_heads,
          std::min(block.count(head.sequence), params.window),
          head.view.k.head_dim,
          params.sums};
}

/// Reads the queries that vote, and their positions.
inline void load_voters(const WindowLayout& mem,
                        const HeadRef& head,
                        const QueryBlock& block) noexcept {
  const std::int32_t next = head.state().next_position;
  const std::int32_t given = block.count(head.sequence);
  for (std::int32_t i = 0; i < mem.votes; ++i) {
    mem.query_positions[WindowLayout::index(i)] =
        block.position(head.sequence, given - mem.votes + i, next);
  }
  const auto lse = block.lse != nullptr ? mem.lse : std::span<float>{};
  load_window_queries(head, block, mem.votes, mem.queries, lse, mem.has_vote);
}

}  // namespace kvtrim::detail
