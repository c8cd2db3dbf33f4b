// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan is made in stages: check, open, score, select, close, finish. Everything that can fail fails in one of them,
// before a byte of the cache is written.

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/detail/close.hpp>
#include <kvtrim/evict/detail/follow.hpp>
#include <kvtrim/evict/detail/open.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>
#include <kvtrim/evict/detail/score.hpp>
#include <kvtrim/evict/detail/select.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

namespace detail::stage {

/// The last check, and the totals: the plan as it is handed out. One that is refused evicts nothing, and lists nothing that
/// was half made.
[[nodiscard]] inline PlanRef finish(const PlanDraft& draft, Status status) noexcept {
  if (draft.memory.header == nullptr) { return PlanRef(status); }
  PlanHeader& header = draft.header();
  if (usable(status) && !common_planes_agree(draft.plan.view(), draft.view)) {
    status = Status::planes_disagree;
  }
  if (usable(status)) {
    if (const Status moves = moves_follow(draft.plan.view(), draft.view); moves != Status::ok) {
      status = moves;
    }
  }
  header.status = status;
  if (usable(status)) {
    for (const SelectScratch& worker : draft.memory.workers) { header.nan_count += worker.nan; }
    draft.for_each_table([&](SequenceId s, std::int32_t t) {
      TablePlan& table = draft.plan.table(s, t);
      header.kept_rows += static_cast<std::int64_t>(table.live_before) *
                          draft.view.layers_per_table() * draft.view.heads_per_table();
      if (!table.evicts) { return; }
      table.generation = table_generation(draft.view, s, t);
      draft.for_each_head(s, t, [&](const HeadRef& at) {
        const HeadPlan& head = draft.plan.head(at);
        header.evicted_rows += head.evicted;
        header.kept_rows -= head.evicted;
        if (head.moved == 0) { return; }
        header.bytes_moved += head.moved * moved_row_bytes(draft.view, at.layer, at.head);
      });
    });
  } else {
    draft.for_each_table([&](SequenceId s, std::int32_t t) {
      draft.plan.table(s, t) = {};
      draft.for_each_head(s, t, [&](const HeadRef& head) { draft.plan.head(head) = {}; });
    });
  }
  return PlanRef(header);
}

}  // namespace detail::stage

/// Bytes of workspace that `plan` needs for views and observations within `shape`. Pure, monotone in every field. A number
/// beyond 2^62 where the extents' product is beyond 64 bits.
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy, const PlanShape& shape) noexcept {
  if (!detail::is_possible(shape)) { return static_cast<std::size_t>(too_large); }
  Arena arena;
  static_cast<void>(detail::take_check(arena, shape.pages));
  static_cast<void>(
      detail::PlanMemory::take(arena, shape, detail::plan_needs(policy, shape, false)));
  return arena.bytes();
}

/// Says what an eviction by `policy` does to every sequence of `view`. Nothing is changed.
///
/// \param view       the cache as it is; `check_layout(view)` passed once
/// \param obs        what the policy's scorer needs, budgets at run time, or ready-made scores
/// \param workspace  [plan_workspace_bytes(policy, plan_shape(view, obs, executor.workers()))]; the plan lies in it
/// \param options    way of removal, shared pages, position mode
/// \returns the plan. Its status: `ok`; `over_budget` (valid; protected or shared rows exceed the budget and stay);
///   otherwise nothing is planned: a fault of the tables, `bad_observation`, `bad_options`, `workspace_too_small`,
///   `unequal_budget`, `rows_unordered`, `shared_page`, `out_of_pages` (`spares_needed()` says how many),
///   `planes_disagree`, `chunk_too_long`
/// \par Ties
/// the lower position is kept. NaN is the lowest class, counted in `nan_count()`
/// \par Complexity
/// the scorer's, and O(live rows) per KV head (O(live rows log live rows) where slot order is not position order); O(table
/// entries) when nothing goes; no allocation
/// \par Thread-safety
/// const; work items are (sequence, layer, KV head)
template <Policy P, Executor E = Serial>
[[nodiscard]] PlanRef plan(const P& policy,
                           const CacheView& view,
                           const Observation& obs,
                           std::span<std::byte> workspace,
                           const PlanOptions& options = {},
                           const E& executor = {}) noexcept {
  namespace stage = detail::stage;
  static_assert(!PagePolicy<P> || (!AdaptivePolicy<P> && !TwoStagePolicy<P>),
                "a policy of pages neither shares a budget nor has a second stage");
  detail::PlanDraft draft{view, options};
  Status status = stage::check(policy, obs, workspace, executor.workers(), draft);
  if (usable(status)) { status = stage::open(policy, obs, draft, executor); }
  if (usable(status) && draft.evicts()) {  // most steps evict nothing, and pay for no head
    stage::score(policy, obs, draft, executor);
    status = stage::select(policy, obs, draft, executor);
  }
  if (usable(status)) { status = stage::close(policy, obs, draft); }
  return stage::finish(draft, status);
}

}  // namespace kvtrim
