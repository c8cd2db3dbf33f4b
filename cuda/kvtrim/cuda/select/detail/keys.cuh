// SPDX-License-Identifier: Apache-2.0
#pragma once

// The key of an entry: its score's `order_key`, or that it is protected or no row. What is asked of one task.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/detail/head_place.cuh>
#include <kvtrim/cuda/select/select_task.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

// Keys that no score has (the highest is that of +inf, 0xFF80'0000).
inline constexpr std::uint32_t key_protected = 0xFFFF'FFFFU;
inline constexpr std::uint32_t key_none = 0xFFFF'FFFEU;

KVTRIM_DEVICE HeadPlace place_of(const SelectBounds& bounds, int item) {
  return head_place(item, bounds.layers, bounds.kv_heads);
}

KVTRIM_DEVICE std::int64_t list_of(const SelectTask& task, const SelectBounds& bounds, int item) {
  return task.list >= 0 ? task.list : static_cast<std::int64_t>(item) * bounds.listed();
}
/// Where the entries that do not stay begin in a list: behind those that do, unless these are not listed.
KVTRIM_DEVICE std::int32_t gone_of(const SelectTask& task, const SelectBounds& bounds) {
  return bounds.max_evicted > 0 ? -1 : task.keep;
}

/// Rows that stay besides the protected ones; below 1, scores are not looked at.
KVTRIM_DEVICE int wanted_of(const SelectTask& task) {
  const int live = task.extent - (task.hole >= 0 ? 1 : 0);
  return task.keep - (live - (task.end - task.begin));
}
KVTRIM_DEVICE float score_of(const RowScores& rows,
                             const HeadPlace& at,
                             const SelectTask& task,
                             int e) {
  if (wanted_of(task) <= 0) { return 0.0F; }
  if (rows.list != nullptr) { return rows.list[task.scores + e]; }
  if (!rows.scores) { return 0.0F; }
  float score = rows.scores.at<float>(at.s, at.l, at.h, e);
  if (rows.compensations) {
    score = __fadd_rn(score, rows.compensations.at<float>(at.s, at.l, at.h, e));
  }
  if (rows.age_normalised) {
    const int position =
        rows.positions ? rows.positions.load<std::int32_t>(at.s, at.l, at.h, e) : e;
    const int age = task.next_position - position;
    if (age > 0) { score = __fdiv_rn(score, static_cast<float>(age)); }
  }
  return score;
}

/// Which entries compete: by entry if they are in position order, by position if they are not.
struct Competing {
  int first = 0;
  int last = 0;  // first <= entry or position < last
};

/// Key of entry `e`; counts a competing NaN into `nan`.
KVTRIM_DEVICE std::uint32_t key_of(const RowScores& rows,
                                   const HeadPlace& at,
                                   const SelectTask& task,
                                   const Competing& range,
                                   int e,
                                   int& nan) {
  if (e == task.hole) { return key_none; }
  const int place = task.ordered != 0 || !rows.positions
                        ? e
                        : rows.positions.load<std::int32_t>(at.s, at.l, at.h, e);
  if (place < range.first || place >= range.last) { return key_protected; }
  const float score = score_of(rows, at, task, e);
  nan += is_nan(score) ? 1 : 0;
  return order_key(score);
}

KVTRIM_DEVICE int entry_of_rank(const SelectTask& task, int rank) {
  return rank + (task.hole >= 0 && rank >= task.hole ? 1 : 0);
}
KVTRIM_DEVICE Competing range_of(const SelectTask& task) {
  return task.end <= task.begin
             ? Competing{0, 0}
             : Competing{entry_of_rank(task, task.begin), entry_of_rank(task, task.end)};
}
KVTRIM_DEVICE bool has_threshold(const SelectTask& task) {
  const int wanted = wanted_of(task);
  return wanted > 0 && wanted < task.end - task.begin;
}

}  // namespace kvtrim::cuda::detail
