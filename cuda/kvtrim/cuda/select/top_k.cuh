// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows stay, for many KV heads at once: the specification is the host's `candidates` + `top_k`, and the kept set is
// exactly the same. A radix select: its time does not depend on the values.
//
// One block per KV head: keys are made once and stay in shared memory. If there are fewer KV heads than multiprocessors
// and they are long, several blocks share one, in separate kernels (histogram, pick, count, emit): no block ever waits
// for another. Rows that are not in position order are always left to one block: ranks are found by two more selections,
// over the positions. Over 400 lines: both paths share the digits and the emission.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/select/detail/radix.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// What is to be chosen in one (sequence, layer, KV head).
struct SelectTask {
  std::int32_t extent = 0;  ///< entries: live rows, and the hole if there is one
  std::int32_t begin = 0;   ///< rows with a rank below this are protected
  std::int32_t end = 0;     ///< rows with this rank or a higher one are protected
  std::int32_t keep =
      0;  ///< rows that stay, the protected ones included; not above begin + live - end + competing
  std::int32_t hole = -1;          ///< entry that is not a row; -1: none
  std::int32_t next_position = 0;  ///< of the sequence, for age normalisation
  std::int32_t ordered = 1;  ///< entries are in position order; 0 needs `RowScores::positions`
  std::int32_t active = 0;   ///< 0: nothing is chosen, nothing is written
  std::int64_t list = -1;    ///< where its rows begin in `out`; -1: at item * max_rows
};

/// Scores of all KV heads. Higher is kept.
struct RowScores {
  SequencePlane scores{};         ///< fp32; absent: all equal
  SequencePlane compensations{};  ///< fp32, added; absent: none
  SequencePlane positions{};      ///< int32; absent: row r is position r
  bool age_normalised = false;    ///< divide by next_position - position
};

/// Bounds of a selection: what the path and the workspace depend on.
struct SelectBounds {
  std::int32_t sequences = 1;
  std::int32_t layers = 1;
  std::int32_t kv_heads = 1;
  std::int32_t max_rows = 0;  ///< entries of the longest KV head
};

namespace detail {

// Keys that no score has (the highest is that of +inf, 0xFF80'0000).
inline constexpr std::uint32_t key_protected = 0xFFFF'FFFFU;
inline constexpr std::uint32_t key_none = 0xFFFF'FFFEU;
inline constexpr int select_chunk = 8192;  // entries per block if several share a KV head
inline constexpr int shared_keys_at_most = 48 * 1024;
inline constexpr int long_rows = 16 * 1024;
inline constexpr int most_shared_heads = 256;  // that have workspace, whatever the device

/// The entries of one KV head.
struct SelectItem {
  SequenceId s;
  LayerId l;
  HeadId h;
};
KVTRIM_DEVICE SelectItem item_of(const SelectBounds& bounds, int item) {
  return {SequenceId{item / (bounds.layers * bounds.kv_heads)},
          LayerId{item / bounds.kv_heads % bounds.layers},
          HeadId{item % bounds.kv_heads}};
}

KVTRIM_DEVICE std::int64_t list_of(const SelectTask& task, const SelectBounds& bounds, int item) {
  return task.list >= 0 ? task.list : static_cast<std::int64_t>(item) * bounds.max_rows;
}

/// Rows that stay besides the protected ones; below 1, scores are not looked at.
KVTRIM_DEVICE int wanted_of(const SelectTask& task) {
  const int live = task.extent - (task.hole >= 0 ? 1 : 0);
  return task.keep - (live - (task.end - task.begin));
}
KVTRIM_DEVICE float score_of(const RowScores& rows,
                             const SelectItem& at,
                             const SelectTask& task,
                             int e) {
  if (!rows.scores || wanted_of(task) <= 0) { return 0.0F; }
  float score = rows.scores.at<float>(at.s, at.l, at.h, e);
  if (rows.compensations) {
    score = __fadd_rn(score, rows.compensations.at<float>(at.s, at.l, at.h, e));
  }
  if (rows.age_normalised) {
    const int position =
        rows.positions ? rows.positions.load<std::int32_t>(at.s, at.l, at.h, e) : e;
    const int age = task.next_position - position;
    if (age > 0) { score = __fdiv_rn(score, static_cast<float>(age)); }
  }
  return score;
}

/// Which entries compete: by entry if they are in position order, by position if they are not.
struct Competing {
  int first = 0;
  int last = 0;  // first <= entry or position < last
};

/// Key of entry `e`; counts a competing NaN into `nan`.
KVTRIM_DEVICE std::uint32_t key_of(const RowScores& rows,
                                   const SelectItem& at,
                                   const SelectTask& task,
                                   const Competing& range,
                                   int e,
                                   int& nan) {
  if (e == task.hole) { return key_none; }
  const int place = task.ordered != 0 || !rows.positions
                        ? e
                        : rows.positions.load<std::int32_t>(at.s, at.l, at.h, e);
  if (place < range.first || place >= range.last) { return key_protected; }
  const float score = score_of(rows, at, task, e);
  nan += is_nan(score) ? 1 : 0;
  return order_key(score);
}

KVTRIM_DEVICE int entry_of_rank(const SelectTask& task, int rank) {
  return rank + (task.hole >= 0 && rank >= task.hole ? 1 : 0);
}

/// Writes the entries of [first, last): those that stay from `out[kept_before]` on, the others from `out[keep +
/// first - kept_before]` on, both ascending.
///
/// \param ties_before  entries before `first` whose key is the threshold's
/// \param stays_tied   of the entries with the threshold's key: `int(e, ties before it)`, 1 if it stays
template <class KeyAt, class StaysTied>
KVTRIM_DEVICE void emit_entries(int first,
                                int last,
                                std::uint32_t threshold,
                                std::int32_t keep,
                                int sure_before,
                                int ties_before,
                                std::int32_t equal,
                                SelectShared& shared,
                                KeyAt key_at,
                                StaysTied stays_tied,
                                std::int32_t* out) {
  constexpr int per_thread = 4;
  const int thread = static_cast<int>(threadIdx.x);
  for (int base = first; base < last; base += select_threads * per_thread) {
    // Counts of this thread's entries: certain ones in the high half, ties in the low half. A tile has 2,048 entries.
    std::uint32_t sure = 0;
    std::uint32_t tie = 0;
    std::uint32_t own = 0;
    KVTRIM_UNROLL
    for (int j = 0; j < per_thread; ++j) {
      const int e = base + thread * per_thread + j;
      if (e >= last) { break; }
      const std::uint32_t key = key_at(e);
      if (key == key_none) { continue; }
      if (key > threshold) {
        sure |= 1U << j;
        own += 1U << 16U;
      } else if (key == threshold) {
        tie |= 1U << j;
        own += 1U;
      }
    }
    std::uint32_t all = 0;
    const std::uint32_t before = block_sum_before(own, shared.sums, all);
    int sure_here = sure_before + static_cast<int>(before >> 16U);
    int ties_here = ties_before + static_cast<int>(before & 0xFFFFU);
    KVTRIM_UNROLL
    for (int j = 0; j < per_thread; ++j) {
      const int e = base + thread * per_thread + j;
      if (e >= last) { break; }
      const bool tied = (tie >> j & 1U) != 0;
      const int kept_before = stays_tied.kept_before(sure_here, ties_here, equal);
      const bool stays = (sure >> j & 1U) != 0 || (tied && stays_tied(e, ties_here, equal));
      out[stays ? kept_before : keep + (e - kept_before)] = e;
      sure_here += static_cast<int>(sure >> j & 1U);
      ties_here += tied ? 1 : 0;
    }
    sure_before += static_cast<int>(all >> 16U);
    ties_before += static_cast<int>(all & 0xFFFFU);
  }
}

/// Among equal scores in position order, the first `equal` stay.
struct FirstTiesStay {
  KVTRIM_DEVICE int kept_before(int sure, int ties, int equal) const {
    return sure + (ties < equal ? ties : equal);
  }
  KVTRIM_DEVICE bool operator()(int, int ties, int equal) const { return ties < equal; }
};
/// Ties were decided before: keys of those that stay are raised above the threshold, so none is left.
struct NoTiesLeft {
  KVTRIM_DEVICE int kept_before(int sure, int, int) const { return sure; }
  KVTRIM_DEVICE bool operator()(int, int, int) const { return false; }
};

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
    const SelectItem at = item_of(bounds, item);
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
    if (thread == 0) { shared.nan = 0; }
    __syncthreads();
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
    if (nan != 0) { atomicAdd(&shared.nan, nan); }
    __syncthreads();
    const auto key_at = [&](int e) {
      if constexpr (KeysInShared) {
        return keys[e];
      } else {
        int ignored = 0;
        return key_of(rows, at, task, range, e, ignored);
      }
    };
    if (thread == 0) { nan_counts[item] = shared.nan; }
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
                   task.keep,
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
                   task.keep,
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

// --- several blocks per KV head -------------------------------------------------------------------------

struct SharedSelection {  // of one KV head, in global memory
  RadixState state;
  std::int32_t nan;
};

KVTRIM_DEVICE bool takes_part(const SelectTask& task) {
  return task.active != 0 && task.ordered != 0;
}
KVTRIM_DEVICE Competing range_of(const SelectTask& task) {
  return task.end <= task.begin
             ? Competing{0, 0}
             : Competing{entry_of_rank(task, task.begin), entry_of_rank(task, task.end)};
}
KVTRIM_DEVICE bool has_threshold(const SelectTask& task) {
  const int wanted = wanted_of(task);
  return wanted > 0 && wanted < task.end - task.begin;
}

// A block: one chunk of one KV head; its counts are added to the head's.
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads)
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
    const SelectItem at = item_of(bounds, item);
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
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads)
    select_count_kernel(RowScores rows,
                        const SelectTask* tasks,
                        SelectBounds bounds,
                        int chunks,
                        const SharedSelection* selections,
                        std::uint32_t* chunk_counts) {
  KVTRIM_SHARED(SelectShared, shared, );
  const int items = bounds.sequences * bounds.layers * bounds.kv_heads;
  for (int work = static_cast<int>(blockIdx.x); work < items * chunks;
       work += static_cast<int>(gridDim.x)) {
    const int item = work / chunks;
    const SelectTask task = tasks[item];
    const int first = work % chunks * select_chunk;
    if (!takes_part(task)) { continue; }
    if (threadIdx.x == 0) { shared.digit = 0; }
    __syncthreads();
    const SelectItem at = item_of(bounds, item);
    const Competing range = range_of(task);
    const std::uint32_t threshold = selections[item].state.prefix;
    const int last = first + select_chunk < task.extent ? first + select_chunk : task.extent;
    std::uint32_t own = 0;
    int ignored = 0;
    for (int e = first + static_cast<int>(threadIdx.x); e < last; e += select_threads) {
      const std::uint32_t key = key_of(rows, at, task, range, e, ignored);
      own += key == key_none ? 0U : key > threshold ? 1U << 16U : key == threshold ? 1U : 0U;
    }
    own = __reduce_add_sync(full_warp, own);
    if ((threadIdx.x & 31U) == 0) { atomicAdd(&shared.digit, own); }
    __syncthreads();
    if (threadIdx.x == 0) { chunk_counts[work] = shared.digit; }
    __syncthreads();
  }
}

// A block: one chunk of one KV head.
template <class = void>  // a template so that a header may hold it
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads)
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
    const SelectItem at = item_of(bounds, item);
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
        task.keep,
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
/// Shared memory of `select_kernel<true>`: a key per entry.
[[nodiscard]] inline SharedBytes key_bytes(const SelectBounds& b) noexcept {
  return {static_cast<std::size_t>(b.max_rows) * 4, sizeof(SelectShared)};
}
[[nodiscard]] inline bool keys_fit(const SelectBounds& b) noexcept {
  return b.max_rows <= shared_keys_at_most && key_bytes(b).fits();
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

}  // namespace detail

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
///   ascending, then the other entries (the hole among them), ascending
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
  SelectWorkspace w;
  if (shares) {
    WorkspaceLayout layout(workspace, workspace_bytes);
    w = SelectWorkspace::take(layout, bounds);
    if (!layout.ok()) { return cudaErrorInvalidValue; }
  }
  const dim3 block(select_threads);
  const dim3 heads(bounded_grid(items));
  if (shares) {
    const dim3 all(bounded_grid(items * chunks));
    const int n = static_cast<int>(chunks);
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
                                     n,
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
                           n,
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
               n,
               w.selections,
               w.chunk_counts,
               out);
    if (e != cudaSuccess || !rows.positions) { return e; }
  }
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
