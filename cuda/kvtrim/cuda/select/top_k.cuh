// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows stay, for many KV heads at once: the specification is the host's `candidates` + `top_k`, and the kept set is
// exactly the same. A radix select: its time does not depend on the values.
//
// One block per KV head (detail/one_block.cuh). If there are fewer KV heads than multiprocessors and they are long, several
// blocks share one (detail/many_blocks.cuh); rows that are not in position order are always left to one block.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/select/detail/many_blocks.cuh>
#include <kvtrim/cuda/select/detail/one_block.cuh>
#include <kvtrim/cuda/select/select_task.cuh>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// Bytes of workspace of `top_k`: only heads that several blocks share have any. Pure, monotone in every field.
[[nodiscard]] inline std::size_t top_k_workspace_bytes(const SelectBounds& bounds) noexcept {
  detail::WorkspaceLayout layout;
  static_cast<void>(detail::SelectWorkspace::take(layout, bounds));
  return layout.bytes();
}

/// Chooses the rows that stay in every active KV head.
///
/// \param rows         scores; planes on the device
/// \param tasks        device, [sequences, layers, kv_heads]
/// \param bounds       host bounds; path and workspace depend on nothing else
/// \param[out] out     device, [sequences, layers, kv_heads, max_rows], or by `SelectTask::list`: `keep` entries that stay,
///   ascending, then the other entries (the hole among them), ascending; with `SelectBounds::max_evicted` the others alone,
///   of which no active task has more
/// \param[out] nan_counts device, [sequences, layers, kv_heads]: NaN among the scores that compete;
///   scores are not looked at if none of those rows can stay
/// \param workspace    device, [top_k_workspace_bytes(bounds)], aligned to 256 bytes
/// \returns `cudaErrorInvalidValue` for invalid bounds or workspace, before any launch; otherwise the launch's status
/// \par Ties
/// the lower position is kept. NaN: the lowest class, by `order_key`; counted
/// \par Complexity
/// O(entries) per KV head, whatever the values
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing
[[nodiscard]] inline cudaError_t top_k(const RowScores& rows,
                                       const SelectTask* tasks,
                                       const SelectBounds& bounds,
                                       std::int32_t* out,
                                       std::int32_t* nan_counts,
                                       void* workspace,
                                       std::size_t workspace_bytes,
                                       cudaStream_t stream) noexcept {
  using namespace detail;
  const std::int64_t items =
      static_cast<std::int64_t>(bounds.sequences) * bounds.layers * bounds.kv_heads;
  const auto chunks = static_cast<std::int64_t>(
      (static_cast<std::int64_t>(bounds.max_rows) + select_chunk - 1) / select_chunk);
  if (bounds.sequences < 0 || bounds.layers < 1 || bounds.kv_heads < 1 || bounds.max_rows < 0 ||
      items * (chunks + 1) > 0x7FFF'FFFF) {
    return cudaErrorInvalidValue;
  }
  if (items == 0 || bounds.max_rows == 0) { return cudaSuccess; }
  if (tasks == nullptr || out == nullptr || nan_counts == nullptr) { return cudaErrorInvalidValue; }
  const bool shares = shares_heads(bounds);
  if (shares) {
    WorkspaceLayout layout(workspace, workspace_bytes);
    const SelectWorkspace w = SelectWorkspace::take(layout, bounds);
    if (!layout.ok()) { return cudaErrorInvalidValue; }
    const cudaError_t e = select_by_many_blocks(rows, tasks, bounds, out, nan_counts, w, stream);
    if (e != cudaSuccess || !rows.positions) { return e; }
  }
  const dim3 block(select_threads);
  const dim3 heads(bounded_grid(items));
  if (keys_fit(bounds)) {
    return launch(select_kernel<true>,
                  heads,
                  block,
                  key_bytes(bounds),
                  stream,
                  rows,
                  tasks,
                  bounds,
                  shares,
                  out,
                  nan_counts);
  }
  return launch(
      select_kernel<false>, heads, block, 16, stream, rows, tasks, bounds, shares, out, nan_counts);
}

}  // namespace kvtrim::cuda
