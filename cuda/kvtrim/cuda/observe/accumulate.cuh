// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decode steps of engines that keep their probabilities. Specification: observe/accumulate.hpp. For queries with an LSE
// instead of probabilities, see column_sums.cuh.

#include <kvtrim/core/compensated.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/policy/accumulate_params.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// Softmax probabilities of one query per sequence, on the device: [sequences, layers, query heads, rows of the table].
struct DeviceProbabilities {
  const float* data = nullptr;       ///< sequence 0, layer 0, head 0, row 0
  std::int32_t query_heads = 0;      ///< a multiple of the KV heads
  std::int64_t sequence_stride = 0;  ///< floats
  std::int64_t layer_stride = 0;     ///< floats
  std::int64_t head_stride = 0;      ///< floats between query heads
};

namespace detail {

struct AccumulateArgs {
  CacheView view;
  DeviceProbabilities probabilities;
  TileList tiles;
  AccumulateParams params;
  SequencePlane scores;  // absent: not wanted
  bool vectors;          // four rows at a time
};

inline constexpr int accumulate_threads = 128;
inline constexpr int accumulate_rows = 4 * accumulate_threads;

// Four floats of a row of `data`, from row r; those beyond `count` are 0.
KVTRIM_DEVICE float4 load_4(const float* data, std::int32_t count, bool vector) {
  if (vector && count >= 4) { return __ldg(reinterpret_cast<const float4*>(data)); }
  return make_float4(count > 0 ? data[0] : 0,
                     count > 1 ? data[1] : 0,
                     count > 2 ? data[2] : 0,
                     count > 3 ? data[3] : 0);
}

/// A thread adds the probabilities of four rows.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) accumulate_kernel(AccumulateArgs a) {
  const std::int32_t tiles = a.tiles.starts[a.tiles.tables];
  const std::int32_t group = a.probabilities.query_heads / a.view.kv_heads;
  const float share = __fdiv_rn(1.0F, static_cast<float>(group));
  const auto decay = static_cast<double>(a.params.decay);
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < tiles;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const KeyTile tile = tile_at(a.view, a.tiles, i);
    const std::int32_t row = tile.first + 4 * static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t count = tile.extent - row;
    if (count <= 0) { continue; }
    const float* from = a.probabilities.data +
                        raw(tile.sequence) * a.probabilities.sequence_stride +
                        raw(tile.layer) * a.probabilities.layer_stride +
                        raw(tile.head) * group * a.probabilities.head_stride + row;
    float p[4] = {0, 0, 0, 0};
    for (std::int32_t g = 0; g < group; ++g, from += a.probabilities.head_stride) {
      const float4 x = load_4(from, count, a.vectors);
      p[0] += a.params.squared ? x.x * x.x : x.x;
      p[1] += a.params.squared ? x.y * x.y : x.y;
      p[2] += a.params.squared ? x.z * x.z : x.z;
      p[3] += a.params.squared ? x.w * x.w : x.w;
    }
    std::byte* const sums = a.view.score_sums.row(tile.sequence, tile.layer, tile.head, row);
    std::byte* const rests =
        a.view.score_compensations.row(tile.sequence, tile.layer, tile.head, row);
    std::byte* const scores =
        a.scores ? a.scores.row(tile.sequence, tile.layer, tile.head, row) : nullptr;
    const bool vector = a.vectors && count >= 4 && tile.hole < 0;
    float sum[4];
    float rest[4];
    float score[4] = {0, 0, 0, 0};
    if (vector) {
      const float4 s = *reinterpret_cast<const float4*>(sums);
      const float4 c = *reinterpret_cast<const float4*>(rests);
      sum[0] = s.x, sum[1] = s.y, sum[2] = s.z, sum[3] = s.w;
      rest[0] = c.x, rest[1] = c.y, rest[2] = c.z, rest[3] = c.w;
    } else {
      KVTRIM_UNROLL
      for (int k = 0; k < 4; ++k) {
        const bool there = tile.holds(row + k);
        sum[k] =
            there ? *reinterpret_cast<const float*>(sums + k * a.view.score_sums.row_stride) : 0;
        rest[k] =
            there
                ? *reinterpret_cast<const float*>(rests + k * a.view.score_compensations.row_stride)
                : 0;
      }
    }
    KVTRIM_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (decay != 1) { scale_compensated(sum[k], rest[k], decay); }
      add_compensated(sum[k], rest[k], __fmul_rn(p[k], share));  // no fma: the sum must be exact
      score[k] = sum[k] + rest[k];
      if (a.params.age_normalised && scores != nullptr && tile.holds(row + k)) {
        const std::int32_t age =
            tile.next_position -
            raw(a.view.position(tile.sequence, tile.layer, tile.head, row + k));
        if (age > 0) { score[k] = __fdiv_rn(score[k], static_cast<float>(age)); }
      }
    }
    if (vector) {
      *reinterpret_cast<float4*>(sums) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      *reinterpret_cast<float4*>(rests) = make_float4(rest[0], rest[1], rest[2], rest[3]);
      if (scores != nullptr) {
        *reinterpret_cast<float4*>(scores) = make_float4(score[0], score[1], score[2], score[3]);
      }
    } else {
      KVTRIM_UNROLL
      for (int k = 0; k < 4; ++k) {
        if (!tile.holds(row + k)) { continue; }
        *reinterpret_cast<float*>(sums + k * a.view.score_sums.row_stride) = sum[k];
        *reinterpret_cast<float*>(rests + k * a.view.score_compensations.row_stride) = rest[k];
        if (scores != nullptr) {
          *reinterpret_cast<float*>(scores + k * a.scores.row_stride) = score[k];
        }
      }
    }
  }
}

/// Whether four neighbouring rows of a plane are 16 aligned bytes.
[[nodiscard]] inline bool rows_by_four(const SequencePlane& p) noexcept {
  return p.row_stride == 4 && aligned_to(16, p.base) &&
         (p.sequence_stride | p.layer_stride | p.head_stride) % 16 == 0;
}

}  // namespace detail

/// Working space of `accumulate_probabilities`: the list of tiles, 4 bytes per table.
[[nodiscard]] inline std::size_t accumulate_workspace_bytes(const CacheView& view) noexcept {
  return detail::tile_list_bytes(view);
}

/// Adds one query's probabilities to the accumulated scores of every live row of a batch.
///
/// \param view           pointers inside it are device pointers; both score planes must be present
/// \param probabilities  of the step just attended; a value that is not finite is added as it is, and its row then ranks
///   lowest
/// \param[out] scores    fp32 by row: what `AccumulatedScorer` makes of the new sums; may be absent
/// \param max_rows       host bound on the rows of a table
/// \param workspace      [accumulate_workspace_bytes(view)], at a multiple of 256; one per stream
/// \returns `cudaErrorInvalidValue` before anything is launched: exact sums, no score planes, no probabilities, query heads that are
///   not a multiple of the KV heads, misaligned planes, a workspace that is too small
/// \par Ties
///   none. NaN: as `accumulate_probabilities` on the CPU. Without decay and squares the sums equal the CPU's bit for bit,
///   otherwise to 2^-40
/// \par Complexity
///   O(group * live rows); rows 16 bytes at a time if planes and probabilities allow it
/// \par Stream
///   asynchronous on `stream`, two launches; never synchronises or allocates; may be captured
/// \par Source
///   Zhang et al., 2023, arXiv:2306.14048 (H2O); as `accumulate_probabilities` on the CPU
[[nodiscard]] inline cudaError_t accumulate_probabilities(const AccumulateParams& params,
                                                          const CacheView& view,
                                                          const DeviceProbabilities& probabilities,
                                                          const SequencePlane& scores,
                                                          std::int32_t max_rows,
                                                          void* workspace,
                                                          std::size_t workspace_bytes,
                                                          cudaStream_t stream) noexcept {
  using namespace detail;
  const std::int64_t each =
      (static_cast<std::int64_t>(max_rows) + accumulate_rows - 1) / accumulate_rows;
  const std::int64_t tiles =
      each * view.sequences * view.layers * static_cast<std::int64_t>(view.kv_heads);
  if (params.sums != Sums::floating || view.kv_heads < 1 || view.layers < 1 || view.sequences < 0 ||
      max_rows < 0 || !own_float_plane(view.score_sums, view) ||
      !own_float_plane(view.score_compensations, view) ||
      (scores && !own_float_plane(scores, view)) || probabilities.data == nullptr ||
      !aligned_to(4, probabilities.data) || probabilities.query_heads < view.kv_heads ||
      probabilities.query_heads % view.kv_heads != 0 || tiles > 0x7FFF'FFFF ||
      (tiles > 0 && !workspace_fits(workspace, workspace_bytes, tile_list_bytes(view)))) {
    return cudaErrorInvalidValue;
  }
  if (tiles == 0) { return cudaSuccess; }
  AccumulateArgs a{};
  a.view = view;
  a.probabilities = probabilities;
  a.tiles = tile_list(workspace, view, accumulate_rows, max_rows);
  a.params = params;
  a.scores = scores;
  a.vectors =
      rows_by_four(view.score_sums) && rows_by_four(view.score_compensations) &&
      (!scores || rows_by_four(scores)) && aligned_to(16, probabilities.data) &&
      (probabilities.sequence_stride | probabilities.layer_stride | probabilities.head_stride) %
              4 ==
          0;
  const cudaError_t error = launch(
      &list_tiles_kernel<list_threads>, dim3(1), dim3(list_threads), 0, stream, view, a.tiles);
  return error != cudaSuccess ? error
                              : launch(&accumulate_kernel<accumulate_threads>,
                                       dim3(bounded_grid(tiles)),
                                       dim3(accumulate_threads),
                                       0,
                                       stream,
                                       a);
}

}  // namespace kvtrim::cuda
