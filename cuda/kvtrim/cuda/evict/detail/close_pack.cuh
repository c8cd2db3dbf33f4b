// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows close up: in order, from the tail, or into spare pages. What must not be written stays, or is copied: rows that would move
// into a shared page, and keys that would be rotated in one.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/closing_table.cuh>
#include <kvtrim/cuda/evict/detail/renumber.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/select/choose_rows.hpp>
#include <kvtrim/select/pages.hpp>

#include <climits>
#include <cstdint>

namespace kvtrim::cuda::detail {

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

}  // namespace kvtrim::cuda::detail
