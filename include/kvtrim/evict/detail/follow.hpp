// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether everything that pages hold can follow the rows that a plan moves.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/evict/detail/closing.hpp>
#include <kvtrim/evict/detail/plan_draft.hpp>

#include <cstdint>

namespace kvtrim::detail::stage {

// Calls f(old place, new place) for each row of a head that the plan moves.
template <class F>
void for_each_moved_row(const Closing& c, const HeadRef& head, F&& f) noexcept {
  const std::int32_t size = c.view.page_size;
  if (c.plan.removal == Removal::overwrite_slot) {
    const std::int32_t victim = c.draft.plan.head(head).victim;
    const std::int32_t free = c.plan.append_row >= 0 ? c.plan.append_row : c.plan.extent_before - 1;
    if (victim != free) { f(place_of(head, free), place_of(head, victim)); }
  } else if (c.plan.removal != Removal::drop_pages) {
    c.for_each_move(head, [&](std::int32_t from, std::int32_t to, std::int32_t, bool moves) {
      const std::int32_t at = to + c.plan.first_row;
      if (!moves) { return; }
      f(place_of(head, from),
        RowPlace{c.k_pages[at / size], c.v_pages[at / size], Slot{at % size}});
    });
  }
}

/// Says whether all that belongs to a row goes where the row goes.
///
/// \returns `bad_options` where a row would move that has no key: in a view without keys, rows stay where they are.
///   `planes_disagree` where it would move to another entry of a page plane whose entries belong to several rows
[[nodiscard]] inline Status moves_follow(const PlanDraft& draft) noexcept {
  const CacheView& view = draft.view;
  bool ties = false;
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    ties = ties || ties_rows(view, view.page_planes[i]);
  }
  Status status = Status::ok;
  if (view.k && !ties) { return status; }
  draft.for_each_table([&](SequenceId s, std::int32_t t) {
    const Closing c(draft, s, t);
    if (!c.plan.evicts) { return; }
    c.for_each_head([&](const HeadRef& head) {
      if (draft.plan.head(head).moved == 0) { return; }
      if (!view.k) { status = Status::bad_options; }
      for_each_moved_row(c, head, [&](RowPlace from, RowPlace to) {
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

}  // namespace kvtrim::detail::stage
