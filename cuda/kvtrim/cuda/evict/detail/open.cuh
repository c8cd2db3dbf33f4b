// SPDX-License-Identifier: Apache-2.0
#pragma once

// What each table is to do, as far as it does not depend on which rows are best: the host's `stage::open`. Where pages leave
// by position there is nothing to score or to choose: the same launch closes the tables and finishes the plan.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/close.cuh>
#include <kvtrim/cuda/evict/detail/finish.cuh>
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
  PositionMode positions = PositionMode::keep;
  std::int32_t sinks = 0;  // that follow the window

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
                                    const Demand& demand,
                                    TablePlan& table) {
  const std::int32_t keep = demand.keep;
  Status status = Status::ok;
  const bool overwrites = table.removal == Removal::overwrite_slot;
  const bool loses_order = overwrites || table.removal == Removal::fill_holes;
  const bool unrecorded = (loses_order && (view.states == nullptr || !view.positions)) ||
                          (overwrites && view.last_page_len != nullptr);
  if (unrecorded && input.named) { status = Status::bad_options; }
  // Rope positions are 0 to n - 1: rows that are not in order can be renumbered.
  const bool numbered = state.next_rope_position == table.live_before;
  const bool may_renumber = input.positions == PositionMode::keep ||
                            (input.positions == PositionMode::in_cache && numbered);
  if (unrecorded || (overwrites && (table.live_before - keep != 1 || state.append_row >= 0 ||
                                    input.out_of_place || !may_renumber))) {
    table.removal = Removal::stable_pack;
    table.replaced = true;
  }
  if (state.open) { status = Status::step_open; }
  if (state.applied) { status = Status::eviction_open; }
  // What follows the window are the first rows: they must be the sinks whose keys are there.
  if (input.positions == PositionMode::sinks_follow && demand.protection.sinks < input.sinks) {
    status = Status::bad_options;
  }
  if (view.fixed_rows && table.removal != Removal::drop_pages) { status = Status::bad_options; }
  if (input.by_page && table.removal != Removal::drop_pages) { status = Status::bad_options; }
  if (table.removal == Removal::drop_pages && (!state.ordered || state.append_row >= 0)) {
    status = Status::rows_unordered;
  }
  if (input.positions == PositionMode::in_cache && !state.ordered && !numbered) {
    status = Status::rows_unordered;
  }
  return status;
}

/// What is to be chosen in one KV head. `list`: where its rows are listed.
template <Policy P>
KVTRIM_DEVICE SelectTask task_of(const P& policy,
                                 const CacheView& view,
                                 const OpenInput& input,
                                 SequenceId s,
                                 LayerId l,
                                 HeadId h,
                                 std::int64_t list,
                                 std::int64_t scores) {
  const SequenceState state = view.state(s, l, h);
  const std::int32_t live = view.live_rows(s, l, h);
  const Demand demand = demand_of(policy, view, input, s, l, h);
  const CandidateRange range = candidates(demand.protection, live);
  const bool evicts = demand.keep < live;
  SelectTask task;
  task.extent = live + (state.append_row >= 0 ? 1 : 0);
  task.begin = range.begin;
  task.end = range.end;
  task.keep = demand.keep;
  task.hole = state.append_row;
  task.next_position = state.next_position;
  task.ordered = state.ordered || !view.positions ? 1 : 0;
  task.active = !evicts || (input.by_position && input.removal == Removal::drop_pages) ? 0 : 1;
  task.list = list;
  task.scores = scores;
  return task;
}

struct OpenShared {
  BlockScan<table_threads, unsigned long long> sums;
};

/// Why the plan is refused as a whole, and how many entries are before those of this block; all threads get the answer.
struct OpenBlock {
  Status all = Status::ok;
  std::int64_t entries = 0;
};
KVTRIM_DEVICE OpenBlock open_block(const DevicePlan& plan,
                                   const OpenInput& input,
                                   OpenShared& shared) {
  unsigned long long before = 0;
  unsigned long long all = 0;
  bool bad = false;
  bool large = false;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += table_threads) {
    const CheckNote note = plan.notes[b];
    all += static_cast<unsigned long long>(note.entries);
    before += b < blockIdx.x ? static_cast<unsigned long long>(note.entries) : 0;
    bad = bad || note.bad_planes != 0;
    large = large || note.too_long != 0;
  }
  OpenBlock block;
  block.entries = static_cast<std::int64_t>(block_sum(before, shared.sums));
  all = block_sum(all, shared.sums);
  large = __syncthreads_or(large) != 0 || all > static_cast<unsigned long long>(plan.entries);
  bad = __syncthreads_or(bad) != 0;
  if (input.refused != Status::ok) { block.all = input.refused; }
  if (large) { block.all = Status::workspace_too_small; }
  if (bad) { block.all = Status::bad_observation; }
  if (threadIdx.x == 0 && blockIdx.x == 0 && block.all != Status::ok) {
    note_fault_of_all(plan, phase_length, block.all);
  }
  if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) {
    plan.entry_starts[plan.all_tables()] = large ? 0 : static_cast<std::int32_t>(all);
  }
  if (large) { block.entries = -1; }
  return block;
}

/// Opens a table and its heads; whether it evicts and nothing is wrong with its sequence so far. For a whole block.
///
/// \param first    where its entries begin
/// \param entries  how many it has
template <Policy P>
KVTRIM_DEVICE bool open_table(const P& policy,
                              const OpenInput& input,
                              const CheckedTable& at,
                              const DevicePlan& plan,
                              Status all,
                              std::int64_t first,
                              std::int32_t entries,
                              TablePlan& table) {
  const CacheView& view = at.view;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t check = plan.checks[at.index];
  const Status length = checked_length(check);
  const Status ids = checked_entries(check);
  if (thread == 0 && length != Status::ok) { note_fault(plan, phase_length, at.s, at.t, length); }
  if (thread == 0 && ids != Status::ok) { note_fault(plan, phase_entries, at.s, at.t, ids); }
  // The sequence's other tables: what belongs to several of them is not looked at if one cannot be.
  bool sound = all == Status::ok;
  for (std::int32_t t = thread; t < plan.tables; t += table_threads) {
    sound = sound && plan.checks[plan.table_index(at.s, t)] == 0;
  }
  sound = __syncthreads_and(sound) != 0;
  const bool readable = all == Status::ok && length == Status::ok;  // so that a demand can be made
  if (readable) { find_page_twice(at, plan); }
  const std::int32_t heads = plan.heads_a_table();
  const std::int32_t heads_a_layer = view.heads_per_table();
  const Demand demand = readable ? demand_of(policy, view, input, at.s, at.l, at.h) : Demand{};
  const std::int32_t live = readable ? view.live_rows(at.s, at.l, at.h) : 0;
  const bool evicts = demand.keep < live;
  bool bad_budget = false;
  bool unequal = false;
  bool too_many = false;  // rows go for the lists of the workspace
  for (std::int32_t k = thread; k < heads; k += table_threads) {
    const std::int64_t i = at.index * heads + k;
    const LayerId l{raw(at.l) + k / heads_a_layer};
    const HeadId h{raw(at.h) + k % heads_a_layer};
    plan.head_plans[i] = {};
    plan.nan_counts[i] = 0;
    SelectTask task{};
    if (readable) {
      const std::int64_t rows =
          (first * heads + static_cast<std::int64_t>(k) * entries) * plan.page_size;
      const bool all_rows = plan.max_evicted == 0;
      task = task_of(policy, view, input, at.s, l, h, all_rows ? rows : i * plan.max_evicted, rows);
      // A demand depends on the layer; on the head, by its budget alone.
      if (input.budgets != nullptr || k % heads_a_layer == 0) {
        bad_budget = bad_budget || input.budget(at.s, l, h) < -1;
        unequal = unequal || (task.keep < live ? task.keep : live) != (evicts ? demand.keep : live);
      }
      const bool outgrows = task.active != 0 && !input.by_page && !all_rows &&
                            task.extent - task.keep > plan.max_evicted;
      too_many = too_many || outgrows;
      if (!sound || outgrows) { task.active = 0; }
    }
    plan.tasks[i] = task;
  }
  bad_budget = __syncthreads_or(bad_budget) != 0;
  unequal = __syncthreads_or(unequal) != 0;
  too_many = __syncthreads_or(too_many) != 0;
  table = {};
  Status status = Status::ok;
  if (readable) {
    const SequenceState state = view.state(at.s, at.l, at.h);
    const CandidateRange range = candidates(demand.protection, live);
    table.live_before = table.live_after = live;
    table.extent_before = live + (state.append_row >= 0 ? 1 : 0);
    table.first_row = view.first_row(at.s);
    table.append_row = state.append_row;
    table.ordered_after = state.ordered;
    table.pages_before = table.pages_after =
        live == 0 ? 0 : pages_for(table.extent_before + table.first_row, view.page_size);
    table.reserved_before = table.reserved_after = view.reserved(at.s, at.t);
    table.status = demand.status;
    table.evicts = evicts;
    table.removal = input.removal;
    table.positions_known = view.knows_positions(at.s, at.t);
    status = usable(demand.status) ? Status::ok : demand.status;
    if (bad_budget) { status = Status::bad_observation; }
    if (unequal) { status = Status::unequal_budget; }
    if (evicts) {
      if (input.reads_positions && !table.positions_known) { status = Status::bad_observation; }
      const Status chosen = choose_removal(view, input, state, demand, table);
      if (chosen != Status::ok) { status = chosen; }
      // Rank of the row that left the window, for `overwrite_slot`.
      table.shared_kept = demand.window;
    }
    // If every competing row goes, no scores are needed.
    if (thread == 0) {
      plan.active[at.index] = sound && evicts && demand.keep > live - range.count() ? 1 : 0;
    }
  } else if (thread == 0) {
    plan.active[at.index] = 0;
  }
  if (thread == 0) {
    plan.table_plans[at.index] = table;
    plan.table_tiles[at.index] = evicts ? 1 : 0;  // what `finish_plan` asks
    if (status != Status::ok) { note_fault(plan, phase_open, at.s, at.t, status); }
    if (too_many) { note_fault_of_all(plan, phase_open, Status::workspace_too_small); }
  }
  return sound && evicts && status == Status::ok;
}

// A block: some neighbouring tables, the same as in the launch before.
template <Policy P>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    open_kernel(P policy, CacheView view, DevicePlan plan, OpenInput input) {
  KVTRIM_SHARED(OpenShared, shared, );
  OpenBlock block = open_block(plan, input, shared);
  const TableRange range = tables_of_block(plan);
  for (std::int64_t i = range.first; i < range.last; ++i) {
    const std::int32_t entries = plan.entry_starts[i];
    __syncthreads();  // all threads have read what thread 0 writes
    if (threadIdx.x == 0) {
      plan.entry_starts[i] = block.entries < 0 ? 0 : static_cast<std::int32_t>(block.entries);
    }
    const CheckedTable at(view, plan, i);
    TablePlan table;
    open_table(policy, input, at, plan, block.all, block.entries, entries, table);
    if (block.entries >= 0) { block.entries += entries; }
  }
}

struct OpenCloseShared {
  OpenShared open;
  CloseShared close;
  FinishShared finish;
};

/// Whether the tables of a sequence that share sequence planes give up the same pages by position.
template <Policy P>
KVTRIM_DEVICE bool agrees_by_position(const P& policy,
                                      const OpenInput& input,
                                      const CheckedTable& at,
                                      const DevicePlan& plan) {
  const CacheView& view = at.view;
  const SharedPlanes common = shared_planes(view);
  if (!common.heads && !common.layers) { return true; }
  const std::int32_t heads = plan.heads_a_table();
  const std::int32_t heads_a_layer = view.heads_per_table();
  bool agree = true;
  for (auto k = static_cast<std::int32_t>(threadIdx.x); k < heads; k += table_threads) {
    const LayerId l{raw(at.l) + k / heads_a_layer};
    const HeadId h{raw(at.h) + k % heads_a_layer};
    const LayerId l0 = common.layers ? LayerId{0} : l;
    const HeadId h0 = common.heads ? HeadId{0} : h;
    const SelectTask x = task_of(policy, view, input, at.s, l, h, 0, 0);
    const SelectTask y = task_of(policy, view, input, at.s, l0, h0, 0, 0);
    agree = agree && x.extent == y.extent && x.keep == y.keep;
  }
  return __syncthreads_and(agree) != 0;
}

// The same, and the rest of the plan: where pages leave by position, rows are neither scored nor chosen.
template <Policy P>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2) open_and_close_kernel(
    P policy, CacheView view, DevicePlan plan, OpenInput input, FinishInput finishing) {
  KVTRIM_SHARED(OpenCloseShared, shared, );
  OpenBlock block = open_block(plan, input, shared.open);
  const TableRange range = tables_of_block(plan);
  for (std::int64_t i = range.first; i < range.last; ++i) {
    const std::int32_t entries = plan.entry_starts[i];
    __syncthreads();  // all threads have read what thread 0 writes
    if (threadIdx.x == 0) {
      plan.entry_starts[i] = block.entries < 0 ? 0 : static_cast<std::int32_t>(block.entries);
    }
    const CheckedTable at(view, plan, i);
    TablePlan table;
    const bool closes =
        open_table(policy, input, at, plan, block.all, block.entries, entries, table);
    if (block.entries >= 0) { block.entries += entries; }
    __syncthreads();
    if (!closes) { continue; }
    const bool agrees = agrees_by_position(policy, input, at, plan);
    close_table(closing_table(view, plan, i, finishing.close, shared.close), agrees, table);
  }
  if (last_block(&plan.control->arrived, &shared.finish.last)) {
    finish_plan(view, plan, finishing, shared.finish);
  }
}

}  // namespace kvtrim::cuda::detail
