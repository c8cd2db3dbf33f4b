// SPDX-License-Identifier: Apache-2.0
#pragma once

// Renumbering rotated keys on the device, in place, after rows have moved. Specification: evict/rerotate.hpp. The rule for
// which keys may be rotated is the same: f32 keys, or f16 and bf16 keys with a plane of un-rotated ones or with pristine
// sinks; anything else is refused before the launch.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/evict/rerotate.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// A model's RoPE with its frequencies on the device; the fields of `Rope`.
struct DeviceRope {
  const double* inverse_frequencies = nullptr;  ///< [layers of the model, dim / 2], or [dim / 2]
  std::int32_t dim = 0;                         ///< rotated features; even
  std::int32_t offset = 0;                      ///< first rotated feature
  RopePairs pairs = RopePairs::half_split;      ///< which features are rotated together
  RopeKind kind = RopeKind::standard;           ///< only `standard` can be rotated
  bool same_for_all_layers = false;             ///< one array of frequencies serves all layers
};

namespace detail {

struct RerotateArgs {
  CacheView view;
  TileList tiles;
  DeviceRope rope;
  PositionMode mode;
  PristineSinks pristine;
  bool from_unrotated;    // keys come from `view.unrotated_keys`
  SequencePlane targets;  // absent: live row r goes to rope position r
  std::int32_t unit;      // features per load: 4 or 1
};

inline constexpr int rerotate_threads = 128;

/// Cosine and sine of delta positions at this frequency: the angle is reduced in double, as on the CPU. In half turns,
/// because sincosf's slow path, which no reduced angle takes, would cost local memory.
KVTRIM_DEVICE float2 rotation(double frequency, std::int32_t delta) {
  constexpr double inverse_turn = 0.159154943091895335768883763372514362;
  const double turns = delta * frequency * inverse_turn;
  const auto half_turns = static_cast<float>(2 * (turns - rint(turns)));
  float2 r;
  sincospif(half_turns, &r.y, &r.x);
  return r;
}

// Features of `bytes` as floats, and back.
template <class T>
KVTRIM_DEVICE float element_at(const std::byte* p) {
  return to_float(*reinterpret_cast<const T*>(p));
}
KVTRIM_DEVICE float read_feature(const std::byte* p, DType dtype) {
  return dtype == DType::f32   ? element_at<float>(p)
         : dtype == DType::f16 ? element_at<__half>(p)
                               : element_at<__nv_bfloat16>(p);
}
KVTRIM_DEVICE void write_feature(std::byte* p, DType dtype, float x) {
  if (dtype == DType::f32) {
    *reinterpret_cast<float*>(p) = x;
  } else if (dtype == DType::f16) {
    *reinterpret_cast<__half*>(p) = from_float<__half>(x);
  } else {
    *reinterpret_cast<__nv_bfloat16*>(p) = from_float<__nv_bfloat16>(x);
  }
}

/// One warp per row: its lanes share the pairs. Rows in pages that must not be written, and rows that are already where
/// they should be, are left alone.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) rerotate_kernel(RerotateArgs a) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const std::int32_t tiles = a.tiles.starts[a.tiles.tables];
  const std::int32_t half = a.rope.dim / 2;
  const Plane& to = a.view.k;
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(a.view, a.tiles, i);
    const double* const frequencies =
        a.rope.inverse_frequencies +
        (a.rope.same_for_all_layers ? 0 : raw(a.view.model_layer(tile.layer)) * half);
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
      if (before == after || !a.view.writable(page, tile.layer, tile.head)) { continue; }
      const Slot slot{place % a.view.page_size};
      std::byte* const key = to.row(tile.layer, page, tile.head, slot);
      const std::byte* from = key;
      std::int32_t delta = after - before;
      const float* sink = nullptr;
      if (a.mode == PositionMode::sinks_follow) {
        if (rank >= a.pristine.sinks) { continue; }
        sink = a.pristine.keys +
               (static_cast<std::int64_t>(tile.item) * a.pristine.sinks + rank) * to.head_dim;
        delta = after;
      } else if (a.from_unrotated) {
        from = a.view.unrotated_keys.row(tile.layer, page, tile.head, slot);
        delta = after;
      }
      const auto read = [&](std::int32_t d) {
        return sink != nullptr    ? sink[d]
               : a.from_unrotated ? read_feature(from + a.view.unrotated_keys.feature_offset(d),
                                                 a.view.unrotated_keys.dtype)
                                  : read_feature(from + to.feature_offset(d), to.dtype);
      };
      if (from != key ||
          sink != nullptr) {  // features that RoPE leaves alone come from the source too
        for (std::int32_t d = lane; d < to.head_dim; d += 32) {
          if (d < a.rope.offset || d >= a.rope.offset + a.rope.dim) {
            write_feature(key + to.feature_offset(d), to.dtype, read(d));
          }
        }
      }
      if (a.unit == 4) {  // f32 keys in place: the halves of four pairs, or two pairs, per 16 bytes
        for (std::int32_t j = 4 * lane;
             j < (a.rope.pairs == RopePairs::half_split ? half : a.rope.dim);
             j += 128) {
          auto* const first = reinterpret_cast<float4*>(key + (a.rope.offset + j) * 4);
          if (a.rope.pairs == RopePairs::half_split) {
            auto* const second = reinterpret_cast<float4*>(key + (a.rope.offset + j + half) * 4);
            float4 x = *first;
            float4 y = *second;
            const auto turn = [&](float& u, float& v, std::int32_t pair) {
              const float2 r = rotation(frequencies[pair], delta);
              const float rotated = u * r.x - v * r.y;
              v = u * r.y + v * r.x;
              u = rotated;
            };
            turn(x.x, y.x, j);
            turn(x.y, y.y, j + 1);
            turn(x.z, y.z, j + 2);
            turn(x.w, y.w, j + 3);
            *first = x;
            *second = y;
          } else {
            float4 x = *first;
            const float2 r = rotation(frequencies[j / 2], delta);
            const float2 q = rotation(frequencies[j / 2 + 1], delta);
            *first = make_float4(x.x * r.x - x.y * r.y,
                                 x.x * r.y + x.y * r.x,
                                 x.z * q.x - x.w * q.y,
                                 x.z * q.y + x.w * q.x);
          }
        }
      } else {
        for (std::int32_t j = lane; j < half; j += 32) {
          const bool split = a.rope.pairs == RopePairs::half_split;
          const std::int32_t first = a.rope.offset + (split ? j : 2 * j);
          const std::int32_t second = a.rope.offset + (split ? j + half : 2 * j + 1);
          const float x = read(first);
          const float y = read(second);
          const float2 r = rotation(frequencies[j], delta);
          write_feature(key + to.feature_offset(first), to.dtype, x * r.x - y * r.y);
          write_feature(key + to.feature_offset(second), to.dtype, x * r.y + y * r.x);
        }
      }
      if (lane == 0) { *stands = after; }
    }
  }
}

/// Whether float pairs can be loaded 16 bytes at a time.
[[nodiscard]] inline bool rotates_by_four(const CacheView& view, const DeviceRope& rope) noexcept {
  const Plane& k = view.k;
  const std::int32_t step = rope.pairs == RopePairs::half_split ? rope.dim / 2 : rope.dim;
  return k.dtype == DType::f32 && k.contiguous_rows() && k.layer_bases == nullptr &&
         aligned_to(16, k.base) &&
         (k.layer_stride | k.page_stride | k.token_stride | k.head_stride) % 16 == 0 &&
         rope.offset % 4 == 0 && step % 4 == 0;
}

/// Whether values are part of the features that turn.
[[nodiscard]] inline bool turns_values(const CacheView& view, const DeviceRope& rope) noexcept {
  if (!values_in_keys(view)) { return false; }
  const std::int64_t first =
      view.k.layer_bases != nullptr ? 0 : kvtrim::detail::value_offset(view, LayerId{0});
  const std::int64_t element = element_bytes(view.k.dtype);
  return rope.offset * element < first + view.v.row_bytes() &&
         first < (rope.offset + rope.dim) * element;
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
  const bool source = mode == PositionMode::in_cache && static_cast<bool>(view.unrotated_keys);
  const Plane& k = view.k;
  const auto element = static_cast<std::size_t>(element_bytes(k.dtype));
  if (rope.kind != RopeKind::standard || rope.inverse_frequencies == nullptr || rope.dim < 2 ||
      rope.dim % 2 != 0 || rope.offset < 0 || rope.offset + rope.dim > k.head_dim ||
      !readable(k.dtype) || (k.base == nullptr && k.layer_bases == nullptr) ||
      !aligned_to(element, k.base) ||
      ((k.layer_bases != nullptr ? 0 : k.layer_stride) | k.page_stride | k.token_stride |
       k.head_stride | k.feature_stride) %
              static_cast<std::int64_t>(element) !=
          0 ||
      !view.is_of_model() || turns_values(view, rope)) {
    return cudaErrorInvalidValue;
  }
  if (source &&
      (!readable(view.unrotated_keys.dtype) || view.unrotated_keys.head_dim != k.head_dim)) {
    return cudaErrorInvalidValue;
  }
  if (mode == PositionMode::in_cache && k.dtype != DType::f32 && !source) {
    return cudaErrorInvalidValue;  // 1,000 rotations of 16-bit keys lose half of them
  }
  if (mode == PositionMode::sinks_follow && (pristine.keys == nullptr || pristine.sinks < 1)) {
    return cudaErrorInvalidValue;
  }
  const SequencePlane& stands = view.rope_positions;
  if (!float_plane(stands) || (targets && !float_plane(targets)) ||
      (view.kv_heads > 1 && stands.head_stride == 0) ||
      (view.layers > 1 && stands.layer_stride == 0) || view.table.ids == nullptr ||
      view.page_size < 1 || max_rows < 0) {
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
  a.tiles = tile_list(workspace, view, tile_keys(k.head_dim), max_rows);
  a.rope = rope;
  a.mode = mode;
  a.pristine = pristine;
  a.from_unrotated = source;
  a.targets = targets;
  a.unit = !source && mode == PositionMode::in_cache && rotates_by_four(view, rope) ? 4 : 1;
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
