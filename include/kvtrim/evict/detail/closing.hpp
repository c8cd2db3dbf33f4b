// SPDX-License-Identifier: Apache-2.0
#pragma once

// A table on its way to what it is afterwards: what the ways of removal have in common.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/evict/detail/follow.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>

#include <cstdint>

namespace kvtrim::detail::stage {

// The table that is being closed: its old entries, and the lists of the new ones.
struct Closing {
  const PlanDraft& draft;
  const CacheView& view;
  SequenceId s;
  std::int32_t t;
  TablePlan& plan;
  const std::int32_t* entries;
  PageId* k_pages;
  PageId* v_pages;
  std::int32_t* sources;

  Closing(const PlanDraft& from, SequenceId sequence, std::int32_t table) noexcept
      : draft(from),
        view(from.view),
        s(sequence),
        t(table),
        plan(from.plan.table(sequence, table)),
        entries(view.table.row(sequence, view.first_layer(table), view.first_head(table))),
        k_pages(PlanWriter::writable(from.plan.view().k_pages(s, t)).data()),
        v_pages(PlanWriter::writable(from.plan.view().v_pages(s, t)).data()),
        sources(PlanWriter::writable(from.plan.view().sources(s, t)).data()) {}

  // Entry `to` of the new table is entry `from` of the old one.
  void take(std::int32_t to, std::int32_t from) const noexcept {
    k_pages[to] = view.table.page(entries[from]);
    v_pages[to] = view.table.page(entries[from + view.table.v_offset]);
    sources[to] = from;
  }
  // The first entries stay where they are.
  void take_first(std::int32_t count) const noexcept {
    for (std::int32_t e = 0; e < count; ++e) { take(e, e); }
  }
  // Lists the old entries that the new table does not name, tail first: of [first, end) those that do not `stay(e)`. Reserved
  // entries are behind the last page that stays, or leave with the others.
  template <class Stays>
  void release(const Stays& stays, std::int32_t first, std::int32_t end) const noexcept {
    plan.reserved_after =
        draft.options.reserved == ReservedPages::follow ? plan.reserved_before : 0;
    for (std::int32_t e = 0; e < plan.reserved_after; ++e) {
      take(plan.pages_after + e, plan.pages_before + e);
    }
    PageId* const out = PlanWriter::writable(draft.plan.view().released(s, t)).data();
    std::int32_t count = 0;
    const auto list = [&](std::int32_t e) {
      out[count++] = view.table.page(entries[e]);
      if (view.table.v_offset != 0) {
        out[count++] = view.table.page(entries[e + view.table.v_offset]);
      }
    };
    const std::int32_t used = plan.pages_before;
    for (std::int32_t e = used + plan.reserved_before - plan.reserved_after; e-- > used;) {
      list(e);
    }
    for (std::int32_t e = end; e-- > first;) {
      if (!stays(e)) { list(e); }
    }
    plan.released = count;
  }
  template <class F>
  void for_each_head(F&& f) const noexcept {
    draft.for_each_head(s, t, f);
  }
  [[nodiscard]] bool shared(std::int32_t e) const noexcept { return draft.shared_entry(s, t, e); }
  // Calls f(from row, to row, index in the kept list, whether its data moves) for each kept row of a head.
  template <class F>
  void for_each_move(const HeadRef& head, F&& f) const noexcept {
    for_each_packed_row(draft.plan.view(), head, f);
  }
};

}  // namespace kvtrim::detail::stage
