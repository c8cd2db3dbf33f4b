// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes what an applied plan says into the engine's tables on the device: the counterpart of kvtrim::commit with
// `DenseTables` or `CsrTables`. An engine that keeps its tables elsewhere reads `DevicePlan` instead.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/csr.cuh>
#include <kvtrim/cuda/evict/detail/fits.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstdint>

namespace kvtrim::cuda {

/// The engine's own arrays on the device, writable.
struct DeviceTables {
  std::int32_t* ids = nullptr;      ///< the same array as `view.table.ids`
  std::int32_t* lengths = nullptr;  ///< the same array as `view.lengths`; null: none
  std::int32_t* ref_counts =
      nullptr;  ///< the same array as `view.writable.ref_counts`; null: every released page is free
  std::int32_t* freed =
      nullptr;  ///< receives the pages without any owner left, in the order of `released`
  std::int32_t* freed_count = nullptr;  ///< [1]: how many
  std::int32_t* indptr = nullptr;       ///< compressed rows: the same array as `view.table.indptr`
  std::int32_t* last_page_len = nullptr;  ///< the same array as `view.last_page_len`; null: none
};

namespace detail {

// A block: one table.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    commit_tables_kernel(CacheView view, DevicePlan plan, DeviceTables out) {
  if (plan.control->go == 0) { return; }
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const TablePlan table = plan.table_plans[i];
    if (!table.evicts) { continue; }
    const auto t = static_cast<std::int32_t>(i % plan.tables);
    const SequenceId s{static_cast<std::int32_t>(i / plan.tables)};
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    SequenceState state = view.state(s, l, h);
    __syncthreads();  // thread 0 writes what `state` reads
    const std::int64_t row = view.table.rows(s, l, h);
    std::int32_t* const k =
        out.ids + (out.indptr != nullptr ? out.indptr[row] : row * view.table.row_stride);
    const std::int32_t* const k_pages = plan.pages_of(i);
    const std::int32_t* const sources = plan.sources_of(i);
    // An entry that stays keeps its flag bits. None moves up, so a tile that was read may be overwritten.
    const std::int32_t before = table.pages_before + table.reserved_before;
    for (std::int32_t base = 0; base < before; base += table_threads) {
      const std::int32_t e = base + static_cast<std::int32_t>(threadIdx.x);
      const bool used = e < table.pages_after + table.reserved_after;
      const std::int32_t source = used ? sources[e] : -1;
      const auto entry_of = [&](std::int64_t offset, std::int32_t id) {
        const std::int32_t old = source >= 0 ? k[source + offset] : view.table.null_id;
        return source >= 0 && raw(view.table.page(old)) == id ? old
               : id == raw(null_page)                         ? view.table.null_id
                                                              : id;
      };
      const std::int32_t k_entry = entry_of(0, used ? k_pages[e] : raw(null_page));
      const std::int32_t v_entry =
          entry_of(view.table.v_offset, used ? k_pages[plan.entries + e] : raw(null_page));
      __syncthreads();
      if (e < before) {
        if (view.table.v_offset != 0) { k[e + view.table.v_offset] = v_entry; }
        k[e] = k_entry;
      }
      __syncthreads();
    }
    // References of the pages that leave; the last one frees a page.
    const std::int32_t first = plan.list_starts[2 * i];
    for (std::int32_t r = static_cast<std::int32_t>(threadIdx.x); r < table.released;
         r += table_threads) {
      bool free = true;
      if (out.ref_counts != nullptr) {
        std::int32_t& count =
            out.ref_counts[view.writable.index(PageId{plan.released[first + r]}, l, h)];
        const std::int32_t held = atomicAdd(&count, -1);
        free = held == 1;
        if (held <= 0) { atomicAdd(&count, 1); }  // nobody's: not returned again
      }
      plan.released_free[first + r] = free ? 1 : 0;
    }
    if (threadIdx.x == 0) {
      if (view.generations != nullptr) { ++view.generations[i]; }
      if (out.lengths != nullptr) { out.lengths[view.length_rows(s, l, h)] = table.live_after; }
      if (out.last_page_len != nullptr) {
        const std::int32_t live = table.live_after;
        out.last_page_len[row] = live == 0 ? 0 : (live - 1) % view.page_size + 1;
      }
      if (view.states != nullptr) {
        state.live_rows = table.live_after;
        state.append_row = table.append_row;
        state.ordered = table.ordered_after;
        state.steps = 0;
        state.rows_at_eviction = table.live_after;
        state.applied = false;
        ++state.generation;
        view.states[i] = state;
      }
    }
    __syncthreads();
  }
}

struct ReleaseShared {
  BlockScan<table_threads, std::int32_t> ranks;
};

// One block: the pages that became free, in the order of `released`.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    release_kernel(DevicePlan plan, DeviceTables out) {
  KVTRIM_SHARED(ReleaseShared, shared, );
  const std::int32_t listed = plan.control->go == 0 ? 0 : plan.control->listed;
  std::int32_t freed = 0;
  for (std::int32_t base = 0; base < listed; base += table_threads) {
    const std::int32_t i = base + static_cast<std::int32_t>(threadIdx.x);
    const bool free = i < listed && plan.released_free[i] != 0;
    std::int32_t here = 0;
    const std::int32_t to = freed + block_rank(free, shared.ranks, here);
    if (free && out.freed != nullptr) { out.freed[to] = plan.released[i]; }
    freed += here;
  }
  if (out.freed_count != nullptr && threadIdx.x == 0) { *out.freed_count = freed; }
}

}  // namespace detail

/// Stores the tables, lengths and states of an applied plan (entries that stay keep their flag bits), and drops the references of the pages it releases.
///
/// Nothing is written if the plan was not applied or was committed before: then the report's status is `not_applied` or
/// `stale_plan`, and `freed_count` is 0. A sequence that ended since (it has no rows, or its state is no longer `applied`) is
/// left out; if all did, the status is `stale_plan`. A table that was changed since its rows were moved is `torn`: it is lost,
/// the others are committed.
///
/// \param workspace  as given to `plan`
/// \param view       as given to `plan`. Compressed rows are those of the view's tables, each once, with one id for K and V and
///   no padding: all are closed up, those of tables that stay too
/// \param out        the engine's arrays
/// \returns `cudaErrorInvalidValue` before any launch for a missing array, or other compressed rows; otherwise the launches'
///   status. Compressed rows that were changed since the rows were moved so that they descend, or have more than twice the
///   entries of the plan's bounds, are `torn`: no table is written
/// \par Complexity
/// O(table entries)
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing. Freed pages may be handed on only behind an event
/// recorded after this
[[nodiscard]] inline cudaError_t commit(const PlanWorkspace& workspace,
                                        const CacheView& view,
                                        const DeviceTables& out,
                                        cudaStream_t stream) noexcept {
  using namespace detail;
  const DevicePlan plan = device_plan(workspace);
  if (plan.report == nullptr || !detail::fits(view, workspace.shape) ||
      (view.table.indptr == nullptr) != (out.indptr == nullptr) ||
      (out.indptr != nullptr && !csr_fits(view)) || out.ids == nullptr ||
      (view.last_page_len != nullptr && out.last_page_len == nullptr) ||
      (view.lengths != nullptr && out.lengths == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) { return cudaSuccess; }
  const dim3 threads(table_threads);
  const dim3 tables(bounded_grid(plan.all_tables()));
  cudaError_t e = launch(check_kernel<>, tables, threads, 0, stream, view, plan, CheckPass::commit);
  if (e != cudaSuccess) { return e; }
  e = launch(gate_kernel<>, dim3(1), threads, 0, stream, view, plan, CheckPass::commit);
  if (e != cudaSuccess) { return e; }
  if (out.indptr != nullptr) {
    e = launch(csr_starts_kernel<>, dim3(1), threads, 0, stream, view, plan, out.indptr);
    if (e != cudaSuccess) { return e; }
  }
  e = launch(commit_tables_kernel<>, tables, threads, 0, stream, view, plan, out);
  if (e != cudaSuccess) { return e; }
  if (out.indptr != nullptr) {
    e = launch(csr_gather_kernel<>, tables, threads, 0, stream, view, plan, out.ids, out.indptr);
    if (e != cudaSuccess) { return e; }
    e = launch(csr_scatter_kernel<>, tables, threads, 0, stream, view, plan, out.ids, out.indptr);
    if (e != cudaSuccess) { return e; }
  }
  return launch(release_kernel<>, dim3(1), threads, 0, stream, plan, out);
}

}  // namespace kvtrim::cuda
