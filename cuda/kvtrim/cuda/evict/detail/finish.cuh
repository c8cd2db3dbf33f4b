// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which sequences are refused, the totals of a plan, and where each table's share of the common lists begins: the host's
// `stage::finish`, for each sequence by itself. The last block of the launch that closes tables does it; its work is bounded
// by the number of tables. A sequence that is refused evicts nothing, and lists nothing that was half made.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/close.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/rotation.cuh>

#include <cstdint>

namespace kvtrim::cuda {

/// How to make a device plan.
struct DevicePlanOptions {
  Removal removal = Removal::automatic;  ///< `automatic`: the policy's own
  bool out_of_place =
      false;  ///< `stable_pack` into spare pages: shared pages are not written, all old ones are released
  /// device: free pages, taken from the front, out of place and by `SharedPages::copy`; that one wants the caller's own: in no
  /// table, none twice, none held by another (`bad_options`). Null: none
  const std::int32_t* spare_pages = nullptr;
  const std::int32_t* spare_count = nullptr;       ///< device, [1]: how many there are
  ReservedPages reserved = ReservedPages::follow;  ///< what becomes of `CacheView::reserved_pages`
  DeviceRotation rotation{};                       ///< position mode; `apply` must be told the same
  /// What happens to pages that must not be written, as on the host. Out of place none is written, and this is not looked at.
  SharedPages shared = SharedPages::leave;

  /// Whether spare pages must be the caller's own.
  [[nodiscard]] KVTRIM_HOST_DEVICE bool checks_spares() const noexcept {
    return shared == SharedPages::copy && !out_of_place && spare_pages != nullptr &&
           spare_count != nullptr;
  }
  /// Whether shared pages of `view` may be replaced.
  [[nodiscard]] KVTRIM_HOST_DEVICE bool copies(const CacheView& view) const noexcept {
    return shared == SharedPages::copy && !out_of_place && !view.writable.all();
  }
  /// Whether rows may go into spare pages.
  [[nodiscard]] KVTRIM_HOST_DEVICE bool takes_spares(const CacheView& view) const noexcept {
    return out_of_place || copies(view);
  }
};

namespace detail {

/// What the launch that closes tables is told.
struct FinishInput {
  CloseInput close{};
  DevicePlanOptions options{};
  bool goes_on = false;  // moves and commits follow, with nothing in between
};

struct FinishShared {
  BlockScan<table_threads, std::int32_t> counts;
  BlockScan<table_threads, unsigned long long> totals;
  unsigned long long first[phases];  // fault of each phase: place, status
  std::int32_t last;
};

/// Sum over the threads of a block.
KVTRIM_DEVICE std::int64_t total_of(std::int64_t mine, FinishShared& shared) {
  return static_cast<std::int64_t>(block_sum(static_cast<unsigned long long>(mine), shared.totals));
}

/// Says of each sequence whether it is refused, and returns how many are; all threads get the answer. `report` gets the status,
/// and the place of the first fault.
KVTRIM_DEVICE std::int32_t refuse_sequences(const DevicePlan& plan,
                                            bool any_evicts,
                                            FinishShared& shared,
                                            Status& all,
                                            DeviceReport& report) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread < phases) { shared.first[thread] = no_fault; }
  __syncthreads();
  std::int32_t refused = 0;
  for (std::int32_t s = thread; s <= plan.sequences; s += table_threads) {
    DeviceRefusal mine;
    for (int phase = 0; phase < phases; ++phase) {
      const unsigned long long fault = plan.faults[std::int64_t{s} * phases + phase];
      if (fault == no_fault || (phase == phase_entries && !any_evicts)) { continue; }
      const auto table = static_cast<std::int32_t>(fault >> 8U);
      const auto status = static_cast<Status>(fault & 0xFFU);
      // Lengths and entries are checked table by table, everything else sequence by sequence; what concerns all comes first.
      const std::int64_t place = phase == phase_length || phase == phase_entries
                                     ? std::int64_t{table} * plan.sequences + s
                                     : std::int64_t{s} * plan.tables + table;
      atomicMin(&shared.first[phase],
                static_cast<unsigned long long>(s == plan.sequences ? 0 : place + 1) << 8U |
                    (fault & 0xFFU));
      if (mine.status == Status::ok) { mine = {status, table}; }
    }
    if (s < plan.sequences) {
      plan.refusals[s] = mine;
      refused += mine.status != Status::ok ? 1 : 0;
    }
  }
  refused = block_sum(refused, shared.counts);
  const unsigned long long* const common =
      plan.faults + static_cast<std::int64_t>(plan.sequences) * phases;
  all = Status::ok;
  for (int phase = phases - 1; phase >= 0; --phase) {
    if (common[phase] != no_fault) { all = static_cast<Status>(common[phase] & 0xFFU); }
    const unsigned long long first = shared.first[phase];
    if (first == no_fault) { continue; }
    report.status = static_cast<Status>(first & 0xFFU);
    const auto place = static_cast<std::int64_t>(first >> 8U) - 1;
    const bool by_table = phase == phase_length || phase == phase_entries;
    report.first_refused = static_cast<std::int32_t>(place < 0  ? -1
                                                     : by_table ? place % plan.sequences
                                                                : place / plan.tables);
    report.first_table = static_cast<std::int32_t>(place < 0  ? -1
                                                   : by_table ? place / plan.sequences
                                                              : place % plan.tables);
  }
  __syncthreads();
  return refused;
}

/// Refuses all: a plan of nothing.
KVTRIM_DEVICE void refuse_all(const DevicePlan& plan, Status all, const DeviceReport& report) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t i = thread; i < plan.all_tables(); i += table_threads) {
    plan.table_plans[i] = {};
  }
  for (std::int32_t s = thread; s < plan.sequences; s += table_threads) {
    if (plan.refusals[s].status == Status::ok) { plan.refusals[s] = {all, -1}; }
  }
  if (thread == 0) {
    *plan.report = report;
    plan.report->refused = plan.sequences;
    plan.control->status = report.status;
    plan.control->all = all;
    plan.control->evicting = 0;
  }
}

// One block. Before the launch that checks tables: nobody has claimed a spare page yet.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads) clear_spares_kernel(CacheView view,
                                                                        DevicePlan plan,
                                                                        const std::int32_t* spares,
                                                                        const std::int32_t* count) {
  for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x); k < *count; k += table_threads) {
    for (std::int32_t pool = 0; pool < plan.pools; ++pool) {
      if (spares[k] < 0 || spares[k] >= view.pages) { continue; }
      store_any(&plan.owners[pool * plan.pool_pages + spares[k]], no_fault);
    }
  }
}

/// Whether spare pages are the caller's own: the host's `are_spare`. For the whole last block. A page that may be written and that
/// a table names has been claimed.
KVTRIM_DEVICE bool are_spare(const CacheView& view,
                             const DevicePlan& plan,
                             const std::int32_t* spares,
                             std::int32_t count) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t layers = view.writable.layer_stride == 0 ? 1 : view.layers;
  const std::int32_t heads = view.writable.head_stride == 0 ? 1 : view.kv_heads;
  bool bad = false;
  for (std::int32_t k = thread; k < count; k += table_threads) {
    const PageId p{spares[k]};
    if (raw(p) < 0 || raw(p) >= view.pages) {
      bad = true;
      continue;
    }
    for (std::int32_t i = 0; !view.writable.all() && i < layers * heads; ++i) {
      bad = bad || !view.writable(p, LayerId{i / heads}, HeadId{i % heads});
    }
    for (std::int32_t pool = 0; pool < plan.pools; ++pool) {
      bad = bad || plan.owners[pool * plan.pool_pages + raw(p)] != no_fault;
    }
  }
  if (__syncthreads_or(bad) != 0) { return false; }
  const auto claim_of = [](std::int32_t k) { return static_cast<unsigned long long>(k); };
  for (std::int32_t k = thread; k < count; k += table_threads) {
    store_any(&plan.owners[spares[k]], claim_of(k));
  }
  __syncthreads();
  for (std::int32_t k = thread; k < count; k += table_threads) {
    bad = bad || plan.owners[spares[k]] != claim_of(k);  // listed twice
  }
  return __syncthreads_or(bad) == 0;
}

/// For the whole last block.
KVTRIM_DEVICE void finish_plan(const CacheView& view,
                               const DevicePlan& plan,
                               const FinishInput& input,
                               FinishShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const DevicePlanOptions& options = input.options;
  bool any = false;
  for (std::int64_t i = thread; i < plan.all_tables(); i += table_threads) {
    any = any || plan.table_tiles[i] != 0;  // as it was opened
  }
  any = __syncthreads_or(any) != 0;
  const bool given = options.spare_pages != nullptr && options.spare_count != nullptr;
  const std::int32_t there = given && *options.spare_count > 0 ? *options.spare_count : 0;
  if (any && options.checks_spares()) {
    if (!are_spare(view, plan, options.spare_pages, there) && thread == 0) {
      note_fault_of_all(plan, phase_close, Status::bad_options);
    }
    __syncthreads();
  }
  DeviceReport report;
  Status all = Status::ok;
  report.refused = refuse_sequences(plan, any, shared, all, report);
  // Compressed rows close up together: where one cannot be read, none moves.
  if (view.table.indptr != nullptr && report.refused > 0 && all == Status::ok) {
    all = report.status;
  }
  const auto goes = [&](std::int64_t i) {
    return plan.table_plans[i].evicts && plan.refusals[i / plan.tables].status == Status::ok;
  };
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  if (options.takes_spares(view) && all == Status::ok) {
    std::int32_t spares = 0;
    for (std::int64_t base = 0; base < plan.all_tables(); base += table_threads) {
      const std::int64_t i = base + thread;
      const bool in = i < plan.all_tables() && goes(i);
      spares += block_sum(in ? plan.table_plans[i].spare_pages * each : 0, shared.counts);
    }
    report.spares_needed = spares;
    bool outside = false;
    if (spares > there) {
      all = Status::out_of_pages;
    } else {
      for (std::int32_t k = thread; k < spares; k += table_threads) {
        outside = outside || options.spare_pages[k] < 0 || options.spare_pages[k] >= view.pages;
      }
    }
    if (__syncthreads_or(outside) != 0) { all = Status::page_out_of_range; }
    if (all != Status::ok && usable(report.status)) { report.status = all; }
  }
  if (all != Status::ok) {
    refuse_all(plan, all, report);
    return;
  }
  // Released ids of all tables, one list; spare pages of each; tiles of the moves that go through lists; and the totals.
  const std::int64_t heads = plan.heads_a_table();
  std::int32_t evicting = 0;
  std::int32_t released = 0;
  std::int32_t spare = 0;
  std::int32_t tiles = 0;
  bool over = false;
  for (std::int64_t base = 0; base < plan.all_tables(); base += table_threads) {
    const std::int64_t i = base + thread;
    const bool in = i < plan.all_tables();
    TablePlan table;
    TableTotals totals;
    bool evicts = false;
    if (in) {
      const bool refused = plan.refusals[i / plan.tables].status != Status::ok;
      const bool opened = plan.table_tiles[i] != 0;  // rows were ranked, even if all stay
      if (opened && !refused) { totals = plan.totals[i]; }
      if (refused) {
        plan.table_plans[i] = {};
      } else {
        table = plan.table_plans[i];
      }
      evicts = table.evicts;
    }
    std::int32_t here = 0;
    const std::int32_t first =
        released + block_sum_before(evicts ? table.released : 0, shared.counts, here);
    released += here;
    const std::int32_t first_spare =
        spare + block_sum_before(evicts ? table.spare_pages * each : 0, shared.counts, here);
    spare += here;
    const std::int32_t first_tile = tiles + block_sum_before(totals.tiles, shared.counts, here);
    tiles += here;
    if (!in) { continue; }
    plan.table_tiles[i] = first_tile;
    over = over || table.status == Status::over_budget;
    report.kept += table.live_after * heads;
    report.nan_count += totals.nan_count;
    if (!evicts) { continue; }
    ++evicting;
    report.evicted += (table.live_before - table.live_after) * heads;
    report.bytes_moved += totals.bytes_moved;
    plan.list_starts[2 * i] = first;
    plan.list_starts[2 * i + 1] = first_spare;
  }
  evicting = block_sum(evicting, shared.counts);
  report.kept = total_of(report.kept, shared);
  report.evicted = total_of(report.evicted, shared);
  report.bytes_moved = total_of(report.bytes_moved, shared);
  report.nan_count = total_of(report.nan_count, shared);
  report.released = released;
  over = __syncthreads_or(over) != 0;
  if (report.status == Status::ok && over) { report.status = Status::over_budget; }
  if (thread == 0) {
    PlanControl& control = *plan.control;
    plan.table_tiles[plan.all_tables()] = tiles;
    *plan.report = report;
    control.status = report.status;
    control.evicting = evicting;
    if (input.goes_on) {
      control.go = evicting > 0 ? 1 : 0;
      control.stage = DeviceStage::committed;
    }
  }
}

// A block: one table at a time; the last block finishes the plan.
struct CloseFinishShared {
  CloseShared close;
  FinishShared finish;
};
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    close_kernel(CacheView view, DevicePlan plan, FinishInput input) {
  KVTRIM_SHARED(CloseFinishShared, shared, );
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const ClosingTable at = closing_table(view, plan, i, input.close, shared.close);
    TablePlan table = plan.table_plans[i];
    __syncthreads();  // all threads have read what thread 0 writes below
    if (!table.evicts || failed_before(plan, at.s, phase_close)) { continue; }
    close_table(at, agrees_with_other_tables(at, table), table);
  }
  if (last_block(&plan.control->arrived, &shared.finish.last)) {
    finish_plan(view, plan, input, shared.finish);
  }
}

struct ListShared {
  BlockScan<table_threads, std::int32_t> ranks;
};

// A block: one table. Its released ids go into the common list.
KVTRIM_DEVICE void list_released(const DevicePlan& plan, std::int64_t i, const TablePlan& table) {
  const std::int32_t* const list = plan.released_rows + 2 * std::int64_t{plan.first_entry(i)};
  std::int32_t* const released = plan.released + plan.list_starts[2 * i];
  for (auto k = static_cast<std::int32_t>(threadIdx.x); k < table.released; k += table_threads) {
    released[k] = list[k];
  }
}
// Its spare pages are taken from the common ones, for the entries that had none before.
KVTRIM_DEVICE void take_spares(const CacheView& view,
                               const DevicePlan& plan,
                               std::int64_t i,
                               const TablePlan& table,
                               const std::int32_t* spare_pages,
                               ListShared& shared) {
  if (table.spare_pages == 0) { return; }
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  const std::int32_t* const spares = spare_pages + plan.list_starts[2 * i + 1];
  const std::int32_t* const sources = plan.sources_of(i);
  std::int32_t* const k_pages = plan.pages_of(i);
  std::int32_t taken = 0;
  for (std::int32_t base = 0; base < table.pages_after; base += table_threads) {
    const std::int32_t e = base + static_cast<std::int32_t>(threadIdx.x);
    const bool takes = e < table.pages_after && sources[e] < 0;
    std::int32_t here = 0;
    const std::int32_t k = taken + block_rank(takes, shared.ranks, here);
    taken += here;
    if (!takes) { continue; }
    k_pages[e] = spares[k * each];
    k_pages[plan.entries + e] = spares[k * each + each - 1];
  }
}

// A block: one table.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    lists_kernel(CacheView view, DevicePlan plan, const std::int32_t* spare_pages) {
  KVTRIM_SHARED(ListShared, shared, );
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const TablePlan table = plan.table_plans[i];
    if (!table.evicts) { continue; }
    list_released(plan, i, table);
    take_spares(view, plan, i, table, spare_pages, shared);
  }
}

}  // namespace detail

}  // namespace kvtrim::cuda
