// SPDX-License-Identifier: Apache-2.0
#pragma once

// From kept rows, or kept pages, to tables: which pages a table has, what leaves it, what moves, and whether that may be.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/evict/detail/closing.hpp>
#include <kvtrim/evict/detail/open.hpp>
#include <kvtrim/evict/detail/own_pages.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>
#include <kvtrim/select/pages.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail::stage {

// Closes the table up to the entries whose flag is set. Its rows must be in position order.
[[nodiscard]] inline Status drop_entries(const Closing& c, std::span<std::uint8_t> flags) noexcept {
  TablePlan& plan = c.plan;
  const auto stays = [&](std::int32_t e) { return flags[static_cast<std::size_t>(e)] != 0; };
  // The padding's pages stay: rows are counted from inside the last of them.
  std::fill_n(flags.begin(), pages_for(plan.first_row, c.view.page_size), std::uint8_t{1});
  // First and last entry that goes: nothing is looked at outside of them, and no row that stays.
  std::int32_t first = plan.pages_before;
  std::int32_t last = -1;
  const PageSpan span{plan.live_before, plan.first_row, c.view.page_size};
  // Counted here, not in the plan, whose memory the lists share as far as a compiler knows.
  const std::int32_t entries = plan.pages_before;
  std::int32_t pages = 0;
  std::int32_t gone = 0;
  for (std::int32_t e = 0; e < entries; ++e) {
    c.take(pages, e);  // overwritten unless it stays
    if (stays(e)) {
      ++pages;
      continue;
    }
    gone += span.end(e) - span.begin(e);
    first = std::min(first, e), last = e;
  }
  if (c.view.fixed_rows && !stays(entries - 1) &&
      (plan.extent_before + plan.first_row) % c.view.page_size != 0) {
    return Status::bad_options;  // the next row falls into it, behind rows that are gone
  }
  plan.live_after = plan.live_before - gone;
  plan.pages_after = pages;
  c.release(stays, first, last + 1);
  const bool rotates = c.draft.rotates();
  bool turns_shared = false;
  c.for_each_head([&](const HeadRef& head) {
    c.draft.plan.head(head) = {};
    Position* const out = c.draft.plan.evicted(head);
    const Int32View positions = head.positions();
    std::int32_t evicted = 0;
    for (std::int32_t e = first; e <= last; ++e) {
      if (stays(e)) { continue; }
      const std::int32_t begin = span.begin(e);
      while (e < last && !stays(e + 1)) { ++e; }  // neighbours are one run of rows
      const std::int32_t end = span.end(e);
      if (positions != nullptr) {
        positions.copy(begin, end - begin, out + evicted);
        evicted += end - begin;
        continue;
      }
      for (std::int32_t r = begin; r < end; ++r) { out[evicted++] = head.position(r); }
    }
    c.draft.plan.head(head) = {.evicted = evicted};
    if (!rotates) { return; }
    std::int32_t rank = 0;
    for (std::int32_t r = 0; r < plan.live_before; ++r) {
      const auto e = static_cast<std::int32_t>(c.draft.entry_of(c.s, r));
      if (!stays(e)) { continue; }
      turns_shared = turns_shared || (c.shared(e) && c.draft.turns(head, r, rank));
      ++rank;
    }
  });
  plan.evicts = plan.live_after != plan.live_before;
  return turns_shared ? Status::shared_page : Status::ok;
}

[[nodiscard]] inline Status close_overwrite(const Closing& c) noexcept {
  TablePlan& plan = c.plan;
  const std::int32_t first_victim = c.draft.plan.head(c.draft.first_head(c.s, c.t)).victim;
  bool moves = false;
  bool same = true;
  c.for_each_head([&](const HeadRef& at) {
    HeadPlan& head = c.draft.plan.head(at);
    head.moved = head.victim == plan.append_row ? 0 : 1;
    moves = moves || head.moved != 0;
    same = same && head.victim == first_victim;
  });
  if (!same && has_common_planes(c.view)) { return Status::planes_disagree; }
  plan.live_after = plan.live_before - 1;
  plan.ordered_after = plan.ordered_after && !moves;
  if (plan.append_row == plan.extent_before - 1) { plan.append_row = -1; }
  const std::int32_t extent = plan.live_after + (plan.append_row >= 0 ? 1 : 0);
  plan.pages_after = pages_for(extent + plan.first_row, c.view.page_size);
  c.take_first(plan.pages_after);
  c.release([](std::int32_t) { return false; }, plan.pages_after, plan.pages_before);
  return Status::ok;
}

// Pages of the new table that must be written but may not: refused, or replaced by spare ones; sources become -1.
[[nodiscard]] inline Status replace_shared_pages(const Closing& c) noexcept {
  PlanHeader& header = c.draft.header();
  const auto spares = c.draft.options.spare_pages;
  c.plan.spare_pages = 0;
  for (std::int32_t e = 0; e < c.plan.pages_after; ++e) {
    if (!c.shared(c.sources[e])) { continue; }
    bool written = false;
    c.for_each_head([&](const HeadRef& head) {
      const auto ranks = c.draft.plan.view().ranks(head.sequence, head.layer, head.head);
      c.for_each_move(head, [&](std::int32_t from, std::int32_t to, std::int32_t i, bool moved) {
        if ((to + c.plan.first_row) / c.view.page_size != e) { return; }
        const std::int32_t rank = ranks.empty() ? i : ranks[static_cast<std::size_t>(i)];
        written = written || moved || c.draft.turns(head, from, rank);
      });
    });
    if (!written) { continue; }
    if (c.draft.options.shared == SharedPages::leave) { return Status::shared_page; }
    const std::int32_t pages = header.separate_values ? 2 : 1;
    header.spares_needed += pages;
    ++c.plan.spare_pages;
    c.sources[e] = -1;
    const auto end = static_cast<std::size_t>(header.spares_needed);
    if (end > spares.size()) { continue; }
    c.k_pages[e] = spares[end - static_cast<std::size_t>(pages)];
    c.v_pages[e] = spares[end - 1];
  }
  return static_cast<std::size_t>(header.spares_needed) > spares.size() ? Status::out_of_pages
                                                                        : Status::ok;
}

// `keep`: the rows that the budget allows.
[[nodiscard]] inline Status close_pack(const Closing& c, std::int32_t keep) noexcept {
  TablePlan& plan = c.plan;
  const HeadRef first = c.draft.first_head(c.s, c.t);
  const std::int32_t kept = c.draft.plan.head(first).kept;
  bool equal = true;
  bool same = true;
  c.for_each_head([&](const HeadRef& head) {
    equal = equal && kept == c.draft.plan.head(head).kept;
    same = same && std::ranges::equal(c.draft.plan.kept_list(first), c.draft.plan.kept_list(head));
  });
  if (!equal) { return Status::unequal_budget; }
  if (!same && has_common_planes(c.view)) { return Status::planes_disagree; }
  const Status status = kept > keep ? Status::over_budget : Status::ok;
  plan.live_after = kept;
  plan.evicts = kept != plan.live_before;
  if (!plan.evicts) { return status; }

  const bool restricted =
      c.draft.options.shared == SharedPages::leave && c.draft.chosen_again(c.s, c.t);
  const auto flags = c.draft.entries(c.s, c.t);
  const auto is = [&](std::int32_t e, RowKind kind) {
    return restricted && static_cast<RowKind>(flags[static_cast<std::size_t>(e)]) == kind;
  };
  const std::int32_t padding = c.draft.padding_entries(c.s);
  plan.append_row = -1;
  plan.pages_after = pages_for(kept + plan.first_row, c.view.page_size);
  c.take_first(padding);
  std::int32_t pages = padding;
  bool any_free = false;
  for (std::int32_t e = padding; e < plan.pages_before; ++e) {
    any_free = any_free || is(e, RowKind::free);
    if (!is(e, RowKind::locked)) { continue; }
    // Locked pages must come first and be full: rows behind them are numbered from their end.
    const std::int32_t begin = e * c.view.page_size - plan.first_row;
    const bool full = begin + c.view.page_size <= plan.extent_before;
    if (any_free || pages >= plan.pages_after || (!full && pages + 1 < plan.pages_after)) {
      return Status::shared_page;
    }
    c.take(pages++, e);
  }
  plan.shared_kept = pages - padding;
  for (std::int32_t e = padding; e < plan.pages_before && pages < plan.pages_after; ++e) {
    if (!is(e, RowKind::locked) && !is(e, RowKind::dropped)) { c.take(pages++, e); }
  }
  if (pages < plan.pages_after) { return Status::shared_page; }
  if (const Status copied = replace_shared_pages(c); copied != Status::ok) { return copied; }
  c.release(
      [&](std::int32_t e) {
        return std::find(c.sources, c.sources + pages, e) != c.sources + pages;
      },
      0,
      plan.pages_before);
  bool moves = false;
  c.for_each_head([&](const HeadRef& head) {
    std::int64_t& moved = c.draft.plan.head(head).moved;
    moved = 0;
    c.for_each_move(head, [&](std::int32_t, std::int32_t, std::int32_t, bool moves_now) {
      moved += moves_now ? 1 : 0;
    });
    moves = moves || moved != 0;
  });
  plan.ordered_after = plan.ordered_after && !(plan.removal == Removal::fill_holes && moves);
  return status;
}

// Pages that hold a protected or a kept row stay, and by position no others.
template <Policy P>
[[nodiscard]] Status close_drop(const Closing& c, const Demand& demand) noexcept {
  const auto flags = c.draft.entries(c.s, c.t);
  if constexpr (PagePolicy<P>) { return drop_entries(c, flags); }
  std::ranges::fill(flags, std::uint8_t{0});
  if constexpr (by_position<P>) {
    const CandidateRange range = candidates(demand.protection, c.plan.live_before);
    const PageSpan span{c.plan.live_before, c.plan.first_row, c.view.page_size};
    for (std::int32_t e = 0; e < c.plan.pages_before; ++e) {
      flags[static_cast<std::size_t>(e)] =
          span.begin(e) < range.begin || span.end(e) > range.end ? 1 : 0;
    }
    return drop_entries(c, flags);
  }
  c.for_each_head([&](const HeadRef& head) {
    for (const std::int32_t r : c.draft.plan.kept_list(head)) {
      flags[c.draft.entry_of(c.s, r)] = 1;
    }
  });
  const Status status = drop_entries(c, flags);
  const bool over = status == Status::ok && c.plan.live_after > demand.keep;
  return over ? Status::over_budget : status;
}

/// Writes every table's pages and length, and which rows move.
///
/// \returns the first status that is not `ok`
template <Policy P>
[[nodiscard]] Status close(const P& policy,
                           const Observation& obs,
                           const PlanDraft& draft) noexcept {
  const auto spares = draft.options.spare_pages;
  if (draft.evicts() && draft.options.shared == SharedPages::copy &&
      !are_spare(draft.view, spares, draft.check_scratch)) {
    return Status::bad_options;
  }
  Status status = Status::ok;
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    const Closing c(draft, s, t);
    TablePlan& plan = c.plan;
    if (plan.evicts) {
      const Demand demand = demand_of(policy, obs, draft, draft.first_head(s, t));
      const Status closed = plan.removal == Removal::drop_pages       ? close_drop<P>(c, demand)
                            : plan.removal == Removal::overwrite_slot ? close_overwrite(c)
                                                                      : close_pack(c, demand.keep);
      if (usable(plan.status) && closed != Status::ok) { plan.status = closed; }
    }
    if (!plan.evicts) {
      plan.live_after = plan.live_before, plan.pages_after = plan.pages_before, plan.released = 0;
      plan.reserved_after = plan.reserved_before;
    }
    if (usable(status) && plan.status != Status::ok) { status = plan.status; }
  });
  return status;
}

}  // namespace kvtrim::detail::stage
