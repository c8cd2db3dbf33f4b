// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/check_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/executor.hpp>
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
  HeadMover(const PlanView& plan,
            const CacheView& view,
            const Rerotator& rerotator,
            SequenceId s,
            LayerId l,
            HeadId h) noexcept
      : plan_(plan),
        view_(view),
        rerotator_(rerotator),
        s_(s),
        l_(l),
        h_(h),
        t_(view.table_of(l, h)),
        table_(plan.table(s, t_)) {}

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
    const std::int32_t at = row + view_.first_row(s_);
    const auto e = static_cast<std::size_t>(at / view_.page_size);
    return {plan_.k_pages(s_, t_)[e], plan_.v_pages(s_, t_)[e], Slot{at % view_.page_size}};
  }

  void pack() const noexcept {
    const auto kept = plan_.kept_list(s_, l_, h_);
    const auto ranks = plan_.ranks(s_, l_, h_);
    move_rows(kept);
    for_each_sequence_plane(view_, [&](const SequencePlane& plane) {
      if (moves_with(plane, l_, h_)) { move_elements(kept, plane); }
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
    for_each_move(kept, [&](RowPlace from, RowPlace to) {
      push_row(keys, view_.k, from.k_page, from.slot, to.k_page, to.slot);
      push_row(values, view_.v, from.v_page, from.slot, to.v_page, to.slot);
    });
    if (view_.unrotated_keys.base != nullptr) {
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        push_row(keys, view_.unrotated_keys, from.k_page, from.slot, to.k_page, to.slot);
      });
    }
    for (std::int32_t p = 0; p < view_.page_plane_count; ++p) {
      const PagePlane& plane = view_.page_planes[p];
      if (!moves_with(view_, plane, l_, h_)) { continue; }
      for_each_move(kept, [&](RowPlace from, RowPlace to) {
        keys.push(plane.row(l_, plane.of_values ? from.v_page : from.k_page, h_, from.slot),
                  plane.row(l_, plane.of_values ? to.v_page : to.k_page, h_, to.slot),
                  plane.row_bytes);
      });
    }
  }

  // Calls f(old place, new place) for each row that changes its place.
  template <class F>
  void for_each_move(std::span<const std::int32_t> kept, F&& f) const noexcept {
    const auto size = static_cast<std::uint32_t>(view_.page_size);
    const auto padding = view_.first_row(s_);
    const auto shift = static_cast<std::uint32_t>(std::countr_zero(size));
    const bool shifts = std::has_single_bit(size);
    const std::int32_t* const entries = view_.table.row(s_, l_, h_);
    const std::int64_t v_offset = view_.table.v_offset;
    const PageId* const k_pages = plan_.k_pages(s_, t_).data();
    const PageId* const v_pages = plan_.v_pages(s_, t_).data();
    for_each_target(kept, table_.removal, [&](std::int32_t from, std::int32_t to, std::int32_t) {
      const auto a = static_cast<std::uint32_t>(from + padding);
      const auto b = static_cast<std::uint32_t>(to + padding);
      const std::uint32_t old = shifts ? a >> shift : a / size;
      const std::uint32_t fresh = shifts ? b >> shift : b / size;
      const RowPlace source{view_.table.page(entries[old]),
                            view_.table.page(entries[old + v_offset]),
                            Slot{static_cast<std::int32_t>(a - old * size)}};
      const RowPlace target{
          k_pages[fresh], v_pages[fresh], Slot{static_cast<std::int32_t>(b - fresh * size)}};
      if (!(source == target)) { f(source, target); }
    });
  }

  void push_row(
      CopyQueue& queue, const Plane& plane, PageId from, Slot i, PageId to, Slot j) const noexcept {
    const std::byte* const source = plane.row(l_, from, h_, i);
    std::byte* const target = plane.row(l_, to, h_, j);
    if (plane.contiguous_rows()) {
      queue.push(source, target, plane.row_bytes());
    } else {
      copy_row(plane, source, target);
    }
  }

  // The elements of a plane for one KV head.
  void move_elements(std::span<const std::int32_t> kept,
                     const SequencePlane& plane) const noexcept {
    std::byte* const base = plane.row(s_, l_, h_, 0);
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
      if (!moves_with(plane, l_, h_)) { return; }
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
    const std::int32_t padding = view_.first_row(s_);
    const auto sources = plan_.sources(s_, t_);
    const auto pages = static_cast<std::int32_t>(sources.size());
    const auto source = [&](std::int32_t e) { return sources[static_cast<std::size_t>(e)]; };
    for (std::int32_t e = 0; e < pages;) {
      std::int32_t end = e + 1;
      while (end < pages && source(end) == source(e) + end - e) { ++end; }
      const std::int32_t begin = std::max(0, e * view_.page_size - padding);
      const std::int32_t count =
          std::min(end * view_.page_size - padding, table_.live_after) - begin;
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
    std::byte* const source = plane.row(s_, l_, h_, from);
    std::byte* const target = plane.row(s_, l_, h_, to);
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
    const std::int32_t victim = plan_.head(s_, l_, h_).victim;
    // A hole at the end of the table does not count: the row there is the last one in use.
    const std::int32_t free = table_.append_row >= 0 ? table_.append_row : table_.extent_before - 1;
    const std::int32_t gone =
        rerotator_.mode() == PositionMode::keep ? 0 : view_.rope_position(s_, l_, h_, victim);
    if (victim != free) {
      move_page_data(
          view_, l_, h_, place_of(view_, s_, l_, h_, free), place_of(view_, s_, l_, h_, victim));
      move_sequence_data(view_, s_, l_, h_, free, victim);
    }
    if (rerotator_.mode() != PositionMode::in_cache) { return; }
    for (std::int32_t r = 0; r < table_.extent_before; ++r) {
      if (r == free) { continue; }
      const std::int32_t old = view_.rope_position(s_, l_, h_, r);
      if (old > gone) { renumber(place_of(view_, s_, l_, h_, r), r, old - 1); }
    }
  }

  // Row `row`, now at `place`, with rank `rank` among the kept rows.
  void renumber(RowPlace place, std::int32_t row, std::int32_t rank) const noexcept {
    std::int32_t& rope = view_.rope_positions.at<std::int32_t>(s_, l_, h_, row);
    std::int32_t to = rank;
    if (rerotator_.mode() == PositionMode::sinks_follow) {
      if (rank >= rerotator_.sinks() || table_.live_after <= rerotator_.sinks()) { return; }
      to = window_begin() - rerotator_.sinks() + rank;
    }
    rerotator_.renumber(view_, s_, l_, h_, place.k_page, place.slot, rank, rope, to);
    rope = to;
  }

  // Rope position of the oldest row after the sinks.
  [[nodiscard]] std::int32_t window_begin() const noexcept {
    const auto ranks = plan_.ranks(s_, l_, h_);
    std::int32_t begin = 0;
    if (table_.removal == Removal::drop_pages) {
      return view_.rope_position(s_, l_, h_, rerotator_.sinks());
    }
    for_each_target(
        plan_.kept_list(s_, l_, h_),
        table_.removal,
        [&](std::int32_t, std::int32_t to, std::int32_t i) {
          if ((ranks.empty() ? i : ranks[static_cast<std::size_t>(i)]) == rerotator_.sinks()) {
            begin = view_.rope_position(s_, l_, h_, to);
          }
        });
    return begin;
  }

  const PlanView& plan_;
  const CacheView& view_;
  const Rerotator& rerotator_;
  SequenceId s_;
  LayerId l_;
  HeadId h_;
  std::int32_t t_;
  const TablePlan& table_;
};

// Whether the lengths and pages of a plan of the view's shape can be the view's: a plan read back from bytes may say
// anything.
[[nodiscard]] inline bool fits(const PlanView& plan, const CacheView& view) noexcept {
  const auto page_of_pool = [&](PageId p) { return raw(p) >= 0 && raw(p) < view.pages; };
  for (std::int32_t i = 0; i < view.sequences; ++i) {
    const SequenceId s{i};
    const auto padding = static_cast<std::size_t>(view.first_row(s) / view.page_size);
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const TablePlan& table = plan.table(s, t);
      if (!table.evicts) { continue; }
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const std::int32_t hole = view.state(s, l, h).append_row >= 0 ? 1 : 0;
      const auto k = plan.k_pages(s, t);
      const auto v = plan.v_pages(s, t);
      if (table.live_before != view.live_rows(s, l, h) ||
          table.extent_before != table.live_before + hole || table.first_row != view.first_row(s) ||
          table.pages_before != pages_for(table.extent_before + table.first_row, view.page_size) ||
          table.pages_after * static_cast<std::int64_t>(view.page_size) <
              static_cast<std::int64_t>(table.live_after) + table.first_row ||
          k.size() < padding ||
          !std::all_of(k.begin() + static_cast<std::ptrdiff_t>(padding), k.end(), page_of_pool) ||
          !std::all_of(v.begin() + static_cast<std::ptrdiff_t>(padding), v.end(), page_of_pool) ||
          !std::ranges::all_of(plan.released(s, t), page_of_pool)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace detail

/// Moves and rotates rows as `plan` says. Tables and lengths stay unchanged until `commit`.
///
/// \param plan       made from `view`, not yet applied
/// \param view       the cache, unchanged since the plan was made
/// \param rerotator  the one the plan was made with
/// \returns `ok`; `stale_plan` if the view changed or the plan was applied before; the plan's own status if it is not
///   usable; `bad_observation` if the plan has another shape or position mode, or names pages that the view does not
///   have. Unless `ok`, nothing is written
/// \par Complexity
/// O(rows that stay) per KV head; no allocation; cannot fail once it writes
/// \par Thread-safety
/// work items are (sequence, layer, KV head) over disjoint rows; one caller
template <Executor E = Serial>
Status apply(const PlanView& plan,
             const CacheView& view,
             const Rerotator& rerotator = {},
             const E& executor = {}) noexcept {
  if (!usable(plan.status())) { return plan.status(); }
  detail::PlanHeader* const header = plan.header();
  if (header == nullptr) { return Status::ok; }
  if (header->sequences != view.sequences || header->layers != view.layers ||
      header->kv_heads != view.kv_heads || header->scope != view.scope ||
      header->page_size != view.page_size || header->positions != rerotator.mode()) {
    return Status::bad_observation;
  }
  if (header->stage != detail::PlanStage::planned || header->generation != generation_of(view)) {
    return Status::stale_plan;
  }
  if (!detail::fits(plan, view)) { return Status::bad_observation; }
  const std::int64_t heads = static_cast<std::int64_t>(view.layers) * view.kv_heads;
  executor.for_each(view.sequences * heads, [&](std::int64_t item, std::int32_t) noexcept {
    const SequenceId s{static_cast<std::int32_t>(item / heads)};
    const LayerId l{static_cast<std::int32_t>(item % heads / view.kv_heads)};
    const HeadId h{static_cast<std::int32_t>(item % view.kv_heads)};
    if (plan.table(s, view.table_of(l, h)).evicts) {
      detail::HeadMover(plan, view, rerotator, s, l, h).run();
    }
  });
  // If the view has states, they carry the generation, so that a copy of the plan cannot be applied either.
  if (view.states != nullptr) {
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
        if (plan.table(SequenceId{s}, t).evicts) {
          ++view.states[s * view.tables_per_sequence() + t].generation;
        }
      }
    }
  }
  header->stage = detail::PlanStage::applied;
  header->generation = generation_of(view);
  return Status::ok;
}

}  // namespace kvtrim
