// SPDX-License-Identifier: Apache-2.0
#pragma once

// From kept rows, or kept pages, to tables: which pages a table has, what leaves it, what moves, and whether that may be: the
// host's `stage::close`. Over 400 lines: one block closes one table, and its steps share what it keeps in shared memory.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/renumber.cuh>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/select/choose_rows.hpp>
#include <kvtrim/select/pages.hpp>

#include <climits>
#include <cstdint>

namespace kvtrim::cuda::detail {

/// What a closing block is told besides the plan.
struct CloseInput {
  bool by_position = false;             // pages stay by the ranks of their rows alone
  bool out_of_place = false;            // rows go into spare pages
  const std::uint8_t* stays = nullptr;  // by entry: pages were chosen; 1: it stays
  ReservedPages reserved = ReservedPages::follow;
  bool leaves_shared = false;  // what `fix_pages_kernel` says of shared pages holds
  bool copies_shared = false;  // shared pages that would be written are replaced by spare pages
  PositionMode positions = PositionMode::keep;  // in which keys are rotated
  std::int32_t sinks = 0;                       // that follow the window
};

/// Shared memory of a closing block.
struct CloseShared {
  BlockScan<table_threads, std::int32_t> ranks;
  BlockScan<table_threads, unsigned long long> sums;
  std::int32_t slot;
  std::int32_t first_replaced;
};

/// The table that a closing block works on.
struct ClosingTable {
  const CacheView& view;
  const DevicePlan& plan;
  CloseShared& shared;
  SequenceId s;
  std::int32_t t;
  std::int64_t index;
  LayerId l0;
  HeadId h0;
  std::int32_t heads;  // that it serves
  std::int32_t heads_a_layer;
  const CloseInput& input;

  KVTRIM_DEVICE LayerId layer(std::int32_t i) const { return LayerId{raw(l0) + i / heads_a_layer}; }
  KVTRIM_DEVICE HeadId head(std::int32_t i) const { return HeadId{raw(h0) + i % heads_a_layer}; }
  KVTRIM_DEVICE std::int64_t head_index(std::int32_t i) const {
    return plan.head_index(s, layer(i), head(i));
  }
  /// Ids of an entry that leaves: K's, and V's where they are separate.
  KVTRIM_DEVICE std::int32_t ids() const { return view.table.v_offset != 0 ? 2 : 1; }
  KVTRIM_DEVICE void release(std::int32_t e, std::int32_t place) const {
    std::int32_t* const list = plan.released_rows + 2 * plan.first_entry(index) + place * ids();
    list[0] = raw(view.k_page(s, l0, h0, e));
    if (ids() == 2) { list[1] = raw(view.v_page(s, l0, h0, e)); }
  }
  KVTRIM_DEVICE void take(std::int32_t to, std::int32_t from) const {
    std::int32_t* const k_pages = plan.pages_of(index);
    k_pages[to] = raw(view.k_page(s, l0, h0, from));
    k_pages[plan.entries + to] = raw(view.v_page(s, l0, h0, from));
    plan.sources_of(index)[to] = from;
  }
  /// Reserved entries are behind the last page that stays, or leave before all others. Returns how many leave.
  KVTRIM_DEVICE std::int32_t settle_reserved(TablePlan& table) const {
    const bool follow = input.reserved == ReservedPages::follow;
    table.reserved_after = follow ? table.reserved_before : 0;
    for (std::int32_t e = static_cast<std::int32_t>(threadIdx.x); e < table.reserved_before;
         e += table_threads) {
      if (follow) {
        take(table.pages_after + e, table.pages_before + e);
      } else {
        release(table.pages_before + e, table.reserved_before - 1 - e);
      }
    }
    return table.reserved_before - table.reserved_after;
  }
  KVTRIM_DEVICE bool entry_is_shared(const TablePlan& table, std::int32_t e) const {
    if (e < table.first_row / view.page_size) { return false; }
    return !view.writable(view.k_page(s, l0, h0, e), l0, h0) ||
           !view.writable(view.v_page(s, l0, h0, e), l0, h0);
  }
};

/// Whether row `from` has, at place `to`, another entry of a page plane whose entries belong to several rows.
KVTRIM_DEVICE bool leaves_entry(const CacheView& view,
                                std::int32_t first_row,
                                std::int32_t from,
                                std::int32_t to) {
  const std::int32_t a = from + first_row;
  const std::int32_t b = to + first_row;
  const bool same_page = a / view.page_size == b / view.page_size;
  bool leaves = false;
  for (int i = 0; i < view.page_plane_count; ++i) {
    const PagePlane p = view.page_planes[i];
    const std::int32_t each = p.rows_per_entry(view.page_size);
    leaves = leaves || (kvtrim::detail::ties_rows(view, p) &&
                        !(same_page && a % view.page_size / each == b % view.page_size / each));
  }
  return leaves;
}

/// Entries of `sources` that are not 0 stay and move up; the others, `going` of them, are released, tail first. Leaves in
/// `sources` what each entry was.
KVTRIM_DEVICE void close_up(const ClosingTable& at, TablePlan& table, std::int32_t going) {
  std::int32_t* const flags = at.plan.sources_of(at.index);
  const std::int32_t reserved_going =
      at.input.reserved == ReservedPages::follow ? 0 : table.reserved_before;
  std::int32_t taken = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + static_cast<std::int32_t>(threadIdx.x);
    const bool in = e < table.pages_before;
    const bool stays = in && flags[e] != 0;
    std::int32_t here = 0;
    const std::int32_t to = taken + block_rank(stays, at.shared.ranks, here);
    if (stays) {
      at.take(to, e);  // `to` is not above `e`, and this tile's flags have been read
    } else if (in) {
      at.release(e, reserved_going + going - 1 - (e - to));
    }
    taken += here;
  }
  table.pages_after = taken;
  table.released = (going + at.settle_reserved(table)) * at.ids();
}

/// Closes the table up to whole pages.
KVTRIM_DEVICE Status close_drop(const ClosingTable& at, TablePlan& table, const SelectTask& task) {
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  const CacheView& view = at.view;
  const bool by_position = at.input.by_position;
  const std::uint8_t* const chosen =
      at.input.stays == nullptr ? nullptr : at.input.stays + at.plan.first_entry(at.index);
  std::int32_t* const flags = at.plan.sources_of(at.index);
  const PageSpan span{table.live_before, table.first_row, view.page_size};
  const std::int32_t padded = pages_for(table.first_row, view.page_size);
  for (std::int32_t e = thread; e < table.pages_before; e += table_threads) {
    const bool stays = e < padded || (chosen != nullptr && chosen[e] != 0) ||
                       (by_position && (span.begin(e) < task.begin || span.end(e) > task.end));
    flags[e] = stays ? 1 : 0;
  }
  __syncthreads();
  if (!by_position && chosen == nullptr) {
    for (std::int32_t i = 0; i < at.heads; ++i) {
      const RowLists rows = at.plan.lists_of(at.head_index(i));
      for (std::int32_t e = thread; e < table.pages_before; e += table_threads) {
        const std::int32_t begin = span.begin(e);
        const std::int32_t end = span.end(e);
        if (rows.gone_below(end) - rows.gone_below(begin) < end - begin) { flags[e] = 1; }
      }
    }
    __syncthreads();
  }
  // Two walks: how many go (the released ones are listed tail first), then the lists.
  std::int32_t staying = 0;
  std::int32_t rows = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + thread;
    const bool stays = e < table.pages_before && flags[e] != 0;
    staying += __syncthreads_count(stays);
    rows += stays ? span.end(e) - span.begin(e) : 0;
  }
  rows = block_sum(rows, at.shared.ranks);
  close_up(at, table, table.pages_before - staying);
  table.live_after = rows;
  table.shared_kept = 0;
  if (rows == table.live_before) {
    table.evicts = false;
    table.released = 0;
    table.pages_after = table.pages_before;
    table.reserved_after = table.reserved_before;
  }
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    HeadPlan head;
    head.evicted = table.live_before - rows;
    at.plan.head_plans[at.head_index(i)] = head;
  }
  if (chosen != nullptr) { return Status::ok; }
  return !by_position && rows > task.keep ? Status::over_budget : Status::ok;
}

/// Entries [0, pages_after) keep their ids; those from `released_from` on are released, tail first.
KVTRIM_DEVICE void keep_leading_pages(const ClosingTable& at,
                                      TablePlan& table,
                                      std::int32_t released_from) {
  const std::int32_t reserved_going = at.settle_reserved(table);
  for (std::int32_t e = static_cast<std::int32_t>(threadIdx.x); e < table.pages_before;
       e += table_threads) {
    if (e < table.pages_after) {
      at.take(e, e);
      if (e >= released_from) { at.plan.sources_of(at.index)[e] = -1; }
    }
    if (e >= released_from) { at.release(e, reserved_going + table.pages_before - 1 - e); }
  }
  table.released = (reserved_going + table.pages_before - released_from) * at.ids();
}

/// For one row too many: its slot takes the next append.
KVTRIM_DEVICE Status close_overwrite(const ClosingTable& at,
                                     TablePlan& table,
                                     const SelectTask& task,
                                     bool common) {
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  const CacheView& view = at.view;
  const std::int32_t window = table.shared_kept;
  table.shared_kept = 0;
  const std::int32_t first_victim = at.plan.lists_of(at.head_index(0)).gone[0];
  bool differs = false;  // a victim in a shared page is none: `fix_pages_kernel`
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    differs = differs || at.plan.lists_of(at.head_index(i)).gone[0] != first_victim;
  }
  differs = __syncthreads_or(differs) != 0;
  // The row that just left the window, if it can be found: this keeps the window's slots a ring.
  std::int32_t slot = first_victim;
  if (differs) {
    if (common) { return Status::planes_disagree; }
    if (thread == 0) { at.shared.slot = first_victim; }
    __syncthreads();
    const Position leaving{task.next_position - 1 - window};
    for (std::int32_t r = thread; r < table.live_before; r += table_threads) {
      if (view.position(at.s, at.l0, at.h0, r) == leaving &&
          !at.entry_is_shared(table, (r + table.first_row) / view.page_size)) {
        at.shared.slot = r;  // one row at most
      }
    }
    __syncthreads();
    slot = at.shared.slot;
  }
  bool moves = false;
  bool parts = false;
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    HeadPlan head;
    head.evicted = 1;
    head.victim = at.plan.lists_of(at.head_index(i)).gone[0];
    head.moved = head.victim == slot ? 0 : 1;
    moves = moves || head.moved != 0;
    parts = parts || (head.moved != 0 && leaves_entry(view, table.first_row, slot, head.victim));
    at.plan.head_plans[at.head_index(i)] = head;
  }
  moves = __syncthreads_or(moves) != 0;
  if (__syncthreads_or(parts) != 0) { return Status::planes_disagree; }
  table.live_after = table.live_before - 1;
  table.ordered_after = table.ordered_after && !moves;
  table.append_row = slot == table.extent_before - 1 ? -1 : slot;
  const std::int32_t extent = table.live_after + (table.append_row >= 0 ? 1 : 0);
  table.pages_after = pages_for(extent + table.first_row, view.page_size);
  keep_leading_pages(at, table, table.pages_after);
  return Status::ok;
}

/// Whether the kept rows of two KV heads are the same; all threads of the block get the answer.
KVTRIM_DEVICE bool same_kept_rows(const DevicePlan& plan, std::int64_t a, std::int64_t b) {
  const SelectTask x = plan.tasks[a];
  const SelectTask y = plan.tasks[b];
  bool differs = x.active != y.active || x.extent != y.extent || x.keep != y.keep;
  if (!differs && x.active != 0) {
    const RowLists p = plan.lists_of(a);
    const RowLists q = plan.lists_of(b);
    for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x); k < p.gone_count;
         k += table_threads) {
      differs = differs || p.gone[k] != q.gone[k];
    }
  }
  return __syncthreads_or(differs) == 0;
}
/// The same of the pages that were chosen for two tables.
KVTRIM_DEVICE bool same_pages(const ClosingTable& at, const TablePlan& table, std::int64_t other) {
  const std::uint8_t* const a = at.input.stays + at.plan.first_entry(at.index);
  const std::uint8_t* const b = at.input.stays + at.plan.first_entry(other);
  bool differs = false;
  for (std::int32_t e = static_cast<std::int32_t>(threadIdx.x); e < table.pages_before;
       e += table_threads) {
    differs = differs || a[e] != b[e];
  }
  return __syncthreads_or(differs) == 0;
}

/// Kept rows [`count`, `kept`) of a KV head move, and no others, where a table's rows are packed in order and those of `kinds` that
/// are dropped are passed over. Returns `count`.
KVTRIM_DEVICE std::int32_t rows_before_gap(const RowLists& rows,
                                           const std::int32_t* kinds,
                                           const PageSpan& span,
                                           std::int32_t kept) {
  for (std::int32_t k = 0; k < rows.gone_count;) {
    const std::int32_t e = (rows.gone[k] + span.first_row) / span.page_size;
    if (kinds == nullptr || static_cast<RowKind>(kinds[e]) != RowKind::dropped) {
      const std::int32_t count = rows.gone[k] - k;
      return count < kept ? count : kept;
    }
    k = rows.gone_below(span.end(e));
  }
  return kept;
}

/// Turns the kinds of a table's entries in `sources` into what stays: the locked pages, which must come first, then as many of the
/// free ones as the rows need. False where they do not. (A locked page that is not full is the last one: no free one is behind it.)
KVTRIM_DEVICE bool choose_entries(const ClosingTable& at, TablePlan& table, std::int32_t padding) {
  std::int32_t* const kinds = at.plan.sources_of(at.index);
  const auto kind_of = [&](std::int32_t e) { return static_cast<RowKind>(kinds[e]); };
  bool bad = false;
  std::int32_t locked = 0;
  std::int32_t free = 0;
  for (std::int32_t base = padding; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + static_cast<std::int32_t>(threadIdx.x);
    const bool in = e < table.pages_before;
    std::int32_t here = 0;
    const std::int32_t before =
        free + block_rank(in && kind_of(e) == RowKind::free, at.shared.ranks, here);
    free += here;
    const bool stays = in && kind_of(e) == RowKind::locked;
    bad = bad || (stays && before > 0);
    locked += __syncthreads_count(stays);
  }
  table.shared_kept = locked;
  const std::int32_t rest = table.pages_after - padding - locked;
  bad = bad || rest < 0 || rest > free;
  if (__syncthreads_or(bad) != 0) { return false; }
  free = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + static_cast<std::int32_t>(threadIdx.x);
    const bool in = e >= padding && e < table.pages_before;
    const RowKind kind = in ? kind_of(e) : RowKind::locked;
    std::int32_t here = 0;
    const std::int32_t before =
        free + block_rank(in && kind == RowKind::free, at.shared.ranks, here);
    free += here;
    const bool stays = kind == RowKind::locked || (kind == RowKind::free && before < rest);
    if (e < table.pages_before) { kinds[e] = stays ? 1 : 0; }
  }
  __syncthreads();
  return true;
}

/// Entries of `sources` that are -1 are replaced by spare pages: their pages, and those behind the last page that stays, are
/// released, tail first. Rows of replaced pages move with the others.
KVTRIM_DEVICE void replace_pages(const ClosingTable& at, TablePlan& table) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t* const sources = at.plan.sources_of(at.index);
  const PageSpan span{table.live_after, table.first_row, at.view.page_size};
  const bool fills = table.removal == Removal::fill_holes;
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    const RowLists rows = at.plan.lists_of(at.head_index(i));
    HeadPlan& head = at.plan.head_plans[at.head_index(i)];
    const std::int32_t in_place = table.live_after - static_cast<std::int32_t>(head.moved);
    for (std::int32_t e = 0; e < table.pages_after; ++e) {
      if (sources[e] >= 0) { continue; }
      const std::int32_t begin = span.begin(e);
      const std::int32_t end = span.end(e);
      const std::int32_t stayed = in_place < end ? in_place : end;
      head.moved += fills            ? end - begin - (rows.gone_below(end) - rows.gone_below(begin))
                    : stayed > begin ? stayed - begin
                                     : 0;
    }
  }
  const std::int32_t reserved_going = at.settle_reserved(table);
  const std::int32_t going = table.pages_before - table.pages_after + table.spare_pages;
  std::int32_t gone = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + thread;
    const bool in = e < table.pages_before;
    const bool goes = in && (e >= table.pages_after || sources[e] < 0);
    std::int32_t here = 0;
    const std::int32_t before = gone + block_rank(goes, at.shared.ranks, here);
    gone += here;
    if (goes) {
      at.release(e, reserved_going + going - 1 - before);
    } else if (in) {
      at.take(e, e);
    }
  }
  table.released = (reserved_going + going) * at.ids();
}

/// Calls f(entry) where a key would be rotated in a page that must not be written: for rows that stay where they lie. For a whole
/// block.
///
/// \param source_of  the entry that entry `e` of the new table was; -1: a spare page
template <class SourceOf, class F>
KVTRIM_DEVICE void for_each_turned_in_shared(const ClosingTable& at,
                                             const TablePlan& table,
                                             SourceOf source_of,
                                             F f) {
  const CacheView& view = at.view;
  const CloseInput& input = at.input;
  if (input.positions == PositionMode::keep || input.out_of_place || !table.evicts ||
      view.writable.all()) {
    return;
  }
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const bool in_cache = input.positions == PositionMode::in_cache;
  const bool fills = table.removal == Removal::fill_holes;
  const bool ordered = view.state(at.s, at.l0, at.h0).ordered;
  for (std::int32_t i = 0; i < at.heads; ++i) {
    const LayerId l = at.layer(i);
    const HeadId h = at.head(i);
    const RowLists rows = at.plan.lists_of(at.head_index(i));
    const auto stands = [&](std::int32_t row) {
      return *reinterpret_cast<const std::int32_t*>(view.rope_positions.row(at.s, l, h, row));
    };
    const auto position = [&](std::int32_t row) { return raw(view.position(at.s, l, h, row)); };
    // Of rows that are not in order: the lowest rope position that goes, or the position of the first row behind the sinks.
    std::int32_t bound = INT_MAX;
    if (!ordered && in_cache) {
      const std::int32_t hole = at.plan.tasks[at.head_index(i)].hole;
      for (std::int32_t k = thread; k < rows.gone_count; k += table_threads) {
        const std::int32_t r = rows.gone[k];
        if (r != hole && stands(r) < bound) { bound = stands(r); }
      }
      bound = block_min(bound, at.shared.ranks);
    } else if (!ordered) {
      bound = position_of(input.sinks, table.live_after, at.shared.ranks, [&](std::int32_t k) {
        return position(rows.kept_row(k));
      });
    }
    for (std::int32_t to = thread; to < table.live_after; to += table_threads) {
      const std::int32_t e = (to + table.first_row) / view.page_size;
      const std::int32_t source = source_of(e);
      if (source < 0 || !at.entry_is_shared(table, source)) { continue; }
      const std::int32_t from = to + (source - e) * view.page_size;
      const std::int32_t rank = fills ? to - rows.gone_below(to) : to;
      const bool turns = !ordered   ? (in_cache ? stands(from) > bound : position(from) < bound)
                         : in_cache ? stands(from) != rank
                                    : rank < input.sinks;
      if (turns) { f(e); }
    }
  }
}
/// Whether there is any. Where pages are copied, such a one was replaced.
KVTRIM_DEVICE bool turns_shared_key(const ClosingTable& at, const TablePlan& table) {
  const std::int32_t* const sources = at.plan.sources_of(at.index);
  __syncthreads();  // they are written
  bool turns = false;
  for_each_turned_in_shared(
      at, table, [&](std::int32_t e) { return sources[e]; }, [&](std::int32_t) { turns = true; });
  return __syncthreads_or(turns) != 0;
}

/// Rows close up (in order, from the tail, or into spare pages).
KVTRIM_DEVICE Status close_pack(
    const ClosingTable& at, TablePlan& table, const SelectTask& task, bool common, bool ties) {
  const bool out_of_place = at.input.out_of_place;
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  const CacheView& view = at.view;
  const bool fixed = at.input.leaves_shared && at.plan.active[at.index] != 0;
  const std::int32_t kept = task.keep;
  const std::int32_t budget = fixed ? table.live_after : kept;
  if (fixed) {
    bool unequal = false;
    for (std::int32_t i = thread; i < at.heads; i += table_threads) {
      unequal = unequal || at.plan.tasks[at.head_index(i)].keep != kept;
    }
    if (__syncthreads_or(unequal) != 0) { return Status::unequal_budget; }
  }
  if (common) {
    for (std::int32_t i = 1; i < at.heads; ++i) {
      if (!same_kept_rows(at.plan, at.head_index(0), at.head_index(i))) {
        return Status::planes_disagree;
      }
    }
  }
  const Status status = kept > budget ? Status::over_budget : Status::ok;
  const std::int32_t padding = table.first_row / view.page_size;
  table.live_after = kept;
  table.shared_kept = 0;
  if (kept == table.live_before) {  // those of shared pages are all that there are
    table.evicts = false;
    return status;
  }
  table.append_row = -1;
  table.pages_after = pages_for(kept + table.first_row, view.page_size);
  table.spare_pages = out_of_place ? table.pages_after - padding : 0;
  std::int32_t* const sources = at.plan.sources_of(at.index);
  bool moves = false;
  const bool fills = table.removal == Removal::fill_holes;
  const PageSpan before{table.extent_before, table.first_row, view.page_size};
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    const RowLists rows = at.plan.lists_of(at.head_index(i));
    HeadPlan head;
    head.kept = kept;
    head.evicted = table.live_before - kept;
    // Stable: rows before the first gap stay. Holes: rows below `kept` stay, the others fill the holes in order.
    const std::int32_t moved =
        fills ? rows.gone_below(kept)
              : kept - rows_before_gap(rows, fixed ? sources : nullptr, before, kept);
    head.moved = out_of_place ? kept : moved;
    moves = moves || head.moved != 0;
    at.plan.head_plans[at.head_index(i)] = head;
  }
  moves = __syncthreads_or(moves) != 0;
  if (fixed) {
    if (!choose_entries(at, table, padding)) { return Status::shared_page; }
    close_up(at, table, table.pages_before - table.pages_after);
    __syncthreads();
  }
  if (!out_of_place && !view.writable.all()) {
    const PageSpan span{kept, table.first_row, view.page_size};  // of the rows as they will be
    const bool copies = at.input.copies_shared;
    bool refused = false;
    std::int32_t replaced = 0;
    std::int32_t* const turned = at.plan.pages_of(at.index);  // written below
    const bool turns = copies && at.input.positions != PositionMode::keep;
    if (thread == 0) { at.shared.first_replaced = kept; }
    for (std::int32_t e = thread; turns && e < table.pages_after; e += table_threads) {
      turned[e] = 0;
    }
    __syncthreads();
    if (turns) {
      for_each_turned_in_shared(
          at,
          table,
          [](std::int32_t e) { return e; },
          [&](std::int32_t e) { atomicExch(&turned[e], 1); });
      __syncthreads();
    }
    for (std::int32_t e = thread; e < table.pages_after; e += table_threads) {
      bool written = turns && turned[e] != 0;
      if (e >= padding && at.entry_is_shared(table, fixed ? sources[e] : e)) {
        for (std::int32_t i = 0; i < at.heads && !written; ++i) {
          const RowLists rows = at.plan.lists_of(at.head_index(i));
          const auto moved = static_cast<std::int32_t>(at.plan.head_plans[at.head_index(i)].moved);
          written = fills ? rows.gone_below(span.end(e)) > rows.gone_below(span.begin(e))
                          : kept - moved < span.end(e);
        }
      }
      if (copies) {
        sources[e] = written ? -1 : e;
        replaced += written ? 1 : 0;
        if (written) { atomicMin(&at.shared.first_replaced, span.begin(e)); }
      }
      refused = refused || (written && !copies);
    }
    if (__syncthreads_or(refused) != 0) { return Status::shared_page; }
    table.spare_pages = block_sum(replaced, at.shared.ranks);
  }
  if (ties && moves) {
    bool parts = table.spare_pages > 0;  // into other pages
    for (std::int32_t i = 0; i < at.heads && !parts; ++i) {
      const RowLists rows = at.plan.lists_of(at.head_index(i));
      const auto moved = static_cast<std::int32_t>(at.plan.head_plans[at.head_index(i)].moved);
      for (std::int32_t k = thread; k < moved && !parts; k += table_threads) {
        std::int32_t to = fills ? rows.gone[k] : kept - moved + k;
        if (fixed) {  // the row that was in its place
          const std::int32_t place = to + table.first_row;
          to += (sources[place / view.page_size] - place / view.page_size) * view.page_size;
        }
        parts = leaves_entry(view, table.first_row, rows.kept_row(kept - moved + k), to);
      }
    }
    if (__syncthreads_or(parts) != 0) { return Status::planes_disagree; }
  }
  table.ordered_after = table.ordered_after && !(fills && moves);
  if (table.spare_pages > 0 && !out_of_place) {
    replace_pages(at, table);
  } else if (!fixed) {
    keep_leading_pages(at, table, out_of_place ? padding : table.pages_after);
  }
  return status;
}

/// Whether heads, or layers, that have tables of their own share sequence planes.
struct SharedPlanes {
  bool heads = false;
  bool layers = false;
};
KVTRIM_DEVICE SharedPlanes shared_planes(const CacheView& view) {
  SharedPlanes common;
  for (int i = 0; i < sequence_plane_count(view); ++i) {
    const SequencePlane p = sequence_plane(view, i);
    common.heads = common.heads || (p && p.head_stride == 0);
    common.layers = common.layers || (p && p.layer_stride == 0);
  }
  common.heads = common.heads && view.scope == TableScope::head && view.kv_heads > 1;
  common.layers = common.layers && view.scope != TableScope::group && view.layers > 1;
  return common;
}

/// Whether they keep the same rows.
KVTRIM_DEVICE bool agrees_with_other_tables(const ClosingTable& at, const TablePlan& table) {
  const CacheView& view = at.view;
  const SharedPlanes common = shared_planes(view);
  if (!common.heads && !common.layers) { return true; }
  bool agree = true;
  for (std::int32_t i = 0; i < at.heads; ++i) {
    const LayerId l = common.layers ? LayerId{0} : at.layer(i);
    const HeadId h = common.heads ? HeadId{0} : at.head(i);
    const std::int64_t other = at.plan.head_index(at.s, l, h);
    const SelectTask x = at.plan.tasks[at.head_index(i)];
    const SelectTask y = at.plan.tasks[other];
    if (at.input.stays == nullptr) {
      agree = same_kept_rows(at.plan, at.head_index(i), other) && agree;
    } else if (x.active != y.active || x.extent != y.extent) {
      agree = false;
    } else {
      const std::int64_t theirs = at.plan.table_index(at.s, view.table_of(l, h));
      agree = same_pages(at, table, theirs) && agree;
    }
  }
  return agree;
}

/// What a closed table adds to the report, and where its heads' tiles begin.
KVTRIM_DEVICE void add_up_table(const ClosingTable& at, const TablePlan& table) {
  const DevicePlan& plan = at.plan;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const bool by_list = table.removal == Removal::fill_holes ||
                       table.removal == Removal::overwrite_slot ||
                       all_pages_replaced(table, at.view.page_size);
  const bool every_row = table.removal == Removal::fill_holes && table.spare_pages > 0;
  unsigned long long bytes = 0;
  unsigned long long nan = 0;
  std::int32_t tiles = 0;
  for (std::int32_t base = 0; base < at.heads; base += table_threads) {
    const std::int32_t k = base + thread;
    std::int32_t mine = 0;
    if (k < at.heads) {
      const std::int64_t i = at.head_index(k);
      const std::int64_t moved = plan.head_plans[i].moved;
      bytes += static_cast<unsigned long long>(moved *
                                               moved_row_bytes(at.view, at.layer(k), at.head(k)));
      if (plan.tasks[i].active != 0) { nan += static_cast<unsigned long long>(plan.nan_counts[i]); }
      const std::int64_t listed = every_row ? table.live_after : moved;
      mine = by_list ? static_cast<std::int32_t>((listed + move_tile - 1) / move_tile) : 0;
    }
    std::int32_t here = 0;
    const std::int32_t before = tiles + block_sum_before(mine, at.shared.ranks, here);
    if (k < at.heads) { plan.tile_starts[at.head_index(k)] = before; }
    tiles += here;
  }
  bytes = block_sum(bytes, at.shared.sums);
  nan = block_sum(nan, at.shared.sums);
  if (thread == 0) {
    plan.totals[at.index] = {
        static_cast<std::int64_t>(bytes),
        static_cast<std::int64_t>(nan),
        tiles,
        table.spare_pages > 0 && !at.input.out_of_place ? at.shared.first_replaced : 0};
  }
}

/// Table `i` of all.
KVTRIM_DEVICE ClosingTable closing_table(const CacheView& view,
                                         const DevicePlan& plan,
                                         std::int64_t i,
                                         const CloseInput& input,
                                         CloseShared& shared) {
  const auto t = static_cast<std::int32_t>(i % plan.tables);
  return {view,
          plan,
          shared,
          SequenceId{static_cast<std::int32_t>(i / plan.tables)},
          t,
          i,
          view.first_layer(t),
          view.first_head(t),
          view.layers_per_table() * view.heads_per_table(),
          view.heads_per_table(),
          input};
}

/// Closes a table, for a whole block. `agrees`: with the tables that it shares planes with.
KVTRIM_DEVICE void close_table(const ClosingTable& at, bool agrees, TablePlan& table) {
  const CacheView& view = at.view;
  const DevicePlan& plan = at.plan;
  const SelectTask task = plan.tasks[at.head_index(0)];
  bool common = false;
  for (int k = 0; k < sequence_plane_count(view); ++k) {
    const SequencePlane p = sequence_plane(view, k);
    common = common || (p && ((p.head_stride == 0 && view.kv_heads > 1) ||
                              (p.layer_stride == 0 && view.layers > 1)));
  }
  bool ties = false;
  for (int k = 0; k < view.page_plane_count; ++k) {
    const PagePlane& p = view.page_planes[k];
    ties = ties || kvtrim::detail::ties_rows(view, p);
    common =
        common || (kvtrim::detail::has_row_entries(view, p) &&
                   ((p.head_stride == 0 && view.scope != TableScope::head && view.kv_heads > 1) ||
                    (p.layer_stride == 0 && view.scope == TableScope::group && view.layers > 1)));
  }
  Status status = table.status;
  Status closed = Status::ok;
  if (!agrees) {
    closed = Status::planes_disagree;
  } else if (table.removal == Removal::drop_pages) {
    closed = close_drop(at, table, task);
  } else if (table.removal == Removal::overwrite_slot) {
    closed = close_overwrite(at, table, task, common);
  } else {
    closed = close_pack(at, table, task, common, ties);
  }
  if (usable(closed) && turns_shared_key(at, table)) { closed = Status::shared_page; }
  if (usable(status) && closed != Status::ok) { status = closed; }
  table.status = status;
  __syncthreads();  // the heads' plans are written
  if (usable(status)) { add_up_table(at, table); }
  if (threadIdx.x == 0) {
    plan.table_plans[at.index] = table;
    if (!usable(status)) { note_fault(plan, phase_close, at.s, at.t, status); }
  }
  __syncthreads();
}

}  // namespace kvtrim::cuda::detail
