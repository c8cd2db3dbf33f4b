// SPDX-License-Identifier: Apache-2.0
#pragma once

// Column sums of the attention matrix on the device, without the matrix. Specification: observe/column_sums.hpp. One query
// per call is a decode step; all queries of a chunk with their LSE are a prompt. It is the same kernel as for window
// scores, but its results go into the two score planes instead of a workspace.

#include <kvtrim/cuda/observe/detail/instances.cuh>
#include <kvtrim/policy/accumulate_params.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvtrim::cuda {

/// Working space of `accumulate_column_sums`: the list of tiles, 4 bytes per table.
[[nodiscard]] inline std::size_t column_sums_workspace_bytes(const CacheView& view) noexcept {
  return detail::tile_list_bytes(view);
}

/// Adds the attention that each of the given queries pays to each live row to the accumulated scores of a batch: the mean
/// over the query heads of the group, summed over the queries.
///
/// \param view         pointers inside it are device pointers; both score planes must be present
/// \param queries      rows of the chunk, or of the step, just attended, with their LSE; same layers as the view
/// \param[out] scores  fp32 by row: what `AccumulatedScorer` makes of the new sums; may be absent
/// \param bounds       `min_rows` is ignored: every live row of an active table is accumulated
/// \param workspace    [column_sums_workspace_bytes(view)], at a multiple of 256; one per stream
/// \pre the rows are those that the queries attended to; each query has at most one place in `queries`
/// \returns `cudaErrorInvalidValue` before anything is launched: as `window_scores`; also without LSE or score planes
/// \par Ties
///   none. NaN: the row of a key that is not finite gets NaN; a query with a non-finite value or LSE is left out
/// \par Error
///   of a probability: as `window_scores`; of the sums: at most 34 fp32 additions, then compensated
/// \par Complexity
///   O(queries * rows * head_dim); tiles that lie wholly in the future of a block of queries are skipped
/// \par Stream
///   asynchronous on `stream`, two launches; never synchronises or allocates; may be captured
/// \par Source
///   Zhang et al., 2023, arXiv:2306.14048 (H2O); as `accumulate_column_sums` on the CPU
[[nodiscard]] inline cudaError_t accumulate_column_sums(
    const AccumulateParams& params,
    const CacheView& view,
    const DeviceQueries& queries,
    const SequencePlane& scores,
    const ScoreBounds& bounds,
    void* workspace,
    std::size_t workspace_bytes,
    cudaStream_t stream,
    ScorePath path = ScorePath::automatic) noexcept {
  using namespace detail;
  if (params.sums != Sums::floating || !readable_on_device(view, queries) ||
      queries.block.lse == nullptr || bounds.max_rows < 0 ||
      !own_float_plane(view.score_sums, view) || !own_float_plane(view.score_compensations, view) ||
      (scores && !own_float_plane(scores, view))) {
    return cudaErrorInvalidValue;
  }
  const AttentionChoice attention = choose_attention(view, queries, path);
  const std::int32_t tiles = most_tiles(view, bounds.max_rows);
  if (attention.kernel == nullptr || tiles < 0 ||
      (tiles > 0 && !workspace_fits(workspace, workspace_bytes, tile_list_bytes(view)))) {
    return cudaErrorInvalidValue;
  }
  if (tiles == 0) { return cudaSuccess; }

  AttentionArgs a{};
  a.view = view;
  a.queries = queries;
  if (queries.block.scale == 0) {
    a.queries.block.scale = 1.0F / std::sqrt(static_cast<float>(view.k.head_dim));
  }
  a.tiles =
      tile_list(workspace, view, tile_keys(view.k.head_dim), bounds.max_rows, 0, bounds.active);
  a.chunk_stride = key_chunk_stride(view.k);
  a.window = std::numeric_limits<std::int32_t>::max();
  a.use = AttentionUse::column_sums;
  a.rows = Reduction::sum;
  a.group = Reduction::mean;
  a.query_vectors = queries_aligned(queries, queries.dtype == DType::f32 ? 16 : 8);
  a.squared = params.squared;
  a.age_normalised = params.age_normalised;
  a.decay = static_cast<double>(params.decay);
  a.scores = scores;

  const cudaError_t error = launch(
      &list_tiles_kernel<list_threads>, dim3(1), dim3(list_threads), 0, stream, view, a.tiles);
  return error != cudaSuccess ? error
                              : launch(attention.kernel,
                                       dim3(bounded_grid(tiles)),
                                       dim3(attention_threads),
                                       0,
                                       stream,
                                       a);
}

}  // namespace kvtrim::cuda
