// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/check_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/executor.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
    for_each_target(kept, table_.removal, [&](std::int32_t from, std::int32_t to, std::int32_t) {
      const RowPlace source = place_of(view_, s_, l_, h_, from);
      const RowPlace target = new_place(to);
      if (!(source == target)) { move_page_data(view_, l_, h_, source, target); }
      if (from != to) { move_sequence_data(view_, s_, l_, h_, from, to); }
    });
    if (rerotator_.mode() == PositionMode::keep) { return; }
    for_each_target(kept, table_.removal, [&](std::int32_t, std::int32_t to, std::int32_t i) {
      renumber(new_place(to), to, ranks.empty() ? i : ranks[static_cast<std::size_t>(i)]);
    });
  }

  void close_up() const noexcept {
    const std::int32_t first = view_.first_row(s_);
    const auto sources = plan_.sources(s_, t_);
    for (std::int32_t to = 0; to < table_.live_after; ++to) {
      const std::int32_t at = to + first;
      const std::int32_t from =
          sources[static_cast<std::size_t>(at / view_.page_size)] * view_.page_size +
          at % view_.page_size - first;
      if (from != to) { move_sequence_data(view_, s_, l_, h_, from, to); }
    }
    if (rerotator_.mode() == PositionMode::keep) { return; }
    for (std::int32_t to = 0; to < table_.live_after; ++to) { renumber(new_place(to), to, to); }
  }

  void overwrite() const noexcept {
    const std::int32_t victim = plan_.head(s_, l_, h_).victim;
    // A hole at the end of the table is none: the row there is the last one in use.
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

  // Row `row`, now at `place`, of rank `rank` among the kept.
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

  // Rope position of the oldest row behind the sinks.
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

/// Moves and rotates what `plan` says. Tables and lengths stay until `commit`.
///
/// \param plan       made from `view`, not yet applied
/// \param view       the cache, unchanged since the plan was made
/// \param rerotator  the one the plan was made with
/// \returns `ok`; `stale_plan` if the view changed or the plan was applied before; the plan's own status if it is not
///   usable; `bad_observation` if the plan is of another shape or position mode, or names pages that the view does not
///   have. Nothing is written then
/// \par Complexity
/// O(rows that stay) a KV head; no allocation; cannot fail once it writes
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
  // States carry the generation of views that have them, so that no copy of the plan can be applied either.
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
