// SPDX-License-Identifier: Apache-2.0
#pragma once

// The host's `plan`, on the device: the specification is kvtrim::plan. Equal scores give equal kept rows, bit for bit.
//
// Kernels in order: clear, check (what the tables say is never trusted), layout (where planes lie on the device), open (the policy's demand), the scorer's, the
// selection's, close (pages, moves and costs of a table), finish (totals), lists (released ids, spare pages). Each returns at
// once if a fault was found or nothing goes. Paths depend on bounds alone, so all of it can be captured into a graph.
//
// Differs from the host: positions stay (`PositionMode::keep`); a shared page that would be written is refused
// (`shared_page`) where the host keeps or copies it (an out-of-place plan writes none); a page that must not be written and
// occurs twice in one table is not noticed. Over 400 lines: its kernels share one unfinished plan.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/move.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/layout.cuh>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/select/pages.hpp>
#include <kvtrim/select/protection.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace kvtrim::cuda {

/// How to make a device plan.
struct DevicePlanOptions {
  Removal removal = Removal::automatic;  ///< `automatic`: the policy's own
  bool out_of_place =
      false;  ///< `stable_pack` into spare pages: shared pages are not written, all old ones are released
  const std::int32_t* spare_pages = nullptr;  ///< device: free pages, taken from the front
  const std::int32_t* spare_count = nullptr;  ///< device, [1]: how many there are
};

namespace detail {

template <class P>
using DeviceScorerOf =
    DeviceScorer<std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>>;

inline constexpr int table_threads = 256;
inline constexpr int table_warps = table_threads / 32;

KVTRIM_DEVICE unsigned long long scramble(unsigned long long x) {
  x = (x ^ (x >> 30U)) * 0xBF58'476D'1CE4'E5B9ULL;
  x = (x ^ (x >> 27U)) * 0x94D0'49BB'1331'11EBULL;
  return x ^ (x >> 31U);
}
KVTRIM_DEVICE unsigned long long scramble(unsigned long long a, unsigned long long b) {
  return scramble(scramble(a + 0x9E37'79B9'7F4A'7C15ULL) ^ b);
}

KVTRIM_DEVICE bool restricts_writing(const CacheView& view) {
  return view.writable.ref_counts != nullptr || view.writable.bits != nullptr;
}
KVTRIM_DEVICE bool layers_have_own_pages(const CacheView& view) {
  return view.k.layer_stride != 0 || view.k.layer_bases != nullptr;
}
/// Which memory the pages of table `t` name.
KVTRIM_DEVICE int pool_of(const CacheView& view, int t) {
  if (view.scope == TableScope::head && view.k.head_stride != 0) { return t; }
  return layers_have_own_pages(view) ? raw(view.first_layer(t)) : 0;
}

// Grid over the words.
template <class = void>
__global__ void clear_kernel(DevicePlan plan) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < plan.tables * plan.seen_words; i += step) { plan.seen[i] = 0; }
  for (std::int64_t i = first; i < plan.heads(); i += step) { plan.nan_counts[i] = 0; }
  if (first == 0) {
    *plan.report = {};
    *plan.control = {{no_fault, no_fault, no_fault}, 0, 0, DeviceStage::planned, 0};
  }
}

/// What `check_kernel` is for. `plan` checks lengths and ids, and sums up the generation of all tables; `apply` only the latter.
/// Once rows are moved, only the tables that evict count, and not which of their pages may be written: `record` sums up their
/// generation as `apply` leaves it, `commit` as it finds it.
enum class CheckPass : std::int32_t { plan, apply, record, commit };

// A block: one table.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    check_kernel(CacheView view, DevicePlan plan, std::int32_t layer_base_unit, CheckPass pass) {
  const bool verify = pass != CheckPass::plan;
  const bool moved = pass == CheckPass::record || pass == CheckPass::commit;
  if (pass == CheckPass::record && plan.control->go == 0) { return; }
  unsigned long long* const to =
      pass == CheckPass::record ? &plan.control->generation : &plan.control->current;
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    if (moved && !plan.table_plans[i].evicts) { continue; }
    const auto t = static_cast<int>(i % plan.tables);
    const SequenceId s{static_cast<std::int32_t>(i / plan.tables)};
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    const SequenceState state = view.state(s, l, h);
    const std::int64_t live = view.live_rows(s, l, h);
    const int first_row = view.first_row(s);
    const std::int64_t rows = live + (state.append_row >= 0 ? 1 : 0) + first_row;
    const std::int64_t used = live == 0 ? 0 : (rows + view.page_size - 1) / view.page_size;
    const long long place = static_cast<long long>(t) * plan.sequences + raw(s);
    const bool bad_length = live < 0 || first_row < 0 || used > view.table.capacity(s, l, h);
    const bool too_long = rows > plan.max_rows;
    if (threadIdx.x == 0) {
      if (!verify && (bad_length || too_long)) {
        note_fault(plan.control,
                   phase_check,
                   place,
                   bad_length ? Status::length_beyond_table : Status::workspace_too_small);
      }
      if (!verify && view.k.layer_bases != nullptr &&
          (address_bits(view.k.layer_bases[raw(l)]) &
           static_cast<std::uint64_t>(layer_base_unit - 1)) != 0) {
        note_fault(plan.control, phase_check, place, Status::bad_observation);
      }
      if (!verify && view.v.layer_bases != nullptr &&
          (address_bits(view.v.layer_bases[raw(l)]) &
           static_cast<std::uint64_t>(layer_base_unit - 1)) != 0) {
        note_fault(plan.control, phase_check, place, Status::bad_observation);
      }
      const unsigned long long lengths = static_cast<unsigned long long>(live) << 32U |
                                         static_cast<std::uint32_t>(state.append_row);
      atomicAdd(to,
                scramble(static_cast<unsigned long long>(i), lengths) +
                    scramble(~static_cast<unsigned long long>(i), state.generation));
    }
    if (bad_length || too_long || state.append_row > live) { continue; }  // `open` names the latter
    unsigned long long sum = 0;
    for (std::int64_t e = threadIdx.x; e < used; e += table_threads) {
      const PageId k = view.k_page(s, l, h, static_cast<std::int32_t>(e));
      const PageId v = view.v_page(s, l, h, static_cast<std::int32_t>(e));
      unsigned writable = 0;
      const auto visit = [&](PageId p, unsigned bit) {
        const bool in_pool = raw(p) >= 0 && raw(p) < view.pages && view.table.on_step(p, bit == 2U);
        const bool may_write = in_pool && view.writable(p, l, h);
        writable |= may_write ? bit : 0U;
        if (verify || e < first_row / view.page_size) { return; }
        if (!in_pool) {
          note_fault(plan.control, phase_check, place, Status::page_out_of_range);
        } else if (may_write) {
          const std::int64_t word = pool_of(view, t) * plan.seen_words + raw(p) / 32;
          const std::uint32_t mine = 1U << (static_cast<unsigned>(raw(p)) % 32U);
          if ((atomicOr(&plan.seen[word], mine) & mine) != 0) {
            note_fault(plan.control, phase_check, place, Status::page_twice);
          }
        }
      };
      visit(k, 1U);
      if (view.table.v_offset != 0) { visit(v, 2U); }
      const unsigned long long ids =
          static_cast<unsigned long long>(static_cast<std::uint32_t>(raw(k))) << 32U |
          static_cast<std::uint32_t>(raw(v));
      sum +=
          scramble(scramble(static_cast<unsigned long long>(i), static_cast<unsigned long long>(e)),
                   scramble(ids, moved ? 0U : writable));
    }
    if (sum != 0) { atomicAdd(to, sum); }
  }
}

// What the demand of a head depends on besides the view.
struct OpenInput {
  const std::int32_t* budgets;
  RowMap budget_rows;
  Removal removal;
  bool named;  // by the options
  bool given;  // scores
  bool out_of_place;
  bool by_position;
};

template <Policy P>
KVTRIM_DEVICE Demand demand_of(const P& policy,
                               const CacheView& view,
                               const OpenInput& input,
                               SequenceId s,
                               LayerId l,
                               HeadId h) {
  DemandInput in;
  in.state = view.state(s, l, h);
  in.live = view.live_rows(s, l, h);
  in.page_size = view.page_size;
  in.first_row = view.first_row(s);
  in.budget = input.budgets == nullptr ? -1 : input.budgets[input.budget_rows(s, l, h)];
  in.layer = view.model_layer(l);
  in.layers = view.layers_of_model();
  Demand demand = policy.demand(in);
  if (demand.keep >= in.live) { return demand; }
  const std::int32_t fixed = in.live - candidates(demand.protection, in.live).count();
  if (demand.keep < fixed) {
    demand.keep = fixed;
    if (demand.status == Status::ok) { demand.status = Status::over_budget; }
  }
  return demand;
}

// A thread: one KV head; the first one of a table opens the table too.
template <Policy P>
__global__ void open_kernel(P policy, CacheView view, DevicePlan plan, OpenInput input) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < plan.heads(); i += step) {
    const HeadId h{static_cast<std::int32_t>(i % plan.kv_heads)};
    const LayerId l{static_cast<std::int32_t>(i / plan.kv_heads % plan.layers)};
    const SequenceId s{static_cast<std::int32_t>(i / plan.kv_heads / plan.layers)};
    const std::int32_t t = view.table_of(l, h);
    const LayerId l0 = view.first_layer(t);
    const HeadId h0 = view.first_head(t);
    const bool leads = l == l0 && h == h0;
    plan.head_plans[i] = {};
    plan.tasks[i] = {};
    if (failed_before(plan.control, phase_open)) {  // the lengths cannot be trusted
      if (leads) {
        plan.table_plans[plan.table_index(s, t)] = {};
        plan.active[plan.table_index(s, t)] = 0;
      }
      continue;
    }
    const SequenceState state = view.state(s, l, h);
    const std::int32_t live = view.live_rows(s, l, h);
    const Demand demand = demand_of(policy, view, input, s, l, h);
    // Lengths were checked before anything was read by them; states are, before anything is chosen by them.
    const Status sound = kvtrim::detail::check_length(view, s, t).status;
    const bool evicts = demand.keep < live && sound == Status::ok;
    if (evicts) {
      const CandidateRange range = candidates(demand.protection, live);
      SelectTask task;
      task.extent = live + (state.append_row >= 0 ? 1 : 0);
      task.begin = range.begin;
      task.end = range.end;
      task.keep = demand.keep;
      task.hole = state.append_row;
      task.next_position = state.next_position;
      task.ordered = state.ordered || !view.positions ? 1 : 0;
      task.active = input.by_position && input.removal == Removal::drop_pages ? 0 : 1;
      plan.tasks[i] = task;
    }
    if (!leads) { continue; }
    TablePlan table;
    table.live_before = table.live_after = live;
    table.extent_before = live + (state.append_row >= 0 ? 1 : 0);
    table.first_row = view.first_row(s);
    table.append_row = state.append_row;
    table.ordered_after = state.ordered;
    table.pages_before = table.pages_after =
        live == 0 ? 0 : pages_for(table.extent_before + table.first_row, view.page_size);
    table.status = demand.status;
    table.evicts = evicts;
    table.removal = input.removal;
    table.positions_known = view.knows_positions(s, t);
    Status status = usable(demand.status) ? Status::ok : demand.status;
    bool bad_budget = false;
    if (input.budgets != nullptr) {
      for (std::int32_t dl = 0; dl < view.layers_per_table(); ++dl) {
        for (std::int32_t dh = 0; dh < view.heads_per_table(); ++dh) {
          const Demand other =
              demand_of(policy, view, input, s, LayerId{raw(l0) + dl}, HeadId{raw(h0) + dh});
          const std::int32_t theirs = other.keep < live ? other.keep : live;
          if (theirs != (evicts ? demand.keep : live)) { status = Status::unequal_budget; }
          const LayerId layer{raw(l0) + dl};
          const HeadId head{raw(h0) + dh};
          bad_budget = bad_budget || input.budgets[input.budget_rows(s, layer, head)] < -1;
        }
      }
    }
    if (evicts) {
      // Some scores depend on positions: none is made where they are unknown.
      if (!input.by_position && !input.given && !table.positions_known) {
        status = Status::bad_observation;
      }
      const bool overwrites = table.removal == Removal::overwrite_slot;
      const bool loses_order = overwrites || table.removal == Removal::fill_holes;
      const bool unrecorded = (loses_order && (view.states == nullptr || !view.positions)) ||
                              (overwrites && view.last_page_len != nullptr);
      if (unrecorded && input.named) { status = Status::bad_options; }
      if (unrecorded || (overwrites && (live - demand.keep != 1 || state.append_row >= 0 ||
                                        input.out_of_place))) {
        table.removal = Removal::stable_pack;
        table.replaced = true;
      }
      if (view.fixed_rows && table.removal != Removal::drop_pages) { status = Status::bad_options; }
      if (state.open) { status = Status::step_open; }
      if (state.applied) { status = Status::eviction_open; }
      if (table.removal == Removal::drop_pages && (!state.ordered || state.append_row >= 0)) {
        status = Status::rows_unordered;
      }
      // Rank of the row that left the window, for `overwrite_slot`.
      table.shared_kept = demand.window;
    }
    if (bad_budget) { status = Status::bad_observation; }
    if (sound != Status::ok) { status = sound; }
    plan.table_plans[plan.table_index(s, t)] = table;
    // If every competing row goes, no scores are needed.
    const CandidateRange range = candidates(demand.protection, live);
    plan.active[plan.table_index(s, t)] = evicts && demand.keep > live - range.count() ? 1 : 0;
    if (status != Status::ok) {
      note_fault(
          plan.control, phase_open, static_cast<long long>(raw(s)) * plan.tables + t, status);
    }
  }
}

/// Shared memory of a closing block.
struct CloseShared {
  std::int32_t warps[table_warps];
  std::int32_t total;
  unsigned long long bytes;
  std::int32_t first_victim;
  std::int32_t slot;
};

/// Exclusive count of `flag` over the block's threads; `total`: over all of them. Two barriers.
KVTRIM_DEVICE std::int32_t block_rank(bool flag, CloseShared& shared, std::int32_t& total) {
  const unsigned lane = threadIdx.x & 31U;
  const unsigned warp = threadIdx.x >> 5U;
  const unsigned votes = __ballot_sync(full_warp, flag);
  if (lane == 0) { shared.warps[warp] = __popc(votes); }
  __syncthreads();
  std::int32_t before = 0;
  total = 0;
  for (unsigned w = 0; w < table_warps; ++w) {
    before += w < warp ? shared.warps[w] : 0;
    total += shared.warps[w];
  }
  __syncthreads();
  return before + __popc(votes & ((1U << lane) - 1U));
}

/// Index of the first of `rows[0, n)` that is not below `value + i * slope`; the differences ascend.
KVTRIM_DEVICE std::int32_t first_not_below(const std::int32_t* rows,
                                           std::int32_t n,
                                           std::int32_t value,
                                           std::int32_t slope) {
  std::int32_t low = 0;
  std::int32_t high = n;
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (rows[middle] < value + slope * middle) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

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

  KVTRIM_DEVICE LayerId layer(std::int32_t i) const { return LayerId{raw(l0) + i / heads_a_layer}; }
  KVTRIM_DEVICE HeadId head(std::int32_t i) const { return HeadId{raw(h0) + i % heads_a_layer}; }
  KVTRIM_DEVICE std::int64_t head_index(std::int32_t i) const {
    return plan.head_index(s, layer(i), head(i));
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

/// Closes the table up to whole pages.
KVTRIM_DEVICE Status close_drop(const ClosingTable& at,
                                TablePlan& table,
                                const SelectTask& task,
                                bool by_position) {
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  const CacheView& view = at.view;
  std::int32_t* const flags = at.plan.sources + at.index * at.plan.max_pages;
  const PageSpan span{table.live_before, table.first_row, view.page_size};
  const std::int32_t padded = pages_for(table.first_row, view.page_size);
  for (std::int32_t e = thread; e < table.pages_before; e += table_threads) {
    const bool stays =
        e < padded || (by_position && (span.begin(e) < task.begin || span.end(e) > task.end));
    flags[e] = stays ? 1 : 0;
  }
  __syncthreads();
  if (!by_position) {
    for (std::int32_t i = 0; i < at.heads; ++i) {
      const std::int32_t* const rows = at.plan.rows_of(at.head_index(i));
      for (std::int32_t k = thread; k < task.keep; k += table_threads) {
        atomicExch(&flags[(rows[k] + table.first_row) / view.page_size], 1);
      }
    }
    __syncthreads();
  }
  // Two walks: how many go (the released ones are listed tail first), then the lists.
  std::int32_t staying = 0;
  std::int32_t live_after = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + thread;
    const bool stays = e < table.pages_before && flags[e] != 0;
    staying += __syncthreads_count(stays);
  }
  if (thread == 0) { at.shared.total = 0; }
  __syncthreads();
  const std::int32_t going = table.pages_before - staying;
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  std::int32_t* const k_pages = at.plan.pages_of(at.index);
  std::int32_t* const v_pages = k_pages + at.plan.max_pages;
  std::int32_t* const released = at.plan.released_rows + at.index * 2 * at.plan.max_pages;
  std::int32_t taken = 0;
  for (std::int32_t base = 0; base < table.pages_before; base += table_threads) {
    const std::int32_t e = base + thread;
    const bool in = e < table.pages_before;
    const bool stays = in && flags[e] != 0;
    std::int32_t here = 0;
    const std::int32_t to = taken + block_rank(stays, at.shared, here);
    if (in) {
      const PageId k = view.k_page(at.s, at.l0, at.h0, e);
      const PageId v = view.v_page(at.s, at.l0, at.h0, e);
      if (stays) {
        k_pages[to] = raw(k);
        v_pages[to] = raw(v);
        flags[to] = e;  // `to` is not above `e`, and this tile's flags have been read
        atomicAdd(&at.shared.total, span.end(e) - span.begin(e));
      } else {
        const std::int32_t from_end = going - 1 - (e - to);
        released[from_end * each] = raw(k);
        if (each == 2) { released[from_end * each + 1] = raw(v); }
      }
    }
    taken += here;
  }
  __syncthreads();
  live_after = at.shared.total;
  __syncthreads();
  table.pages_after = staying;
  table.released = going * each;
  table.live_after = live_after;
  if (live_after == table.live_before) {
    table.evicts = false;
    table.released = 0;
    table.pages_after = table.pages_before;
  }
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    HeadPlan head;
    head.evicted = table.live_before - live_after;
    at.plan.head_plans[at.head_index(i)] = head;
  }
  return !by_position && live_after > task.keep ? Status::over_budget : Status::ok;
}

/// Entries [first, pages_after) keep their ids; those from `pages_after` on are released, tail first.
KVTRIM_DEVICE void keep_leading_pages(const ClosingTable& at,
                                      TablePlan& table,
                                      std::int32_t released_from) {
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t* const k_pages = at.plan.pages_of(at.index);
  std::int32_t* const v_pages = k_pages + at.plan.max_pages;
  std::int32_t* const sources = at.plan.sources + at.index * at.plan.max_pages;
  std::int32_t* const released = at.plan.released_rows + at.index * 2 * at.plan.max_pages;
  const std::int32_t each = at.view.table.v_offset != 0 ? 2 : 1;
  for (std::int32_t e = thread; e < table.pages_before; e += table_threads) {
    const PageId k = at.view.k_page(at.s, at.l0, at.h0, e);
    const PageId v = at.view.v_page(at.s, at.l0, at.h0, e);
    if (e < table.pages_after) {
      k_pages[e] = raw(k);
      v_pages[e] = raw(v);
      sources[e] = e < released_from ? e : -1;
    }
    if (e >= released_from) {
      const std::int32_t from_end = table.pages_before - 1 - e;
      released[from_end * each] = raw(k);
      if (each == 2) { released[from_end * each + 1] = raw(v); }
    }
  }
  table.released = (table.pages_before - released_from) * each;
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
  const std::int32_t first_victim = at.plan.rows_of(at.head_index(0))[task.keep];
  bool differs = false;
  bool shared_victim = false;
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    const std::int32_t victim = at.plan.rows_of(at.head_index(i))[task.keep];
    differs = differs || victim != first_victim;
    shared_victim =
        shared_victim || at.entry_is_shared(table, (victim + table.first_row) / view.page_size);
  }
  differs = __syncthreads_or(differs) != 0;
  if (__syncthreads_or(shared_victim) != 0) { return Status::shared_page; }
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
    head.victim = at.plan.rows_of(at.head_index(i))[task.keep];
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
    for (std::int32_t k = static_cast<std::int32_t>(threadIdx.x); k < x.keep; k += table_threads) {
      differs = differs || plan.rows_of(a)[k] != plan.rows_of(b)[k];
    }
  }
  return __syncthreads_or(differs) == 0;
}

/// Rows close up (in order, from the tail, or into spare pages).
KVTRIM_DEVICE Status close_pack(const ClosingTable& at,
                                TablePlan& table,
                                const SelectTask& task,
                                bool common,
                                bool ties,
                                bool out_of_place) {
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  const CacheView& view = at.view;
  if (common) {
    for (std::int32_t i = 1; i < at.heads; ++i) {
      if (!same_kept_rows(at.plan, at.head_index(0), at.head_index(i))) {
        return Status::planes_disagree;
      }
    }
  }
  const std::int32_t kept = task.keep;
  const std::int32_t padding = table.first_row / view.page_size;
  table.live_after = kept;
  table.append_row = -1;
  table.pages_after = pages_for(kept + table.first_row, view.page_size);
  table.shared_kept = 0;
  table.spare_pages = out_of_place ? table.pages_after - padding : 0;
  bool moves = false;
  bool writes_shared = false;
  const bool fills = table.removal == Removal::fill_holes;
  for (std::int32_t i = thread; i < at.heads; i += table_threads) {
    const std::int32_t* const rows = at.plan.rows_of(at.head_index(i));
    HeadPlan head;
    head.kept = kept;
    head.evicted = table.live_before - kept;
    // Stable: rows before the first gap stay. Holes: rows below `kept` stay, the others fill the holes in order.
    const std::int32_t stay =
        fills ? first_not_below(rows, kept, kept, 0) : first_not_below(rows, kept, 1, 1);
    head.moved = out_of_place ? kept : kept - stay;
    moves = moves || head.moved != 0;
    at.plan.head_plans[at.head_index(i)] = head;
  }
  moves = __syncthreads_or(moves) != 0;
  if (!out_of_place && restricts_writing(view)) {
    for (std::int32_t i = 0; i < at.heads; ++i) {
      const std::int32_t* const rows = at.plan.rows_of(at.head_index(i));
      const auto moved = static_cast<std::int32_t>(at.plan.head_plans[at.head_index(i)].moved);
      for (std::int32_t k = thread; k < moved; k += table_threads) {
        const std::int32_t to = fills ? rows[kept + k] : kept - moved + k;
        writes_shared =
            writes_shared || at.entry_is_shared(table, (to + table.first_row) / view.page_size);
      }
    }
  }
  if (__syncthreads_or(writes_shared) != 0) { return Status::shared_page; }
  if (ties && moves) {
    bool parts = out_of_place;  // into other pages
    for (std::int32_t i = 0; i < at.heads && !parts; ++i) {
      const std::int32_t* const rows = at.plan.rows_of(at.head_index(i));
      const auto moved = static_cast<std::int32_t>(at.plan.head_plans[at.head_index(i)].moved);
      for (std::int32_t k = thread; k < moved && !parts; k += table_threads) {
        const std::int32_t to = fills ? rows[kept + k] : kept - moved + k;
        parts = leaves_entry(view, table.first_row, rows[kept - moved + k], to);
      }
    }
    if (__syncthreads_or(parts) != 0) { return Status::planes_disagree; }
  }
  table.ordered_after = table.ordered_after && !(fills && moves);
  keep_leading_pages(at, table, out_of_place ? padding : table.pages_after);
  return Status::ok;
}

/// Whether heads or layers that have their own tables but share sequence planes keep the same rows.
KVTRIM_DEVICE bool agrees_with_other_tables(const ClosingTable& at) {
  const CacheView& view = at.view;
  bool heads = false;
  bool layers = false;
  for (int i = 0; i < sequence_plane_count(view); ++i) {
    const SequencePlane p = sequence_plane(view, i);
    heads = heads || (p && p.head_stride == 0);
    layers = layers || (p && p.layer_stride == 0);
  }
  heads = heads && view.scope == TableScope::head && view.kv_heads > 1;
  layers = layers && view.scope != TableScope::group && view.layers > 1;
  if (!heads && !layers) { return true; }
  bool agree = true;
  for (std::int32_t i = 0; i < at.heads; ++i) {
    const LayerId l = layers ? LayerId{0} : at.layer(i);
    const HeadId h = heads ? HeadId{0} : at.head(i);
    const bool same = same_kept_rows(at.plan, at.head_index(i), at.plan.head_index(at.s, l, h));
    agree = agree && same;
  }
  return agree;
}

// A block: one table.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads, 2)
    close_kernel(CacheView view, DevicePlan plan, bool by_position, bool out_of_place) {
  KVTRIM_SHARED(CloseShared, shared, );
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    if (failed_before(plan.control, phase_close)) { return; }
    TablePlan table = plan.table_plans[i];
    __syncthreads();  // all threads have read what thread 0 writes below
    if (!table.evicts) { continue; }
    const auto t = static_cast<std::int32_t>(i % plan.tables);
    const SequenceId s{static_cast<std::int32_t>(i / plan.tables)};
    const ClosingTable at{view,
                          plan,
                          shared,
                          s,
                          t,
                          i,
                          view.first_layer(t),
                          view.first_head(t),
                          view.layers_per_table() * view.heads_per_table(),
                          view.heads_per_table()};
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
    if (!agrees_with_other_tables(at)) {
      closed = Status::planes_disagree;
    } else if (table.removal == Removal::drop_pages) {
      closed = close_drop(at, table, task, by_position);
    } else if (table.removal == Removal::overwrite_slot) {
      closed = close_overwrite(at, table, task, common);
    } else {
      closed = close_pack(at, table, task, common, ties, out_of_place);
    }
    if (usable(status) && closed != Status::ok) { status = closed; }
    table.status = status;
    if (threadIdx.x == 0) {
      plan.table_plans[i] = table;
      if (!usable(status)) { note_fault(plan.control, phase_close, i, status); }
    }
    __syncthreads();
  }
}

struct FinishShared {
  unsigned long long sums[4];  // kept, evicted, bytes, nan
  std::int32_t warps[select_warps];
  std::int32_t over;
};

/// Exclusive sum over the block's threads; `total`: of all of them. Two barriers.
KVTRIM_DEVICE std::int32_t block_sum_before(std::int32_t value,
                                            FinishShared& shared,
                                            std::int32_t& total) {
  const unsigned lane = threadIdx.x & 31U;
  const unsigned warp = threadIdx.x >> 5U;
  std::int32_t upto = value;
  KVTRIM_UNROLL
  for (unsigned step = 1; step < 32; step <<= 1U) {
    const std::int32_t other = __shfl_up_sync(full_warp, upto, step);
    if (lane >= step) { upto += other; }
  }
  if (lane == 31) { shared.warps[warp] = upto; }
  __syncthreads();
  std::int32_t before = 0;
  total = 0;
  for (unsigned w = 0; w < select_warps; ++w) {
    before += w < warp ? shared.warps[w] : 0;
    total += shared.warps[w];
  }
  __syncthreads();
  return before + upto - value;
}

// One block: totals, and where each table's share of the common lists begins.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads)
    finish_kernel(CacheView view, DevicePlan plan, DevicePlanOptions options) {
  KVTRIM_SHARED(FinishShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  if (thread < 4) { shared.sums[thread] = 0; }
  if (thread == 0) { shared.over = 0; }
  unsigned long long fault = no_fault;
  for (int phase = phase_close; phase >= 0; --phase) {
    if (plan.control->faults[phase] != no_fault) { fault = plan.control->faults[phase]; }
  }
  __syncthreads();
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  std::int32_t spares = 0;
  if (fault == no_fault && options.out_of_place) {
    for (std::int64_t base = 0; base < plan.all_tables(); base += select_threads) {
      const std::int64_t i = base + thread;
      const bool in = i < plan.all_tables() && plan.table_plans[i].evicts;
      const std::int32_t mine = in ? plan.table_plans[i].spare_pages * each : 0;
      std::int32_t here = 0;
      static_cast<void>(block_sum_before(mine, shared, here));
      spares += here;
    }
    const std::int32_t there = options.spare_count != nullptr ? *options.spare_count : 0;
    bool bad = spares > there;
    if (!bad) {
      bool outside = false;
      for (std::int32_t k = thread; k < spares; k += select_threads) {
        outside = outside || options.spare_pages[k] < 0 || options.spare_pages[k] >= view.pages;
      }
      if (__syncthreads_or(outside) != 0) {
        fault = static_cast<unsigned long long>(Status::page_out_of_range);
      }
    } else {
      fault = static_cast<unsigned long long>(Status::out_of_pages);
    }
  }
  if (fault != no_fault) {
    for (std::int64_t i = thread; i < plan.all_tables(); i += select_threads) {
      plan.table_plans[i] = {};
    }
    for (std::int64_t i = thread; i < plan.heads(); i += select_threads) {
      plan.head_plans[i] = {};
    }
    for (std::int64_t i = thread; i <= plan.heads(); i += select_threads) {
      plan.tile_starts[i] = 0;
    }
    if (thread == 0) {
      DeviceReport report;
      report.status = static_cast<Status>(fault & 0xFFU);
      report.spares_needed = spares;
      *plan.report = report;
      plan.control->generation = plan.control->current;
      plan.control->current = 0;
    }
    return;
  }
  // Released ids of all tables, one list; spare pages of each.
  std::int32_t released = 0;
  std::int32_t spare = 0;
  for (std::int64_t base = 0; base < plan.all_tables(); base += select_threads) {
    const std::int64_t i = base + thread;
    const bool in = i < plan.all_tables();
    TablePlan table;
    if (in) { table = plan.table_plans[i]; }
    std::int32_t here = 0;
    const std::int32_t first =
        released + block_sum_before(table.evicts ? table.released : 0, shared, here);
    released += here;
    const std::int32_t first_spare =
        spare + block_sum_before(table.evicts ? table.spare_pages * each : 0, shared, here);
    spare += here;
    if (!in) { continue; }
    if (table.status == Status::over_budget) { atomicOr(&shared.over, 1); }
    if (!table.evicts) { continue; }
    plan.list_starts[2 * i] = first;
    plan.list_starts[2 * i + 1] = first_spare;
  }
  // Tiles of the moves that go through lists, and the totals.
  std::int64_t kept = 0;
  std::int64_t evicted = 0;
  std::int64_t bytes = 0;
  std::int64_t nan = 0;
  std::int32_t tiles = 0;
  for (std::int64_t base = 0; base < plan.heads(); base += select_threads) {
    const std::int64_t i = base + thread;
    std::int32_t mine = 0;
    if (i < plan.heads()) {
      const HeadId h{static_cast<std::int32_t>(i % plan.kv_heads)};
      const LayerId l{static_cast<std::int32_t>(i / plan.kv_heads % plan.layers)};
      const SequenceId s{static_cast<std::int32_t>(i / plan.kv_heads / plan.layers)};
      const TablePlan table = plan.table_plans[plan.table_index(s, view.table_of(l, h))];
      const HeadPlan head = plan.head_plans[i];
      const SelectTask task = plan.tasks[i];
      kept += table.live_before - head.evicted;
      evicted += head.evicted;
      bytes += head.moved * moved_row_bytes(view, l, h);
      if (task.active != 0) { nan += plan.nan_counts[i]; }
      const bool by_list =
          table.evicts && (table.removal == Removal::fill_holes ||
                           table.removal == Removal::overwrite_slot || table.spare_pages > 0);
      mine = by_list ? static_cast<std::int32_t>((head.moved + move_tile - 1) / move_tile) : 0;
    }
    std::int32_t here = 0;
    const std::int32_t before = tiles + block_sum_before(mine, shared, here);
    tiles += here;
    if (i < plan.heads()) { plan.tile_starts[i] = before; }
  }
  const auto add = [&](int which, std::int64_t value) {
    if (value != 0) { atomicAdd(&shared.sums[which], static_cast<unsigned long long>(value)); }
  };
  add(0, kept);
  add(1, evicted);
  add(2, bytes);
  add(3, nan);
  __syncthreads();
  if (thread == 0) {
    plan.tile_starts[plan.heads()] = tiles;
    DeviceReport report;
    report.status = shared.over != 0 ? Status::over_budget : Status::ok;
    report.released = released;
    report.spares_needed = spares;
    report.nan_count = static_cast<std::int64_t>(shared.sums[3]);
    report.kept = static_cast<std::int64_t>(shared.sums[0]);
    report.evicted = static_cast<std::int64_t>(shared.sums[1]);
    report.bytes_moved = static_cast<std::int64_t>(shared.sums[2]);
    *plan.report = report;
    plan.control->generation = plan.control->current;
    plan.control->current = 0;
  }
}

// A block: one table. Its released ids go into the common list; its spare pages are taken from the common ones.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(table_threads)
    lists_kernel(CacheView view, DevicePlan plan, DevicePlanOptions options) {
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const TablePlan table = plan.table_plans[i];
    if (!table.evicts) { continue; }
    const std::int32_t* const list = plan.released_rows + i * 2 * plan.max_pages;
    std::int32_t* const released = plan.released + plan.list_starts[2 * i];
    for (std::int32_t k = thread; k < table.released; k += table_threads) { released[k] = list[k]; }
    const std::int32_t* const spares = options.spare_pages + plan.list_starts[2 * i + 1];
    std::int32_t* const k_pages = plan.pages_of(i) + table.first_row / view.page_size;
    for (std::int32_t k = thread; k < table.spare_pages; k += table_threads) {
      k_pages[k] = spares[k * each];
      k_pages[plan.max_pages + k] = spares[k * each + each - 1];
    }
  }
}

[[nodiscard]] inline SelectBounds select_bounds(const PlanShape& shape) noexcept {
  return {shape.sequences, shape.layers, shape.kv_heads, shape.max_rows};
}

/// Whether everything the host can check is in order.
[[nodiscard]] inline bool fits(const CacheView& view, const PlanShape& shape) noexcept {
  return view.sequences >= 0 && view.sequences == shape.sequences && view.layers == shape.layers &&
         view.kv_heads == shape.kv_heads && view.scope == shape.scope && view.layers >= 1 &&
         view.kv_heads >= 1 && view.page_size == shape.page_size && view.page_size >= 1 &&
         view.pages <= shape.pages && shape.max_rows >= 1 && view.table.ids != nullptr &&
         (view.lengths != nullptr || view.last_page_len != nullptr || view.states != nullptr) &&
         view.reserved_pages == nullptr && view.generations == nullptr &&  // not yet on the device
         view.is_of_model() && row_planes(view).count > 0 && layout_fits(view);
}

/// Bytes that the layer bases must be multiples of.
[[nodiscard]] inline std::int32_t layer_base_unit(const CacheView& view) noexcept {
  const RowPlanes planes = row_planes(view);
  std::int32_t unit = 1;
  for (std::int32_t i = 0; i < planes.count; ++i) {
    if (planes.at[i].layer_bases != nullptr && planes.at[i].unit > unit) {
      unit = planes.at[i].unit;
    }
  }
  return unit;
}

}  // namespace detail

/// Device bytes that `plan` needs for views within `shape`. Pure, monotone in every field, a multiple of 256.
template <Policy P>
[[nodiscard]] std::size_t plan_workspace_bytes(const P& policy, const PlanShape& shape) noexcept {
  detail::WorkspaceLayout layout;
  static_cast<void>(detail::take_plan(layout, shape));
  return layout.bytes() + top_k_workspace_bytes(detail::select_bounds(shape)) +
         detail::DeviceScorerOf<P>::workspace_bytes(policy.scorer(), shape);
}

/// Plans what an eviction by `policy` does to every sequence of `view`. Writes nothing except the workspace.
///
/// \param view       every pointer in it is a device pointer; its extents are those of the workspace's shape
/// \param obs        what the policy's scorer needs, budgets, or ready-made scores; on the device
/// \param workspace  where the plan will lie: `device_plan(workspace)`
/// \param options    way of removal; spare pages of an out-of-place plan
/// \returns `cudaErrorInvalidValue` before any launch for a misaligned plane, planes that overlap or lack a stride, a view
///   without keys or one that does not fit the shape, a missing input or a workspace that is too small; otherwise the
///   launches' status. What lies on the device (ids, lengths, budgets, layer bases, arrays of planes) is checked there: a
///   fault is reported in `DeviceReport::status`, and `apply` then writes nothing
/// \par Ties
/// the lower position is kept. NaN is the lowest class, counted in the report
/// \par Complexity
/// the scorer's, plus O(live rows) per KV head; O(table entries) if nothing goes
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing, may be captured into a graph
template <Policy P>
[[nodiscard]] cudaError_t plan(const P& policy,
                               const CacheView& view,
                               const DeviceObservation& obs,
                               const PlanWorkspace& workspace,
                               cudaStream_t stream,
                               const DevicePlanOptions& options = {}) noexcept {
  using namespace detail;
  using Scorer = DeviceScorerOf<P>;
  const PlanShape& shape = workspace.shape;
  if (!detail::fits(view, shape) || workspace.bytes < plan_workspace_bytes(policy, shape)) {
    return cudaErrorInvalidValue;
  }
  WorkspaceLayout layout(workspace.memory, workspace.bytes);
  const DevicePlan made = take_plan(layout, shape);
  if (!layout.ok()) { return cudaErrorInvalidValue; }
  const bool given = !Scorer::by_position && static_cast<bool>(obs.scores);
  if (given ? obs.scores.element_bytes != 4 : !Scorer::check(policy.scorer(), view, obs)) {
    return cudaErrorInvalidValue;
  }
  Removal removal = options.removal == Removal::automatic ? policy.removal() : options.removal;
  if (removal == Removal::automatic || options.out_of_place) { removal = Removal::stable_pack; }
  if (options.out_of_place && (options.spare_pages == nullptr || options.spare_count == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (view.sequences == 0) {
    return launch(clear_kernel<>, dim3(1), dim3(table_threads), 0, stream, made);
  }

  std::byte* rest = static_cast<std::byte*>(workspace.memory) + layout.bytes();
  const SelectBounds bounds = select_bounds(shape);
  const std::size_t select_bytes = top_k_workspace_bytes(bounds);
  const std::size_t scorer_bytes = Scorer::workspace_bytes(policy.scorer(), shape);
  const dim3 threads(table_threads);
  const dim3 tables(bounded_grid(made.all_tables()));
  const OpenInput input{obs.budgets,
                        obs.budget_rows,
                        removal,
                        options.removal != Removal::automatic,
                        given,
                        options.out_of_place,
                        Scorer::by_position};

  cudaError_t e =
      launch(clear_kernel<>,
             dim3(bounded_grid((made.tables * made.seen_words + made.heads()) / table_threads + 1)),
             threads,
             0,
             stream,
             made);
  if (e != cudaSuccess) { return e; }
  e = launch(check_kernel<>,
             tables,
             threads,
             0,
             stream,
             view,
             made,
             layer_base_unit(view),
             CheckPass::plan);
  if (e != cudaSuccess) { return e; }
  e = check_device_layout(view, made, stream);
  if (e != cudaSuccess) { return e; }
  e = launch(open_kernel<P>,
             dim3(bounded_grid(made.heads() / table_threads + 1)),
             threads,
             0,
             stream,
             policy,
             view,
             made,
             input);
  if (e != cudaSuccess) { return e; }
  RowScores rows;
  if (given) {
    rows = {obs.scores, {}, view.positions, false};
  } else {
    const ScorerCall call{shape, made.active, rest + select_bytes, scorer_bytes, stream};
    e = Scorer::launch(policy.scorer(), view, obs, call, rows);
    if (e != cudaSuccess) { return e; }
  }
  if (!(Scorer::by_position && removal == Removal::drop_pages)) {
    e = top_k(rows, made.tasks, bounds, made.rows, made.nan_counts, rest, select_bytes, stream);
    if (e != cudaSuccess) { return e; }
  }
  e = launch(close_kernel<>,
             tables,
             threads,
             0,
             stream,
             view,
             made,
             Scorer::by_position,
             options.out_of_place);
  if (e != cudaSuccess) { return e; }
  e = launch(finish_kernel<>, dim3(1), dim3(select_threads), 0, stream, view, made, options);
  if (e != cudaSuccess) { return e; }
  return launch(lists_kernel<>, tables, threads, 0, stream, view, made, options);
}

}  // namespace kvtrim::cuda
