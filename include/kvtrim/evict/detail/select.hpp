// SPDX-License-Identifier: Apache-2.0
#pragma once

// Third stage of a plan: which rows, or which pages, stay.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/evict/detail/open.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>
#include <kvtrim/evict/detail/score.hpp>
#include <kvtrim/score/page_scores.hpp>
#include <kvtrim/select/choose_rows.hpp>
#include <kvtrim/select/pages.hpp>
#include <kvtrim/select/protection.hpp>
#include <kvtrim/select/victim.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail::stage {

// One row too many: the lowest candidate. False where there is none.
[[nodiscard]] inline bool select_victim(const PlanDraft& draft,
                                        const HeadRef& head,
                                        const Demand& demand,
                                        std::span<const float> scores,
                                        SelectScratch& scratch) noexcept {
  const auto live = static_cast<std::int32_t>(scores.size());
  const CandidateRange range = candidates(demand.protection, live);
  if (range.count() < 1) { return false; }
  const SequenceState state = head.state();
  Int32View positions;
  if (!state.ordered) {
    positions = head.positions();
    for (std::int32_t r = 0; positions == nullptr && r < live; ++r) {
      scratch.rank_of[static_cast<std::size_t>(r)] = raw(head.position(r));
    }
    if (positions == nullptr) { positions = Int32View(scratch.rank_of.data()); }
  }
  const Victim victim = lowest_row(scores, positions, range, state.next_position, scratch.order);
  scratch.nan += victim.nan_count;
  draft.plan.head(head) = {.evicted = 1, .victim = victim.row};
  draft.plan.evicted(head)[0] = head.position(victim.row);
  return true;
}

// The best rows by their scores, `first_stage` of them before `rescore()` (-1: all). Where rows are chosen again, what the
// flags of the table's entries say comes before scores.
template <class Rescore>
void select_rows(const PlanDraft& draft,
                 const HeadRef& head,
                 const Demand& demand,
                 std::span<const float> scores,
                 SelectScratch& scratch,
                 std::int32_t first_stage,
                 const Rescore& rescore) noexcept {
  const auto index = [](std::int32_t i) { return static_cast<std::size_t>(i); };
  const LiveRows rows(head);
  const std::int32_t live = rows.count();
  if (!rows.ordered()) { rows.order(scratch.order.first(index(live))); }
  const auto row_of = [&](std::int32_t rank) {
    return rows.row(rows.ordered() ? rank : scratch.order[index(rank)]);
  };
  const bool again = draft.chosen_again(head.sequence, head.table());
  const auto flags = draft.entries(head.sequence, head.table());
  const auto kind_of = [&](std::int32_t rank) {
    return again ? static_cast<RowKind>(flags[draft.entry_of(head.sequence, row_of(rank))])
                 : RowKind::free;
  };
  const auto score_of = [&](std::int32_t rank) { return scores[index(row_of(rank))]; };
  const auto& keep = scratch.rows.keep;
  const std::int64_t nan = choose_rows(live,
                                       candidates(demand.protection, live),
                                       demand.keep,
                                       kind_of,
                                       score_of,
                                       first_stage,
                                       rescore,
                                       scratch.rows);
  scratch.nan += again ? 0 : nan;  // none is counted twice

  // Kept rows ascending, their ranks, and the positions of the others.
  HeadPlan& plan = draft.plan.head(head);
  std::int32_t* const list = draft.plan.rows(head);
  plan = {};
  plan.has_ranks = rows.ordered() ? 0 : 1;
  std::fill_n(scratch.rank_of.begin(), rows.ordered() ? 0 : rows.extent(), -1);
  for (std::int32_t rank = 0; rank < live; ++rank) {
    if (keep[index(rank)] == 0) { continue; }
    if (rows.ordered()) {
      list[plan.kept] = row_of(rank);
    } else {
      scratch.rank_of[index(row_of(rank))] = plan.kept;
    }
    ++plan.kept;
  }
  Position* const evicted = draft.plan.evicted(head);
  for (std::int32_t rank = 0; rank < live; ++rank) {
    if (keep[index(rank)] != 0) { continue; }
    evicted[plan.evicted++] = head.position(row_of(rank));
  }
  if (rows.ordered()) { return; }
  const auto ranks =
      PlanWriter::writable(draft.plan.view().ranks(head.sequence, head.layer, head.head));
  std::int32_t n = 0;
  for (std::int32_t r = 0; r < rows.extent(); ++r) {
    if (scratch.rank_of[index(r)] < 0) { continue; }
    list[n] = r;
    ranks[index(n++)] = scratch.rank_of[index(r)];
  }
}

// Scores of one head, and its rows or its pages' scores by them.
template <Policy P>
void select_head(const P& policy,
                 const Observation& obs,
                 const PlanDraft& draft,
                 const HeadRef& head,
                 SelectScratch& scratch) noexcept {
  if (pages_given<P>(obs)) { return; }
  const TablePlan& plan = draft.plan.table(head.sequence, head.table());
  const Demand demand = demand_of(policy, obs, draft, head);
  const auto scores = scores_of(policy, obs, draft, head, demand, scratch);
  if constexpr (PagePolicy<P>) {
    const CandidateRange range = candidates(demand.protection, plan.live_before);
    const auto first = scores.begin() + range.begin;
    scratch.nan += std::count_if(first, first + range.count(), [](float x) { return is_nan(x); });
    // A page's rows are sorted in place: the scores are not needed any more.
    page_scores(policy.page_scores(),
                scores,
                plan.first_row,
                head.view.page_size,
                scores,
                draft.page_scores(head));
  } else if constexpr (TwoStagePolicy<P>) {
    const auto rescore = [&] {
      const auto factors = scratch.factors.first(scores.size());
      FactorScorer<P>(policy.second_stage()).score(head, obs, scratch.scorer, factors);
      for (std::size_t r = 0; r < scores.size(); ++r) {
        scores[r] = policy.rescaled(scores[r], factors[r]);
      }
    };
    select_rows(draft, head, demand, scores, scratch, policy.first_stage(demand.keep), rescore);
  } else if (plan.removal != Removal::overwrite_slot ||
             !select_victim(draft, head, demand, scores, scratch)) {
    select_rows(draft, head, demand, scores, scratch, -1, [] {});
  }
}

// One set of pages for all tables of a unit, from the sum (or maximum) of their heads' page scores.
template <PagePolicy P>
[[nodiscard]] Status select_pages(const P& policy,
                                  const Observation& obs,
                                  const PlanDraft& draft) noexcept {
  const CacheView& view = draft.view;
  const PageUnit unit = policy.unit();
  const PageScoreParams params = policy.page_scores();
  const bool exact = params.sums == Sums::exact && params.heads != Reduction::max;
  Status status = Status::ok;
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    const std::int32_t u = unit_of(unit, view, t);
    if (t > 0 && unit_of(unit, view, t - 1) == u) { return; }  // not the first table of its unit
    const TablePlan& first = draft.plan.table(s, t);
    const Demand demand = demand_of(policy, obs, draft, draft.first_head(s, t));
    const auto sum = draft.page_scores(draft.first_head(s, t));
    std::int32_t end = t;
    for (; end < view.tables_per_sequence() && unit_of(unit, view, end) == u; ++end) {
      const TablePlan& plan = draft.plan.table(s, end);
      if (plan.evicts != first.evicts || plan.live_before != first.live_before ||
          demand_of(policy, obs, draft, draft.first_head(s, end)).keep != demand.keep) {
        status = Status::unequal_budget;
        return;
      }
      if (exact || !first.evicts || pages_given<P>(obs)) { continue; }
      draft.for_each_head(s, end, [&](const HeadRef& head) {
        const auto scores = draft.page_scores(head);
        if (scores.data() != sum.data()) { add_page_scores(params, scores, sum); }
      });
    }
    if (!first.evicts) { return; }
    for (std::size_t p = 0; exact && !pages_given<P>(obs) && p < sum.size(); ++p) {
      std::uint64_t units = 0;
      for (std::int32_t other = t; other < end; ++other) {
        draft.for_each_head(s, other, [&](const HeadRef& head) {
          units += exact_units(draft.page_scores(head)[p]);
        });
      }
      sum[p] = exact_mean(units, 1);  // the first head's, which is not needed any more
    }
    const PageSpan span{first.live_before, first.first_row, view.page_size};
    const auto scores = pages_given<P>(obs) ? obs.page_scores.of(s, u, first.pages_before) : sum;
    const RowScratch& scratch = draft.memory.workers.front().rows;
    const auto flags = draft.entries(s, t);
    const Status chosen = choose_pages(
        span, scores, demand.keep, demand.protection, scratch.keys, scratch.picked, flags);
    for (std::int32_t other = t; other < end; ++other) {
      if (other != t) { std::ranges::copy(flags, draft.entries(s, other).begin()); }
      if (chosen != Status::ok) { draft.plan.table(s, other).status = chosen; }
    }
  });
  return status;
}

// Whether a table's one victim per head can make room for the next append: pages that are written must be this sequence's
// own. Names the slot of that append.
[[nodiscard]] inline bool can_overwrite(const PlanDraft& draft,
                                        SequenceId s,
                                        std::int32_t t,
                                        bool any_shared,
                                        std::int32_t window) noexcept {
  const HeadRef first = draft.first_head(s, t);
  TablePlan& plan = draft.plan.table(s, t);
  const auto shared_row = [&](std::int32_t row) {
    return any_shared &&
           draft.shared_entry(s, t, static_cast<std::int32_t>(draft.entry_of(s, row)));
  };
  const std::int32_t first_victim = draft.plan.head(first).victim;
  bool possible = !(any_shared && draft.rotates());
  bool same = true;
  draft.for_each_head(s, t, [&](const HeadRef& head) {
    const std::int32_t victim = draft.plan.head(head).victim;
    possible = possible && victim >= 0 && !shared_row(victim);
    same = same && victim == first_victim;
  });
  if (!possible) { return false; }
  plan.append_row = first_victim;
  if (same) { return true; }
  // The row that just left the window, if it can be found: so the window's slots stay a ring.
  const std::int32_t r = LiveRows(first).row_at(Position{first.state().next_position - 1 - window});
  if (r >= 0 && !shared_row(r)) { plan.append_row = r; }
  return true;
}

// Whether the table's rows must be chosen again: with those of shared pages fixed, or as none can be overwritten.
[[nodiscard]] inline bool must_choose_again(const PlanDraft& draft,
                                            SequenceId s,
                                            std::int32_t t,
                                            std::int32_t window) noexcept {
  TablePlan& plan = draft.plan.table(s, t);
  if (!plan.evicts || plan.removal == Removal::drop_pages) { return false; }
  const bool overwrites = plan.removal == Removal::overwrite_slot;
  const bool leaves = draft.options.shared == SharedPages::leave;
  bool any_shared = false;
  for (std::int32_t e = 0; e < plan.pages_before; ++e) {
    any_shared = any_shared || draft.shared_entry(s, t, e);
  }
  if (overwrites ? can_overwrite(draft, s, t, any_shared, window) : !any_shared) { return false; }
  if (!overwrites && !leaves) { return false; }  // copied: the first choice stands
  plan.replaced = plan.replaced || plan.removal != Removal::stable_pack;
  plan.removal = Removal::stable_pack;
  const auto flags = draft.entries(s, t);
  for (std::int32_t e = 0; e < plan.pages_before; ++e) {
    // Rows are counted from inside the page that is partly padding, so it stays, wanted or not.
    const bool padded = e * draft.view.page_size < plan.first_row;
    const RowKind shared = padded ? RowKind::locked : RowKind::dropped;
    const bool fixed = leaves && draft.shared_entry(s, t, e);
    flags[static_cast<std::size_t>(e)] = static_cast<std::uint8_t>(fixed ? shared : RowKind::free);
  }
  const auto want = [&](std::int32_t row) {
    std::uint8_t& flag = flags[draft.entry_of(s, row)];
    if (static_cast<RowKind>(flag) == RowKind::dropped) {
      flag = static_cast<std::uint8_t>(RowKind::locked);
    }
  };
  draft.for_each_head(s, t, [&](const HeadRef& head) {
    const std::int32_t victim = draft.plan.head(head).victim;
    for (std::int32_t r = 0; victim >= 0 && r < plan.extent_before; ++r) {
      if (r != victim) { want(r); }
    }
    for (const std::int32_t r : draft.plan.kept_list(head)) { want(r); }
  });
  draft.memory.second_pass[draft.table_index(s, t)] = 1;
  return true;
}

/// Chooses the rows or pages that stay in every table from which something goes.
template <Policy P, Executor E>
[[nodiscard]] Status select(const P& policy,
                            const Observation& obs,
                            const PlanDraft& draft,
                            const E& executor) noexcept {
  draft.for_each_item(executor, [&](const HeadRef& head, SelectScratch& scratch) {
    const TablePlan& table = draft.plan.table(head.sequence, head.table());
    if (table.evicts && !(by_position<P> && table.removal == Removal::drop_pages)) {
      select_head(policy, obs, draft, head, scratch);
    }
  });
  if constexpr (PagePolicy<P>) {
    if (const Status status = select_pages(policy, obs, draft); !usable(status)) { return status; }
  }
  bool again = false;
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    const TablePlan& table = draft.plan.table(s, t);
    const std::int32_t window = table.evicts && table.removal == Removal::overwrite_slot
                                    ? demand_of(policy, obs, draft, draft.first_head(s, t)).window
                                    : 0;
    again = must_choose_again(draft, s, t, window) || again;
  });
  if (!again) { return Status::ok; }
  draft.for_each_item(executor, [&](const HeadRef& head, SelectScratch& scratch) {
    if (draft.chosen_again(head.sequence, head.table())) {
      select_head(policy, obs, draft, head, scratch);
    }
  });
  return Status::ok;
}

}  // namespace kvtrim::detail::stage
