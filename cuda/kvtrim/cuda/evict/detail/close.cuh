// SPDX-License-Identifier: Apache-2.0
#pragma once

// From kept rows, or kept pages, to tables: which pages a table has, what leaves it, what moves, and whether that may be: the
// host's `stage::close`.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/detail/close_pack.cuh>
#include <kvtrim/cuda/evict/detail/closing_table.cuh>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/select/pages.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

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
