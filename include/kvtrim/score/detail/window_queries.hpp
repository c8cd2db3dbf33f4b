// SPDX-License-Identifier: Apache-2.0
#pragma once

// What scores by the prompt's last queries share: whether queries fit the cache, and how products get to read them.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

/// `bad_observation` without queries (no rows at all need no data), or when their heads are not a multiple of the KV
/// heads, or keys are not readable, or nothing tells which rows are older than a query: the positions of the rows are unknown,
/// and the query is not just the last one.
[[nodiscard]] inline Status check_window_queries(const CacheView& view,
                                                 const QueryBlock& q) noexcept {
  const bool given = q.data != nullptr || (q.rows == 0 && q.row_counts == nullptr);
  const bool fits = given && q.query_heads >= view.kv_heads && q.query_heads % view.kv_heads == 0;
  if (!fits || !readable(view.k)) { return Status::bad_observation; }
  if (knows_positions(view)) { return Status::ok; }
  bool last = q.positions == nullptr;
  for (std::int32_t s = 0; s < view.sequences; ++s) { last = last && q.count(SequenceId{s}) <= 1; }
  return last ? Status::ok : Status::bad_observation;
}

/// Bytes of `Layout{arena, rows, group, votes, head_dim, more...}` for at most `window` votes within `shape`.
template <class Layout, class... More>
[[nodiscard]] std::size_t window_bytes(const PlanShape& shape,
                                       std::int32_t window,
                                       More... more) noexcept {
  const std::int32_t group = shape.kv_heads > 0 ? shape.query_heads / shape.kv_heads : 0;
  const std::int32_t votes = std::max(1, std::min(shape.query_rows, window));
  return largest_need(shape.head_dim, [&](Arena& arena, std::int32_t dim) {
    return Layout{arena, shape.max_rows, std::max(1, group), votes, dim, more...};
  });
}

/// Packs the last `votes` queries that attend to a KV head: query (head g of the group, vote i) is row g * votes + i.
///
/// \param[out] packed  [padded queries, head_dim]; zeros for queries without a vote
/// \param[out] lse     [padded queries] natural; empty: the LSE is not looked at
/// \param[out] counts  [padded queries] 1: the query has a vote, as it and its LSE are finite
inline void load_window_queries(const HeadRef& head,
                                const QueryBlock& block,
                                std::int32_t votes,
                                std::span<float> packed,
                                std::span<float> lse,
                                std::span<std::uint8_t> counts) noexcept {
  const auto [view, s, l, h] = head;
  const std::int32_t dim = view.k.head_dim;
  const std::int32_t group = block.query_heads / view.kv_heads;
  const std::int32_t first = block.count(s) - votes;
  std::fill(packed.begin(), packed.end(), 0.0F);
  std::fill(counts.begin(), counts.end(), std::uint8_t{0});
  for (std::int32_t g = 0; g < group; ++g) {
    const std::int32_t query_head = raw(h) * group + g;
    for (std::int32_t i = 0; i < votes; ++i) {
      const std::int32_t q = g * votes + i;
      const float* const from = block.row(s, l, query_head, first + i);
      if (!finite(from, dim)) { continue; }
      if (!lse.empty()) {
        float& x = lse[static_cast<std::size_t>(q)];
        x = natural(block.lse_of(s, l, query_head, first + i), block.lse_base);
        if (!finite(&x, 1)) { continue; }
      }
      pack_query(from, dim, q, packed.data());
      counts[static_cast<std::size_t>(q)] = 1;
    }
  }
}

}  // namespace kvtrim::detail
