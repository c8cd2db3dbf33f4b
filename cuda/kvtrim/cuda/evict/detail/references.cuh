// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pages that leave a table lose a reference; those that lose their last one are free. Their places in the engine's lists are
// known once those of all tables are counted: the last block does it, and the next launch fills the lists.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/check.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_tables.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

struct ReferenceShared {
  BlockScan<table_threads, std::int32_t> counts;
  std::int32_t last;
};

/// Drops the references of the pages that leave table `i`, and counts those that are free. For a whole block.
KVTRIM_DEVICE void drop_references(const CacheView& view,
                                   const DevicePlan& plan,
                                   std::int64_t i,
                                   const TablePlan& table,
                                   const DeviceTables& out,
                                   ReferenceShared& shared) {
  const auto t = static_cast<std::int32_t>(i % plan.tables);
  const LayerId l = view.first_layer(t);
  const HeadId h = view.first_head(t);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t free = 0;
  if (table.evicts) {
    const std::int32_t* const list = plan.released_rows + 2 * std::int64_t{plan.first_entry(i)};
    std::uint8_t* const flags = plan.released_free + plan.list_starts[2 * i];
    for (std::int32_t r = thread; r < table.released; r += table_threads) {
      bool last = true;
      if (out.ref_counts != nullptr) {
        std::int32_t& count = out.ref_counts[view.writable.index(PageId{list[r]}, l, h)];
        const std::int32_t held = atomicAdd(&count, -1);
        last = held == 1;
        if (held <= 0) { atomicAdd(&count, 1); }  // nobody's: not returned again
      }
      flags[r] = last ? 1 : 0;
      free += last ? 1 : 0;
    }
  }
  free = block_sum(free, shared.counts);
  if (thread == 0) { plan.free_starts[i] = free; }
}

/// Where each table's free pages begin in the lists, and how many there are. For the whole last block.
KVTRIM_DEVICE void count_free_pages(const DevicePlan& plan,
                                    const DeviceTables& out,
                                    ReferenceShared& shared) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t all = 0;
  for (std::int64_t base = 0; base < plan.all_tables(); base += table_threads) {
    const std::int64_t i = base + thread;
    const bool in = i < plan.all_tables();
    std::int32_t here = 0;
    const std::int32_t before =
        all + block_sum_before(in ? plan.free_starts[i] : 0, shared.counts, here);
    if (in) { plan.free_starts[i] = before; }
    all += here;
  }
  if (thread != 0) { return; }
  if (out.freed_count != nullptr) { *out.freed_count = all; }
  if (out.free.count == nullptr) { return; }
  const std::int32_t there = *out.free.count;
  const std::int32_t room = out.free.capacity - there;
  plan.control->free_base = there;
  *out.free.count = there + (all < room ? all : room < 0 ? 0 : room);
}

/// Puts the pages of table `i` that became free where they belong, in the order of `released`. For a whole block.
KVTRIM_DEVICE void list_free_pages(const DevicePlan& plan,
                                   std::int64_t i,
                                   const TablePlan& table,
                                   const DeviceTables& out,
                                   ReferenceShared& shared) {
  const std::int32_t first = plan.list_starts[2 * i];
  std::int32_t to = plan.free_starts[i];
  const std::int32_t top = out.free.count != nullptr ? plan.control->free_base : 0;
  for (std::int32_t base = 0; base < table.released; base += table_threads) {
    const std::int32_t r = base + static_cast<std::int32_t>(threadIdx.x);
    const bool free = r < table.released && plan.released_free[first + r] != 0;
    std::int32_t here = 0;
    const std::int32_t place = to + block_rank(free, shared.counts, here);
    to += here;
    if (!free) { continue; }
    const std::int32_t page = plan.released[first + r];
    if (out.freed != nullptr) { out.freed[place] = page; }
    if (out.free.count != nullptr && top + place < out.free.capacity) {
      out.free.ids[top + place] = page;
    }
  }
}

}  // namespace kvtrim::cuda::detail
