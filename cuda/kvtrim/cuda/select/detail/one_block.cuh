// SPDX-License-Identifier: Apache-2.0
#pragma once

// One block per KV head: keys are made once and stay in shared memory, if they fit. Rows that are not in position order are
// always left to one block: ranks are found by two more selections, over the positions.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/select/detail/emit.cuh>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/select/choose_rows.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim::cuda::detail {

inline constexpr int shared_keys_at_most = 48 * 1024;

/// Every entry is protected or competes, by its rank alone.
struct ByRankAlone {};

/// Lists the entries of one KV head. For a whole block; thread t: entries t, t + 512, ...
///
/// \param kind_of  `ByRankAlone`, or `RowKind(int entry)`: what comes before scores; then as many of the others stay as `task.keep`
///   leaves room for
/// \param keys     a key per entry, with `KeysInShared`
/// \param nan      competing NaN
/// \returns entries that stay
template <bool KeysInShared, class KindOf>
KVTRIM_DEVICE std::int32_t select_entries(const RowScores& rows,
                                          const SelectTask& task,
                                          const SelectBounds& bounds,
                                          int item,
                                          SelectShared& shared,
                                          std::uint32_t* keys,
                                          std::int32_t* out,
                                          std::uint32_t& nan_here,
                                          KindOf kind_of) {
  constexpr bool has_kinds = !std::is_same_v<KindOf, ByRankAlone>;
  const int thread = static_cast<int>(threadIdx.x);
  const HeadPlace at = place_of(bounds, item);
  int competing = task.end - task.begin;
  int wanted = wanted_of(task);
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
    range.first =
        static_cast<int>(~block_radix_select(task.extent, task.begin + 1, shared, inverse).prefix);
    range.last =
        static_cast<int>(~block_radix_select(task.extent, task.end, shared, inverse).prefix) + 1;
    __syncthreads();
  }
  if (competing <= 0) { range = {0, 0}; }
  const auto make_key = [&](int e, int& nan) {
    const std::uint32_t key = key_of(rows, at, task, range, e, nan);
    if constexpr (has_kinds) {
      if (key == key_none) { return key; }
      const RowKind kind = kind_of(e);
      return kind == RowKind::locked ? key_protected : kind == RowKind::dropped ? key_none : key;
    } else {
      return key;
    }
  };
  int nan = 0;
  std::uint32_t fixed = 0;  // that stay whatever the scores
  std::uint32_t open = 0;   // that compete
  if (KeysInShared || has_kinds) {
    for (int e = thread; e < task.extent; e += select_threads) {
      const std::uint32_t key = make_key(e, nan);
      if constexpr (KeysInShared) { keys[e] = key; }
      fixed += key == key_protected ? 1U : 0U;
      open += key < key_none ? 1U : 0U;
    }
  } else {
    for (int e = thread; e < task.extent; e += select_threads) {
      static_cast<void>(key_of(rows, at, task, range, e, nan));
    }
  }
  nan_here = block_sum(static_cast<std::uint32_t>(nan), shared.sums);  // and all keys are there
  std::int32_t keep = task.keep;
  if constexpr (has_kinds) {
    const auto stay = static_cast<int>(block_sum(fixed, shared.sums));
    competing = static_cast<int>(block_sum(open, shared.sums));
    wanted = keep - stay;
    keep = stay + (wanted < 0 ? 0 : wanted < competing ? wanted : competing);
  }
  const auto key_at = [&](int e) {
    if constexpr (KeysInShared) {
      return keys[e];
    } else {
      int ignored = 0;
      return make_key(e, ignored);
    }
  };
  // Either no competing entry stays or all do: there is no threshold among the scores.
  RadixState threshold{wanted <= 0 ? key_protected - 2U : 0U, 0};
  if (wanted >= competing) { threshold.left = competing; }
  if (wanted > 0 && wanted < competing) {
    threshold = block_radix_select(task.extent, wanted, shared, [&](int e, std::uint32_t& key) {
      key = key_at(e);
      return key < key_none;
    });
  }
  const std::int32_t gone_from = bounds.max_evicted > 0 ? -1 : keep;
  std::int32_t* const mine = out + list_of(task, bounds, item);
  if (!by_position || wanted <= 0 || wanted >= competing) {
    emit_entries(0,
                 task.extent,
                 threshold.prefix,
                 gone_from,
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
                 gone_from,
                 0,
                 0,
                 0,
                 shared,
                 decided,
                 NoTiesLeft{},
                 mine);
  }
  __syncthreads();
  return keep;
}

// A block: one KV head.
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
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SelectTask task = tasks[item];
    if (task.active == 0 || (unordered_only && task.ordered != 0)) { continue; }
    std::uint32_t nan = 0;
    select_entries<KeysInShared>(rows, task, bounds, item, shared, keys, out, nan, ByRankAlone{});
    if (threadIdx.x == 0) { nan_counts[item] = static_cast<std::int32_t>(nan); }
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
