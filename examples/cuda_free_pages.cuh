// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an engine does between evictions, for cuda_step.cu: rows are appended, pages come from a stack on the device and go
// back to it. Its rules are those of `PagedCache::try_extend`.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/cuda/detail/device.hpp>

#include <cstdint>

namespace cuda_step {

/// The engine's free list.
struct FreePages {
  std::int32_t* ids;    // [pages]
  std::int32_t* count;  // [1]
};

/// When a step begins: one more row in every sequence, in the hole that the last eviction left or after the last row, taking a
/// new page if needed. Nothing changes for a sequence that cannot have one: `statuses` says why.
///
/// A thread: one sequence. One table serves all layers and KV heads.
template <class = void>
__global__ void append_kernel(kvtrim::CacheView view,
                              std::int32_t* table,
                              FreePages free,
                              kvtrim::Status* statuses) {
  using namespace kvtrim;
  const auto s = static_cast<std::int32_t>(threadIdx.x);
  if (s >= view.sequences) { return; }
  SequenceState& state = view.states[s];
  const bool fills_hole = state.append_row >= 0;
  const std::int32_t row = fills_hole ? state.append_row : state.live_rows;
  const std::int32_t entry = row / view.page_size;
  statuses[s] = state.open                      ? Status::step_open
                : state.applied                 ? Status::eviction_open
                : entry >= view.table.max_pages ? Status::too_many_rows
                                                : Status::ok;
  if (statuses[s] != Status::ok) { return; }
  std::int32_t& page = table[s * view.table.row_stride + entry];
  if (page == view.table.null_id) {
    const std::int32_t left = atomicAdd(free.count, -1);
    if (left <= 0) {  // nothing was there: the count goes back to what it was
      atomicAdd(free.count, 1);
      statuses[s] = Status::out_of_pages;
      return;
    }
    page = free.ids[left - 1];
  }
  for (std::int32_t i = 0; i < view.layers * view.kv_heads; ++i) {
    const SequenceId q{s};
    const LayerId l{i / view.kv_heads};
    const HeadId h{i % view.kv_heads};
    view.positions.at<std::int32_t>(q, l, h, row) = state.next_position;
    view.score_sums.at<float>(q, l, h, row) = 0;
    view.score_compensations.at<float>(q, l, h, row) = 0;
  }
  // The new row in a hole is newer than the rows that follow it.
  state.ordered = state.ordered && (!fills_hole || row == state.live_rows);
  state.append_row = -1;
  ++state.live_rows;
  ++state.next_position;
  ++state.next_rope_position;
  ++state.steps;
  ++state.generation;
}

/// What it does with the pages that an eviction freed. One block.
template <class = void>
__global__ void take_back_kernel(const std::int32_t* freed,
                                 const std::int32_t* freed_count,
                                 FreePages free) {
  const std::int32_t first = *free.count;
  const std::int32_t more = *freed_count;
  __syncthreads();
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < more;
       i += static_cast<std::int32_t>(blockDim.x)) {
    free.ids[first + i] = freed[i];
  }
  if (threadIdx.x == 0) { *free.count = first + more; }
}

}  // namespace cuda_step
