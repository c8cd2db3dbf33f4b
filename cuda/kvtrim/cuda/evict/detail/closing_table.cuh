// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table that a block closes, and what all ways of closing do with its entries.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

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

}  // namespace kvtrim::cuda::detail
