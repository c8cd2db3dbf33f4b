// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows stay, of rows spread over ranks, without the host: the counts of each round are made in device memory, a
// communicator on the device's stream (`NcclCommunicator`) adds them up there, and a kernel takes the next digit. The host
// only queues; it knows how many rounds there are and how long they are. Specification: the host's `ContextTopK`.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/detail/radix_rounds.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// What is to stay of one (sequence, layer, KV head) whose rows are spread over ranks. All but `extent` and `hole` are the
/// same on all ranks.
struct RankedTask {
  std::int32_t extent = 0;  ///< entries of this rank: its live rows, and the hole if there is one
  std::int32_t hole = -1;   ///< entry that is not a row; -1: none
  std::int32_t begin = 0;   ///< rows at lower positions are protected
  std::int32_t end = 0;     ///< rows at this position or a higher one are protected
  std::int32_t competing = 0;      ///< rows of all ranks in between
  std::int32_t wanted = 0;         ///< of these, the ones that stay
  std::int32_t next_position = 0;  ///< of the sequence, for age normalisation
};

namespace detail {

inline constexpr int ranked_threads = 256;  // one per value of a digit
static_assert(ranked_threads == static_cast<int>(::kvtrim::detail::digit_values));
inline constexpr int ranked_chunk =
    4096;  // entries that a block counts before it adds to the rank's counts
inline constexpr int ranked_rounds = 8;  // digits of a key

/// What the kernels of a selection over ranks share.
struct RankedArgs {
  RowScores rows;
  const RankedTask* tasks;
  SelectBounds bounds;
  std::int32_t items;
  std::int32_t chunks;                   // per item
  ::kvtrim::detail::RadixState* states;  // [items]
  std::uint64_t* totals;                 // [items] competing rows of all ranks
  std::uint64_t* counts;                 // [items, 256]
  std::uint8_t* stays;                   // [items, max_rows]
  Status* statuses;                      // [items]
};

/// Key of an entry that competes.
///
/// \returns whether it does
KVTRIM_DEVICE bool ranked_key(const RankedArgs& a,
                              const RankedTask& task,
                              std::int32_t item,
                              std::int32_t e,
                              std::uint64_t& key) {
  if (e == task.hole) { return false; }
  const HeadPlace at = place_of(a.bounds, item);
  const std::int32_t position =
      a.rows.positions ? a.rows.positions.load<std::int32_t>(at.s, at.l, at.h, e) : e;
  if (position < task.begin || position >= task.end) { return false; }
  SelectTask local;  // of which a row is wanted, so that its score is looked at
  local.extent = task.extent;
  local.keep = task.extent + 1;
  local.hole = task.hole;
  local.next_position = task.next_position;
  key = row_key(score_of(a.rows, at, local, e), Position{position});
  return true;
}

/// Chunk `x` of all items' entries.
struct RankedChunk {
  std::int32_t item;
  std::int32_t begin;  // entries [begin, end); none if the item has fewer
  std::int32_t end;
  RankedTask task;
  ::kvtrim::detail::RadixState state;
};
KVTRIM_DEVICE RankedChunk ranked_chunk_at(const RankedArgs& a, std::int64_t x) {
  const auto item = static_cast<std::int32_t>(x / a.chunks);
  const std::int32_t begin = static_cast<std::int32_t>(x % a.chunks) * ranked_chunk;
  const RankedTask task = a.tasks[item];
  const std::int32_t end = task.extent - begin < ranked_chunk ? task.extent : begin + ranked_chunk;
  return {item, begin, end, task, a.states[item]};
}

/// Before the first round. One thread per count.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) begin_ranked_kernel(RankedArgs a) {
  const std::int64_t all = static_cast<std::int64_t>(a.items) * Threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < all;
       i += static_cast<std::int64_t>(gridDim.x) * Threads) {
    a.counts[i] = 0;
    if (i % Threads != 0) { continue; }
    const auto item = static_cast<std::int32_t>(i / Threads);
    const std::int32_t wanted = a.tasks[item].wanted;
    a.states[item] = {0, static_cast<std::uint64_t>(wanted > 0 ? wanted : 0)};
  }
}

/// Counts the digit at `shift` of this rank's keys that begin like the key sought. A block: one chunk of an item.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads)
    count_ranked_kernel(RankedArgs a, std::int32_t shift, bool first) {
  KVTRIM_SHARED(unsigned, counts, [Threads]);
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t all = static_cast<std::int64_t>(a.items) * a.chunks;
  for (std::int64_t x = blockIdx.x; x < all; x += gridDim.x) {
    const auto [item, begin, end, task, state] = ranked_chunk_at(a, x);
    if (begin >= task.extent || (!first && state.left == 0)) { continue; }
    counts[thread] = 0;
    __syncthreads();
    for (std::int32_t e = begin + thread; e < end; e += Threads) {
      std::uint64_t key = 0;
      // Two shifts: one by all 64 bits is not defined.
      if (ranked_key(a, task, item, e, key) && (first || (key >> shift) >> 8U == state.prefix)) {
        atomicAdd(&counts[(key >> shift) & 0xFFU], 1U);
      }
    }
    __syncthreads();
    if (counts[thread] > 0) {
      atomicAdd(
          reinterpret_cast<unsigned long long*>(a.counts + std::int64_t{item} * Threads + thread),
          static_cast<unsigned long long>(counts[thread]));
    }
    __syncthreads();
  }
}

/// Takes a digit by the counts of all ranks, and clears them. A block: one item; thread t: digit t.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) take_ranked_kernel(RankedArgs a, bool first) {
  KVTRIM_SHARED(std::uint64_t, counts, [Threads]);
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int32_t item = static_cast<std::int32_t>(blockIdx.x); item < a.items;
       item += static_cast<std::int32_t>(gridDim.x)) {
    std::uint64_t& count = a.counts[std::int64_t{item} * Threads + thread];
    counts[thread] = count;
    count = 0;
    __syncthreads();
    if (thread == 0) {
      ::kvtrim::detail::RadixState state = a.states[item];
      if (first) {
        std::uint64_t total = 0;
        for (int i = 0; i < Threads; ++i) { total += counts[i]; }
        a.totals[item] = total;
        state.left = state.left < total ? state.left : total;
      }
      ::kvtrim::detail::take_digit(state, counts);
      a.states[item] = state;
    }
    __syncthreads();
  }
}

/// Says of each entry whether it stays. A block: one chunk of an item.
template <int Threads>
__global__ void KVTRIM_LAUNCH_BOUNDS(Threads) mark_ranked_kernel(RankedArgs a) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t all = static_cast<std::int64_t>(a.items) * a.chunks;
  for (std::int64_t x = blockIdx.x; x < all; x += gridDim.x) {
    const auto [item, begin, end, task, state] = ranked_chunk_at(a, x);
    const bool good = a.totals[item] == static_cast<std::uint64_t>(task.competing);
    if (begin == 0 && thread == 0) { a.statuses[item] = good ? Status::ok : Status::ranks_differ; }
    for (std::int32_t e = begin + thread; e < end; e += Threads) {
      std::uint64_t key = 0;
      const bool competes = ranked_key(a, task, item, e, key);
      const bool best = state.left != 0 && key >= state.prefix;
      a.stays[static_cast<std::int64_t>(item) * a.bounds.max_rows + e] =
          e != task.hole && (!competes || best || !good) ? 1 : 0;
    }
  }
}

}  // namespace detail

/// Chooses the rows that stay, of rows spread over ranks, on the device. `drive` exchanges its rounds over a communicator
/// whose words lie in device memory:
///
/// ```
/// ContextTopK run(rows, tasks, bounds, stays, statuses, workspace, bytes, stream);
/// if (run.error() == cudaSuccess) { status = drive(communicator, run); }   // queues 8 rounds, waits for nothing
/// ```
///
/// Each round has 256 counts of 8 bytes for each (sequence, layer, KV head), whatever the number of rows. The kept set is
/// that of the host's `ContextTopK`, and of `cuda::top_k` on one rank. Protected ranges are given as positions, where the
/// host's finds them in 4 more rounds if rows went before.
///
/// \par Ties
/// the lower position is kept. NaN: lowest, by `order_key`
/// \par Complexity
/// O(8 * rows of this rank) time
/// \par Stream
/// asynchronous on `stream`: 2 kernels a round, 2 after the last; never synchronises, allocates or reads back; may be
/// captured if the communicator's calls may (NCCL's may)
/// \par Thread-safety
/// one thread
/// \par Source
/// own, as the host's `ContextTopK`
class ContextTopK {
 public:
  /// Bytes of the workspace, a multiple of 256: 2 KiB for each (sequence, layer, KV head) and a little.
  [[nodiscard]] static std::size_t workspace_bytes(const SelectBounds& bounds) noexcept {
    detail::WorkspaceLayout layout;
    detail::RankedArgs a{};
    take(layout, items_of(bounds), a);
    return layout.bytes();
  }

  /// \param rows       scores of this rank's rows, higher is kept; positions absent: entry e is position e
  /// \param tasks      [sequences, layers, kv_heads] in device memory
  /// \param bounds     the same sequences, layers and KV heads on all ranks; `max_rows` is this rank's
  /// \param[out] stays    [sequences, layers, kv_heads, max_rows] 1: the row stays; a hole's is 0; entries from
  ///   `extent` on are not written
  /// \param[out] statuses [sequences, layers, kv_heads] `ok`; `ranks_differ` if the ranks do not have `competing` rows
  ///   together: then all rows stay
  /// \param workspace  [workspace_bytes(bounds)], at a multiple of 256; in use until the stream has done the last kernel
  ContextTopK(const RowScores& rows,
              const RankedTask* tasks,
              const SelectBounds& bounds,
              std::uint8_t* stays,
              Status* statuses,
              void* workspace,
              std::size_t bytes,
              cudaStream_t stream) noexcept
      : stream_(stream) {
    detail::WorkspaceLayout layout(workspace, bytes);
    args_.rows = rows;
    args_.tasks = tasks;
    args_.bounds = bounds;
    args_.items = items_of(bounds);
    args_.chunks = (bounds.max_rows + detail::ranked_chunk - 1) / detail::ranked_chunk;
    args_.stays = stays;
    args_.statuses = statuses;
    take(layout, args_.items, args_);
    const bool given = tasks != nullptr && stays != nullptr && statuses != nullptr;
    if (bounds.max_rows < 0 || args_.items < 0 || (args_.items > 0 && (!given || !layout.ok()))) {
      error_ = cudaErrorInvalidValue;
    }
    // A rank without rows takes part in all rounds; its tasks need one chunk to get their statuses.
    if (args_.chunks == 0) { args_.chunks = 1; }
  }

  /// Next round: its words lie in device memory. Without words: all done, or `error()`.
  [[nodiscard]] Round next() noexcept {
    if (error_ != cudaSuccess || args_.items == 0 || round_ > detail::ranked_rounds) { return {}; }
    if (round_ == 0) {
      run(&detail::begin_ranked_kernel<detail::ranked_threads>, args_.items);
    } else {
      run(&detail::take_ranked_kernel<detail::ranked_threads>, args_.items, round_ == 1);
    }
    const std::int64_t chunks = static_cast<std::int64_t>(args_.items) * args_.chunks;
    if (round_++ == detail::ranked_rounds) {
      run(&detail::mark_ranked_kernel<detail::ranked_threads>, chunks);
      return {};
    }
    run(&detail::count_ranked_kernel<detail::ranked_threads>, chunks, 64 - 8 * round_, round_ == 1);
    if (error_ != cudaSuccess) { return {}; }
    return {RoundKind::sum,
            {args_.counts, static_cast<std::size_t>(args_.items) * detail::ranked_threads}};
  }

  /// Why no round is handed out: `cudaErrorInvalidValue` from the start on, if an array is missing or the workspace too
  /// small or not aligned; otherwise the status of a launch. Ranks that go on wait for this one: abort the communicator.
  [[nodiscard]] cudaError_t error() const noexcept { return error_; }

 private:
  [[nodiscard]] static std::int32_t items_of(const SelectBounds& b) noexcept {
    return b.sequences * b.layers * b.kv_heads;
  }
  static void take(detail::WorkspaceLayout& layout,
                   std::int64_t items,
                   detail::RankedArgs& a) noexcept {
    a.states = layout.take<::kvtrim::detail::RadixState>(items);
    a.totals = layout.take<std::uint64_t>(items);
    a.counts = layout.take<std::uint64_t>(items * detail::ranked_threads);
  }
  template <class... P, class... A>
  void run(void (*kernel)(detail::RankedArgs, P...), std::int64_t blocks, A... more) noexcept {
    if (error_ != cudaSuccess) { return; }
    error_ = detail::launch(kernel,
                            dim3(detail::bounded_grid(blocks)),
                            dim3(detail::ranked_threads),
                            0,
                            stream_,
                            args_,
                            more...);
  }

  detail::RankedArgs args_{};
  cudaStream_t stream_;
  std::int32_t round_ = 0;
  cudaError_t error_ = cudaSuccess;
};
static_assert(RankRun<ContextTopK>);

}  // namespace kvtrim::cuda
