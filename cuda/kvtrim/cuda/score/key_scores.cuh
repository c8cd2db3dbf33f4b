// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores that need keys and nothing else. Specification: score/key_norm.hpp and score/key_diff.hpp. A warp reads a key; sums
// are in double, so that no finite key overflows and no order of addends matters to fp32.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/head_place.cuh>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/observe/detail/attention_args.cuh>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/cuda/observe/detail/queries.cuh>
#include <kvtrim/cuda/select/select_task.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// Which score of a key.
enum class KeyScore : std::uint8_t {
  norm,  ///< minus its length
  diff,  ///< minus the cosine between it and the mean of all normalised keys of its KV head
};

namespace detail {

inline constexpr int key_threads = 256;
inline constexpr int key_warps = key_threads / 32;
inline constexpr int key_rows = 64;  // whose norms are known at a time

struct KeyScoreArgs {
  CacheView view;
  TileList tiles;
  float* directions;  // [items, head_dim]
  ScoreRows scores;
  KeyScore score;
};

/// Feature `d` of the key at `row`, as it is stored.
KVTRIM_DEVICE float key_feature(const Plane& k, const std::byte* row, std::int32_t d) {
  const std::byte* const at = row + k.feature_offset(d);
  switch (k.dtype) {
    case DType::f32:
      return *reinterpret_cast<const float*>(at);
    case DType::f16:
      return to_float(*reinterpret_cast<const __half*>(at));
    case DType::bf16:
      return to_float(*reinterpret_cast<const __nv_bfloat16*>(at));
    case DType::f8e4m3:
      return to_float(*reinterpret_cast<const __nv_fp8_e4m3*>(at));
    default:
      return to_float(*reinterpret_cast<const __nv_fp8_e5m2*>(at));
  }
}

/// Sum over a warp; all lanes get the same bits.
KVTRIM_DEVICE double warp_sum(double x) {
  KVTRIM_UNROLL
  for (int d = 16; d > 0; d >>= 1) { x += __shfl_xor_sync(full_warp, x, d); }
  return x;
}

/// A key, by a warp.
struct KeyLength {
  float root;      // its length is root * unit; NaN if a feature is not finite
  double unit;     // a power of two, so that neither the root nor the product overflows or vanishes
  double product;  // with a direction
};
KVTRIM_DEVICE KeyLength key_length(const Plane& k, const std::byte* row, const float* direction) {
  double sum = 0;
  double dot = 0;
  bool bad = false;
  for (std::int32_t d = static_cast<std::int32_t>(threadIdx.x & 31U); d < k.head_dim; d += 32) {
    const float x = key_feature(k, row, d);
    bad = bad || !is_finite(x);
    sum += static_cast<double>(x) * static_cast<double>(x);
    if (direction != nullptr) { dot += static_cast<double>(x) * static_cast<double>(direction[d]); }
  }
  sum = warp_sum(sum);
  constexpr double up = 0x1p96;
  constexpr double down = 0x1p-96;
  const double unit = sum > 1e30 ? up : sum < 1e-30 ? down : 1.0;
  const double inverse = sum > 1e30 ? down : sum < 1e-30 ? up : 1.0;
  const bool finite = __any_sync(full_warp, bad ? 1 : 0) == 0;
  return {finite ? __fsqrt_rn(static_cast<float>(sum * inverse * inverse)) : not_a_number,
          unit,
          direction == nullptr ? 0 : warp_sum(dot) * inverse};
}

struct DirectionShared {
  float scale[key_rows];    // a power of two
  float inverse[key_rows];  // one over the length of the key times that; 0: it takes no part
  BlockScan<key_threads, double> sums;
};

// A block: one KV head. Thread t: features t, t + 256, ... of the sum of its normalised keys, then of their direction.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(key_threads, 2) key_direction_kernel(KeyScoreArgs a) {
  KVTRIM_SHARED(DirectionShared, shared, );
  const CacheView& view = a.view;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t warp = thread >> 5;
  const std::int32_t items = view.sequences * view.layers * view.kv_heads;
  for (std::int32_t item = static_cast<std::int32_t>(blockIdx.x); item < items;
       item += static_cast<std::int32_t>(gridDim.x)) {
    const auto [s, l, h] = head_place(item, view.layers, view.kv_heads);
    const std::int32_t t = view.table_of(l, h);
    if (a.tiles.active != nullptr && a.tiles.active[view.table_index(s, t)] == 0) { continue; }
    const std::int32_t extent = bounded_extent(view, s, l, h, a.tiles.max_rows);
    const std::int32_t hole = view.state(s, l, h).append_row;
    float* const out = a.directions + static_cast<std::int64_t>(item) * view.k.head_dim;
    double squares = 0;
    for (std::int32_t first = 0; first < view.k.head_dim; first += key_threads) {
      const std::int32_t d = first + thread;
      double sum = 0;
      for (std::int32_t base = 0; base < extent; base += key_rows) {
        for (std::int32_t i = warp; i < key_rows; i += key_warps) {
          const std::int32_t row = base + i;
          KeyLength length{0, 1, 0};
          if (row < extent && row != hole) {
            length = key_length(view.k, view.key(s, l, h, row), nullptr);
          }
          if ((thread & 31) == 0) {
            shared.scale[i] = length.unit > 1 ? 0x1p-96F : length.unit < 1 ? 0x1p96F : 1.0F;
            shared.inverse[i] = length.root > 0 ? __frcp_rn(length.root) : 0;  // NaN is not above
          }
        }
        __syncthreads();
        for (std::int32_t i = 0; i < key_rows && d < view.k.head_dim; ++i) {
          if (shared.inverse[i] == 0) { continue; }
          const float x = key_feature(view.k, view.key(s, l, h, base + i), d);
          sum += static_cast<double>(x * shared.scale[i] * shared.inverse[i]);
        }
        __syncthreads();
      }
      squares += sum * sum;
      // Of an unknown length as yet: in fp32 it can neither overflow nor vanish, since each key adds at most 1.
      if (d < view.k.head_dim) { out[d] = static_cast<float>(sum); }
    }
    const float length = __fsqrt_rn(static_cast<float>(block_sum(squares, shared.sums)));
    const float inverse = length > 0 ? __frcp_rn(length) : 0;
    for (std::int32_t d = thread; d < view.k.head_dim; d += key_threads) { out[d] *= inverse; }
  }
}

// A warp: one row of a tile.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(key_threads, 2) key_scores_kernel(KeyScoreArgs a) {
  const CacheView& view = a.view;
  const auto warp = static_cast<std::int32_t>(threadIdx.x >> 5U);
  const std::int32_t tiles = a.tiles.starts[a.tiles.tables];
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(view, a.tiles, i);
    const float scale = tile_scale(view.k.scales, tile.layer, tile.head);
    const float* const direction =
        a.score == KeyScore::diff
            ? a.directions + static_cast<std::int64_t>(tile.item) * view.k.head_dim
            : nullptr;
    for (std::int32_t k = warp; k < a.tiles.keys; k += key_warps) {
      const std::int32_t row = tile.first + k;
      if (row >= tile.extent) { break; }
      float score = 0;  // of a hole, or of a key without a direction
      if (row != tile.hole) {
        const std::byte* const key = view.key(tile.sequence, tile.layer, tile.head, row);
        const KeyLength length = key_length(view.k, key, direction);
        if (direction == nullptr) {
          score = -static_cast<float>(static_cast<double>(length.root) * length.unit *
                                      static_cast<double>(scale));
        } else if (length.root != 0) {
          score = -__fdiv_rn(static_cast<float>(length.product), length.root);
        }
      }
      if ((threadIdx.x & 31U) == 0) {
        *a.scores.at(tile.sequence, tile.layer, tile.head, tile.item, row) = score;
      }
    }
  }
}

struct KeyScoreMemory {
  std::int32_t* starts = nullptr;
  float* directions = nullptr;
  std::size_t bytes = 0;

  static KeyScoreMemory take(KeyScore score,
                             const CacheView& view,
                             WorkspaceLayout layout) noexcept {
    KeyScoreMemory m;
    const std::int64_t items =
        static_cast<std::int64_t>(view.sequences) * view.layers * view.kv_heads;
    m.starts = layout.take<std::int32_t>(
        static_cast<std::int64_t>(view.sequences) * view.tables_per_sequence() + 1);
    m.directions = layout.take<float>(score == KeyScore::diff ? items * view.k.head_dim : 0);
    m.bytes = layout.bytes();
    return m;
  }
};

/// `key_scores` into a plane or a list, which is not checked.
[[nodiscard]] inline cudaError_t key_scores_into(KeyScore score,
                                                 const CacheView& view,
                                                 const ScoreRows& scores,
                                                 const ScoreBounds& bounds,
                                                 void* workspace,
                                                 std::size_t workspace_bytes,
                                                 cudaStream_t stream) noexcept {
  const std::int32_t tiles = most_tiles(view, bounds.max_rows);
  const KeyScoreMemory m = KeyScoreMemory::take(score, view, {workspace, workspace_bytes});
  if (!keys_readable(view) || bounds.max_rows < 0 || tiles < 0 ||
      (tiles > 0 && !workspace_fits(workspace, workspace_bytes, m.bytes))) {
    return cudaErrorInvalidValue;
  }
  if (tiles == 0) { return cudaSuccess; }
  KeyScoreArgs a{};
  a.view = view;
  a.tiles = tile_list(
      m.starts, view, tile_keys(view.k.head_dim), bounds.max_rows, bounds.min_rows, bounds.active);
  a.directions = m.directions;
  a.scores = scores;
  a.score = score;
  cudaError_t e = launch(
      &list_tiles_kernel<list_threads>, dim3(1), dim3(list_threads), 0, stream, view, a.tiles);
  if (e == cudaSuccess && score == KeyScore::diff) {
    const std::int64_t items =
        static_cast<std::int64_t>(view.sequences) * view.layers * view.kv_heads;
    e = launch(key_direction_kernel<>, dim3(bounded_grid(items)), dim3(key_threads), 0, stream, a);
  }
  if (e != cudaSuccess) { return e; }
  return launch(key_scores_kernel<>, dim3(bounded_grid(tiles)), dim3(key_threads), 0, stream, a);
}

}  // namespace detail

/// Working space of `key_scores`, a multiple of 256 bytes.
[[nodiscard]] inline std::size_t key_scores_workspace_bytes(KeyScore score,
                                                            const CacheView& view) noexcept {
  return detail::KeyScoreMemory::take(score, view, {}).bytes;
}

/// Loads what `key_scores` launches. Not inside a capture.
[[nodiscard]] inline cudaError_t prepare_key_scores() noexcept {
  using namespace detail;
  const cudaError_t all[] = {load(key_direction_kernel<>),
                             load(key_scores_kernel<>),
                             load(&list_tiles_kernel<list_threads>)};
  return first_error(all);
}

/// Scores every live row of a batch by its key alone, as `KeyNormScorer` and `KeyDiffScorer` do; fp8 keys too.
///
/// \param view         pointers inside it are device pointers
/// \param[out] scores  fp32 by row; a hole's is 0
/// \param workspace    [key_scores_workspace_bytes(score, view)], at a multiple of 256; one per stream
/// \pre the tables name a page for every live row of the tables that are scored
/// \returns `cudaErrorInvalidValue` before anything is launched: keys of a type that cannot be read, an address or a stride that
///   is not a multiple of the element, no page table, scales of single rows, a workspace that is too small;
///   otherwise the launches' status
/// \par Ties
///   none broken here. NaN: a key that is not finite scores NaN; a key of norm 0 scores 0
/// \par Error
///   relative 2^-23 of a norm, absolute 2^-22 of a cosine, against exact arithmetic on the same keys
/// \par Complexity
///   O(live rows * head_dim), three reads of the keys for `diff`, one for `norm`
/// \par Stream
///   asynchronous on `stream`, two or three launches; never synchronises or allocates; may be captured
/// \par Source
///   Devoto et al., 2024, arXiv:2406.11430 (KeyNorm); Park et al., 2025, arXiv:2504.15364 (KeyDiff)
[[nodiscard]] inline cudaError_t key_scores(KeyScore score,
                                            const CacheView& view,
                                            const SequencePlane& scores,
                                            const ScoreBounds& bounds,
                                            void* workspace,
                                            std::size_t workspace_bytes,
                                            cudaStream_t stream) noexcept {
  if (!detail::own_float_plane(scores, view)) { return cudaErrorInvalidValue; }
  return detail::key_scores_into(score, view, {scores}, bounds, workspace, workspace_bytes, stream);
}

}  // namespace kvtrim::cuda
