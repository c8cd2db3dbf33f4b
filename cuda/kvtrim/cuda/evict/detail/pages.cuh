// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which pages stay, for policies that choose pages: the host's `page_scores` and `select_pages`, bit for bit. A head's own
// norm is a sum of doubles in table order, so one thread adds it up; heads are joined by their maximum, whose order does not
// matter.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/workspace.hpp>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/select/pages.hpp>
#include <kvtrim/select/protection.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

/// Working space of a choice of pages.
struct PageChoice {
  float* scores = nullptr;        // by entry, for each head of a table
  std::uint8_t* stays = nullptr;  // by entry

  static PageChoice take(WorkspaceLayout& layout, const PlanBounds& shape) noexcept {
    WorkspaceLayout counts;
    const DevicePlan p = take_plan(counts, shape);
    PageChoice c;
    c.scores = layout.take<float>(p.entries * p.heads_a_table());
    c.stays = layout.take<std::uint8_t>(p.entries);
    return c;
  }
  static std::size_t bytes(const PlanBounds& shape) noexcept {
    WorkspaceLayout layout;
    static_cast<void>(take(layout, shape));
    return layout.bytes();
  }
};

struct PageScoreShared {
  float tile[select_threads];
  double norm;
  std::uint32_t floor;  // key of the lowest finite score, or of 0
  std::int32_t nan;
};

/// The float with this `order_key`; not 0.
KVTRIM_DEVICE float float_of_key(std::uint32_t key) {
  return key >= 0x8000'0000U ? __uint_as_float(key - 0x8000'0000U)
                             : -__uint_as_float(0x8000'0000U - key);
}

/// The score of rows [begin, end): `score(e)` is finite or +inf. In double, from the best row down, as the host adds.
template <class Score>
KVTRIM_DEVICE double page_score(const PageScoreParams& params,
                                std::int32_t begin,
                                std::int32_t end,
                                Score score) {
  if (begin >= end) { return 0; }
  std::uint32_t best = 0;
  for (std::int32_t e = begin; e < end; ++e) {
    const std::uint32_t key = order_key(score(e));
    best = key > best ? key : best;
  }
  if (params.reduction == PageReduction::max) { return static_cast<double>(float_of_key(best)); }
  const std::int32_t n = end - begin;
  const std::int32_t m =
      params.reduction == PageReduction::mean || params.top_m > n ? n : params.top_m;
  double sum = 0;
  for (std::int32_t taken = 0; taken < m;) {
    std::uint32_t next = 0;  // the best key below `best`
    const auto value = static_cast<double>(float_of_key(best));
    for (std::int32_t e = begin; e < end; ++e) {
      const std::uint32_t key = order_key(score(e));
      if (key == best && taken < m) {
        sum += value;
        ++taken;
      }
      next = key < best && key > next ? key : next;
    }
    best = next;
  }
  return sum / m;
}

// A block: one KV head.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads) page_scores_kernel(
    CacheView view, RowScores rows, DevicePlan plan, PageScoreParams params, PageChoice choice) {
  KVTRIM_SHARED(PageScoreShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  constexpr std::uint32_t infinite = 0xFF80'0000U;  // key of +inf
  for (std::int64_t i = blockIdx.x; i < plan.heads(); i += gridDim.x) {
    const SelectTask task = plan.tasks[i];
    if (task.active == 0) { continue; }
    const HeadPlace at = plan.head_at(i);
    if (failed_before(plan, at.s, phase_select)) { continue; }
    const PageSpan span{task.extent, view.first_row(at.s), view.page_size};
    if (thread == 0) {
      shared.floor = order_key(0.0F);
      shared.nan = 0;
      shared.norm = 1;
    }
    __syncthreads();
    double total = 0;  // thread 0's
    for (std::int32_t base = 0; base < task.extent; base += select_threads) {
      const std::int32_t e = base + thread;
      const float x = e < task.extent ? score_of(rows, at, task, e) : 0.0F;
      const std::uint32_t key = order_key(x);
      const bool finite = key != 0 && key != infinite;
      if (finite && key < order_key(0.0F)) { atomicMin(&shared.floor, key); }
      if (e >= task.begin && e < task.end && is_nan(x)) { atomicAdd(&shared.nan, 1); }
      if (params.norm != HeadNorm::sum) { continue; }
      shared.tile[thread] = finite ? x : 0.0F;
      __syncthreads();
      if (thread == 0) {
        const std::int32_t left = task.extent - base;
        const std::int32_t count = left < select_threads ? left : select_threads;
        for (std::int32_t k = 0; k < count; ++k) {
          total += static_cast<double>(fabsf(shared.tile[k]));
        }
      }
      __syncthreads();
    }
    if (thread == 0 && total > 0) { shared.norm = 1.0 / total; }
    __syncthreads();
    if (thread == 0) { plan.nan_counts[i] = shared.nan; }
    const float floor = float_of_key(shared.floor);
    const auto score = [&](std::int32_t e) {
      const float x = score_of(rows, at, task, e);
      return order_key(x) == 0 ? floor : x;
    };
    float* const out = choice.scores + plan.first_of(i);
    for (std::int32_t p = thread; p < span.pages(); p += select_threads) {
      out[p] =
          static_cast<float>(page_score(params, span.begin(p), span.end(p), score) * shared.norm);
    }
    __syncthreads();
  }
}

struct ChooseShared {
  SelectShared select;
  BlockScan<select_threads, std::int32_t> counts;
  std::int32_t begin;  // first page that competes
};

// A block: one set of pages, of all tables of a unit.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(select_threads, 2)
    choose_pages_kernel(CacheView view, DevicePlan plan, PageUnit unit, PageChoice choice) {
  KVTRIM_SHARED(ChooseShared, shared, );
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t i = blockIdx.x; i < plan.all_tables(); i += gridDim.x) {
    const SequenceId s{static_cast<std::int32_t>(i / plan.tables)};
    if (failed_before(plan, s, phase_select)) { continue; }
    const auto t = static_cast<std::int32_t>(i % plan.tables);
    const std::int32_t u = unit_of(unit, view, t);
    if (t > 0 && unit_of(unit, view, t - 1) == u) { continue; }  // not the first of its unit
    const TablePlan first = plan.table_plans[i];
    const std::int64_t first_head = plan.head_index(s, view.first_layer(t), view.first_head(t));
    const SelectTask task = plan.tasks[first_head];
    std::int32_t end = t + 1;
    while (end < plan.tables && unit_of(unit, view, end) == u) { ++end; }
    bool unequal = false;
    for (std::int32_t other = t + thread; other < end; other += select_threads) {
      const TablePlan table = plan.table_plans[i + other - t];
      const SelectTask its =
          plan.tasks[plan.head_index(s, view.first_layer(other), view.first_head(other))];
      unequal = unequal || plan.room(i + other - t) != plan.room(i) ||
                table.evicts != first.evicts || table.live_before != first.live_before ||
                its.keep != task.keep;
    }
    if (__syncthreads_or(unequal) != 0) {
      if (thread == 0) { note_fault(plan, phase_select, s, t, Status::unequal_budget); }
      continue;
    }
    if (!first.evicts) { continue; }
    // The heads of all tables of a unit are neighbours.
    const std::int32_t heads = (end - t) * view.layers_per_table() * view.heads_per_table();
    float* const scores = choice.scores + plan.first_of(first_head);
    const std::int32_t each = plan.room(i);  // the same for all tables: as many rows are live
    for (std::int32_t p = thread; p < first.pages_before; p += select_threads) {
      float best = scores[p];
      for (std::int32_t h = 1; h < heads; ++h) {
        const float x = scores[static_cast<std::int64_t>(h) * each + p];
        best = best < x ? x : best;
      }
      scores[p] = best;
    }
    __syncthreads();
    // Pages with a protected row, and partly filled ones, are at either end: those that compete are neighbours.
    const PageSpan span{first.live_before, first.first_row, view.page_size};
    if (thread == 0) { shared.begin = first.pages_before; }
    __syncthreads();
    std::int32_t competing = 0;
    for (std::int32_t p = thread; p < first.pages_before; p += select_threads) {
      const std::int32_t begin = span.begin(p);
      const std::int32_t stop = span.end(p);
      const bool fixed = begin < task.begin || stop > task.end || stop - begin < span.page_size;
      if (!fixed && competing == 0) { atomicMin(&shared.begin, p); }
      competing += fixed ? 0 : 1;
    }
    competing = block_sum(competing, shared.counts);
    const std::int32_t begin = shared.begin;
    const std::int32_t rows = first.live_before - competing * span.page_size;
    const std::int32_t fit = (task.keep - rows) / span.page_size;
    const std::int32_t room = fit < 0 ? 0 : fit < competing ? fit : competing;
    RadixState threshold{0, 0};
    const float* const theirs = scores + begin;
    if (room > 0 && room < competing) {
      threshold = block_radix_select(
          competing, room, shared.select, [theirs](std::int32_t p, std::uint32_t& key) {
            key = order_key(theirs[p]);
            return true;
          });
    }
    std::int32_t ties_before = 0;
    for (std::int32_t base = 0; base < first.pages_before; base += select_threads) {
      const std::int32_t p = base + thread;
      const bool in = p < first.pages_before;
      const bool competes = in && p >= begin && p < begin + competing;
      const std::uint32_t key = competes ? order_key(scores[p]) : 0;
      std::int32_t here = 0;
      const bool tied = competes && key == threshold.prefix;
      const std::int32_t rank = ties_before + block_rank(tied, shared.counts, here);
      ties_before += here;
      const bool best = room >= competing ||
                        (room > 0 && (key > threshold.prefix || (tied && rank < threshold.left)));
      for (std::int32_t other = 0; in && other < end - t; ++other) {
        choice.stays[plan.first_entry(i + other) + p] = !competes || best ? 1 : 0;
      }
    }
    for (std::int32_t other = thread; rows > task.keep && other < end - t;
         other += select_threads) {
      plan.table_plans[i + other].status = Status::over_budget;
    }
    __syncthreads();
  }
}

}  // namespace kvtrim::cuda::detail
