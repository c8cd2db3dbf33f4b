// SPDX-License-Identifier: Apache-2.0
#pragma once

// Work is cut into tiles of keys, and only the device knows which tiles there are: one block lists them (a prefix sum over
// the tables), then score kernels walk the list with as many blocks as the device holds. A tile starts at a multiple of
// its size in its own table, so nothing that is computed for it depends on the other sequences.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

/// Keys per tile: as many as one block of 128 threads holds in registers.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t tile_keys(std::int32_t head_dim) noexcept {
  return head_dim <= 128 ? 128 : 64;
}

/// The list of tiles: those of table u of the batch are [starts[u], starts[u + 1]), by layer, KV head and row.
struct TileList {
  std::int32_t* starts = nullptr;        ///< [tables + 1]
  std::int32_t tables = 0;               ///< of all sequences
  std::int32_t keys = 0;                 ///< per tile
  std::int32_t max_rows = 0;             ///< host bound on the rows of a table
  std::int32_t min_rows = 0;             ///< tables with at most this many live rows have no tiles
  const std::int32_t* active = nullptr;  ///< [tables] 0: the table has no tiles; null: all have
  std::int32_t most = 0;                 ///< tiles that there is room for; 0: for all
  Status* status = nullptr;  ///< [1] what is to be told if there are more; then there are none
};

/// The list for all tables of a view; it is made by `list_tiles_kernel`.
[[nodiscard]] inline TileList tile_list(void* starts,
                                        const CacheView& view,
                                        std::int32_t keys,
                                        std::int32_t max_rows,
                                        std::int32_t min_rows = 0,
                                        const std::int32_t* active = nullptr) noexcept {
  return {static_cast<std::int32_t*>(starts),
          view.sequences * view.tables_per_sequence(),
          keys,
          max_rows,
          min_rows,
          active};
}

/// One tile.
struct KeyTile {
  SequenceId sequence;
  LayerId layer;
  HeadId head;
  std::int32_t first;          ///< first row
  std::int32_t extent;         ///< rows of the table, the hole included
  std::int32_t live;           ///< live rows
  std::int32_t hole;           ///< row that is a hole; -1: none
  std::int32_t next_position;  ///< of the sequence
  std::int32_t item;           ///< (sequence, layer, KV head) as one index
  std::int32_t index;          ///< of the tile in its KV head
  bool ordered;                ///< rows are in the order of their positions

  /// Whether `row` is a live row, not a hole or past the end.
  [[nodiscard]] KVTRIM_DEVICE bool holds(std::int32_t row) const {
    return row < extent && row != hole;
  }
  /// Index of `row` among the live rows.
  [[nodiscard]] KVTRIM_DEVICE std::int32_t live_index(std::int32_t row) const {
    return row - (hole >= 0 && row > hole ? 1 : 0);
  }
};

/// Rows of a table that lie within the bound.
KVTRIM_DEVICE std::int32_t bounded_extent(
    const CacheView& view, SequenceId s, LayerId l, HeadId h, std::int32_t max_rows) {
  const std::int32_t live = view.live_rows(s, l, h);
  const std::int32_t extent = live + (view.state(s, l, h).append_row >= 0 ? 1 : 0);
  return live <= 0 ? 0 : extent < max_rows ? extent : max_rows;
}

inline constexpr int list_threads = 512;

/// Lists the tiles. One block.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) list_tiles_kernel(CacheView view, TileList list) {
  using Scan = BlockScan<Threads, int>;
  KVTRIM_SHARED(Scan, shared, );
  const int thread = static_cast<int>(threadIdx.x);
  const int tables_each = view.tables_per_sequence();
  const int heads_each = view.layers_per_table() * view.heads_per_table();
  int before = 0;
  for (int begin = 0; begin < list.tables; begin += Threads) {
    const int u = begin + thread;
    int tiles = 0;
    if (u < list.tables) {
      const SequenceId s{u / tables_each};
      const int t = u % tables_each;
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const bool active = list.active == nullptr || list.active[u] != 0;
      if (active && view.live_rows(s, l, h) > list.min_rows) {
        const int rows = bounded_extent(view, s, l, h, list.max_rows);
        tiles = (rows + list.keys - 1) / list.keys * heads_each;
      }
    }
    int all = 0;
    const int first = before + block_sum_before(tiles, shared, all);
    if (u < list.tables) { list.starts[u] = first; }
    before += all;
  }
  if (thread == 0) { list.starts[list.tables] = before; }
  if (list.most > 0 && before > list.most) {
    __syncthreads();
    for (int u = thread; u <= list.tables; u += Threads) { list.starts[u] = 0; }
    if (thread == 0 && list.status != nullptr) { *list.status = Status::workspace_too_small; }
  }
}

/// Tiles of a KV head of `extent` rows.
KVTRIM_DEVICE std::int32_t tiles_of(const TileList& list, std::int32_t extent) {
  return (extent + list.keys - 1) / list.keys;
}
/// Where the rows of the KV head that tile `i` belongs to begin in an array by rows: heads follow each other in whole tiles.
KVTRIM_DEVICE std::int64_t rows_before(const TileList& list, const KeyTile& tile, std::int32_t i) {
  return static_cast<std::int64_t>(i - tile.index) * list.keys;
}

/// Tile `i` of the list.
KVTRIM_DEVICE KeyTile tile_at(const CacheView& view, const TileList& list, std::int32_t i) {
  std::int32_t low = 0;
  std::int32_t high = list.tables;
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    if (list.starts[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const std::int32_t tables_each = view.tables_per_sequence();
  const std::int32_t table = low % tables_each;
  KeyTile t;
  t.sequence = SequenceId{low / tables_each};
  const LayerId l = view.first_layer(table);
  const HeadId h = view.first_head(table);
  t.extent = bounded_extent(view, t.sequence, l, h, list.max_rows);
  const std::int32_t tiles = tiles_of(list, t.extent);
  const std::int32_t inside = i - list.starts[low];
  const std::int32_t pair = inside / tiles;
  const std::int32_t heads = view.heads_per_table();
  t.index = inside % tiles;
  t.layer = LayerId{raw(l) + pair / heads};
  t.head = HeadId{raw(h) + pair % heads};
  t.first = t.index * list.keys;
  const SequenceState state = view.state(t.sequence, l, h);
  t.hole = state.append_row < t.extent ? state.append_row : -1;
  t.live = t.extent - (t.hole >= 0 ? 1 : 0);
  t.next_position = state.next_position;
  t.ordered = state.ordered;
  t.item = (raw(t.sequence) * view.layers + raw(t.layer)) * view.kv_heads + raw(t.head);
  return t;
}

/// Upper bound on the tiles of a batch; -1 if they cannot be counted in 31 bits.
[[nodiscard]] inline std::int32_t most_tiles(const CacheView& view,
                                             std::int32_t max_rows) noexcept {
  const std::int32_t keys = tile_keys(view.k.head_dim);
  const std::int64_t each = (static_cast<std::int64_t>(max_rows) + keys - 1) / keys;
  const std::int64_t items =
      static_cast<std::int64_t>(view.sequences) * view.layers * view.kv_heads;
  const std::int64_t all = each * items;
  return all < 0x7FFF'FFFF ? static_cast<std::int32_t>(all) : -1;
}

/// The same for tiles of `keys` where all sequences have `total_rows` in all; 0: max_rows each.
[[nodiscard]] inline std::int64_t most_tiles(const CacheView& view,
                                             std::int32_t keys,
                                             std::int32_t max_rows,
                                             std::int64_t total_rows) noexcept {
  const auto ceil = [&](std::int64_t rows) { return (rows + keys - 1) / keys; };
  const std::int64_t longest = view.sequences * ceil(max_rows < 0 ? 0 : max_rows);
  const std::int64_t total = ceil(total_rows) + view.sequences;  // each may end within a tile
  return (total_rows > 0 && total < longest ? total : longest) * view.layers * view.kv_heads;
}

/// Whether a plane holds floats that a kernel may write.
[[nodiscard]] inline bool float_plane(const SequencePlane& p) noexcept {
  return p.base != nullptr && p.element_bytes == 4 && aligned_to(4, p.base) &&
         (p.sequence_stride | p.layer_stride | p.head_stride | p.row_stride) % 4 == 0;
}

/// Whether, in addition, each (sequence, layer, KV head) has its own elements: otherwise heads would overwrite each other.
[[nodiscard]] inline bool own_float_plane(const SequencePlane& p, const CacheView& view) noexcept {
  return float_plane(p) && (view.sequences < 2 || p.sequence_stride != 0) &&
         (view.layers < 2 || p.layer_stride != 0) && (view.kv_heads < 2 || p.head_stride != 0);
}

/// Bytes of a workspace that holds the list of tiles alone.
[[nodiscard]] inline std::size_t tile_list_bytes(const CacheView& view) noexcept {
  WorkspaceLayout layout;
  static_cast<void>(layout.take<std::int32_t>(
      static_cast<std::int64_t>(view.sequences) * view.tables_per_sequence() + 1));
  return layout.bytes();
}
/// Whether a workspace can hold `needed` bytes.
[[nodiscard]] inline bool workspace_fits(const void* workspace,
                                         std::size_t bytes,
                                         std::size_t needed) noexcept {
  return workspace != nullptr && aligned_to(WorkspaceLayout::alignment, workspace) &&
         bytes >= needed;
}

}  // namespace kvtrim::cuda::detail
