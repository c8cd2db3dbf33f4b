// SPDX-License-Identifier: Apache-2.0
#pragma once

// From kept rows, or kept pages, to tables: which pages a table has afterwards, what leaves it, what moves, and whether all
// that may be done. Knows nothing of policies and scores. Over 400 lines: the four ways to remove share every check.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/evict/detail/plan_memory.hpp>
#include <kvtrim/evict/plan.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/evict/rerotate.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

// What the second selection may do with the rows of a table entry.
enum class Entry : std::uint8_t { own, locked, dropped };

class PlanTables {
 public:
  PlanTables(const CacheView& view, const PlanOptions& options) noexcept
      : view_(view), options_(options) {}

 protected:
  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }
  [[nodiscard]] std::size_t flag_index(SequenceId s, std::int32_t t) const noexcept {
    return index(static_cast<std::int64_t>(raw(s)) * mem_.header->tables + t);
  }
  [[nodiscard]] TablePlan& table(SequenceId s, std::int32_t t) const noexcept {
    return plan_.table(s, t);
  }
  [[nodiscard]] std::uint8_t* entries(SequenceId s, std::int32_t t) const noexcept {
    return mem_.entry_flags.data() + flag_index(s, t) * index(mem_.header->max_pages);
  }
  [[nodiscard]] bool rotates() const noexcept {
    return options_.rerotator != nullptr && options_.rerotator->rotates();
  }

  [[nodiscard]] PositionMode header_positions() const noexcept { return mem_.header->positions; }

  // A refused plan evicts nothing, and lists nothing that was half made.
  [[nodiscard]] PlanView refuse(Status status) noexcept {
    mem_.header->status = status;
    mem_.header->evicted_rows = 0;
    mem_.header->kept_rows = 0;
    mem_.header->bytes_moved = 0;
    for_each_table([&](SequenceId s, std::int32_t t) {
      table(s, t) = {};
      for_each_head(t, [&](LayerId l, HeadId h) { plan_.head(s, l, h) = {}; });
    });
    return plan_;
  }

  template <class F>
  void for_each_table(F&& f) const noexcept {
    for (std::int32_t s = 0; s < view_.sequences; ++s) {
      for (std::int32_t t = 0; t < view_.tables_per_sequence(); ++t) { f(SequenceId{s}, t); }
    }
  }
  template <class F>
  void for_each_head(std::int32_t t, F&& f) const noexcept {
    for (std::int32_t l = 0; l < view_.layers_per_table(); ++l) {
      for (std::int32_t h = 0; h < view_.heads_per_table(); ++h) {
        f(LayerId{raw(view_.first_layer(t)) + l}, HeadId{raw(view_.first_head(t)) + h});
      }
    }
  }
  // Entries that only left padding uses: null pages may stand there. They are neither moved, dropped nor looked at.
  [[nodiscard]] std::int32_t padding_entries(SequenceId s) const noexcept {
    return view_.first_row(s) / view_.page_size;
  }
  [[nodiscard]] bool shared_entry(SequenceId s, std::int32_t t, std::int32_t e) const noexcept {
    const bool all_writable =
        view_.writable.ref_counts == nullptr && view_.writable.bits == nullptr;
    if (all_writable || e < padding_entries(s)) { return false; }
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    return !view_.writable(view_.k_page(s, l, h, e)) || !view_.writable(view_.v_page(s, l, h, e));
  }
  [[nodiscard]] std::int32_t entry_of(SequenceId s, std::int32_t row) const noexcept {
    return (row + view_.first_row(s)) / view_.page_size;
  }

  // The victims' pages and the page of the next append must be this sequence's own.
  [[nodiscard]] bool overwrite_is_possible(SequenceId s,
                                           std::int32_t t,
                                           bool any_shared,
                                           std::int32_t window) noexcept {
    TablePlan& plan = table(s, t);
    const LayerId l0 = view_.first_layer(t);
    const HeadId h0 = view_.first_head(t);
    const SequenceState state = view_.state(s, l0, h0);
    bool possible = true;
    bool same = true;
    const std::int32_t first_victim = plan_.head(s, l0, h0).victim;
    for_each_head(t, [&](LayerId l, HeadId h) {
      const HeadPlan& head = plan_.head(s, l, h);
      possible = possible && head.victim >= 0 &&
                 !(any_shared && shared_entry(s, t, entry_of(s, head.victim)));
      same = same && head.victim == first_victim;
    });
    if (!possible || (any_shared && rotates())) { return false; }
    // The row that just left the window, if it can be found: so the window's slots stay a ring.
    std::int32_t slot = first_victim;
    if (!same) {
      const Position leaving{state.next_position - 1 - window};
      const Position* const positions = view_.positions.array<Position>(s, l0, h0);
      if (positions != nullptr) {
        const auto at = std::find(positions, positions + plan.live_before, leaving) - positions;
        if (at < plan.live_before) { slot = static_cast<std::int32_t>(at); }
      } else {
        for (std::int32_t r = 0; r < plan.live_before; ++r) {
          if (view_.position(s, l0, h0, r) == leaving) { slot = r; }
        }
      }
      if (any_shared && shared_entry(s, t, entry_of(s, slot))) { slot = first_victim; }
    }
    plan.append_row = slot;
    return true;
  }

  // Sequence planes common to heads or layers that have tables of their own: those, too, must keep the same rows, in the
  // same places. (Inside one table, each way of removal sees to it.)
  [[nodiscard]] bool common_planes_agree() const noexcept {
    bool heads = false;
    bool layers = false;
    for_each_sequence_plane(view_, [&](const SequencePlane& p) {
      heads = heads || (p && p.head_stride == 0);
      layers = layers || (p && p.layer_stride == 0);
    });
    heads = heads && view_.scope == TableScope::head && view_.kv_heads > 1;
    layers = layers && view_.scope != TableScope::group && view_.layers > 1;
    if (!heads && !layers) { return true; }
    bool agree = true;
    for (std::int32_t i = 0; i < view_.sequences; ++i) {
      const SequenceId s{i};
      for (std::int32_t l = 0; l < view_.layers; ++l) {
        for (std::int32_t h = 0; h < view_.kv_heads; ++h) {
          const LayerId like_l{layers ? 0 : l};
          const HeadId like_h{heads ? 0 : h};
          agree = agree && same_rows(s, LayerId{l}, HeadId{h}, like_l, like_h);
        }
      }
    }
    return agree;
  }
  [[nodiscard]] bool same_rows(
      SequenceId s, LayerId l, HeadId h, LayerId like_l, HeadId like_h) const noexcept {
    const std::int32_t t = view_.table_of(l, h);
    const std::int32_t like_t = view_.table_of(like_l, like_h);
    const TablePlan& a = table(s, t);
    const TablePlan& b = table(s, like_t);
    if (a.evicts != b.evicts || a.live_before != b.live_before) { return false; }
    if (!a.evicts) { return true; }
    return a.removal == b.removal && a.append_row == b.append_row &&
           std::ranges::equal(plan_.evicted(s, l, h), plan_.evicted(s, like_l, like_h)) &&
           std::ranges::equal(plan_.kept_list(s, l, h), plan_.kept_list(s, like_l, like_h)) &&
           (a.removal != Removal::drop_pages ||
            std::ranges::equal(plan_.sources(s, t), plan_.sources(s, like_t)));
  }

  void keep_all(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    plan.live_after = plan.live_before;
    plan.pages_after = plan.pages_before;
    plan.released = 0;
    const EntryCopy copy = entry_copy(s, t);
    for (std::int32_t e = 0; e < plan.pages_before; ++e) { copy(e, e); }
  }

  // Entry `to` of the new table is entry `from` of the old one, for many of them: where both lie.
  struct EntryCopy {
    const CacheView& view;
    const std::int32_t* entries;
    PageId* k;
    PageId* v;
    std::int32_t* sources;
    void operator()(std::int32_t to, std::int32_t from) const noexcept {
      k[to] = view.table.page(entries[from]);
      v[to] = view.table.page(entries[from + view.table.v_offset]);
      sources[to] = from;
    }
  };
  [[nodiscard]] EntryCopy entry_copy(SequenceId s, std::int32_t t) const noexcept {
    return {view_,
            view_.table.row(s, view_.first_layer(t), view_.first_head(t)),
            plan_.k_pages(s, t).data(),
            plan_.v_pages(s, t).data(),
            plan_.sources(s, t).data()};
  }

  // Entry `to` of the new table is entry `from` of the old one.
  void take_entry(SequenceId s, std::int32_t t, std::int32_t to, std::int32_t from) noexcept {
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    plan_.k_pages(s, t)[index(to)] = view_.k_page(s, l, h, from);
    plan_.v_pages(s, t)[index(to)] = view_.v_page(s, l, h, from);
    plan_.sources(s, t)[index(to)] = from;
  }

  // Lists the old entries that the new table does not name, tail first. `stays(e)`: whether entry e is still there.
  template <class Stays>
  void release_entries(SequenceId s, std::int32_t t, Stays stays) noexcept {
    TablePlan& plan = table(s, t);
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    plan.released = 2 * plan.pages_before;
    auto* const out = const_cast<PageId*>(plan_.released(s, t).data());
    std::int32_t n = 0;
    for (std::int32_t e = plan.pages_before; e-- > 0;) {
      if (stays(e)) { continue; }
      out[n++] = view_.k_page(s, l, h, e);
      if (mem_.header->separate_values) { out[n++] = view_.v_page(s, l, h, e); }
    }
    plan.released = n;
  }

  // Closes up a table to the entries whose flag is set. Its rows must be in position order.
  [[nodiscard]] Status drop_entries(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t live = plan.live_before;
    std::uint8_t* const flags = entries(s, t);
    // The padding's pages stay: rows are counted from inside the last of them.
    std::fill_n(flags, pages_for(plan.first_row, view_.page_size), std::uint8_t{1});
    // First and last entry that goes: nothing is looked at outside of them, and no row that stays.
    std::int32_t first = plan.pages_before;
    std::int32_t last = -1;
    plan.pages_after = plan.pages_before;
    const EntryCopy copy = entry_copy(s, t);
    std::int32_t pages = 0;
    for (std::int32_t e = 0; e < plan.pages_before; ++e) {
      copy(pages, e);  // overwritten unless it stays
      pages += flags[e] != 0 ? 1 : 0;
      if (flags[e] == 0) {
        first = std::min(first, e);
        last = e;
      }
    }
    plan.pages_after = pages;
    release_entries(s, t, [&](std::int32_t e) { return flags[e] != 0; });
    const auto begin_of = [&](std::int32_t e) {
      return std::min(std::max(0, e * view_.page_size - plan.first_row), live);
    };
    plan.live_after = live;
    for (std::int32_t e = first; e <= last; ++e) {
      if (flags[e] == 0) { plan.live_after -= begin_of(e + 1) - begin_of(e); }
    }
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head = {};
      std::int32_t* const out = plan_.rows(s, l, h);
      std::int32_t n = 0;
      for (std::int32_t e = first; e <= last; ++e) {
        if (flags[e] != 0) { continue; }
        const std::int32_t begin = begin_of(e);
        const std::int32_t count = begin_of(e + 1) - begin;
        const auto* const positions = view_.positions.array<std::int32_t>(s, l, h);
        for (std::int32_t i = 0; positions == nullptr && i < count; ++i) {
          out[n + i] = raw(view_.position(s, l, h, begin + i));
        }
        if (positions != nullptr) { std::copy_n(positions + begin, count, out + n); }
        n += count;
      }
      head.evicted = n;
    });
    if (plan.live_after == live) { plan.evicts = false; }
    return rotates() && rotates_shared(s, t, flags) ? Status::shared_page : Status::ok;
  }

  // Whether a row of a shared page that stays would be rotated.
  [[nodiscard]] bool rotates_shared(SequenceId s,
                                    std::int32_t t,
                                    const std::uint8_t* flags) const noexcept {
    const TablePlan& plan = table(s, t);
    bool any = false;
    for_each_head(t, [&](LayerId l, HeadId h) {
      std::int32_t rank = 0;
      for (std::int32_t r = 0; r < plan.live_before; ++r) {
        const std::int32_t e = entry_of(s, r);
        if (flags[e] == 0) { continue; }
        any = any || (shared_entry(s, t, e) && turns(s, l, h, r, rank));
        ++rank;
      }
    });
    return any;
  }

  // Whether the key of row `r`, of rank `rank` among the kept, is rotated in the rerotator's mode.
  [[nodiscard]] bool turns(
      SequenceId s, LayerId l, HeadId h, std::int32_t r, std::int32_t rank) const noexcept {
    if (options_.rerotator->mode() == PositionMode::sinks_follow) {
      return rank < options_.rerotator->sinks();
    }
    return view_.rope_position(s, l, h, r) != rank;
  }

  [[nodiscard]] Status close_overwrite(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t first_victim =
        plan_.head(s, view_.first_layer(t), view_.first_head(t)).victim;
    bool moves = false;
    bool same = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head.moved = head.victim == plan.append_row ? 0 : 1;
      moves = moves || head.moved != 0;
      same = same && head.victim == first_victim;
    });
    if (!same && has_common_planes(view_)) { return Status::planes_disagree; }
    plan.live_after = plan.live_before - 1;
    plan.ordered_after = plan.ordered_after && !moves;
    if (plan.append_row == plan.extent_before - 1) { plan.append_row = -1; }
    const std::int32_t extent = plan.live_after + (plan.append_row >= 0 ? 1 : 0);
    plan.pages_after = pages_for(extent + view_.first_row(s), view_.page_size);
    const EntryCopy copy = entry_copy(s, t);
    for (std::int32_t e = 0; e < plan.pages_after; ++e) { copy(e, e); }
    release_entries(s, t, [&](std::int32_t e) { return e < plan.pages_after; });
    return Status::ok;
  }

  // `keep`: the rows that the budget allows.
  [[nodiscard]] Status close_pack(SequenceId s, std::int32_t t, std::int32_t keep) noexcept {
    TablePlan& plan = table(s, t);
    const std::int32_t first_row = view_.first_row(s);
    std::int32_t kept = -1;
    bool equal = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      equal = equal && (kept < 0 || kept == plan_.head(s, l, h).kept);
      kept = plan_.head(s, l, h).kept;
    });
    if (!equal) { return Status::unequal_budget; }
    if (has_common_planes(view_) && !same_rows_in_all_heads(s, t)) {
      return Status::planes_disagree;
    }
    Status status = kept > keep ? Status::over_budget : Status::ok;
    plan.live_after = kept;
    if (kept == plan.live_before) {
      plan.evicts = false;
      return status;
    }

    const bool locked =
        options_.shared == SharedPages::leave && mem_.second_pass[flag_index(s, t)] != 0;
    const std::uint8_t* const flags = entries(s, t);
    const auto is_locked = [&](std::int32_t e) {
      return locked && flags[e] == static_cast<std::uint8_t>(Entry::locked);
    };
    plan.append_row = -1;
    plan.pages_after = pages_for(kept + first_row, view_.page_size);
    const std::int32_t padding = padding_entries(s);
    std::int32_t pages = 0;
    while (pages < padding) { take_entry(s, t, pages, pages), ++pages; }
    for (std::int32_t e = padding; e < plan.pages_before; ++e) {
      if (!is_locked(e)) { continue; }
      // Locked pages must come first and be full: rows behind them are numbered from their end.
      const std::int32_t begin = e * view_.page_size - first_row;
      const bool full = begin >= 0 && begin + view_.page_size <= plan.extent_before;
      for (std::int32_t before = padding; before < e; ++before) {
        if (flags[before] == static_cast<std::uint8_t>(Entry::own)) { return Status::shared_page; }
      }
      if (pages >= plan.pages_after || (!full && pages + 1 < plan.pages_after)) {
        return Status::shared_page;
      }
      take_entry(s, t, pages++, e);
    }
    plan.shared_kept = pages - padding;
    for (std::int32_t e = padding; e < plan.pages_before && pages < plan.pages_after; ++e) {
      if (is_locked(e) || (locked && flags[e] == static_cast<std::uint8_t>(Entry::dropped))) {
        continue;
      }
      take_entry(s, t, pages++, e);
    }
    if (pages < plan.pages_after) { return Status::shared_page; }
    if (const Status copied = replace_shared_pages(s, t); copied != Status::ok) { return copied; }
    release_entries(s, t, [&](std::int32_t e) {
      const auto sources = plan_.sources(s, t);
      return std::find(sources.begin(), sources.end(), e) != sources.end();
    });
    bool moves = false;
    for_each_head(t, [&](LayerId l, HeadId h) {
      HeadPlan& head = plan_.head(s, l, h);
      head.moved = 0;
      for_each_move(s, t, l, h, [&](std::int32_t, std::int32_t, std::int32_t, bool moved) {
        head.moved += moved ? 1 : 0;
      });
      moves = moves || head.moved != 0;
    });
    plan.ordered_after = plan.ordered_after && !(plan.removal == Removal::fill_holes && moves);
    return status;
  }

  [[nodiscard]] bool same_rows_in_all_heads(SequenceId s, std::int32_t t) const noexcept {
    const auto first = plan_.kept_list(s, view_.first_layer(t), view_.first_head(t));
    bool same = true;
    for_each_head(t, [&](LayerId l, HeadId h) {
      same = same && std::ranges::equal(first, plan_.kept_list(s, l, h));
    });
    return same;
  }

  // Calls f(from row, to row, index in the kept list, whether its data moves) for each kept row.
  template <class F>
  void for_each_move(SequenceId s, std::int32_t t, LayerId l, HeadId h, F&& f) const noexcept {
    const TablePlan& plan = table(s, t);
    const auto sources = plan_.sources(s, t);
    const std::int32_t first_row = view_.first_row(s);
    for_each_target(plan_.kept_list(s, l, h),
                    plan.removal,
                    [&](std::int32_t from, std::int32_t to, std::int32_t i) {
                      const std::int32_t at = to + first_row;
                      const bool stays =
                          sources[index(at / view_.page_size)] ==
                              (from + first_row) / view_.page_size &&
                          at % view_.page_size == (from + first_row) % view_.page_size;
                      f(from, to, i, !stays);
                    });
  }

  // `copy`: pages of the new table that must be written but may not are replaced by spare ones; sources become -1.
  [[nodiscard]] Status replace_shared_pages(SequenceId s, std::int32_t t) noexcept {
    TablePlan& plan = table(s, t);
    PlanHeader& header = *mem_.header;
    const std::int32_t first_row = view_.first_row(s);
    plan.spare_pages = 0;
    for (std::int32_t e = 0; e < plan.pages_after; ++e) {
      const std::int32_t source = plan_.sources(s, t)[index(e)];
      if (!shared_entry(s, t, source)) { continue; }
      bool written = false;
      for_each_head(t, [&](LayerId l, HeadId h) {
        const auto ranks = plan_.ranks(s, l, h);
        for_each_move(
            s, t, l, h, [&](std::int32_t from, std::int32_t to, std::int32_t i, bool moved) {
              const std::int32_t rank = ranks.empty() ? i : ranks[index(i)];
              if ((to + first_row) / view_.page_size == e) {
                written = written || moved || (rotates() && turns(s, l, h, from, rank));
              }
            });
      });
      if (!written) { continue; }
      if (options_.shared == SharedPages::leave) { return Status::shared_page; }
      const std::int32_t pages = header.separate_values ? 2 : 1;
      header.spares_needed += pages;
      ++plan.spare_pages;
      plan_.sources(s, t)[index(e)] = -1;
      if (static_cast<std::size_t>(header.spares_needed) > options_.spare_pages.size()) {
        continue;
      }
      const auto spare =
          options_.spare_pages.subspan(index(header.spares_needed - pages), index(pages));
      plan_.k_pages(s, t)[index(e)] = spare.front();
      plan_.v_pages(s, t)[index(e)] = spare.back();
    }
    return static_cast<std::size_t>(header.spares_needed) > options_.spare_pages.size()
               ? Status::out_of_pages
               : Status::ok;
  }

  const CacheView& view_;
  const PlanOptions& options_;
  PlanMemory mem_;
  PlanView plan_;
};

}  // namespace kvtrim::detail
