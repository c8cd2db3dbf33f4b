// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention of a prompt's last queries on the device. Specification: score/window.hpp. With the engine's LSE, keys are
// read once; without it, twice: a first pass stores the maximum and the sum for every (query, tile), and these are merged
// in the order of the tiles, so that no result depends on how many blocks there are.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/cuda/detail/head_place.cuh>
#include <kvtrim/cuda/observe/detail/instances.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

namespace detail {

inline constexpr int pool_threads = 128;

/// Rank of each live row by position, in tables that are out of order. One thread per row; O(rows^2).
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads)
    rank_rows_kernel(CacheView view, TileList list, std::int32_t* ranks) {
  KVTRIM_SHARED(std::int32_t, positions, [Threads]);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t tiles = list.starts[list.tables];
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(view, list, i);
    if (tile.ordered) { continue; }
    const auto position_of = [&](std::int32_t row) {
      return tile.holds(row) ? raw(view.position(tile.sequence, tile.layer, tile.head, row))
                             : never_seen;
    };
    for (std::int32_t begin = 0; begin < list.keys; begin += Threads) {
      const std::int32_t row = tile.first + begin + thread;
      const bool mine = begin + thread < list.keys && tile.holds(row);
      const std::int32_t position = mine ? position_of(row) : 0;
      std::int32_t rank = 0;
      for (std::int32_t other = 0; other < tile.extent; other += Threads) {
        __syncthreads();
        positions[thread] = position_of(other + thread);
        __syncthreads();
        for (int k = 0; k < Threads; ++k) { rank += positions[k] < position ? 1 : 0; }
      }
      if (mine) { ranks[rows_before(list, tile, i) + tile.live_index(row)] = rank; }
    }
  }
}

/// LSE of each query from the partials of its tiles; NaN if it sees no row or its logits overflow. One warp per query.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads)
    combine_partials_kernel(AttentionArgs a, std::int32_t pad, std::int32_t items, float* lse2) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int32_t tables_each = a.view.tables_per_sequence();
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (Threads / 32);
  const std::int64_t all = static_cast<std::int64_t>(items) * a.most_queries;
  for (std::int64_t x = static_cast<std::int64_t>(blockIdx.x) * (Threads / 32) +
                        (static_cast<std::int64_t>(threadIdx.x) >> 5);
       x < all;
       x += warps) {
    const auto item = static_cast<std::int32_t>(x / a.most_queries);
    const auto [s, l, h] = head_place(item, a.view.layers, a.view.kv_heads);
    const std::int32_t table = raw(s) * tables_each + a.view.table_of(l, h);
    const std::int32_t p = static_cast<std::int32_t>(x % a.most_queries);
    if (a.tiles.starts[table] == a.tiles.starts[table + 1] ||
        a.view.live_rows(s, l, h) <= a.unscored || p >= query_range(a, s, pad).count()) {
      continue;  // has no partials
    }
    const std::int32_t tiles = tiles_of(a.tiles, bounded_extent(a.view, s, l, h, a.tiles.max_rows));
    const std::int32_t heads_before = a.view.scope == TableScope::group
                                          ? raw(l) * a.view.kv_heads + raw(h)
                                      : a.view.scope == TableScope::layer ? raw(h)
                                                                          : 0;
    const std::int64_t tiles_before =
        a.tiles.starts[table] + static_cast<std::int64_t>(heads_before) * tiles;
    const float2* const parts =
        a.partials + tiles_before * a.most_queries + static_cast<std::int64_t>(p) * tiles;
    float largest = -infinity;
    float sum = 0;
    const auto add = [&](float other_largest, float other_sum) {
      const float both = fmaxf(largest, other_largest);
      sum = (sum > 0 ? sum * exp2_of(largest - both) : sum) +
            (other_sum > 0 ? other_sum * exp2_of(other_largest - both) : other_sum);
      largest = both;
    };
    for (std::int32_t i = lane; i < tiles; i += 32) {
      const float2 part = parts[i];
      add(part.x, part.y);
    }
    KVTRIM_UNROLL
    for (int d = 1; d < 32; d <<= 1) {
      const float other_largest = __shfl_xor_sync(full_warp, largest, d);
      const float other_sum = __shfl_xor_sync(full_warp, sum, d);
      // Both lanes of a pair add the lower one's part first, so all lanes end with the same bits.
      const bool upper = (lane & d) != 0;
      const float mine_largest = largest;
      const float mine_sum = sum;
      largest = upper ? other_largest : mine_largest;
      sum = upper ? other_sum : mine_sum;
      add(upper ? mine_largest : other_largest, upper ? mine_sum : other_sum);
    }
    if (lane == 0) {
      const bool good = sum > 0 && is_finite(sum) && is_finite(largest);
      lse2[x] = good ? largest + log2f(sum) : not_a_number;
    }
  }
}

/// Pools raw scores over neighbouring positions; window columns and holes get 0. One thread per row.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) pool_kernel(CacheView view,
                                                          TileList list,
                                                          WindowParams params,
                                                          std::int32_t unscored,
                                                          const float* raw_scores,
                                                          const std::int32_t* ranks,
                                                          ScoreRows out) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t tiles = list.starts[list.tables];
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(view, list, i);
    const std::int64_t item_rows = rows_before(list, tile, i);
    const float* const in = raw_scores + item_rows;
    const std::int32_t scored = tile.live - unscored;
    const std::int32_t columns = params.columns == PoolColumns::all_columns ? tile.live : scored;
    for (std::int32_t k = thread; k < list.keys; k += Threads) {
      const std::int32_t row = tile.first + k;
      if (row >= tile.extent) { break; }
      const std::int32_t live = tile.live_index(row);
      std::int32_t column = live;
      if (ranks != nullptr && !tile.ordered && tile.holds(row) && scored > 0) {
        column = ranks[item_rows + live];
      }
      float value = 0;
      if (tile.holds(row) && column < scored) {
        const std::int32_t reach = params.kernel / 2;
        const std::int32_t begin = column - reach < 0 ? 0 : column - reach;
        const std::int32_t end = columns - column > reach ? column + reach + 1 : columns;
        value = in[begin];
        for (std::int32_t c = begin + 1; c < end; ++c) {
          const float x = in[c];
          if (params.pooling == Pooling::average) {
            value += x;
          } else if (order_key(x) > order_key(value)) {
            value = x;
          }
        }
        if (params.pooling == Pooling::average) {
          value = __fdiv_rn(value, static_cast<float>(params.kernel));
        }
      }
      *out.at(tile.sequence, tile.layer, tile.head, tile.item, row) = value;
    }
  }
}

/// Pieces of the workspace of `window_scores`. Partials are read before raw scores and ranks are written: they share memory.
struct WindowMemory {
  std::int32_t* starts = nullptr;
  float* raw = nullptr;
  std::int32_t* ranks = nullptr;
  float* lse2 = nullptr;
  float2* partials = nullptr;
  std::size_t bytes = 0;
  std::int32_t items = 0;
  std::int32_t most_queries = 0;
  std::int32_t tiles = 0;  // of all KV heads; -1: more than can be counted

  static WindowMemory take(const WindowParams& params,
                           const CacheView& view,
                           const DeviceQueries& queries,
                           const ScoreBounds& bounds,
                           WorkspaceLayout layout) noexcept {
    WindowMemory m;
    const QueryBlock& b = queries.block;
    const std::int32_t votes =
        b.row_counts == nullptr ? std::min(b.rows, params.window) : params.window;
    const std::int32_t keys = tile_keys(view.k.head_dim);
    m.items = view.sequences * view.layers * view.kv_heads;
    const std::int64_t tiles = most_tiles(view, keys, bounds.max_rows, bounds.total_rows);
    m.tiles = tiles < 0x7FFF'FFFF ? static_cast<std::int32_t>(tiles) : -1;
    m.most_queries = b.query_heads / std::max(1, view.kv_heads) * ((votes + 7) / 8 * 8);
    // In tiles of the largest size: enough for any head dim up to that of the bounds.
    constexpr std::int32_t wide = tile_keys(1);
    const std::int64_t rows = wide * most_tiles(view, wide, bounds.max_rows, bounds.total_rows);
    const std::int64_t voters = static_cast<std::int64_t>(m.items) * m.most_queries;
    m.starts = layout.take<std::int32_t>(
        static_cast<std::int64_t>(view.sequences) * view.tables_per_sequence() + 1);
    if (b.lse == nullptr) { m.lse2 = layout.take<float>(voters); }
    WorkspaceLayout instead = layout;
    m.raw = layout.take<float>(rows);
    // Without states, every table is a fresh prompt; without positions, a row's position is its index.
    if (view.states != nullptr && view.positions) { m.ranks = layout.take<std::int32_t>(rows); }
    if (b.lse == nullptr) { m.partials = instead.take<float2>(tiles * m.most_queries); }
    m.bytes = std::max(layout.bytes(), instead.bytes());
    return m;
  }
};

/// `window_scores` into a plane or a list, which is not checked.
[[nodiscard]] inline cudaError_t window_scores_into(
    const WindowParams& params,
    const CacheView& view,
    const DeviceQueries& queries,
    const ScoreRows& scores,
    const ScoreBounds& bounds,
    void* workspace,
    std::size_t workspace_bytes,
    cudaStream_t stream,
    ScorePath path = ScorePath::automatic) noexcept {
  if (!readable_on_device(view, queries) || params.window < 1 || params.kernel < 1 ||
      params.kernel % 2 == 0 || params.sums != Sums::floating || bounds.max_rows < 0 ||
      bounds.total_rows < 0) {
    return cudaErrorInvalidValue;
  }
  const AttentionChoice attention = choose_attention(view, queries, path);
  const WindowMemory m =
      WindowMemory::take(params, view, queries, bounds, {workspace, workspace_bytes});
  const std::int32_t tiles = m.tiles;
  if (attention.kernel == nullptr || tiles < 0 || most_tiles(view, bounds.max_rows) < 0 ||
      (tiles > 0 && !workspace_fits(workspace, workspace_bytes, m.bytes))) {
    return cudaErrorInvalidValue;
  }
  if (tiles == 0) { return cudaSuccess; }

  AttentionArgs a{};
  a.view = view;
  a.queries = queries;
  if (queries.block.scale == 0) {
    a.queries.block.scale = 1.0F / std::sqrt(static_cast<float>(view.k.head_dim));
  }
  a.tiles = tile_list(
      m.starts, view, tile_keys(view.k.head_dim), bounds.max_rows, bounds.min_rows, bounds.active);
  a.chunk_stride = key_chunk_stride(view.k);
  a.most_queries = m.most_queries;
  a.tiles.most = tiles;
  a.tiles.status = bounds.status;
  a.window = params.window;
  a.unscored = params.unscored();
  a.rows = params.rows;
  a.group = params.group;
  a.query_vectors = queries_aligned(queries, queries.dtype == DType::f32 ? 16 : 8);
  a.decay = 1;
  a.raw = m.raw;
  a.ranks = m.ranks;
  a.partials = m.partials;

  const unsigned blocks = bounded_grid(tiles);
  cudaError_t error = launch(
      &list_tiles_kernel<list_threads>, dim3(1), dim3(list_threads), 0, stream, view, a.tiles);
  if (error == cudaSuccess && m.partials != nullptr) {
    a.use = AttentionUse::partials;
    error = launch(attention.kernel, dim3(blocks), dim3(attention_threads), 0, stream, a);
    if (error == cudaSuccess) {
      const std::int64_t warps = static_cast<std::int64_t>(m.items) * m.most_queries;
      error = launch(&combine_partials_kernel<pool_threads>,
                     dim3(bounded_grid((warps + 3) / 4)),
                     dim3(pool_threads),
                     0,
                     stream,
                     a,
                     attention.pad,
                     m.items,
                     m.lse2);
    }
    a.lse2 = m.lse2;
  }
  if (error == cudaSuccess && m.ranks != nullptr) {
    error = launch(&rank_rows_kernel<pool_threads>,
                   dim3(blocks),
                   dim3(pool_threads),
                   0,
                   stream,
                   view,
                   a.tiles,
                   m.ranks);
  }
  if (error == cudaSuccess) {
    a.use = AttentionUse::window_scores;
    error = launch(attention.kernel, dim3(blocks), dim3(attention_threads), 0, stream, a);
  }
  if (error == cudaSuccess) {
    error = launch(&pool_kernel<pool_threads>,
                   dim3(blocks),
                   dim3(pool_threads),
                   0,
                   stream,
                   view,
                   a.tiles,
                   params,
                   a.unscored,
                   static_cast<const float*>(m.raw),
                   static_cast<const std::int32_t*>(m.ranks),
                   scores);
  }
  return error;
}

}  // namespace detail

/// Working space of `window_scores`, a multiple of 256 bytes: 4 bytes per row and KV head, 8 with states and positions; or,
/// without an LSE, 8 bytes per query and tile of 128 keys (of 64 above a head dim of 128), if that is more. Rows are counted
/// in whole tiles of 128: `total_rows` and one tile for each sequence where a total is given, `max_rows` each otherwise. Also 4
/// bytes per table, and without an LSE 4 per KV head and query. Monotone in every bound.
[[nodiscard]] inline std::size_t window_scores_workspace_bytes(const WindowParams& params,
                                                               const CacheView& view,
                                                               const DeviceQueries& queries,
                                                               const ScoreBounds& bounds) noexcept {
  return detail::WindowMemory::take(params, view, queries, bounds, {}).bytes;
}

/// Loads what `window_scores` and `accumulate_column_sums` launch for such keys and queries; the host reads types, sizes and
/// strides alone.
///
/// \returns `cudaErrorInvalidValue` if there is no kernel for them; otherwise the first status that is not `cudaSuccess`
/// \par Stream
///   none; may wait for the device, so not inside a capture
[[nodiscard]] inline cudaError_t prepare_window_scores(
    const CacheView& view,
    const DeviceQueries& queries,
    ScorePath path = ScorePath::automatic) noexcept {
  using namespace detail;
  const AttentionChoice attention = choose_attention(view, queries, path);
  if (attention.kernel == nullptr) { return cudaErrorInvalidValue; }
  const cudaError_t all[] = {load(attention.kernel),
                             load(&list_tiles_kernel<list_threads>),
                             load(&rank_rows_kernel<pool_threads>),
                             load(&combine_partials_kernel<pool_threads>),
                             load(&pool_kernel<pool_threads>)};
  return first_error(all);
}

/// Scores every live row of a batch by the attention that the last `params.window` queries pay to it, as `WindowScorer`
/// does: reduced over rows and over the heads of a group, with the window's own columns cut, then pooled.
///
/// \param view        pointers inside it are device pointers
/// \param queries     likewise; `block.scale` 0 means 1 / sqrt(head_dim)
/// \param[out] scores fp32 by row; a hole's is 0; not written for tables with at most `bounds.min_rows` live rows, nor at all
///   if there are more rows than `bounds.total_rows` (in whole tiles): `bounds.status` says so
/// \param workspace   [window_scores_workspace_bytes(...)], at a multiple of 256; one per stream
/// \pre the tables name a page for every live row of the tables that are scored
/// \returns `cudaErrorInvalidValue` before anything is launched: dtype or head dim without a kernel, an address or a
///   stride that is not a multiple of the element, no page table, scales of single rows, an even kernel, exact sums (which the
///   host alone has), a workspace that is too small; otherwise the launches' status
/// \par Ties
///   none broken here. NaN: as `WindowScorer`
/// \par Error
///   of a probability p = exp(x - lse) against exact arithmetic on the same keys, with S = scale * sum |q_d k_d|:
///   p (2^-21 + 2^-24 (4 S + 2 |x| + 2 |lse|)) + 2^-126; 16 S instead of 4 S on tensor cores, whose inner rounding is
///   not specified; without an LSE, 4 (or 16) times the largest S of the query is added. The same bits for any page size,
///   page placement and batch. Under -use_fast_math, without an LSE another p 2^-21 (the logarithm of a sum), with a soft cap
///   c another p 2^-10 c (the hyperbolic tangent); the rest does not change, as exponentials are approximated in any build and
///   divisions in none
/// \par Complexity
///   O(query rows * live rows * head_dim), twice that without an LSE; plus O(rows^2) for tables that are out of order
/// \par Stream
///   asynchronous on `stream`, three to six launches; never synchronises or allocates; may be captured
/// \par Source
///   Li et al., 2024, arXiv:2404.14469 (SnapKV); differs: as `WindowScorer`
[[nodiscard]] inline cudaError_t window_scores(const WindowParams& params,
                                               const CacheView& view,
                                               const DeviceQueries& queries,
                                               const SequencePlane& scores,
                                               const ScoreBounds& bounds,
                                               void* workspace,
                                               std::size_t workspace_bytes,
                                               cudaStream_t stream,
                                               ScorePath path = ScorePath::automatic) noexcept {
  if (!detail::own_float_plane(scores, view)) { return cudaErrorInvalidValue; }
  return detail::window_scores_into(
      params, view, queries, {scores}, bounds, workspace, workspace_bytes, stream, path);
}

}  // namespace kvtrim::cuda
