// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tables say is never trusted: lengths, ids and counters are checked before a plan, and whether they are still the
// same before its rows are moved and before its tables are written. The specification is `check_tables`, `table_generation`
// and what `apply` and `commit` say about changed tables.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int table_threads = 256;

KVTRIM_DEVICE unsigned long long scramble(unsigned long long x) {
  x = (x ^ (x >> 30U)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31U);
}
KVTRIM_DEVICE unsigned long long scramble(unsigned long long a, unsigned long long b) {
  return scramble(scramble(a + 0x9E37'79B9'7F4A'7C15ULL) ^ b);
}

/// Which memory the pages of table `t` name.
KVTRIM_DEVICE int pool_of(const CacheView& view, int t) {
  if (kvtrim::detail::has_own_heads(view)) { return t; }
  return kvtrim::detail::has_own_layers(view.k) ? raw(view.first_layer(t)) : 0;
}

// Grid over the words.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads) clear_kernel(DevicePlan plan) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < plan.tables * plan.seen_words; i += step) { plan.seen[i] = 0; }
  for (std::int64_t i = first; i < plan.heads(); i += step) { plan.nan_counts[i] = 0; }
  if (first == 0) {
    *plan.report = {};
    PlanControl control{};
    for (unsigned long long& fault : control.faults) { fault = no_fault; }
    *plan.control = control;
  }
}

/// When the tables are looked at. `plan` checks lengths and entries and notes each table's generation; `apply` and `commit`
/// compare it, for the tables that the plan evicts from.
enum class CheckPass : std::int32_t { plan, apply, commit };

/// One table and a sum of what a plan for it depends on. Once its rows are moved, it does not matter which of its pages may be
/// written: a sequence that shares them may end.
struct CheckedTable {
  const CacheView& view;
  std::int64_t index;
  SequenceId s;
  std::int32_t t;
  LayerId l;
  HeadId h;

  KVTRIM_DEVICE CheckedTable(const CacheView& v, const DevicePlan& plan, std::int64_t i)
      : view(v),
        index(i),
        s{static_cast<std::int32_t>(i / plan.tables)},
        t(static_cast<std::int32_t>(i % plan.tables)),
        l(v.first_layer(t)),
        h(v.first_head(t)) {}

  /// Entries in use, and those that are kept for rows to come.
  [[nodiscard]] KVTRIM_DEVICE std::int64_t entries() const {
    return kvtrim::detail::used_entries(view, s, l, h) + view.reserved(s, t);
  }
  /// What the counters and the length add; `raised` is what `apply` adds to the counters.
  [[nodiscard]] KVTRIM_DEVICE unsigned long long counters(unsigned raised) const {
    const SequenceState state = view.state(s, l, h);
    const auto i = static_cast<unsigned long long>(index);
    const unsigned long long length = static_cast<unsigned long long>(view.live_rows(s, l, h))
                                          << 32U |
                                      static_cast<std::uint32_t>(state.append_row);
    const unsigned long long sides = static_cast<unsigned long long>(view.first_row(s)) << 32U |
                                     static_cast<std::uint32_t>(view.reserved(s, t));
    const unsigned long long of_state = view.states == nullptr ? 0 : state.generation + raised;
    const unsigned long long of_engine =
        view.generations == nullptr ? 0 : view.generations[view.table_index(s, t)] + raised;
    return scramble(scramble(i, length), sides) + scramble(scramble(~i, of_state), of_engine);
  }
  /// What entry `e` adds; `writable`: bit 0 for the keys' page, bit 1 for the values'.
  [[nodiscard]] KVTRIM_DEVICE unsigned long long entry(std::int64_t e, unsigned writable) const {
    const auto at = static_cast<std::int32_t>(e);
    const unsigned long long ids =
        static_cast<unsigned long long>(static_cast<std::uint32_t>(raw(view.k_page(s, l, h, at))))
            << 32U |
        static_cast<std::uint32_t>(raw(view.v_page(s, l, h, at)));
    return scramble(
        scramble(static_cast<unsigned long long>(index), static_cast<unsigned long long>(e)),
        scramble(ids, writable));
  }
  [[nodiscard]] KVTRIM_DEVICE bool in_pool(PageId p, bool of_values) const {
    return raw(p) >= 0 && raw(p) < view.pages && view.table.on_step(p, of_values);
  }
  [[nodiscard]] KVTRIM_DEVICE unsigned writable(std::int64_t e) const {
    const auto at = static_cast<std::int32_t>(e);
    const PageId k = view.k_page(s, l, h, at);
    const PageId v = view.v_page(s, l, h, at);
    return (in_pool(k, false) && view.writable(k, l, h) ? 1U : 0U) |
           (view.table.v_offset != 0 && in_pool(v, true) && view.writable(v, l, h) ? 2U : 0U);
  }
};

struct CheckShared {
  BlockScan<table_threads, unsigned long long> sums;
};

/// Checks a table's entries and notes its generation.
KVTRIM_DEVICE void check_table(const CheckedTable& at,
                               const DevicePlan& plan,
                               CheckShared& shared) {
  const CacheView& view = at.view;
  const long long place = static_cast<long long>(at.t) * plan.sequences + raw(at.s);
  Status length = kvtrim::detail::check_length(view, at.s, at.t).status;
  const std::int64_t entries = length == Status::ok ? at.entries() : 0;
  const std::int64_t rows = view.live_rows(at.s, at.l, at.h) + view.first_row(at.s) +
                            (view.state(at.s, at.l, at.h).append_row >= 0 ? 1 : 0);
  if (length == Status::ok && (rows > plan.max_rows || entries > plan.max_pages)) {
    length = Status::workspace_too_small;
  }
  if (threadIdx.x == 0) {
    plan.entry_starts[at.index + 1] = length == Status::ok ? static_cast<std::int32_t>(entries) : 0;
    if (length != Status::ok) { note_fault(plan.control, phase_length, place, length); }
  }
  if (length != Status::ok) { return; }
  // Entries that only padding uses are not looked at: null pages may stand there.
  const std::int64_t padding = view.first_row(at.s) / view.page_size;
  unsigned long long sum = threadIdx.x == 0 ? at.counters(0) : 0;
  for (std::int64_t e = threadIdx.x; e < entries; e += table_threads) {
    const unsigned may_write = at.writable(e);
    sum += at.entry(e, may_write);
    const auto visit = [&](PageId p, unsigned bit) {
      if (e < padding) { return; }
      if (!at.in_pool(p, bit == 2U)) {
        note_fault(plan.control, phase_entries, place, Status::page_out_of_range);
      } else if ((may_write & bit) != 0) {
        const std::int64_t word = pool_of(view, at.t) * plan.seen_words + raw(p) / 32;
        const std::uint32_t mine = 1U << (static_cast<unsigned>(raw(p)) % 32U);
        if ((atomicOr(&plan.seen[word], mine) & mine) != 0) {
          note_fault(plan.control, phase_entries, place, Status::page_twice);
        }
      }
    };
    visit(view.k_page(at.s, at.l, at.h, static_cast<std::int32_t>(e)), 1U);
    if (view.table.v_offset != 0) {
      visit(view.v_page(at.s, at.l, at.h, static_cast<std::int32_t>(e)), 2U);
    }
  }
  sum = block_sum(sum, shared.sums);
  if (threadIdx.x == 0) { plan.generations[at.index] = sum; }
}

/// Sum of a table as it is now; bounds are not trusted any more.
KVTRIM_DEVICE unsigned long long table_sum(const CheckedTable& at,
                                           unsigned raised,
                                           bool with_writable,
                                           CheckShared& shared) {
  const bool sound = kvtrim::detail::check_length(at.view, at.s, at.t).status == Status::ok;
  const std::int64_t entries = sound ? at.entries() : 0;
  unsigned long long sum = threadIdx.x == 0 ? at.counters(raised) : 0;
  for (std::int64_t e = threadIdx.x; e < entries; e += table_threads) {
    sum += at.entry(e, with_writable ? at.writable(e) : 0U);
  }
  return block_sum(sum, shared.sums);
}

/// Takes a table that cannot be committed out of the plan: it was changed since its rows were moved (`torn`), or its sequence
/// ended (`stale_plan`).
KVTRIM_DEVICE void leave_out(const CheckedTable& at, const DevicePlan& plan, Status why) {
  TablePlan& table = plan.table_plans[at.index];
  std::uint8_t* const free = plan.released_free + plan.list_starts[2 * at.index];
  for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x); k < table.released;
       k += table_threads) {
    free[k] = 0;
  }
  __syncthreads();
  if (threadIdx.x != 0) { return; }
  const std::int64_t heads =
      static_cast<std::int64_t>(at.view.layers_per_table()) * at.view.heads_per_table();
  const std::int64_t gone = table.live_before - table.live_after;
  const auto subtract = [](std::int64_t& from, std::int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&from),
              static_cast<unsigned long long>(-value));
  };
  subtract(plan.report->evicted, gone * heads);
  subtract(plan.report->kept, table.live_after * heads);
  atomicSub(&plan.report->released, table.released);
  atomicAdd(why == Status::torn ? &plan.control->torn : &plan.control->ended, 1);
  table.status = why;
  table.evicts = false;
}

// A block: one table.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    check_kernel(CacheView view, DevicePlan plan, CheckPass pass) {
  KVTRIM_SHARED(CheckShared, shared, );
  if (pass == CheckPass::commit && plan.control->stage != DeviceStage::applied) { return; }
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const CheckedTable at(view, plan, i);
    if (pass == CheckPass::plan) {
      check_table(at, plan, shared);
      continue;
    }
    if (!plan.table_plans[i].evicts) { continue; }
    if (pass == CheckPass::apply) {
      const unsigned long long now = table_sum(at, 0, true, shared);
      const unsigned long long then = table_sum(at, 1, false, shared);
      if (threadIdx.x == 0) {
        if (now != plan.generations[i]) { atomicExch(&plan.control->changed, 1); }
        plan.moved_generations[i] = then;
      }
      continue;
    }
    const bool applied = view.states == nullptr || view.state(at.s, at.l, at.h).applied;
    const bool ended = view.live_rows(at.s, at.l, at.h) == 0 || !applied;
    const unsigned long long now = ended ? 0 : table_sum(at, 0, false, shared);
    const bool torn = !ended && now != plan.moved_generations[i];
    __syncthreads();  // all threads have read what thread 0 changes
    if (ended || torn) {
      leave_out(at, plan, torn ? Status::torn : Status::stale_plan);
    } else if (threadIdx.x == 0) {
      atomicAdd(&plan.control->whole, 1);
    }
  }
}

struct StartsShared {
  BlockScan<table_threads, long long> sums;
};

// One block: where each table's entries begin in the arrays that are indexed by entry.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads) starts_kernel(DevicePlan plan) {
  KVTRIM_SHARED(StartsShared, shared, );
  if (threadIdx.x == 0) { plan.entry_starts[0] = 0; }
  long long before = 0;
  for (std::int64_t base = 0; base < plan.all_tables(); base += table_threads) {
    const std::int64_t i = base + threadIdx.x;
    const bool in = i < plan.all_tables();
    const long long mine = in ? plan.entry_starts[i + 1] : 0;
    long long here = 0;
    const long long first = before + block_sum_before(mine, shared.sums, here);
    if (in) { plan.entry_starts[i + 1] = static_cast<std::int32_t>(first + mine); }
    before += here;
  }
  if (threadIdx.x == 0 && before > plan.entries) {
    note_fault(plan.control, phase_length, 0, Status::workspace_too_small);
  }
}

// One block: whether the plan may be carried out, from `from` on.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    gate_kernel(CacheView view, DevicePlan plan, CheckPass pass) {
  KVTRIM_SHARED(std::int32_t, opens, [1]);
  if (threadIdx.x == 0) {
    PlanControl& control = *plan.control;
    control.go = 0;
    Status status = control.status;
    if (usable(status) && pass == CheckPass::apply) {
      if (control.evicting == 0) {  // nothing goes: never stale
        if (control.stage == DeviceStage::planned) { control.stage = DeviceStage::applied; }
      } else if (control.stage != DeviceStage::planned || control.changed != 0) {
        status = Status::stale_plan;
      } else {
        control.go = 1;
        control.stage = DeviceStage::applied;
      }
    } else if (usable(status)) {
      if (control.stage == DeviceStage::planned) {
        status = Status::not_applied;
      } else if (control.stage == DeviceStage::committed && control.evicting != 0) {
        status = Status::stale_plan;
      } else if (control.evicting != 0) {
        control.go = control.whole > 0 ? 1 : 0;
        status = control.torn > 0 ? Status::torn : control.whole == 0 ? Status::stale_plan : status;
      }
      if (status != Status::not_applied) { control.stage = DeviceStage::committed; }
    }
    control.changed = 0;
    plan.report->status = status;
    opens[0] = pass == CheckPass::apply ? control.go : 0;
  }
  __syncthreads();
  if (opens[0] == 0) { return; }
  for (std::int64_t i = threadIdx.x; i < plan.all_tables(); i += table_threads) {
    if (!plan.table_plans[i].evicts) { continue; }
    if (view.generations != nullptr) { ++view.generations[i]; }
    if (view.states != nullptr) {
      ++view.states[i].generation;
      view.states[i].applied = true;
    }
  }
}

}  // namespace kvtrim::cuda::detail
