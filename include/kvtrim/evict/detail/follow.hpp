// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a plan as a whole must see to, whoever made it: that all that belongs to a row goes where the row goes.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/evict/plan.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim::detail {

// Calls f(from row, to row, index in the kept list, whether its data moves) for each row of a head that is packed and kept.
template <class F>
void for_each_packed_row(const PlanView& plan, const HeadRef& head, F&& f) noexcept {
  const std::int32_t t = head.table();
  const TablePlan& table = plan.table(head.sequence, t);
  const std::int32_t* const sources = plan.sources(head.sequence, t).data();
  const std::int32_t size = head.view.page_size;
  const std::int32_t first = table.first_row;
  for_each_target(plan.kept_list(head.sequence, head.layer, head.head),
                  table.removal,
                  [&](std::int32_t from, std::int32_t to, std::int32_t i) {
                    const std::int32_t at = to + first;
                    const std::int32_t was = from + first;
                    const bool stays = sources[at / size] == was / size && at % size == was % size;
                    f(from, to, i, !stays);
                  });
}

// Row that the last one was moved from, or the next append takes: what `overwrite_slot` leaves free.
[[nodiscard]] constexpr std::int32_t free_row(const TablePlan& table) noexcept {
  // A hole at the end of the table does not count: the row there is the last one in use.
  return table.append_row >= 0 ? table.append_row : table.extent_before - 1;
}

// Calls f(old place, new place) for each row of a head that the plan moves.
template <class F>
void for_each_moved_row(const PlanView& plan, const HeadRef& head, F&& f) noexcept {
  const std::int32_t t = head.table();
  const TablePlan& table = plan.table(head.sequence, t);
  const std::int32_t size = head.view.page_size;
  if (table.removal == Removal::overwrite_slot) {
    const std::int32_t victim = plan.head(head.sequence, head.layer, head.head).victim;
    const std::int32_t free = free_row(table);
    if (victim != free) { f(place_of(head, free), place_of(head, victim)); }
  } else if (table.removal != Removal::drop_pages) {
    const PageId* const k = plan.k_pages(head.sequence, t).data();
    const PageId* const v = plan.v_pages(head.sequence, t).data();
    for_each_packed_row(
        plan, head, [&](std::int32_t from, std::int32_t to, std::int32_t, bool moves) {
          const std::int32_t at = to + table.first_row;
          if (moves) {
            f(place_of(head, from), RowPlace{k[at / size], v[at / size], Slot{at % size}});
          }
        });
  }
}

/// Says whether all that belongs to a row goes where the row goes.
///
/// \returns `bad_options` where a row would move that has no key: in a view without keys, rows stay where they are.
///   `planes_disagree` where it would move to another entry of a page plane whose entries belong to several rows
[[nodiscard]] inline Status moves_follow(const PlanView& plan, const CacheView& view) noexcept {
  bool ties = false;
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    ties = ties || ties_rows(view, view.page_planes[i]);
  }
  Status status = Status::ok;
  if (view.k && !ties) { return status; }
  plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
    for_each_head(view, s, t, [&](const HeadRef& head) {
      if (plan.head(s, head.layer, head.head).moved == 0) { return; }
      if (!view.k) { status = Status::bad_options; }
      for_each_moved_row(plan, head, [&](RowPlace from, RowPlace to) {
        for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
          const PagePlane& plane = view.page_planes[i];
          const auto entry = [&](RowPlace at) {
            return plane.row(
                head.layer, plane.of_values ? at.v_page : at.k_page, head.head, at.slot);
          };
          if (ties_rows(view, plane) && entry(from) != entry(to)) {
            status = Status::planes_disagree;
          }
        }
      });
    });
  });
  return status;
}

/// Says whether sequence planes that are common to heads or layers with tables of their own can follow: those, too, must
/// keep the same rows, in the same places. (Inside one table, each way of removal sees to it.)
[[nodiscard]] inline bool common_planes_agree(const PlanView& plan,
                                              const CacheView& view) noexcept {
  bool heads = false;
  bool layers = false;
  for_each_sequence_plane(view, [&](const SequencePlane& p) {
    heads = heads || (p && p.head_stride == 0);
    layers = layers || (p && p.layer_stride == 0);
  });
  heads = heads && view.scope == TableScope::head && view.kv_heads > 1;
  layers = layers && view.scope != TableScope::group && view.layers > 1;
  if (!heads && !layers) { return true; }
  const auto agree = [&](const HeadRef& x, const HeadRef& y) {
    const TablePlan& a = plan.table(x.sequence, x.table());
    const TablePlan& b = plan.table(y.sequence, y.table());
    if (a.evicts != b.evicts || a.live_before != b.live_before) { return false; }
    const auto same = [&](auto list) { return std::ranges::equal(list(x), list(y)); };
    return !a.evicts ||
           (a.removal == b.removal && a.append_row == b.append_row &&
            same([&](const HeadRef& h) { return plan.evicted(h.sequence, h.layer, h.head); }) &&
            same([&](const HeadRef& h) { return plan.kept_list(h.sequence, h.layer, h.head); }) &&
            (a.removal != Removal::drop_pages ||
             same([&](const HeadRef& h) { return plan.sources(h.sequence, h.table()); })));
  };
  bool all = true;
  for (std::int32_t i = 0; i < view.sequences * view.tables_per_sequence(); ++i) {
    const SequenceId s{i / view.tables_per_sequence()};
    for_each_head(view, s, i % view.tables_per_sequence(), [&](const HeadRef& head) {
      all =
          all &&
          agree(head,
                HeadRef{view, s, layers ? LayerId{0} : head.layer, heads ? HeadId{0} : head.head});
    });
  }
  return all;
}

}  // namespace kvtrim::detail
