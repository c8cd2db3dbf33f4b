// SPDX-License-Identifier: Apache-2.0
#pragma once

// The totals of a plan, and where each table's share of the common lists begins: the host's `stage::finish`. A plan that is
// refused evicts nothing, and lists nothing that was half made.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>

#include <cstdint>

namespace kvtrim::cuda {

/// How to make a device plan.
struct DevicePlanOptions {
  Removal removal = Removal::automatic;  ///< `automatic`: the policy's own
  bool out_of_place =
      false;  ///< `stable_pack` into spare pages: shared pages are not written, all old ones are released
  const std::int32_t* spare_pages = nullptr;       ///< device: free pages, taken from the front
  const std::int32_t* spare_count = nullptr;       ///< device, [1]: how many there are
  ReservedPages reserved = ReservedPages::follow;  ///< what becomes of `CacheView::reserved_pages`
};

namespace detail {

struct FinishShared {
  BlockScan<select_threads, std::int32_t> counts;
  BlockScan<select_threads, unsigned long long> totals;
};

// One block: totals, and where each table's share of the common lists begins.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 1)
    finish_kernel(CacheView view, DevicePlan plan, DevicePlanOptions options) {
  KVTRIM_SHARED(FinishShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  PlanControl& control = *plan.control;
  std::int32_t evicting = 0;
  for (std::int64_t base = 0; base < plan.all_tables(); base += select_threads) {
    const std::int64_t i = base + thread;
    evicting += __syncthreads_count(i < plan.all_tables() && plan.table_plans[i].evicts);
  }
  unsigned long long fault = no_fault;
  for (int phase = phase_close; phase >= 0; --phase) {
    const bool counts = phase != phase_entries || evicting > 0;
    if (counts && control.faults[phase] != no_fault) { fault = control.faults[phase]; }
  }
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  std::int32_t spares = 0;
  if (fault == no_fault && options.out_of_place) {
    for (std::int64_t base = 0; base < plan.all_tables(); base += select_threads) {
      const std::int64_t i = base + thread;
      const bool in = i < plan.all_tables() && plan.table_plans[i].evicts;
      const std::int32_t mine = in ? plan.table_plans[i].spare_pages * each : 0;
      spares += block_sum(mine, shared.counts);
    }
    const std::int32_t there = options.spare_count != nullptr ? *options.spare_count : 0;
    bool bad = spares > there;
    if (!bad) {
      bool outside = false;
      for (std::int32_t k = thread; k < spares; k += select_threads) {
        outside = outside || options.spare_pages[k] < 0 || options.spare_pages[k] >= view.pages;
      }
      if (__syncthreads_or(outside) != 0) {
        fault = static_cast<unsigned long long>(Status::page_out_of_range);
      }
    } else {
      fault = static_cast<unsigned long long>(Status::out_of_pages);
    }
  }
  if (fault != no_fault) {
    for (std::int64_t i = thread; i < plan.all_tables(); i += select_threads) {
      plan.table_plans[i] = {};
    }
    for (std::int64_t i = thread; i < plan.heads(); i += select_threads) {
      plan.head_plans[i] = {};
    }
    for (std::int64_t i = thread; i <= plan.heads(); i += select_threads) {
      plan.tile_starts[i] = 0;
    }
    if (thread == 0) {
      DeviceReport report;
      report.status = static_cast<Status>(fault & 0xFFU);
      report.spares_needed = spares;
      *plan.report = report;
      control.status = report.status;
      control.evicting = 0;
    }
    return;
  }
  // Released ids of all tables, one list; spare pages of each.
  std::int32_t released = 0;
  std::int32_t spare = 0;
  bool over = false;
  for (std::int64_t base = 0; base < plan.all_tables(); base += select_threads) {
    const std::int64_t i = base + thread;
    const bool in = i < plan.all_tables();
    TablePlan table;
    if (in) { table = plan.table_plans[i]; }
    std::int32_t here = 0;
    const std::int32_t first =
        released + block_sum_before(table.evicts ? table.released : 0, shared.counts, here);
    released += here;
    const std::int32_t first_spare =
        spare + block_sum_before(table.evicts ? table.spare_pages * each : 0, shared.counts, here);
    spare += here;
    if (!in) { continue; }
    over = over || table.status == Status::over_budget;
    if (!table.evicts) { continue; }
    plan.list_starts[2 * i] = first;
    plan.list_starts[2 * i + 1] = first_spare;
  }
  // Tiles of the moves that go through lists, and the totals.
  std::int64_t kept = 0;
  std::int64_t evicted = 0;
  std::int64_t bytes = 0;
  std::int64_t nan = 0;
  std::int32_t tiles = 0;
  for (std::int64_t base = 0; base < plan.heads(); base += select_threads) {
    const std::int64_t i = base + thread;
    std::int32_t mine = 0;
    if (i < plan.heads()) {
      const auto [s, l, h] = plan.head_at(i);
      const TablePlan table = plan.table_plans[plan.table_index(s, view.table_of(l, h))];
      const HeadPlan head = plan.head_plans[i];
      const SelectTask task = plan.tasks[i];
      kept += table.live_before - head.evicted;
      evicted += head.evicted;
      bytes += head.moved * moved_row_bytes(view, l, h);
      if (task.active != 0) { nan += plan.nan_counts[i]; }
      const bool by_list =
          table.evicts && (table.removal == Removal::fill_holes ||
                           table.removal == Removal::overwrite_slot || table.spare_pages > 0);
      mine = by_list ? static_cast<std::int32_t>((head.moved + move_tile - 1) / move_tile) : 0;
    }
    std::int32_t here = 0;
    const std::int32_t before = tiles + block_sum_before(mine, shared.counts, here);
    tiles += here;
    if (i < plan.heads()) { plan.tile_starts[i] = before; }
  }
  const auto total = [&](std::int64_t mine) {
    const auto sum = block_sum(static_cast<unsigned long long>(mine), shared.totals);
    return static_cast<std::int64_t>(sum);
  };
  DeviceReport report;
  report.kept = total(kept);
  report.evicted = total(evicted);
  report.bytes_moved = total(bytes);
  report.nan_count = total(nan);
  report.status = __syncthreads_or(over) != 0 ? Status::over_budget : Status::ok;
  report.released = released;
  report.spares_needed = spares;
  if (thread == 0) {
    plan.tile_starts[plan.heads()] = tiles;
    *plan.report = report;
    control.status = report.status;
    control.evicting = evicting;
    control.listed = released;
  }
}

// A block: one table. Its released ids go into the common list; its spare pages are taken from the common ones.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    lists_kernel(CacheView view, DevicePlan plan, DevicePlanOptions options) {
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const TablePlan table = plan.table_plans[i];
    if (!table.evicts) { continue; }
    const std::int32_t* const list = plan.released_rows + 2 * plan.first_entry(i);
    std::int32_t* const released = plan.released + plan.list_starts[2 * i];
    for (std::int32_t k = thread; k < table.released; k += table_threads) { released[k] = list[k]; }
    const std::int32_t* const spares = options.spare_pages + plan.list_starts[2 * i + 1];
    std::int32_t* const k_pages = plan.pages_of(i) + table.first_row / view.page_size;
    for (std::int32_t k = thread; k < table.spare_pages; k += table_threads) {
      k_pages[k] = spares[k * each];
      k_pages[plan.entries + k] = spares[k * each + each - 1];
    }
  }
}

}  // namespace detail

}  // namespace kvtrim::cuda
