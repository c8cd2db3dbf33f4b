// SPDX-License-Identifier: Apache-2.0
#pragma once

// One block per KV head: keys are made once and stay in shared memory, if they fit. Rows that are not in position order are
// always left to one block: ranks are found by two more selections, over the positions.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/select/detail/emit.cuh>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>
#include <kvtrim/cuda/select/select_task.cuh>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int shared_keys_at_most = 48 * 1024;

// A block: one KV head. Thread t: entries t, t + 512, ...
template <bool KeysInShared>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 1) select_kernel(RowScores rows,
                                                                      const SelectTask* tasks,
                                                                      SelectBounds bounds,
                                                                      bool unordered_only,
                                                                      std::int32_t* out,
                                                                      std::int32_t* nan_counts) {
  KVTRIM_SHARED(SelectShared, shared, );
  KVTRIM_DYNAMIC_SHARED(std::uint32_t, keys);
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  const int thread = static_cast<int>(threadIdx.x);
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SelectTask task = tasks[item];
    if (task.active == 0 || (unordered_only && task.ordered != 0)) { continue; }
    const HeadPlace at = place_of(bounds, item);
    const int competing = task.end - task.begin;
    const int wanted = wanted_of(task);
    Competing range{entry_of_rank(task, task.begin), entry_of_rank(task, task.end)};
    const bool by_position = task.ordered == 0 && static_cast<bool>(rows.positions);
    const auto position_at = [&](int e) {
      return static_cast<std::uint32_t>(rows.positions.load<std::int32_t>(at.s, at.l, at.h, e));
    };
    if (by_position && competing > 0) {
      const auto inverse = [&](int e, std::uint32_t& key) {
        key = ~position_at(e);
        return e != task.hole;
      };
      range.first = static_cast<int>(
          ~block_radix_select(task.extent, task.begin + 1, shared, inverse).prefix);
      range.last =
          static_cast<int>(~block_radix_select(task.extent, task.end, shared, inverse).prefix) + 1;
      __syncthreads();
    }
    if (competing <= 0) { range = {0, 0}; }
    int nan = 0;
    if constexpr (KeysInShared) {
      for (int e = thread; e < task.extent; e += select_threads) {
        keys[e] = key_of(rows, at, task, range, e, nan);
      }
    } else {
      for (int e = thread; e < task.extent; e += select_threads) {
        static_cast<void>(key_of(rows, at, task, range, e, nan));
      }
    }
    const std::uint32_t nan_here =
        block_sum(static_cast<std::uint32_t>(nan), shared.sums);  // and all keys are there
    const auto key_at = [&](int e) {
      if constexpr (KeysInShared) {
        return keys[e];
      } else {
        int ignored = 0;
        return key_of(rows, at, task, range, e, ignored);
      }
    };
    if (thread == 0) { nan_counts[item] = static_cast<std::int32_t>(nan_here); }
    // Either no competing entry stays or all do: there is no threshold among the scores.
    RadixState threshold{wanted <= 0 ? key_protected - 2U : 0U, 0};
    if (wanted >= competing) { threshold.left = competing; }
    if (wanted > 0 && wanted < competing) {
      threshold = block_radix_select(task.extent, wanted, shared, [&](int e, std::uint32_t& key) {
        key = key_at(e);
        return key < key_none;
      });
    }
    std::int32_t* const mine = out + list_of(task, bounds, item);
    if (!by_position || wanted <= 0 || wanted >= competing) {
      emit_entries(0,
                   task.extent,
                   threshold.prefix,
                   gone_of(task, bounds),
                   0,
                   0,
                   threshold.left,
                   shared,
                   key_at,
                   FirstTiesStay{},
                   mine);
    } else {
      // Among equal scores the lowest positions stay; positions are unique, so this selection has no ties.
      const std::uint32_t highest =
          ~block_radix_select(task.extent, threshold.left, shared, [&](int e, std::uint32_t& key) {
             key = ~position_at(e);
             return key_at(e) == threshold.prefix;
           }).prefix;
      __syncthreads();
      const auto decided = [&](int e) {
        const std::uint32_t key = key_at(e);
        if (key != threshold.prefix) { return key; }
        return position_at(e) <= highest ? key_protected : 0U;
      };
      // A key of 0 (NaN) that goes must not meet a threshold of 0.
      emit_entries(0,
                   task.extent,
                   threshold.prefix == 0 ? 1U : threshold.prefix,
                   gone_of(task, bounds),
                   0,
                   0,
                   0,
                   shared,
                   decided,
                   NoTiesLeft{},
                   mine);
    }
    __syncthreads();
  }
}

/// Shared memory of `select_kernel<true>`: a key per entry.
[[nodiscard]] inline SharedBytes key_bytes(const SelectBounds& b) noexcept {
  return {static_cast<std::size_t>(b.max_rows) * 4, sizeof(SelectShared)};
}
[[nodiscard]] inline bool keys_fit(const SelectBounds& b) noexcept {
  return b.max_rows <= shared_keys_at_most && key_bytes(b).fits();
}

}  // namespace kvtrim::cuda::detail
