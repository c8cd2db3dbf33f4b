// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a plan with a position mode does once its rows have moved: every row that stays gets its rope position, and its key is
// rotated there, where it now lies. The specification is the host's `HeadMover::renumber`.
//
// A row's number is its rank by position among those that stay. In a table in order, that follows from where it lies. In a
// table that is not, rope positions are 0 to n - 1 from the last renumbering on (`open` refuses one that never was renumbered):
// then the rank is the number of rows that stay with a lower one, counted in a bitmap.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/rotation.cuh>

#include <climits>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int renumber_threads = 256;

/// The position of the row of this rank, of `count` rows. For a whole block.
///
/// \param position  of row number `k`; all differ
template <int Threads, class PositionOf>
KVTRIM_DEVICE std::int32_t position_of(std::int32_t rank,
                                       std::int32_t count,
                                       BlockScan<Threads, std::int32_t>& shared,
                                       PositionOf position) {
  std::int32_t bound = INT_MIN;
  for (std::int32_t i = 0; i <= rank; ++i) {
    std::int32_t next = INT_MAX;
    for (auto k = static_cast<std::int32_t>(threadIdx.x); k < count; k += Threads) {
      const std::int32_t p = position(k);
      next = p > bound && p < next ? p : next;
    }
    bound = block_min(next, shared);
  }
  return bound;
}

/// Words of the bitmap, and as many counts.
KVTRIM_HOST_DEVICE constexpr std::int32_t rank_words(std::int32_t rows) {
  return (rows + 31) / 32;
}

struct RenumberShared {
  BlockScan<renumber_threads, std::int32_t> scan;
};

/// Ranks by rope position, for a whole block.
struct RopeRanks {
  std::uint32_t* bits;   // [rank_words(rows)]: one for each rope position of a row that stays
  std::int32_t* before;  // as many: ones in the words before
  std::int32_t rows;

  /// `stands(k)`: rope position of number `k` of `count`; -1: not a row
  template <class Stands>
  KVTRIM_DEVICE void fill(std::int32_t count,
                          BlockScan<renumber_threads, std::int32_t>& scan,
                          Stands stands) const {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const std::int32_t words = rank_words(rows);
    for (std::int32_t w = thread; w < words; w += renumber_threads) { bits[w] = 0; }
    __syncthreads();
    for (std::int32_t k = thread; k < count; k += renumber_threads) {
      const std::int32_t p = stands(k);
      if (p >= 0 && p < rows) { atomicOr(&bits[p / 32], 1U << static_cast<unsigned>(p % 32)); }
    }
    __syncthreads();
    std::int32_t all = 0;
    for (std::int32_t base = 0; base < words; base += renumber_threads) {
      const std::int32_t w = base + thread;
      std::int32_t here = 0;
      const std::int32_t mine = all + block_sum_before(w < words ? __popc(bits[w]) : 0, scan, here);
      if (w < words) { before[w] = mine; }
      all += here;
    }
    __syncthreads();
  }
  KVTRIM_DEVICE std::int32_t rank(std::int32_t p) const {
    const std::int32_t at = p < 0 ? 0 : p < rows ? p : rows - 1;
    const std::uint32_t below = (1U << static_cast<unsigned>(at % 32)) - 1U;
    return before[at / 32] + __popc(bits[at / 32] & below);
  }
};

/// One KV head whose rows have moved.
struct RenumberedHead {
  const CacheView& view;
  const DevicePlan& plan;
  const KeyTurn& turn;
  HeadPlace at;
  std::int64_t index;
  std::int64_t table_index;
  TablePlan table;
  RowLists rows;  // of a table whose holes were filled

  KVTRIM_DEVICE std::int32_t& stands(std::int32_t row) const {
    return *reinterpret_cast<std::int32_t*>(view.rope_positions.row(at.s, at.l, at.h, row));
  }
  /// Rank of the row that is now at `row`, in a table that was in order.
  KVTRIM_DEVICE std::int32_t rank(std::int32_t row) const {
    if (table.removal != Removal::fill_holes) { return row; }
    const std::int32_t holes =
        rows.gone_below(table.live_after);  // filled by as many of the last rows
    const std::int32_t before = rows.gone_below(row);
    return before < holes && rows.gone[before] == row ? table.live_after - holes + before
                                                      : row - before;
  }
  /// Gives a row its rope position. For a whole warp.
  KVTRIM_DEVICE void renumber(std::int32_t row, std::int32_t rank, std::int32_t to) const {
    std::int32_t& mine = stands(row);
    const std::int32_t from = mine;
    __syncwarp();  // all lanes have read what lane 0 writes below
    if (from == to) { return; }
    if (turn.touches_keys) {
      const std::int32_t place = row + table.first_row;
      const PageId page{plan.pages_of(table_index)[place / plan.page_size]};
      turn_key(view, turn, {at.l, at.h, page, Slot{place % plan.page_size}}, index, rank, from, to);
    }
    if ((threadIdx.x & 31U) == 0) { mine = to; }
  }
};

// A block: one KV head at a time; a warp: one row at a time.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(renumber_threads, 2)
    renumber_kernel(CacheView view, DevicePlan plan, KeyTurn turn) {
  KVTRIM_SHARED(RenumberShared, shared, );
  KVTRIM_DYNAMIC_SHARED(std::uint32_t, words);
  if (plan.control->go == 0) { return; }
  const auto warp = static_cast<std::int32_t>(threadIdx.x >> 5U);
  const auto lane = static_cast<std::int32_t>(threadIdx.x & 31U);
  constexpr std::int32_t warps = renumber_threads / 32;
  for (std::int64_t i = blockIdx.x; i < plan.heads(); i += gridDim.x) {
    const HeadPlace at = plan.head_at(i);
    const std::int64_t table_index = plan.table_index(at.s, view.table_of(at.l, at.h));
    const TablePlan table = plan.table_plans[table_index];
    if (!table.evicts) { continue; }
    const RenumberedHead head{view, plan, turn, at, i, table_index, table, plan.lists_of(i)};
    const bool ordered = view.state(at.s, at.l, at.h).ordered;
    if (turn.mode == PositionMode::sinks_follow) {
      // The sinks stand right before the oldest row behind them.
      const std::int32_t sinks = turn.pristine.sinks;
      const std::int32_t live = table.live_after;
      if (live <= sinks) { continue; }
      const auto key = [&](std::int32_t row) {
        return ordered ? head.rank(row) : raw(view.position(at.s, at.l, at.h, row));
      };
      const std::int32_t oldest = ordered ? sinks : position_of(sinks, live, shared.scan, key);
      const std::int32_t rows = ordered && table.removal != Removal::fill_holes ? sinks + 1 : live;
      std::int32_t begin = INT_MIN;
      for (auto r = static_cast<std::int32_t>(threadIdx.x); r < rows; r += renumber_threads) {
        if (key(r) == oldest) { begin = head.stands(r); }
      }
      begin = block_max(begin, shared.scan);
      for (std::int32_t r = warp; r < rows; r += warps) {
        const std::int32_t mine = key(r);
        if (mine >= oldest) { continue; }
        std::int32_t rank = mine;
        if (!ordered) {
          std::int32_t lower = 0;
          for (std::int32_t k = lane; k < live; k += 32) { lower += key(k) < mine ? 1 : 0; }
          rank = __reduce_add_sync(full_warp, lower);
        }
        head.renumber(r, rank, begin - sinks + rank);
      }
      __syncthreads();
      continue;
    }
    const bool by_rope = !ordered || table.removal == Removal::overwrite_slot;
    const std::int32_t extent = table.live_after + (table.append_row >= 0 ? 1 : 0);
    const RopeRanks ranks{words,
                          reinterpret_cast<std::int32_t*>(words + rank_words(plan.max_rows)),
                          table.live_before};
    if (by_rope) {
      ranks.fill(extent, shared.scan, [&](std::int32_t row) {
        return row == table.append_row ? -1 : head.stands(row);
      });
    }
    for (std::int32_t row = warp; row < extent; row += warps) {
      if (row == table.append_row) { continue; }
      const std::int32_t rank = by_rope ? ranks.rank(head.stands(row)) : head.rank(row);
      head.renumber(row, rank, rank);
    }
    __syncthreads();
  }
}

/// Shared memory of the kernel: counts by rope position need 2 bits a row.
[[nodiscard]] inline SharedBytes renumber_shared(PositionMode mode,
                                                 std::int32_t max_rows) noexcept {
  const auto words = static_cast<std::size_t>(rank_words(max_rows));
  return {mode == PositionMode::in_cache ? words * 8 : 8, sizeof(RenumberShared)};
}

/// Whether a plan can have this mode. Host bounds only.
[[nodiscard]] inline bool rotation_fits(const CacheView& view,
                                        const DeviceRotation& rotation,
                                        std::int32_t max_rows) noexcept {
  return rotation.mode == PositionMode::keep ||
         (can_rotate(view, rotation) && renumber_shared(rotation.mode, max_rows).fits());
}

/// Queues the renumbering, behind the moves; nothing if positions are kept.
[[nodiscard]] inline cudaError_t renumber_rows(const CacheView& view,
                                               const DevicePlan& plan,
                                               const DeviceRotation& rotation,
                                               cudaStream_t stream) noexcept {
  if (rotation.mode == PositionMode::keep) { return cudaSuccess; }
  return launch(renumber_kernel<>,
                dim3(bounded_grid(plan.heads())),
                dim3(renumber_threads),
                renumber_shared(rotation.mode, plan.max_rows),
                stream,
                view,
                plan,
                key_turn(view, rotation));
}

}  // namespace kvtrim::cuda::detail
