// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plan from elsewhere, against the cache it is to be applied to. Whatever apply, commit and a sink follow must be what
// the planner writes for the same kept rows; which rows those are is the sender's business.

#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/generation.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/evict/detail/follow.hpp>
#include <kvtrim/evict/detail/own_pages.hpp>
#include <kvtrim/evict/detail/same_cache.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim::detail {

// Checks one plan, whose counts and lists are within its own block of bytes.
class PlanCheck {
 public:
  PlanCheck(const PlanView& plan, const CacheView& view, const PlanOptions& options)
      : plan_(plan),
        view_(view),
        rerotator_(options.rerotator == nullptr ? keep_ : *options.rerotator),
        allowed_(options.spare_pages),
        scratch_(static_cast<std::size_t>(check_tables_words(view.pages))) {}

  // `bad_plan`, `stale_plan`, or the fault of a table that the plan evicts from.
  [[nodiscard]] Status run() {
    const PlanHeader& header = plan_.header();
    if (!usable(plan_.status())) { return Status::ok; }  // says why, and does nothing
    if (!same_shape(plan_, view_) || header.separate_values != (view_.table.v_offset != 0) ||
        header.positions != rerotator_.mode() || header.nan_count < 0) {
      return Status::bad_plan;
    }
    Status status = Status::ok;
    bool any = false;
    plan_.for_each_evicting([&](SequenceId, std::int32_t) { any = true; });
    if (any) { status = check_tables(view_, scratch_).status; }
    for_each_table(status, [&](SequenceId s, std::int32_t t) {
      const SequenceState state = view_.state(s, view_.first_layer(t), view_.first_head(t));
      return state.open                                                      ? Status::step_open
             : state.applied                                                 ? Status::eviction_open
             : plan_.table(s, t).generation != table_generation(view_, s, t) ? Status::stale_plan
                                                                             : Status::ok;
    });
    for_each_table(status, [&](SequenceId s, std::int32_t t) {
      const bool sound = lengths_follow(s, t) && entries_follow(s, t) && released_follow(s, t) &&
                         rows_follow(s, t);
      return sound ? Status::ok : Status::bad_plan;
    });
    if (status != Status::ok) { return status; }
    // Taken from the front of those that the caller allows: nobody else knows which pages outside the tables are free.
    const bool sums = header.bytes_moved == bytes_moved_ &&
                      header.spares_needed == static_cast<std::int64_t>(spares_.size()) &&
                      spares_.size() <= allowed_.size() &&
                      std::ranges::equal(spares_, allowed_.first(spares_.size()));
    return sums && are_spare(view_, spares_, scratch_) && common_planes_agree(plan_, view_) &&
                   moves_follow(plan_, view_) == Status::ok
               ? Status::ok
               : Status::bad_plan;
  }

 private:
  // Calls f for the tables that the plan evicts from, until one is not `ok`.
  template <class F>
  void for_each_table(Status& status, F&& f) {
    plan_.for_each_evicting([&](SequenceId s, std::int32_t t) {
      if (status == Status::ok) { status = f(s, t); }
    });
  }
  [[nodiscard]] SequenceState state(SequenceId s, std::int32_t t) const {
    return view_.state(s, view_.first_layer(t), view_.first_head(t));
  }

  // Counts before are the table's, counts afterwards follow from the way of removal.
  [[nodiscard]] bool lengths_follow(SequenceId s, std::int32_t t) const {
    const TablePlan& p = plan_.table(s, t);
    const SequenceState before = state(s, t);
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    const bool hole = before.append_row >= 0;
    const bool records_order = view_.states != nullptr && static_cast<bool>(view_.positions);
    const bool common =
        usable(p.status) && p.live_before == view_.live_rows(s, l, h) &&
        p.extent_before == p.live_before + (hole ? 1 : 0) && p.first_row == view_.first_row(s) &&
        p.pages_before == pages_for(p.extent_before + p.first_row, view_.page_size) &&
        p.reserved_before == view_.reserved(s, t) && p.live_after < p.live_before &&
        p.positions_known == view_.knows_positions(s, t) &&
        (p.reserved_after == 0 || p.reserved_after == p.reserved_before);
    const auto fills = [&](std::int32_t extent) {
      return p.pages_after == pages_for(extent + p.first_row, view_.page_size);
    };
    if (!common) { return false; }
    switch (p.removal) {
      case Removal::drop_pages:
        return before.ordered && !hole && p.append_row == -1;
      case Removal::overwrite_slot:
        return records_order && !hole && p.live_after == p.live_before - 1 &&
               p.append_row < p.extent_before - 1 &&
               fills(p.live_after + (p.append_row >= 0 ? 1 : 0)) &&
               (header_positions() == PositionMode::keep ||
                (header_positions() == PositionMode::in_cache &&
                 before.next_rope_position == p.live_before));
      case Removal::fill_holes:
        return records_order && p.append_row == -1 && fills(p.live_after);
      case Removal::stable_pack:
        return p.append_row == -1 && fills(p.live_after);
      case Removal::automatic:
        break;
    }
    return false;
  }
  [[nodiscard]] PositionMode header_positions() const { return plan_.header().positions; }
  [[nodiscard]] static bool packs(const TablePlan& p) {
    return p.removal == Removal::stable_pack || p.removal == Removal::fill_holes;
  }

  // Entries afterwards are old ones that move up, or spare pages.
  [[nodiscard]] bool entries_follow(SequenceId s, std::int32_t t) {
    const TablePlan& p = plan_.table(s, t);
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    const auto sources = plan_.sources(s, t);
    const auto k = plan_.k_pages(s, t);
    const auto v = plan_.v_pages(s, t);
    // Those of the padding stay: dropping counts rows from inside the last of them.
    const std::int32_t fixed = p.removal == Removal::drop_pages
                                   ? pages_for(p.first_row, view_.page_size)
                                   : p.first_row / view_.page_size;
    std::int32_t last = -1;
    std::int32_t spares = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const auto e = static_cast<std::int32_t>(i);
      const std::int32_t from = sources[i];
      const bool reserved = e >= p.pages_after;
      if (from < 0) {
        if (!packs(p) || reserved || e < fixed) { return false; }
        spares_.push_back(k[i]);
        if (view_.table.v_offset != 0) { spares_.push_back(v[i]); }
        if (view_.table.v_offset == 0 && k[i] != v[i]) { return false; }
        ++spares;
        continue;
      }
      const bool in_place = reserved    ? from == p.pages_before + e - p.pages_after
                            : e < fixed ? from == e
                                        : from < p.pages_before;
      if (!in_place || from <= last || from < e || k[i] != view_.k_page(s, l, h, from) ||
          v[i] != view_.v_page(s, l, h, from)) {
        return false;
      }
      last = from;
    }
    return p.spare_pages == spares;
  }

  // What leaves is every old entry that is not among the new ones, tail first.
  [[nodiscard]] bool released_follow(SequenceId s, std::int32_t t) const {
    const TablePlan& p = plan_.table(s, t);
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    const auto sources = plan_.sources(s, t);
    const auto released = plan_.released(s, t);
    std::size_t listed = 0;
    const auto is_next = [&](PageId page) {
      const bool same = listed < released.size() && released[listed] == page;
      ++listed;
      return same;
    };
    auto stays = sources.rbegin();
    for (std::int32_t e = p.pages_before + p.reserved_before; e-- > 0;) {
      while (stays != sources.rend() && *stays < 0) { ++stays; }
      if (stays != sources.rend() && *stays == e) {
        ++stays;
      } else if (!is_next(view_.k_page(s, l, h, e)) ||
                 (view_.table.v_offset != 0 && !is_next(view_.v_page(s, l, h, e)))) {
        return false;
      }
    }
    return listed == released.size();
  }

  // Each head: which rows stay, their order, what is reported of the others, and that only pages of its own are written.
  [[nodiscard]] bool rows_follow(SequenceId s, std::int32_t t) {
    const TablePlan& p = plan_.table(s, t);
    bool sound = true;
    bool moves = false;
    std::int32_t rows_left = p.live_before;
    for_each_head(view_, s, t, [&](const HeadRef& head) {
      const HeadPlan& q = plan_.head(s, head.layer, head.head);
      const bool victim = p.removal == Removal::overwrite_slot;
      sound = sound && q.kept == (packs(p) ? p.live_after : 0) && (q.victim >= 0) == victim &&
              (!victim || !has_common_planes(view_) ||
               q.victim == plan_.head(s, view_.first_layer(t), view_.first_head(t)).victim) &&
              order_follows(head, q, rows_left);
      sound = sound && writes_own_pages(head, p, q);
      moves = moves || q.moved != 0;
      if (sound) { bytes_moved_ += q.moved * moved_row_bytes(view_, head.layer, head.head); }
    });
    const bool mixes = moves && p.removal != Removal::stable_pack;
    return sound && rows_left == p.live_after &&
           p.ordered_after == (state(s, t).ordered && !mixes) && same_rows(s, t);
  }

  // Rows by position: those that stay have their ranks, those that go are listed. Sinks that follow the window stay.
  [[nodiscard]] bool order_follows(const HeadRef& head, const HeadPlan& q, std::int32_t& left) {
    const LiveRows rows(head);
    stays_.assign(static_cast<std::size_t>(rows.extent()), 0);
    plan_.for_each_kept(head.sequence, head.layer, head.head, [&](std::int32_t r) {
      stays_[static_cast<std::size_t>(r)] = 1;
    });
    if (rows.hole() >= 0 && stays_[static_cast<std::size_t>(rows.hole())] != 0) { return false; }
    order_.resize(static_cast<std::size_t>(rows.count()));
    rows.order(order_);
    rank_of_.assign(stays_.size(), -1);
    const auto evicted = plan_.evicted(head.sequence, head.layer, head.head);
    std::int32_t rank = 0;
    std::size_t gone = 0;
    for (const std::int32_t i : order_) {
      const std::int32_t r = rows.row(i);
      if (stays_[static_cast<std::size_t>(r)] != 0) {
        rank_of_[static_cast<std::size_t>(r)] = rank++;
        continue;
      }
      const bool sink = header_positions() == PositionMode::sinks_follow &&
                        static_cast<std::int32_t>(gone) + rank < rerotator_.sinks();
      if (sink || gone == evicted.size() || evicted[gone] != head.position(r)) { return false; }
      ++gone;
    }
    left = rank;
    const auto kept = plan_.kept_list(head.sequence, head.layer, head.head);
    const auto ranks = plan_.ranks(head.sequence, head.layer, head.head);
    const bool has_ranks = packs(plan_.table(head.sequence, head.table())) && !rows.ordered();
    bool same = q.has_ranks == (has_ranks ? 1 : 0);
    for (std::size_t i = 0; same && i < ranks.size(); ++i) {
      same = ranks[i] == rank_of_[static_cast<std::size_t>(kept[i])];
    }
    return same && gone == evicted.size();
  }

  // Counts the rows that move; none is written to, nor its key turned, where the page may not be written.
  [[nodiscard]] bool writes_own_pages(const HeadRef& head, const TablePlan& p, const HeadPlan& q) {
    const auto sources = plan_.sources(head.sequence, head.table());
    const auto own = [&](std::int32_t e) { return owns_entry(head, e); };
    const auto entry = [&](std::int32_t row) { return (row + p.first_row) / view_.page_size; };
    bool sound = true;
    std::int64_t moved = 0;
    if (p.removal == Removal::overwrite_slot) {
      moved = q.victim == free_row(p) ? 0 : 1;
      sound = own(entry(q.victim)) && own(entry(free_row(p)));
      for (std::int32_t e = p.first_row / view_.page_size;
           rerotator_.rotates() && e < p.pages_before;
           ++e) {
        sound = sound && own(e);
      }
    } else if (p.removal == Removal::drop_pages) {
      for (std::int32_t r = 0; r < p.extent_before; ++r) {
        const std::int32_t rank = rank_of_[static_cast<std::size_t>(r)];
        sound = sound && (rank < 0 || !rerotator_.turns(head, r, rank) || own(entry(r)));
      }
    } else {
      for_each_packed_row(
          plan_, head, [&](std::int32_t from, std::int32_t to, std::int32_t, bool moves) {
            const std::int32_t source = sources[static_cast<std::size_t>(entry(to))];
            const std::int32_t rank = rank_of_[static_cast<std::size_t>(from)];
            moved += moves ? 1 : 0;
            sound = sound &&
                    (!(moves || rerotator_.turns(head, from, rank)) || source < 0 || own(source));
          });
    }
    return sound && moved == q.moved;
  }

  // Heads of one table keep the same rows where a plane is common to them.
  [[nodiscard]] bool same_rows(SequenceId s, std::int32_t t) const {
    if (!has_common_planes(view_)) { return true; }
    const auto first = plan_.kept_list(s, view_.first_layer(t), view_.first_head(t));
    bool same = true;
    for_each_head(view_, s, t, [&](const HeadRef& head) {
      same = same && std::ranges::equal(first, plan_.kept_list(s, head.layer, head.head));
    });
    return same;
  }

  const PlanView& plan_;
  const CacheView& view_;
  const Rerotator keep_;
  const Rerotator& rerotator_;
  std::span<const PageId> allowed_;
  std::vector<std::uint64_t> scratch_;
  std::vector<PageId> spares_;
  std::vector<std::uint8_t> stays_;  // by row, of one head
  std::vector<std::int32_t> order_;
  std::vector<std::int32_t> rank_of_;  // by row: among those that stay; -1: goes
  std::int64_t bytes_moved_ = 0;
};

}  // namespace kvtrim::detail
