// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pages that must not be written: the host's `must_choose_again` and its second choice. Where rows of a table would move, those of
// shared pages stay as they are, if any KV head wants one of them, or leave with their page; the rows of the other pages compete
// for what is left of the budget. Two launches, only where the view says which pages may be written.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/closing_table.cuh>
#include <kvtrim/cuda/evict/detail/fits.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/select/detail/one_block.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/select/choose_rows.hpp>
#include <kvtrim/select/pages.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

// A block: one table. Says in `DevicePlan::active` whether its rows must be chosen again, and then in `sources` the `RowKind` of
// each entry's rows; the budget goes to `TablePlan::live_after`, as its tasks will say how many rows stay. Tasks of a table whose
// way of removal is another one now are marked by 2.
//
// `leaves`: shared pages stay; otherwise they are copied, and the first choice stands. `rotates`: keys get other rope positions, in
// all rows where a slot would be overwritten.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    fix_pages_kernel(CacheView view, DevicePlan plan, bool leaves, bool rotates) {
  KVTRIM_SHARED(CloseShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const CloseInput none;
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const ClosingTable at = closing_table(view, plan, i, none, shared);
    TablePlan table = plan.table_plans[i];
    __syncthreads();  // all threads have read what thread 0 writes below
    if (thread == 0) { plan.active[i] = 0; }
    if (!table.evicts || table.removal == Removal::drop_pages ||
        failed_before(plan, at.s, phase_close)) {
      continue;
    }
    const bool overwrites = table.removal == Removal::overwrite_slot;
    bool fixes = false;
    for (std::int32_t k = thread; overwrites && k < at.heads; k += table_threads) {
      const std::int32_t victim = plan.lists_of(at.head_index(k)).gone[0];
      fixes = fixes || at.entry_is_shared(table, (victim + table.first_row) / view.page_size);
    }
    const bool any = !overwrites || rotates;
    for (std::int32_t e = thread; any && e < table.pages_before; e += table_threads) {
      fixes = fixes || at.entry_is_shared(table, e);
    }
    if (__syncthreads_or(fixes) == 0 || (!overwrites && !leaves)) { continue; }
    const bool other_way = table.removal != Removal::stable_pack;
    const PageSpan span{table.extent_before, table.first_row, view.page_size};
    for (std::int32_t e = thread; leaves && e < table.pages_before; e += table_threads) {
      RowKind kind = RowKind::free;
      if (at.entry_is_shared(table, e)) {
        // Rows are counted from inside the page that is partly padding, so it stays, wanted or not.
        bool wanted = e * view.page_size < table.first_row;
        const std::int32_t begin = span.begin(e);
        const std::int32_t end = span.end(e);
        for (std::int32_t k = 0; k < at.heads && !wanted; ++k) {
          const RowLists rows = plan.lists_of(at.head_index(k));
          wanted = rows.gone_below(end) - rows.gone_below(begin) < end - begin;
        }
        kind = wanted ? RowKind::locked : RowKind::dropped;
      }
      plan.sources_of(i)[e] = static_cast<std::int32_t>(kind);
    }
    for (std::int32_t k = thread; other_way && k < at.heads; k += table_threads) {
      plan.tasks[at.head_index(k)].active = 2;
    }
    if (thread == 0) {
      plan.active[i] = leaves ? 1 : 0;
      table.replaced = table.replaced || other_way;
      table.removal = Removal::stable_pack;
      table.live_after = plan.tasks[at.head_index(0)].keep;
      plan.table_plans[i] = table;
    }
  }
}

// A block: one KV head of a table whose rows are chosen again. NaN were counted before.
template <bool KeysInShared>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 1)
    choose_again_kernel(CacheView view, RowScores rows, DevicePlan plan, SelectBounds bounds) {
  KVTRIM_SHARED(SelectShared, shared, );
  KVTRIM_DYNAMIC_SHARED(std::uint32_t, keys);
  const std::int32_t heads = plan.heads_a_table();
  for (std::int64_t i = blockIdx.x; i < plan.heads(); i += gridDim.x) {
    const std::int64_t table = i / heads;
    const SelectTask task = plan.tasks[i];
    if (plan.active[table] == 0 || task.active == 0) { continue; }
    const std::int32_t first_row = plan.table_plans[table].first_row;
    const std::int32_t* const kinds = plan.sources_of(table);
    std::uint32_t nan = 0;
    const std::int32_t keep = select_entries<KeysInShared>(
        rows, task, bounds, static_cast<int>(i), shared, keys, plan.rows, nan, [&](int e) {
          return static_cast<RowKind>(kinds[(e + first_row) / view.page_size]);
        });
    if (threadIdx.x == 0) { plan.tasks[i].keep = keep; }
  }
}

/// Queues the second choice, behind the first. `leaves`, `rotates`: as `fix_pages_kernel`.
[[nodiscard]] inline cudaError_t choose_again(const CacheView& view,
                                              const RowScores& rows,
                                              const DevicePlan& plan,
                                              const PlanBounds& shape,
                                              bool leaves,
                                              bool rotates,
                                              cudaStream_t stream) noexcept {
  const cudaError_t e = launch(fix_pages_kernel<>,
                               dim3(bounded_grid(plan.all_tables())),
                               dim3(table_threads),
                               0,
                               stream,
                               view,
                               plan,
                               leaves,
                               rotates);
  if (e != cudaSuccess || !leaves) { return e; }
  const SelectBounds bounds = select_bounds(shape);
  const dim3 heads(bounded_grid(plan.heads()));
  const dim3 block(select_threads);
  if (keys_fit(bounds)) {
    return launch(choose_again_kernel<true>,
                  heads,
                  block,
                  key_bytes(bounds),
                  stream,
                  view,
                  rows,
                  plan,
                  bounds);
  }
  return launch(choose_again_kernel<false>, heads, block, 16, stream, view, rows, plan, bounds);
}

}  // namespace kvtrim::cuda::detail
