// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tables in compressed rows: a row that became shorter moves all behind it, so all of them are written at once. The
// specification is the host's `CsrTables`. Entries go through the workspace, where a plan's own lists are not needed any
// more: no entry is overwritten before it is read, and no block waits for another.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// What the host can see of compressed rows: one id for K and V, no padding, and the rows are those of the view's tables, each
/// once, in whatever order.
[[nodiscard]] inline bool csr_fits(const CacheView& view) noexcept {
  const RowMap& rows = view.table.rows;
  struct Axis {
    std::int64_t count;
    std::int64_t stride;
  };
  Axis axes[] = {{view.sequences, rows.sequence},
                 {view.scope == TableScope::group ? 1 : view.layers, rows.layer},
                 {view.scope == TableScope::head ? view.kv_heads : 1, rows.head}};
  std::int64_t next = 1;  // stride of the next outer axis
  for (int outer = 0; outer < 3; ++outer) {
    bool found = false;
    for (Axis& axis : axes) {
      if (found || axis.count <= 1 || axis.stride != next) { continue; }
      next *= axis.count;
      axis.count = 1;
      found = true;
    }
  }
  const bool all = axes[0].count <= 1 && axes[1].count <= 1 && axes[2].count <= 1;
  return all && view.table.v_offset == 0 && view.first_rows == nullptr;
}

/// Row of table `i` of the plan.
KVTRIM_DEVICE std::int64_t csr_row(const CacheView& view, const DevicePlan& plan, std::int64_t i) {
  const auto t = static_cast<std::int32_t>(i % plan.tables);
  const SequenceId s{static_cast<std::int32_t>(i / plan.tables)};
  return view.table.rows(s, view.first_layer(t), view.first_head(t));
}

/// Where rows will begin, [tables + 1], and their entries meanwhile, [2 * entries]: of a plan whose rows are moved, neither
/// tiles nor released rows are looked at again.
KVTRIM_DEVICE std::int32_t* csr_starts(const DevicePlan& plan) {
  return plan.table_tiles;
}
KVTRIM_DEVICE std::int32_t* csr_entries(const DevicePlan& plan) {
  return plan.released_rows;
}

struct CsrShared {
  BlockScan<table_threads, long long> sums;
};

// One block, O(tables): where rows will begin. Rows that fell, or grew beyond the workspace, since the plan was made are not
// written: the tables that evict are torn.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    csr_starts_kernel(CacheView view, DevicePlan plan, const std::int32_t* indptr) {
  KVTRIM_SHARED(CsrShared, shared, );
  if (plan.control->go == 0) { return; }
  const auto thread = static_cast<std::int64_t>(threadIdx.x);
  std::int32_t* const counts = plan.active;  // as nothing is selected any more
  bool bad = false;
  for (std::int64_t i = thread; i < plan.all_tables(); i += table_threads) {
    const std::int64_t r = csr_row(view, plan, i);
    const TablePlan& table = plan.table_plans[i];
    const long long now = static_cast<long long>(indptr[r + 1]) - indptr[r];
    const long long then = table.evicts ? table.pages_after + table.reserved_after : now;
    bad = bad || now < then || then < 0 || then > 2 * plan.entries;
    counts[r] = static_cast<std::int32_t>(then);
  }
  bad = __syncthreads_or(bad) != 0;
  std::int32_t* const starts = csr_starts(plan);
  const std::int32_t base = indptr[0];
  if (thread == 0) { starts[0] = base; }
  long long before = 0;
  for (std::int64_t first = 0; first < plan.all_tables() && !bad; first += table_threads) {
    const std::int64_t r = first + thread;
    const long long mine = r < plan.all_tables() ? counts[r] : 0;
    long long here = 0;
    const long long upto = before + block_sum_before(mine, shared.sums, here) + mine;
    if (r < plan.all_tables()) { starts[r + 1] = static_cast<std::int32_t>(base + upto); }
    before += here;
  }
  if (thread == 0 && (bad || before > 2 * plan.entries)) {
    plan.control->go = 0;
    DeviceReport report;
    report.status = Status::torn;
    *plan.report = report;
  }
}

// A block: one table. Its entries go into the workspace.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads) csr_gather_kernel(CacheView view,
                                                                      DevicePlan plan,
                                                                      const std::int32_t* ids,
                                                                      const std::int32_t* indptr) {
  if (plan.control->go == 0) { return; }
  const std::int32_t* const starts = csr_starts(plan);
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const std::int64_t r = csr_row(view, plan, i);
    const std::int32_t* const from = ids + indptr[r];
    std::int32_t* const to = csr_entries(plan) + (starts[r] - starts[0]);
    const std::int32_t count = starts[r + 1] - starts[r];
    for (auto e = static_cast<std::int32_t>(threadIdx.x); e < count; e += table_threads) {
      to[e] = from[e];
    }
  }
}

// A block: one table. Its entries come back, to where its row begins now.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    csr_scatter_kernel(CacheView view, DevicePlan plan, std::int32_t* ids, std::int32_t* indptr) {
  if (plan.control->go == 0) { return; }
  const std::int32_t* const starts = csr_starts(plan);
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const std::int64_t r = csr_row(view, plan, i);
    const std::int32_t* const from = csr_entries(plan) + (starts[r] - starts[0]);
    const std::int32_t count = starts[r + 1] - starts[r];
    for (auto e = static_cast<std::int32_t>(threadIdx.x); e < count; e += table_threads) {
      ids[starts[r] + e] = from[e];
    }
    if (threadIdx.x == 0) { indptr[r + 1] = starts[r + 1]; }
  }
}

}  // namespace kvtrim::cuda::detail
