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
#include <kvtrim/cuda/evict/detail/references.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_tables.cuh>

#include <cstdint>

namespace kvtrim::cuda {

namespace detail {

// A block: one table. The last one knows where the pages that became free belong.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    references_kernel(CacheView view, DevicePlan plan, DeviceTables out) {
  KVTRIM_SHARED(ReferenceShared, shared, );
  if (plan.control->go == 0) {
    const bool first = blockIdx.x == 0 && threadIdx.x == 0;
    if (first && out.freed_count != nullptr) { *out.freed_count = 0; }
    return;
  }
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    drop_references(view, plan, i, plan.table_plans[i], out, shared);
  }
  if (last_block(&plan.control->arrived, &shared.last)) { count_free_pages(plan, out, shared); }
}

// A block: one table. `changes`: how many its counters are told of, one, or two if `apply` raised none.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    commit_tables_kernel(CacheView view, DevicePlan plan, DeviceTables out, unsigned changes) {
  KVTRIM_SHARED(ReferenceShared, shared, );
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
    list_free_pages(plan, i, table, out, shared);
    if (threadIdx.x == 0) {
      if (view.generations != nullptr) { view.generations[i] += changes; }
      if (out.lengths != nullptr) { out.lengths[view.length_rows(s, l, h)] = table.live_after; }
      if (out.last_page_len != nullptr) {
        const std::int32_t live = table.live_after;
        out.last_page_len[row] = live == 0 ? 0 : (live - 1) % view.page_size + 1;
      }
      if (view.states != nullptr) {
        state.live_rows = table.live_after;
        state.append_row = table.append_row;
        state.ordered = table.ordered_after;
        if (plan.control->positions == PositionMode::in_cache) {
          state.next_rope_position = table.live_after;
        }
        state.steps = 0;
        state.rows_at_eviction = table.live_after;
        state.applied = false;
        state.generation += changes;
        view.states[i] = state;
      }
    }
    __syncthreads();
  }
}

/// Whether the engine's arrays are what `commit` writes for such a view.
[[nodiscard]] inline bool tables_fit(const CacheView& view, const DeviceTables& out) noexcept {
  return (view.table.indptr == nullptr) == (out.indptr == nullptr) &&
         (out.indptr == nullptr || csr_fits(view)) && out.ids != nullptr &&
         (view.last_page_len == nullptr || out.last_page_len != nullptr) &&
         (view.lengths == nullptr || out.lengths != nullptr) &&
         (out.free.ids == nullptr) == (out.free.count == nullptr) && out.free.capacity >= 0;
}

}  // namespace detail

/// Stores the tables, lengths and states of an applied plan (entries that stay keep their flag bits), and drops the references of
/// the pages it releases.
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
  if (plan.report == nullptr || !detail::fits(view, workspace.shape) || !tables_fit(view, out)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) { return cudaSuccess; }
  const dim3 threads(table_threads);
  const dim3 tables(bounded_grid(plan.all_tables()));
  cudaError_t e = launch(compare_kernel<>,
                         tables,
                         threads,
                         0,
                         stream,
                         view,
                         plan,
                         view_mark(view),
                         ComparePass::commit);
  if (e == cudaSuccess) {
    e = launch(gate_kernel<>,
               dim3(1),
               threads,
               0,
               stream,
               view,
               plan,
               view_mark(view),
               ComparePass::commit,
               PositionMode::keep);
  }
  if (e == cudaSuccess && out.indptr != nullptr) {
    e = launch(csr_starts_kernel<>, dim3(1), threads, 0, stream, view, plan, out.indptr);
  }
  if (e == cudaSuccess) {
    e = launch(references_kernel<>, tables, threads, 0, stream, view, plan, out);
  }
  if (e != cudaSuccess) { return e; }
  e = launch(commit_tables_kernel<>, tables, threads, 0, stream, view, plan, out, 1U);
  if (e != cudaSuccess || out.indptr == nullptr) { return e; }
  e = launch(csr_gather_kernel<>, tables, threads, 0, stream, view, plan, out.ids, out.indptr);
  if (e != cudaSuccess) { return e; }
  return launch(csr_scatter_kernel<>, tables, threads, 0, stream, view, plan, out.ids, out.indptr);
}

}  // namespace kvtrim::cuda
