// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several blocks per KV head, in separate kernels (histogram, pick, count, emit): no block ever waits for another.

#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/select/detail/emit.cuh>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>
#include <kvtrim/cuda/select/select_task.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int select_chunk = 8192;  // entries per block
inline constexpr int long_rows = 16 * 1024;
inline constexpr int most_shared_heads = 256;  // that have workspace, whatever the device

struct SharedSelection {  // of one KV head, in global memory
  RadixState state;
  std::int32_t nan;
};

KVTRIM_DEVICE bool takes_part(const SelectTask& task) {
  return task.active != 0 && task.ordered != 0;
}
// A block: one chunk of one KV head; its counts are added to the head's.
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 2)
    select_histogram_kernel(RowScores rows,
                            const SelectTask* tasks,
                            SelectBounds bounds,
                            int digit,
                            int chunks,
                            SharedSelection* selections,
                            std::uint32_t* counts) {
  KVTRIM_SHARED(SelectShared, shared, );
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  const Digit d = digit_of(digit);
  for (int work = static_cast<int>(blockIdx.x); work < items * chunks;
       work += static_cast<int>(gridDim.x)) {
    const int item = work / chunks;
    const SelectTask task = tasks[item];
    const int first = work % chunks * select_chunk;
    if (!takes_part(task) || first >= task.extent) { continue; }
    if (digit > 0 && !has_threshold(task)) { continue; }
    const int last = first + select_chunk < task.extent ? first + select_chunk : task.extent;
    const HeadPlace at = place_of(bounds, item);
    const Competing range = range_of(task);
    const std::uint32_t prefix = selections[item].state.prefix;
    clear_counts(shared);
    __syncthreads();
    int nan = 0;
    for (int e = first + static_cast<int>(threadIdx.x); e < last; e += select_threads) {
      const std::uint32_t key = key_of(rows, at, task, range, e, nan);
      if (key < key_none && has_prefix(key, prefix, digit)) {
        atomicAdd(&shared.counts[(key >> static_cast<unsigned>(d.shift)) & ((1U << d.bits) - 1U)],
                  1U);
      }
    }
    if (digit == 0 && nan != 0) { atomicAdd(&selections[item].nan, nan); }
    __syncthreads();
    std::uint32_t* const all = counts + static_cast<std::int64_t>(item) * radix_bins;
    for (int i = static_cast<int>(threadIdx.x); i < radix_bins; i += select_threads) {
      if (shared.counts[i] != 0) { atomicAdd(&all[i], shared.counts[i]); }
    }
    __syncthreads();
  }
}

// A block: one KV head. Digit -1: sets the start.
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads) select_pick_kernel(const SelectTask* tasks,
                                                                        SelectBounds bounds,
                                                                        int digit,
                                                                        SharedSelection* selections,
                                                                        std::uint32_t* counts,
                                                                        std::int32_t* nan_counts) {
  KVTRIM_SHARED(SelectShared, shared, );
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SelectTask task = tasks[item];
    if (!takes_part(task)) { continue; }
    std::uint32_t* const mine = counts + static_cast<std::int64_t>(item) * radix_bins;
    const bool searches = has_threshold(task);
    const int wanted = wanted_of(task);
    const int competing = task.end - task.begin;
    RadixState state{};
    if (digit < 0) {
      state = searches
                  ? RadixState{0, wanted}
                  : RadixState{wanted <= 0 ? key_protected - 2U : 0U, wanted <= 0 ? 0 : competing};
    } else if (searches) {
      state = selections[item].state;
      pick_digit(mine, digit, state, shared);
    }
    if (digit < 0 || searches) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < radix_bins; i += select_threads) {
        mine[i] = 0;
      }
      if (threadIdx.x == 0) {
        selections[item].state = state;
        if (digit < 0) { selections[item].nan = 0; }
      }
    }
    if (digit == 0 && threadIdx.x == 0) { nan_counts[item] = selections[item].nan; }
    __syncthreads();
  }
}

// A block: one chunk of one KV head: how many entries are above the threshold (high half) and at it (low half).
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 2)
    select_count_kernel(RowScores rows,
                        const SelectTask* tasks,
                        SelectBounds bounds,
                        int chunks,
                        const SharedSelection* selections,
                        std::uint32_t* chunk_counts) {
  using Scan = BlockScan<select_threads, std::uint32_t>;
  KVTRIM_SHARED(Scan, shared, );
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  for (int work = static_cast<int>(blockIdx.x); work < items * chunks;
       work += static_cast<int>(gridDim.x)) {
    const int item = work / chunks;
    const SelectTask task = tasks[item];
    const int first = work % chunks * select_chunk;
    if (!takes_part(task)) { continue; }
    const HeadPlace at = place_of(bounds, item);
    const Competing range = range_of(task);
    const std::uint32_t threshold = selections[item].state.prefix;
    const int last = first + select_chunk < task.extent ? first + select_chunk : task.extent;
    std::uint32_t own = 0;
    int ignored = 0;
    for (int e = first + static_cast<int>(threadIdx.x); e < last; e += select_threads) {
      const std::uint32_t key = key_of(rows, at, task, range, e, ignored);
      own += key == key_none ? 0U : key > threshold ? 1U << 16U : key == threshold ? 1U : 0U;
    }
    own = block_sum(own, shared);
    if (threadIdx.x == 0) { chunk_counts[work] = own; }
  }
}

// A block: one chunk of one KV head.
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 2)
    select_emit_kernel(RowScores rows,
                       const SelectTask* tasks,
                       SelectBounds bounds,
                       int chunks,
                       const SharedSelection* selections,
                       const std::uint32_t* chunk_counts,
                       std::int32_t* out) {
  KVTRIM_SHARED(SelectShared, shared, );
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  for (int work = static_cast<int>(blockIdx.x); work < items * chunks;
       work += static_cast<int>(gridDim.x)) {
    const int item = work / chunks;
    const SelectTask task = tasks[item];
    const int chunk = work % chunks;
    const int first = chunk * select_chunk;
    if (!takes_part(task) || first >= task.extent) { continue; }
    const HeadPlace at = place_of(bounds, item);
    const Competing range = range_of(task);
    const RadixState threshold = selections[item].state;
    int sure = 0;
    int ties = 0;
    for (int c = 0; c < chunk; ++c) {
      const std::uint32_t n = chunk_counts[item * chunks + c];
      sure += static_cast<int>(n >> 16U);
      ties += static_cast<int>(n & 0xFFFFU);
    }
    const int last = first + select_chunk < task.extent ? first + select_chunk : task.extent;
    emit_entries(
        first,
        last,
        threshold.prefix,
        gone_of(task, bounds),
        sure,
        ties,
        threshold.left,
        shared,
        [&](int e) {
          int ignored = 0;
          return key_of(rows, at, task, range, e, ignored);
        },
        FirstTiesStay{},
        out + list_of(task, bounds, item));
  }
}

/// Whether several blocks share a KV head.
[[nodiscard]] inline bool shares_heads(const SelectBounds& b) noexcept {
  return b.max_rows > long_rows && static_cast<std::int64_t>(b.sequences) * b.layers * b.kv_heads <
                                       std::min(most_shared_heads, multiprocessors());
}
struct SelectWorkspace {
  SharedSelection* selections = nullptr;
  std::uint32_t* counts = nullptr;
  std::uint32_t* chunk_counts = nullptr;

  static SelectWorkspace take(WorkspaceLayout& layout, const SelectBounds& b) noexcept {
    const std::int64_t all = static_cast<std::int64_t>(b.sequences) * b.layers * b.kv_heads;
    const std::int64_t items =
        b.max_rows > long_rows ? std::min<std::int64_t>(all, most_shared_heads) : 0;
    const std::int64_t chunks =
        (static_cast<std::int64_t>(b.max_rows) + select_chunk - 1) / select_chunk;
    SelectWorkspace w;
    w.selections = layout.take<SharedSelection>(items);
    w.counts = layout.take<std::uint32_t>(items * radix_bins);
    w.chunk_counts = layout.take<std::uint32_t>(items * chunks);
    return w;
  }
};

/// Queues the kernels of a selection whose KV heads are shared by several blocks each.
[[nodiscard]] inline cudaError_t select_by_many_blocks(const RowScores& rows,
                                                       const SelectTask* tasks,
                                                       const SelectBounds& bounds,
                                                       std::int32_t* out,
                                                       std::int32_t* nan_counts,
                                                       const SelectWorkspace& w,
                                                       cudaStream_t stream) noexcept {
  const std::int64_t items =
      static_cast<std::int64_t>(bounds.sequences) * bounds.layers * bounds.kv_heads;
  const int chunks = (bounds.max_rows + select_chunk - 1) / select_chunk;
  const dim3 block(select_threads);
  const dim3 heads(bounded_grid(items));
  const dim3 all(bounded_grid(items * chunks));
  for (int digit = -1; digit < radix_digits; ++digit) {
    if (digit >= 0) {
      const cudaError_t e = launch(select_histogram_kernel<>,
                                   all,
                                   block,
                                   0,
                                   stream,
                                   rows,
                                   tasks,
                                   bounds,
                                   digit,
                                   chunks,
                                   w.selections,
                                   w.counts);
      if (e != cudaSuccess) { return e; }
    }
    const cudaError_t e = launch(select_pick_kernel<>,
                                 heads,
                                 block,
                                 0,
                                 stream,
                                 tasks,
                                 bounds,
                                 digit,
                                 w.selections,
                                 w.counts,
                                 nan_counts);
    if (e != cudaSuccess) { return e; }
  }
  cudaError_t e = launch(select_count_kernel<>,
                         all,
                         block,
                         0,
                         stream,
                         rows,
                         tasks,
                         bounds,
                         chunks,
                         w.selections,
                         w.chunk_counts);
  if (e != cudaSuccess) { return e; }
  e = launch(select_emit_kernel<>,
             all,
             block,
             0,
             stream,
             rows,
             tasks,
             bounds,
             chunks,
             w.selections,
             w.chunk_counts,
             out);
  return e;
}

}  // namespace kvtrim::cuda::detail
