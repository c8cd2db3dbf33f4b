// SPDX-License-Identifier: Apache-2.0
#pragma once

// First stage of a plan: what each table is to do, as far as it does not depend on which rows are best.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>
#include <kvtrim/evict/detail/score.hpp>
#include <kvtrim/select/protection.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail::stage {

/// Whether lengths and states are sound, what the policy needs to see is there, and the workspace is large enough.
template <Policy P>
[[nodiscard]] Status check(const P& policy,
                           const Observation& obs,
                           std::span<std::byte> workspace,
                           std::int32_t workers,
                           PlanDraft& draft) noexcept {
  const CacheView& view = draft.view;
  Arena arena(workspace);
  draft.check_scratch = take_check(arena, view.pages);
  if (!arena.ok()) { return Status::workspace_too_small; }
  if (const ViewFault fault = check_lengths(view); fault.status != Status::ok) {
    return fault.status;
  }
  if (!view.is_of_model()) { return Status::bad_observation; }
  if constexpr (PagePolicy<P>) {  // sets of their own for layers that share a table
    if (policy.unit() == PageUnit::per_layer && view.scope == TableScope::group &&
        view.layers > 1) {
      return Status::unequal_budget;
    }
  }
  const bool rows = rows_given<P>(obs);
  const bool pages = pages_given<P>(obs);
  Status status = Status::ok;
  if constexpr (TwoStagePolicy<P>) {
    status = FactorScorer<P>(policy.second_stage()).check(view, obs);
  }
  if (status == Status::ok && !pages) {
    status = rows ? ExternalScorer{}.check(view, obs)
                  : PolicyScorer<P>(policy.scorer()).check(view, obs);
  }
  if (status != Status::ok) { return status; }
  const PlanShape shape = plan_shape(view, obs, workers);
  if (!is_possible(shape)) { return Status::workspace_too_small; }
  draft.memory = PlanMemory::take(arena, shape, plan_needs(policy, shape, rows || pages));
  if (!arena.ok()) { return Status::workspace_too_small; }
  PlanHeader& header = draft.header();
  header.separate_values = view.table.v_offset != 0;
  header.positions =
      draft.options.rerotator == nullptr ? PositionMode::keep : draft.options.rerotator->mode();
  draft.plan = PlanWriter(header);
  return Status::ok;
}

// What the policy is told of a head.
[[nodiscard]] inline DemandInput demand_input(const HeadRef& head,
                                              const Observation& obs) noexcept {
  DemandInput in;
  in.state = head.state();
  in.live = head.live_rows();
  in.page_size = head.view.page_size;
  in.first_row = head.view.first_row(head.sequence);
  in.budget = obs.budget(head.sequence, head.layer, head.head);
  in.layer = head.view.model_layer(head.layer);
  in.layers = head.view.layers_of_model();
  return in;
}

// What it demands, protected rows raised to the least that stays; of heads that share a budget, their share.
template <Policy P>
[[nodiscard]] Demand demand_of(const P& policy,
                               const Observation& obs,
                               const PlanDraft& draft,
                               const HeadRef& head) noexcept {
  const DemandInput in = demand_input(head, obs);
  Demand demand = policy.demand(in);
  constexpr bool shares = AdaptivePolicy<P>;
  const std::int32_t share = shares ? draft.memory.budgets[draft.head_index(head)] : -1;
  if ((shares ? share : demand.keep) >= in.live) {
    demand.keep = in.live;
    return demand;
  }
  const std::int32_t fixed = in.live - candidates(demand.protection, in.live).count();
  if (demand.keep < fixed) {
    demand.keep = fixed;
    if (demand.status == Status::ok) { demand.status = Status::over_budget; }
  }
  if (shares) { demand.keep = share; }
  return demand;
}

// `row_key`s of the rows that compete; `order` has room for all rows.
inline void candidate_keys(const HeadRef& head,
                           std::span<const float> scores,
                           const CandidateRange& range,
                           std::span<std::int32_t> order,
                           std::span<std::uint64_t> keys) noexcept {
  const LiveRows rows(head);
  rows.order(order.first(static_cast<std::size_t>(rows.count())));
  for (std::int32_t i = range.begin; i < range.end; ++i) {
    const std::int32_t r = rows.row(order[static_cast<std::size_t>(i)]);
    keys[static_cast<std::size_t>(i - range.begin)] =
        row_key(scores[static_cast<std::size_t>(r)], head.position(r));
  }
}

/// Scores the heads that compete for a common budget, and writes how many rows each of them may keep.
template <AdaptivePolicy P, Executor E>
[[nodiscard]] Status share(const P& policy,
                           const Observation& obs,
                           const PlanDraft& draft,
                           const E& executor) noexcept {
  const CacheView& view = draft.view;
  const PlanMemory& memory = draft.memory;
  // Heads of so many layers, from a multiple of them on, share.
  const std::int32_t layers = policy.adaptive().over == AdaptiveOver::all_heads ? view.layers : 1;
  const auto members = memory.sharing.first(static_cast<std::size_t>(layers * view.kv_heads));
  const auto for_each_member = [&](SequenceId s, std::int32_t first_layer, auto&& f) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      const auto item = static_cast<std::int32_t>(i);
      f(i,
        HeadRef{
            view, s, LayerId{first_layer + item / view.kv_heads}, HeadId{item % view.kv_heads}});
    }
  };
  const auto longest_of = [&](SequenceId s, std::int32_t first_layer) {
    std::int32_t longest = 0;
    for_each_member(s, first_layer, [&](std::size_t, const HeadRef& head) {
      longest = std::max(longest, head.live_rows());
    });
    return longest;
  };
  // What a head would keep if it did not share. The same for short and long heads: the longest one is asked for.
  const auto equal_share = [&](const HeadRef& head, std::int32_t longest) {
    DemandInput in = demand_input(head, obs);
    in.live = longest;
    return policy.demand(in).keep;
  };
  const auto exceeds = [&](SequenceId s, std::int32_t first_layer) {
    const std::int32_t longest = longest_of(s, first_layer);
    std::int64_t excess = 0;
    for_each_member(s, first_layer, [&](std::size_t, const HeadRef& head) {
      excess += head.live_rows() - equal_share(head, longest);
    });
    return excess > 0;
  };
  const auto for_each_group = [&](auto&& f) {
    for (std::int32_t item = 0; item < view.sequences * (view.layers / layers); ++item) {
      f(SequenceId{item / (view.layers / layers)}, item % (view.layers / layers) * layers);
    }
  };
  bool any = false;
  Status now =
      Status::ok;  // rows that are not written, or have moved, would decide what other heads keep
  for_each_group([&](SequenceId s, std::int32_t first_layer) {
    if (!exceeds(s, first_layer)) { return; }
    any = true;
    for_each_member(s, first_layer, [&](std::size_t, const HeadRef& head) {
      const SequenceState state = head.state();
      now = state.open ? Status::step_open : state.applied ? Status::eviction_open : now;
    });
  });
  if (!usable(now)) { return now; }
  if (any) {
    const Status status = check_entries(view, draft.check_scratch).status;
    if (status != Status::ok) { return status; }
    save_scores(policy, obs, draft, executor, [&](const HeadRef& head) {
      return exceeds(head.sequence, raw(head.layer) / layers * layers);
    });
  }
  for_each_group([&](SequenceId s, std::int32_t first_layer) {
    const std::int32_t longest = longest_of(s, first_layer);
    const bool competes = exceeds(s, first_layer);
    for_each_member(s, first_layer, [&](std::size_t i, const HeadRef& head) {
      members[i].rows = head.live_rows();
      if (!competes) { return; }
      const Protection protection = policy.demand(demand_input(head, obs)).protection;
      const CandidateRange range = candidates(protection, members[i].rows);
      const auto keys =
          memory.sharing_keys.subspan(i * static_cast<std::size_t>(draft.header().max_rows),
                                      static_cast<std::size_t>(range.count()));
      candidate_keys(head, saved_scores<P>(draft, head), range, memory.workers.front().order, keys);
      members[i] = {keys, members[i].rows - range.count(), equal_share(head, longest), 0};
    });
    if (competes) { adaptive_rows(policy.adaptive(), members, memory.adaptive); }
    for_each_member(s, first_layer, [&](std::size_t i, const HeadRef& head) {
      memory.budgets[draft.head_index(head)] = members[i].rows;
    });
  });
  return Status::ok;
}

// The way of removal of a table that evicts: the one asked for, or `stable_pack` where that cannot be. False if the options
// name one that would lose an order which nothing records.
template <Policy P>
[[nodiscard]] bool choose_removal(const P& policy,
                                  const PlanDraft& draft,
                                  const SequenceState& state,
                                  const Demand& demand,
                                  TablePlan& plan) noexcept {
  const bool named = draft.options.removal != Removal::automatic;
  const Removal wanted = named ? draft.options.removal : policy.removal();
  plan.removal = wanted == Removal::automatic ? Removal::stable_pack : wanted;
  if (!plan.evicts) { return true; }
  bool possible = true;
  if (wanted == Removal::overwrite_slot || wanted == Removal::fill_holes) {
    possible = draft.records_order();
    if (named && !possible) { return false; }
  }
  // Numbers of rows in the last page cannot say that there is a hole.
  if (wanted == Removal::overwrite_slot && draft.view.last_page_len != nullptr) {
    possible = false;
    if (named) { return false; }
  }
  if (wanted == Removal::overwrite_slot) {
    const PositionMode positions = draft.header().positions;
    const bool one_victim = plan.live_before - demand.keep == 1 && state.append_row < 0 &&
                            !TwoStagePolicy<P>;  // the victim is the lowest score
    const bool may_renumber = positions == PositionMode::keep ||
                              (positions == PositionMode::in_cache &&
                               state.next_rope_position == plan.live_before);  // 0..live-1
    possible = possible && one_victim && may_renumber;
  }
  plan.replaced = !possible;
  if (!possible) { plan.removal = Removal::stable_pack; }
  return true;
}

/// Writes what each table is to do: whether anything goes, and by which way of removal. Entries are checked, unless nothing
/// goes.
///
/// \returns the first status that is not usable, with which nothing is planned
template <Policy P, Executor E>
[[nodiscard]] Status open(const P& policy,
                          const Observation& obs,
                          const PlanDraft& draft,
                          const E& executor) noexcept {
  if constexpr (AdaptivePolicy<P>) {
    if (const Status shared = share(policy, obs, draft, executor); !usable(shared)) {
      return shared;
    }
  }
  const CacheView& view = draft.view;
  const PlanOptions& options = draft.options;
  const PositionMode positions = draft.header().positions;
  // A demand depends on the layer; on the head, by its budget alone.
  const bool heads_differ = AdaptivePolicy<P> || obs.budgets != nullptr;
  Status status = Status::ok;
  bool any = false;
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    if (!usable(status)) { return; }
    const HeadRef first = draft.first_head(s, t);
    const SequenceState state = first.state();
    const Demand demand = demand_of(policy, obs, draft, first);
    const bool hole = state.append_row >= 0;
    TablePlan& plan = draft.plan.table(s, t);
    plan.live_before = plan.live_after = first.live_rows();
    plan.extent_before = plan.live_before + (hole ? 1 : 0);
    plan.first_row = view.first_row(s);
    plan.append_row = state.append_row;
    plan.ordered_after = state.ordered;
    plan.pages_before = plan.pages_after =
        plan.live_before == 0 ? 0 : pages_for(plan.extent_before + plan.first_row, view.page_size);
    plan.reserved_before = plan.reserved_after = view.reserved(s, t);
    plan.positions_known = view.knows_positions(s, t);
    plan.status = demand.status;
    plan.evicts = demand.keep < plan.live_before;
    any = any || plan.evicts;
    const bool served = choose_removal(policy, draft, state, demand, plan);
    if (!usable(demand.status)) { status = demand.status; }
    for (std::int32_t l = 0; l < view.layers_per_table(); ++l) {
      for (std::int32_t h = 0; h < (heads_differ ? view.heads_per_table() : 1); ++h) {
        const HeadRef head{view, s, LayerId{raw(first.layer) + l}, HeadId{raw(first.head) + h}};
        if (obs.budget(s, head.layer, head.head) < policy_budget) {
          status = Status::bad_observation;
        }
        const std::int32_t keep = demand_of(policy, obs, draft, head).keep;
        if (std::min(keep, plan.live_before) != std::min(demand.keep, plan.live_before)) {
          status = Status::unequal_budget;
        }
      }
    }
    if (!plan.evicts) { return; }
    if (!served) { status = Status::bad_options; }
    if (state.open) { status = Status::step_open; }
    if (state.applied) { status = Status::eviction_open; }
    // What follows the window are the first rows: they must be the sinks whose keys the rerotator has.
    if (positions == PositionMode::sinks_follow &&
        demand.protection.sinks < options.rerotator->sinks()) {
      status = Status::bad_options;
    }
    if (view.fixed_rows && plan.removal != Removal::drop_pages) { status = Status::bad_options; }
    if (PagePolicy<P> && plan.removal != Removal::drop_pages) { status = Status::bad_options; }
    if (plan.removal == Removal::drop_pages && (!state.ordered || hole)) {
      status = Status::rows_unordered;
    }
  });
  // Whoever shares a budget was scored by its entries, so they are checked.
  if (!AdaptivePolicy<P> && any && usable(status)) {
    status = check_entries(view, draft.check_scratch).status;
  }
  return status;
}

}  // namespace kvtrim::detail::stage
