// SPDX-License-Identifier: Apache-2.0
#pragma once

// What each table is to do, as far as it does not depend on which rows are best: the host's `stage::open`.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/select/protection.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

// What the demand of a head depends on besides the view, and what the host knows of the plan.
struct OpenInput {
  const std::int32_t* budgets = nullptr;
  RowMap budget_rows{};
  Removal removal = Removal::stable_pack;
  bool named = false;            // by the options
  bool out_of_place = false;     // into spare pages
  bool by_position = false;      // there are no scores
  bool by_page = false;          // pages are chosen, not rows
  bool reads_positions = false;  // scores depend on positions: none is made where they are unknown
  Status refused = Status::ok;   // what is wrong with policy and view as such

  [[nodiscard]] KVTRIM_DEVICE std::int32_t budget(SequenceId s, LayerId l, HeadId h) const {
    return budgets == nullptr ? -1 : budgets[budget_rows(s, l, h)];
  }
};

template <Policy P>
KVTRIM_DEVICE Demand demand_of(const P& policy,
                               const CacheView& view,
                               const OpenInput& input,
                               SequenceId s,
                               LayerId l,
                               HeadId h) {
  DemandInput in;
  in.state = view.state(s, l, h);
  in.live = view.live_rows(s, l, h);
  in.page_size = view.page_size;
  in.first_row = view.first_row(s);
  in.budget = input.budget(s, l, h);
  in.layer = view.model_layer(l);
  in.layers = view.layers_of_model();
  Demand demand = policy.demand(in);
  if (demand.keep >= in.live) { return demand; }
  const std::int32_t fixed = in.live - candidates(demand.protection, in.live).count();
  if (demand.keep < fixed) {
    demand.keep = fixed;
    if (demand.status == Status::ok) { demand.status = Status::over_budget; }
  }
  return demand;
}

// The way of removal of a table that evicts, and what is wrong with it.
KVTRIM_DEVICE Status choose_removal(const CacheView& view,
                                    const OpenInput& input,
                                    const SequenceState& state,
                                    std::int32_t keep,
                                    TablePlan& table) {
  Status status = Status::ok;
  const bool overwrites = table.removal == Removal::overwrite_slot;
  const bool loses_order = overwrites || table.removal == Removal::fill_holes;
  const bool unrecorded = (loses_order && (view.states == nullptr || !view.positions)) ||
                          (overwrites && view.last_page_len != nullptr);
  if (unrecorded && input.named) { status = Status::bad_options; }
  if (unrecorded || (overwrites && (table.live_before - keep != 1 || state.append_row >= 0 ||
                                    input.out_of_place))) {
    table.removal = Removal::stable_pack;
    table.replaced = true;
  }
  if (view.fixed_rows && table.removal != Removal::drop_pages) { status = Status::bad_options; }
  if (state.open) { status = Status::step_open; }
  if (state.applied) { status = Status::eviction_open; }
  if (input.by_page && table.removal != Removal::drop_pages) { status = Status::bad_options; }
  if (table.removal == Removal::drop_pages && (!state.ordered || state.append_row >= 0)) {
    status = Status::rows_unordered;
  }
  return status;
}

// A thread: one KV head; the first one of a table opens the table too.
template <Policy P>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 1)
    open_kernel(P policy, CacheView view, DevicePlan plan, OpenInput input) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < plan.heads(); i += step) {
    const HeadPlace at = plan.head_at(i);
    const auto [s, l, h] = at;
    const std::int32_t t = view.table_of(l, h);
    const std::int64_t index = plan.table_index(s, t);
    const LayerId l0 = view.first_layer(t);
    const HeadId h0 = view.first_head(t);
    const bool leads = l == l0 && h == h0;
    plan.head_plans[i] = {};
    plan.tasks[i] = {};
    if (failed_before(plan.control, phase_open)) {  // the lengths cannot be trusted
      if (leads) {
        plan.table_plans[index] = {};
        plan.active[index] = 0;
      }
      continue;
    }
    const SequenceState state = view.state(s, l, h);
    const std::int32_t live = view.live_rows(s, l, h);
    const Demand demand = demand_of(policy, view, input, s, l, h);
    const bool evicts = demand.keep < live;
    const CandidateRange range = candidates(demand.protection, live);
    SelectTask task;
    task.extent = live + (state.append_row >= 0 ? 1 : 0);
    task.begin = range.begin;
    task.end = range.end;
    task.keep = demand.keep;
    task.hole = state.append_row;
    task.next_position = state.next_position;
    task.ordered = state.ordered || !view.positions ? 1 : 0;
    task.active = !evicts || (input.by_position && input.removal == Removal::drop_pages) ? 0 : 1;
    task.list = plan.list_of(i);
    task.scores = plan.first_of(i) * plan.page_size;
    const bool too_many = task.active != 0 && !input.by_page && plan.max_evicted > 0 &&
                          task.extent - task.keep > plan.max_evicted;
    if (too_many) { task.active = 0; }
    plan.tasks[i] = task;
    if (!leads) { continue; }
    TablePlan table;
    table.live_before = table.live_after = live;
    table.extent_before = task.extent;
    table.first_row = view.first_row(s);
    table.append_row = state.append_row;
    table.ordered_after = state.ordered;
    table.pages_before = table.pages_after =
        live == 0 ? 0 : pages_for(table.extent_before + table.first_row, view.page_size);
    table.reserved_before = table.reserved_after = view.reserved(s, t);
    table.status = demand.status;
    table.evicts = evicts;
    table.removal = input.removal;
    table.positions_known = view.knows_positions(s, t);
    // A demand depends on the layer; on the head, by its budget alone.
    Status status = usable(demand.status) ? Status::ok : demand.status;
    const std::int32_t heads = input.budgets == nullptr ? 1 : view.heads_per_table();
    for (std::int32_t dl = 0; dl < view.layers_per_table(); ++dl) {
      for (std::int32_t dh = 0; dh < heads; ++dh) {
        const LayerId layer{raw(l0) + dl};
        const HeadId head{raw(h0) + dh};
        if (input.budget(s, layer, head) < -1) { status = Status::bad_observation; }
        const std::int32_t theirs = demand_of(policy, view, input, s, layer, head).keep;
        if ((theirs < live ? theirs : live) != (evicts ? demand.keep : live)) {
          status = Status::unequal_budget;
        }
      }
    }
    if (evicts) {
      if (input.reads_positions && !table.positions_known) { status = Status::bad_observation; }
      const Status chosen = choose_removal(view, input, state, demand.keep, table);
      if (chosen != Status::ok) { status = chosen; }
      // Rank of the row that left the window, for `overwrite_slot`.
      table.shared_kept = demand.window;
    }
    if (input.refused != Status::ok) { status = input.refused; }
    if (too_many && status == Status::ok) { status = Status::workspace_too_small; }
    plan.table_plans[index] = table;
    // If every competing row goes, no scores are needed.
    const bool sound = plan.control->faults[phase_entries] == no_fault;
    plan.active[index] = sound && evicts && demand.keep > live - range.count() ? 1 : 0;
    if (status != Status::ok) { note_fault(plan.control, phase_open, index, status); }
  }
}

}  // namespace kvtrim::cuda::detail
