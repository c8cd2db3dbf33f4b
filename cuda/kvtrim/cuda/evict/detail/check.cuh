// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the tables say is never trusted: lengths, ids and counters are checked before a plan, and whether they are still the
// same before its rows are moved and before its tables are written. The specification is `check_tables`, `table_generation`
// and what `apply` and `commit` say about changed tables.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/layout.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int table_threads = 256;

__host__ KVTRIM_DEVICE unsigned long long scramble(unsigned long long x) {
  x = (x ^ (x >> 30U)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31U);
}
__host__ KVTRIM_DEVICE unsigned long long scramble(unsigned long long a, unsigned long long b) {
  return scramble(scramble(a + 0x9E37'79B9'7F4A'7C15ULL) ^ b);
}

/// Which memory the pages of table `t` name.
KVTRIM_DEVICE int pool_of(const CacheView& view, int t) {
  if (kvtrim::detail::has_own_heads(view)) { return t; }
  return kvtrim::detail::has_own_layers(view.k) ? raw(view.first_layer(t)) : 0;
}

/// How many such memories there are.
[[nodiscard]] inline std::int32_t pools_of(const CacheView& view) noexcept {
  if (kvtrim::detail::has_own_heads(view)) { return view.tables_per_sequence(); }
  const bool layers = kvtrim::detail::has_own_layers(view.k) && view.scope != TableScope::group;
  return layers ? view.layers : 1;
}

/// When a table is compared with what it was: `apply` and `commit` do, for the tables that the plan evicts from.
enum class ComparePass : std::int32_t { apply, commit };

/// A number that tells caches apart: a plan is for one of them.
[[nodiscard]] inline unsigned long long view_mark(const CacheView& view) noexcept {
  unsigned long long mark = 1;
  for (const void* const p : {static_cast<const void*>(view.k.base),
                              static_cast<const void*>(view.k.layer_bases),
                              static_cast<const void*>(view.v.base),
                              static_cast<const void*>(view.table.ids),
                              static_cast<const void*>(view.table.indptr),
                              static_cast<const void*>(view.lengths),
                              static_cast<const void*>(view.last_page_len),
                              static_cast<const void*>(view.states),
                              static_cast<const void*>(view.positions.base),
                              static_cast<const void*>(view.score_sums.base)}) {
    mark = scramble(mark, reinterpret_cast<std::uintptr_t>(p));
  }
  return mark;
}

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

/// What the checking launch is told.
struct CheckInput {
  BaseUnits units{};
  unsigned long long mark = 0;  // `view_mark`
  bool sums = true;             // note the tables' generations, to compare them later
  bool written = false;         // the open step is written in all layers
  PositionMode positions = PositionMode::keep;
};

struct CheckShared {
  BlockScan<table_threads, unsigned long long> sums;
  LayoutShared layout;
};

// What the launch found out about a table, for the next one: the status of its length, and of its entries.
KVTRIM_DEVICE constexpr std::int32_t check_of(Status length, Status entries) {
  return static_cast<std::int32_t>(length) | static_cast<std::int32_t>(entries) << 8;
}
KVTRIM_DEVICE constexpr Status checked_length(std::int32_t check) {
  return static_cast<Status>(check & 0xFF);
}
KVTRIM_DEVICE constexpr Status checked_entries(std::int32_t check) {
  return static_cast<Status>(check >> 8);
}

/// Word of `DevicePlan::owners` that says which entry holds a page that may be written.
KVTRIM_DEVICE unsigned long long& owner_of(const CacheView& view,
                                           const DevicePlan& plan,
                                           std::int32_t t,
                                           PageId p) {
  return plan.owners[pool_of(view, t) * plan.pool_pages + raw(p)];
}
/// An entry of keys, or of values, as such a word; its table is the high half.
KVTRIM_DEVICE unsigned long long owner_word(std::int64_t table, std::int64_t e, bool of_values) {
  return static_cast<unsigned long long>(table) << 32U |
         (static_cast<unsigned long long>(e) << 1U | (of_values ? 1U : 0U));
}
/// Calls f(page, of_values) for the ids of entry `e`.
template <class F>
KVTRIM_DEVICE void for_each_id(const CheckedTable& at, std::int64_t e, F&& f) {
  f(at.view.k_page(at.s, at.l, at.h, static_cast<std::int32_t>(e)), false);
  if (at.view.table.v_offset != 0) {
    f(at.view.v_page(at.s, at.l, at.h, static_cast<std::int32_t>(e)), true);
  }
}

/// Checks a table's length and the range of its ids, claims the pages that it may write, and notes its generation. Whether
/// another entry claimed a page too can only be seen once all have: `find_page_twice`, in the next launch.
KVTRIM_DEVICE void check_table(const CheckedTable& at,
                               const DevicePlan& plan,
                               bool sums,
                               CheckShared& shared,
                               CheckNote& note) {
  const CacheView& view = at.view;
  Status length = kvtrim::detail::check_length(view, at.s, at.t).status;
  const std::int64_t entries = length == Status::ok ? at.entries() : 0;
  const std::int64_t rows = view.live_rows(at.s, at.l, at.h) + view.first_row(at.s) +
                            (view.state(at.s, at.l, at.h).append_row >= 0 ? 1 : 0);
  if (length == Status::ok && (rows > plan.max_rows || entries > plan.max_pages)) {
    length = Status::workspace_too_small;
    note.too_long = 1;
  }
  if (length != Status::ok) {
    if (threadIdx.x == 0) {
      plan.entry_starts[at.index] = 0;
      plan.checks[at.index] = check_of(length, Status::ok);
    }
    return;
  }
  note.entries += entries;
  // Entries that only padding uses are not looked at: null pages may stand there.
  const std::int64_t padding = view.first_row(at.s) / view.page_size;
  unsigned long long sum = sums && threadIdx.x == 0 ? at.counters(0) : 0;
  bool outside = false;
  for (std::int64_t e = threadIdx.x; e < entries; e += table_threads) {
    const unsigned may_write = at.writable(e);
    if (sums) { sum += at.entry(e, may_write); }
    if (e < padding) { continue; }
    for_each_id(at, e, [&](PageId p, bool of_values) {
      if (!at.in_pool(p, of_values)) {
        outside = true;
      } else if ((may_write & (of_values ? 2U : 1U)) != 0) {
        store_any(&owner_of(view, plan, at.t, p), owner_word(at.index, e, of_values));
      }
    });
  }
  outside = __syncthreads_or(outside) != 0;
  if (sums) { sum = block_sum(sum, shared.sums); }
  if (threadIdx.x == 0) {
    plan.entry_starts[at.index] = static_cast<std::int32_t>(entries);
    plan.checks[at.index] = check_of(Status::ok, outside ? Status::page_out_of_range : Status::ok);
    if (sums) { plan.generations[at.index] = sum; }
  }
}

/// Finds pages that two entries may write: both sequences are at fault.
KVTRIM_DEVICE void find_page_twice(const CheckedTable& at, const DevicePlan& plan) {
  const CacheView& view = at.view;
  const std::int64_t entries = at.entries();
  const std::int64_t padding = view.first_row(at.s) / view.page_size;
  for (std::int64_t e = padding + threadIdx.x; e < entries; e += table_threads) {
    const unsigned may_write = at.writable(e);
    for_each_id(at, e, [&](PageId p, bool of_values) {
      if (!at.in_pool(p, of_values) || (may_write & (of_values ? 2U : 1U)) == 0) { return; }
      const unsigned long long owner = owner_of(view, plan, at.t, p);
      if (owner == owner_word(at.index, e, of_values)) { return; }
      const auto other = static_cast<std::int64_t>(owner >> 32U);
      const auto sequence = static_cast<std::int32_t>(other / plan.tables);
      const auto table = static_cast<std::int32_t>(other % plan.tables);
      note_fault(plan, phase_entries, at.s, at.t, Status::page_twice);
      note_fault(plan, phase_entries, SequenceId{sequence}, table, Status::page_twice);
    });
  }
}

// A block: some neighbouring tables, and a share of the planes. The first launch of a plan: it sets what the others add to.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    check_kernel(CacheView view, DevicePlan plan, CheckInput input) {
  KVTRIM_SHARED(CheckShared, shared, );
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = thread; i < (plan.sequences + std::int64_t{1}) * phases; i += step) {
    plan.faults[i] = no_fault;
  }
  if (thread == 0) {
    *plan.report = {};
    PlanControl control{};
    control.view = input.mark;
    control.positions = input.positions;
    *plan.control = control;
  }
  CheckNote note;
  note.bad_planes = bad_device_layout<table_threads>(view, input.units, shared.layout) ? 1 : 0;
  const TableRange range = tables_of_block(plan);
  for (std::int64_t i = range.first; i < range.last; ++i) {
    if (input.written && view.states != nullptr) {
      if (threadIdx.x == 0) { view.states[i].open = false; }
      __syncthreads();
    }
    check_table(CheckedTable(view, plan, i), plan, input.sums, shared, note);
  }
  if (threadIdx.x == 0) { plan.notes[blockIdx.x] = note; }
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
  if (threadIdx.x != 0) { return; }
  TablePlan& table = plan.table_plans[at.index];
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

// A block: one table that the plan evicts from: whether it is what it was.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    compare_kernel(CacheView view, DevicePlan plan, unsigned long long mark, ComparePass pass) {
  KVTRIM_SHARED(CheckShared, shared, );
  const DeviceStage due = pass == ComparePass::apply ? DeviceStage::planned : DeviceStage::applied;
  if (plan.control->stage != due || plan.control->view != mark) { return; }
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    if (!plan.table_plans[i].evicts) { continue; }
    const CheckedTable at(view, plan, i);
    if (pass == ComparePass::apply) {
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

// One block: whether the plan may be carried out, from `pass` on.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads) gate_kernel(CacheView view,
                                                                DevicePlan plan,
                                                                unsigned long long mark,
                                                                ComparePass pass,
                                                                PositionMode positions) {
  KVTRIM_SHARED(std::int32_t, opens, [1]);
  if (threadIdx.x == 0) {
    PlanControl& control = *plan.control;
    control.go = 0;
    Status status = control.status;
    const bool other = control.view != mark;  // a plan for another cache lies in the workspace now
    if (control.evicting != 0 && other) {
      status = Status::stale_plan;
    } else if (control.evicting == 0) {  // nothing goes: never stale
      if (pass == ComparePass::apply) {
        if (control.stage == DeviceStage::planned) { control.stage = DeviceStage::applied; }
      } else if (usable(status)) {
        if (control.stage == DeviceStage::planned) {
          status = Status::not_applied;
        } else {
          control.stage = DeviceStage::committed;
        }
      }
    } else if (pass == ComparePass::apply) {
      if (control.stage != DeviceStage::planned || control.changed != 0) {
        status = Status::stale_plan;
      } else if (control.positions != positions) {
        status = Status::bad_plan;
      } else {
        control.go = 1;
        control.stage = DeviceStage::applied;
      }
    } else if (control.stage == DeviceStage::planned) {
      status = Status::not_applied;
    } else if (control.stage == DeviceStage::committed) {
      status = Status::stale_plan;
    } else {
      control.go = control.whole > 0 ? 1 : 0;
      if (control.torn > 0) {
        status = Status::torn;
      } else if (control.whole == 0) {
        status = Status::stale_plan;
      }
      control.stage = DeviceStage::committed;
    }
    control.changed = 0;
    plan.report->status = status;
    opens[0] = pass == ComparePass::apply ? control.go : 0;
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
