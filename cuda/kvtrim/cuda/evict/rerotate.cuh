// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rotating the keys of a cache to rope positions that are given, in place. What an eviction does to positions is a mode of its
// plan: `DevicePlanOptions::rotation`.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/rotation.cuh>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/evict/rerotate.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

namespace detail {

struct RerotateArgs {
  CacheView view;
  TileList tiles;
  KeyTurn turn;
  SequencePlane targets;  // absent: live row r goes to rope position r
};

inline constexpr int rerotate_threads = 128;

/// One warp per row: its lanes share the pairs. Rows in pages that must not be written, and rows that are already where
/// they should be, are left alone.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) rerotate_kernel(RerotateArgs a) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int32_t tiles = a.tiles.starts[a.tiles.tables];
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(a.view, a.tiles, i);
    for (std::int32_t k = warp; k < a.tiles.keys; k += Threads / 32) {
      const std::int32_t row = tile.first + k;
      if (!tile.holds(row)) { continue; }
      const std::int32_t rank = tile.live_index(row);
      auto* const stands = reinterpret_cast<std::int32_t*>(
          a.view.rope_positions.row(tile.sequence, tile.layer, tile.head, row));
      const std::int32_t before = *stands;
      const std::int32_t after = a.targets ? *reinterpret_cast<const std::int32_t*>(a.targets.row(
                                                 tile.sequence, tile.layer, tile.head, row))
                                           : rank;
      const std::int32_t place = row + a.view.first_row(tile.sequence);
      const PageId page =
          a.view.k_page(tile.sequence, tile.layer, tile.head, place / a.view.page_size);
      __syncwarp();  // all lanes have read the position that lane 0 writes below
      if (before == after || !a.view.writable(page, tile.layer, tile.head) ||
          (a.turn.mode == PositionMode::sinks_follow && rank >= a.turn.pristine.sinks)) {
        continue;
      }
      const KeyPlace at{tile.layer, tile.head, page, Slot{place % a.view.page_size}};
      turn_key(a.view, a.turn, at, tile.item, rank, before, after);
      if (lane == 0) { *stands = after; }
    }
  }
}

}  // namespace detail

/// Working space of `rerotate`: the list of tiles, 4 bytes per table.
[[nodiscard]] inline std::size_t rerotate_workspace_bytes(const CacheView& view) noexcept {
  return detail::tile_list_bytes(view);
}

/// Rotates the key of every live row from its current rope position to the one it should have, and writes that position.
///
/// \param view      pointers inside it are device pointers; `rope_positions` must exist for each layer and KV head
/// \param rope      its frequencies on the device
/// \param mode      `in_cache`: all rows, from `view.unrotated_keys` if there is such a plane, otherwise by the difference;
///   `sinks_follow`: the first `pristine.sinks` rows, from `pristine.keys` (a device pointer)
/// \param targets   int32 by row, the rope position each key should have; absent: r for live row r (ordered tables)
/// \param max_rows  host bound on the rows of a table
/// \param workspace [rerotate_workspace_bytes(view)], at a multiple of 256; one per stream
/// \returns `cudaErrorInvalidValue` before anything is launched, for everything that `Rerotator` throws on, missing
///   frequencies, an address that is not a multiple of the element, or a workspace that is too small
/// \par Error
///   angles agree with the CPU's to an ulp of fp32; a key differs from `rotate_key`'s by at most 4 * 2^-24 (|x| + |y|),
///   plus half an ulp of a 16-bit type
/// \par Complexity
///   O(live rows * dim); f32 rows 16 bytes at a time if the layout allows it; rows already in place are not touched
/// \par Stream
///   asynchronous on `stream`, two launches; never synchronises or allocates; may be captured
/// \par Source
///   Su et al., 2021, arXiv:2104.09864
[[nodiscard]] inline cudaError_t rerotate(const CacheView& view,
                                          const DeviceRope& rope,
                                          PositionMode mode,
                                          const PristineSinks& pristine,
                                          const SequencePlane& targets,
                                          std::int32_t max_rows,
                                          void* workspace,
                                          std::size_t workspace_bytes,
                                          cudaStream_t stream) noexcept {
  using namespace detail;
  if (mode == PositionMode::keep) { return cudaSuccess; }
  const DeviceRotation rotation{mode, rope, pristine};
  if (!can_rotate(view, rotation) || (targets && !float_plane(targets)) ||
      view.table.ids == nullptr || view.page_size < 1 || max_rows < 0) {
    return cudaErrorInvalidValue;
  }
  const std::int32_t tiles = most_tiles(view, max_rows);
  if (tiles < 0 ||
      (tiles > 0 && !workspace_fits(workspace, workspace_bytes, tile_list_bytes(view)))) {
    return cudaErrorInvalidValue;
  }
  if (tiles == 0) { return cudaSuccess; }
  RerotateArgs a{};
  a.view = view;
  a.tiles = tile_list(workspace, view, tile_keys(view.k.head_dim), max_rows);
  a.turn = key_turn(view, rotation);
  a.targets = targets;
  const cudaError_t error = launch(
      &list_tiles_kernel<list_threads>, dim3(1), dim3(list_threads), 0, stream, view, a.tiles);
  return error != cudaSuccess ? error
                              : launch(&rerotate_kernel<rerotate_threads>,
                                       dim3(bounded_grid(tiles)),
                                       dim3(rerotate_threads),
                                       0,
                                       stream,
                                       a);
}

}  // namespace kvtrim::cuda
