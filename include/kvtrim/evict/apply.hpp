// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/detail/follow.hpp>
#include <kvtrim/evict/detail/same_cache.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvtrim {

namespace detail {

// Moves and rotates the rows of one KV head.
class HeadMover {
 public:
  HeadMover(const PlanView& plan, const HeadRef& head, const Rerotator& rerotator) noexcept
      : plan_(plan),
        head_(head),
        view_(head.view),
        rerotator_(rerotator),
        table_(plan.table(head.sequence, head.table())),
        padding_(view_.first_row(head.sequence)),
        k_pages_(plan.k_pages(head.sequence, head.table()).data()),
        v_pages_(plan.v_pages(head.sequence, head.table()).data()) {}

  void run() const noexcept {
    if (table_.removal == Removal::overwrite_slot) {
      overwrite();
    } else if (table_.removal == Removal::drop_pages) {
      close_up();
    } else {
      pack();
    }
  }

 private:
  [[nodiscard]] RowPlace new_place(std::int32_t row) const noexcept {
    const std::int32_t at = row + padding_;
    const std::int32_t e = at / view_.page_size;
    return {k_pages_[e], v_pages_[e], Slot{at % view_.page_size}};
  }

  void pack() const noexcept {
    const auto kept = kept_list();
    const auto ranks = rank_list();
    move_rows(kept);
    for_each_sequence_plane(view_, [&](const SequencePlane& plane) {
      if (moves_with(plane, head_.layer, head_.head)) { move_elements(kept, plane); }
    });
    if (rerotator_.mode() == PositionMode::keep) { return; }
    for_each_target(kept, table_.removal, [&](std::int32_t, std::int32_t to, std::int32_t i) {
      renumber(new_place(to), to, ranks.empty() ? i : ranks[static_cast<std::size_t>(i)]);
    });
  }

  // Everything that lies in pages; done when it returns.
  void move_rows(std::span<const std::int32_t> kept) const noexcept {
    // Each plane has its own queue: its rows are two streams, whereas the rows of all planes at once would be many.
    CopyQueue keys;
    CopyQueue values;
    if (!view_.k) { return; }  // `plan` made sure that no row moves
    if (moves_values(view_, head_.layer)) {
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        push_row(keys, view_.k, from.k_page, from.slot, to.k_page, to.slot);
        push_row(values, view_.v, from.v_page, from.slot, to.v_page, to.slot);
      });
    } else {
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        push_row(keys, view_.k, from.k_page, from.slot, to.k_page, to.slot);
      });
    }
    if (view_.unrotated_keys) {
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        push_row(keys, view_.unrotated_keys, from.k_page, from.slot, to.k_page, to.slot);
      });
    }
    for (std::int32_t p = 0; p < view_.page_plane_count; ++p) {
      const PagePlane& plane = view_.page_planes[p];
      if (!moves_with(view_, plane, head_.layer, head_.head)) { continue; }
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        keys.push(
            plane.row(
                head_.layer, plane.of_values ? from.v_page : from.k_page, head_.head, from.slot),
            plane.row(head_.layer, plane.of_values ? to.v_page : to.k_page, head_.head, to.slot),
            plane.row_bytes);
      });
    }
  }

  // Calls f(old place, new place) for each row that changes its place.
  template <class F>
  void for_each_move(std::span<const std::int32_t> kept, F&& f) const noexcept {
    const auto size = static_cast<std::uint32_t>(view_.page_size);
    const auto shift = static_cast<std::uint32_t>(std::countr_zero(size));
    const bool shifts = std::has_single_bit(size);
    const std::int32_t* const entries = view_.table.row(head_.sequence, head_.layer, head_.head);
    const std::int64_t v_offset = view_.table.v_offset;
    for_each_target(kept, table_.removal, [&](std::int32_t from, std::int32_t to, std::int32_t) {
      const auto a = static_cast<std::uint32_t>(from + padding_);
      const auto b = static_cast<std::uint32_t>(to + padding_);
      const std::uint32_t old = shifts ? a >> shift : a / size;
      const std::uint32_t fresh = shifts ? b >> shift : b / size;
      const RowPlace source{view_.table.page(entries[old]),
                            view_.table.page(entries[old + v_offset]),
                            Slot{static_cast<std::int32_t>(a - old * size)}};
      const RowPlace target{
          k_pages_[fresh], v_pages_[fresh], Slot{static_cast<std::int32_t>(b - fresh * size)}};
      if (!(source == target)) { f(source, target); }
    });
  }

  void push_row(
      CopyQueue& queue, const Plane& plane, PageId from, Slot i, PageId to, Slot j) const noexcept {
    const std::byte* const source = plane.row(head_.layer, from, head_.head, i);
    std::byte* const target = plane.row(head_.layer, to, head_.head, j);
    if (plane.contiguous_rows()) {
      queue.push(source, target, plane.row_bytes());
    } else {
      copy_row(plane, source, target);
    }
  }

  // The elements of a plane for one KV head.
  void move_elements(std::span<const std::int32_t> kept,
                     const SequencePlane& plane) const noexcept {
    std::byte* const base = plane.row(head_.sequence, head_.layer, head_.head, 0);
    const auto run = [&](auto copy) {
      for_each_target(kept, table_.removal, [&](std::int32_t from, std::int32_t to, std::int32_t) {
        if (from != to) { copy(base + to * plane.row_stride, base + from * plane.row_stride); }
      });
    };
    if (plane.element_bytes == 4) {  // a copy of known size is one instruction
      run([](std::byte* to, const std::byte* from) { std::memcpy(to, from, 4); });
    } else {
      run([&](std::byte* to, const std::byte* from) {
        std::memcpy(to, from, static_cast<std::size_t>(plane.element_bytes));
      });
    }
  }

  void close_up() const noexcept {
    for_each_sequence_plane(view_, [&](const SequencePlane& plane) {
      if (!moves_with(plane, head_.layer, head_.head)) { return; }
      for_each_kept_run([&](std::int32_t from, std::int32_t to, std::int32_t count) {
        move_elements(plane, from, to, count);
      });
    });
    if (rerotator_.mode() == PositionMode::keep) { return; }
    for (std::int32_t to = 0; to < table_.live_after; ++to) { renumber(new_place(to), to, to); }
  }

  // Calls f(first row, new first row, rows) for each run of consecutive pages that stay and whose rows get new numbers.
  template <class F>
  void for_each_kept_run(F&& f) const noexcept {
    const auto sources = plan_.sources(head_.sequence, head_.table());
    const auto pages = static_cast<std::int32_t>(sources.size());
    const auto source = [&](std::int32_t e) { return sources[static_cast<std::size_t>(e)]; };
    for (std::int32_t e = 0; e < pages;) {
      std::int32_t end = e + 1;
      while (end < pages && source(end) == source(e) + end - e) { ++end; }
      const std::int32_t begin = std::max(0, e * view_.page_size - padding_);
      const std::int32_t count =
          std::min(end * view_.page_size - padding_, table_.live_after) - begin;
      const std::int32_t from = begin + (source(e) - e) * view_.page_size;
      if (from != begin && count > 0) { f(from, begin, count); }
      e = end;
    }
  }

  // Moves the elements of consecutive rows towards the front.
  void move_elements(const SequencePlane& plane,
                     std::int32_t from,
                     std::int32_t to,
                     std::int32_t count) const noexcept {
    std::byte* const source = plane.row(head_.sequence, head_.layer, head_.head, from);
    std::byte* const target = plane.row(head_.sequence, head_.layer, head_.head, to);
    const auto bytes = static_cast<std::size_t>(plane.element_bytes);
    if (plane.row_stride == plane.element_bytes) {
      std::memmove(target, source, static_cast<std::size_t>(count) * bytes);
      return;
    }
    for (std::int32_t i = 0; i < count; ++i) {
      std::memcpy(target + i * plane.row_stride, source + i * plane.row_stride, bytes);
    }
  }

  void overwrite() const noexcept {
    const std::int32_t victim = plan_.head(head_.sequence, head_.layer, head_.head).victim;
    const std::int32_t free = free_row(table_);
    const std::int32_t gone = rerotator_.mode() == PositionMode::keep ? 0 : rope_position(victim);
    if (victim != free) {
      move_page_data(head_, place_of(head_, free), place_of(head_, victim));
      move_sequence_data(head_, free, victim);
    }
    if (rerotator_.mode() != PositionMode::in_cache) { return; }
    for (std::int32_t r = 0; r < table_.extent_before; ++r) {
      if (r == free) { continue; }
      const std::int32_t old = rope_position(r);
      if (old > gone) { renumber(place_of(head_, r), r, old - 1); }
    }
  }

  // Row `row`, now at `place`, with rank `rank` among the kept rows.
  void renumber(RowPlace place, std::int32_t row, std::int32_t rank) const noexcept {
    std::int32_t& rope =
        view_.rope_positions.at<std::int32_t>(head_.sequence, head_.layer, head_.head, row);
    std::int32_t to = rank;
    if (rerotator_.mode() == PositionMode::sinks_follow) {
      if (rank >= rerotator_.sinks() || table_.live_after <= rerotator_.sinks()) { return; }
      to = window_begin() - rerotator_.sinks() + rank;
    }
    rerotator_.renumber(head_, place, rank, rope, to);
    rope = to;
  }

  // Rope position of the oldest row after the sinks.
  [[nodiscard]] std::int32_t window_begin() const noexcept {
    const auto ranks = rank_list();
    std::int32_t begin = 0;
    if (table_.removal == Removal::drop_pages) { return rope_position(rerotator_.sinks()); }
    for_each_target(
        kept_list(), table_.removal, [&](std::int32_t, std::int32_t to, std::int32_t i) {
          if ((ranks.empty() ? i : ranks[static_cast<std::size_t>(i)]) == rerotator_.sinks()) {
            begin = rope_position(to);
          }
        });
    return begin;
  }

  [[nodiscard]] std::span<const std::int32_t> kept_list() const noexcept {
    return plan_.kept_list(head_.sequence, head_.layer, head_.head);
  }
  [[nodiscard]] std::span<const std::int32_t> rank_list() const noexcept {
    return plan_.ranks(head_.sequence, head_.layer, head_.head);
  }
  [[nodiscard]] std::int32_t rope_position(std::int32_t row) const noexcept {
    return view_.rope_position(head_.sequence, head_.layer, head_.head, row);
  }

  const PlanView& plan_;
  const HeadRef& head_;
  const CacheView& view_;
  const Rerotator& rerotator_;
  const TablePlan& table_;
  std::int32_t padding_;
  const PageId* k_pages_;  // of the table afterwards
  const PageId* v_pages_;
};

}  // namespace detail

/// Moves and rotates rows as `plan` says. Tables and lengths stay unchanged until `commit`.
///
/// \param plan       made from `view`, not yet applied
/// \param view       the cache; of the tables that the plan evicts from, unchanged since it was made. Other sequences and
///   layers may have gone on
/// \param rerotator  the one the plan was made with
/// \returns `ok`; `stale_plan` if such a table changed or the plan was applied before (never if nothing goes); the plan's own
///   status if it is not usable; `bad_plan` if it is of another shape or position mode, or was read from bytes without a view.
///   Nothing is written then
/// \par Complexity
/// O(rows that stay) per KV head; no allocation; cannot fail once it writes
/// \par Thread-safety
/// work items are (sequence, layer, KV head) over disjoint rows; one caller
template <Executor E = Serial>
Status apply(const PlanRef& plan,
             const CacheView& view,
             const Rerotator& rerotator = {},
             const E& executor = {}) noexcept {
  if (!usable(plan.status())) { return plan.status(); }
  detail::PlanHeader* const header = plan.own_header();
  if (header == nullptr) { return Status::ok; }
  if (header->stage == detail::PlanStage::unchecked || !detail::same_shape(plan, view) ||
      header->positions != rerotator.mode()) {
    return Status::bad_plan;
  }
  if (plan.empty()) {
    if (header->stage == detail::PlanStage::planned) { header->stage = detail::PlanStage::applied; }
    return Status::ok;
  }
  if (header->stage != detail::PlanStage::planned || !detail::fresh(plan, view)) {
    return Status::stale_plan;
  }
  const std::int64_t heads = static_cast<std::int64_t>(view.layers) * view.kv_heads;
  executor.for_each(view.sequences * heads, [&](std::int64_t item, std::int32_t) noexcept {
    const HeadRef head{view,
                       SequenceId{static_cast<std::int32_t>(item / heads)},
                       LayerId{static_cast<std::int32_t>(item % heads / view.kv_heads)},
                       HeadId{static_cast<std::int32_t>(item % view.kv_heads)}};
    if (plan.table(head.sequence, head.table()).evicts) {
      detail::HeadMover(plan, head, rerotator).run();
    }
  });
  // Counters, where there are any, tell: so a copy of the plan cannot be applied either.
  plan.for_each_evicting([&](SequenceId s, std::int32_t t) {
    const std::int64_t i = view.table_index(s, t);
    const std::uint64_t added = detail::raise_generation(view, i);
    // From now on sequences that share pages with this one may end: whether a page may be written does not count.
    std::uint64_t& generation = plan.own_table(s, t).generation;
    generation = view.writable.all() ? generation + added : table_generation(view, s, t, false);
    if (view.states != nullptr) { view.states[i].applied = true; }
  });
  header->stage = detail::PlanStage::applied;
  return Status::ok;
}

}  // namespace kvtrim
