// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which rows of a KV head stay: protected ranges, the best of the others, one order for all. Knows scores, not where they
// come from.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/evict/detail/plan_tables.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/select/protection.hpp>
#include <kvtrim/select/top_k.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace kvtrim::detail {

inline void sort_by_position(const CacheView& view,
                             SequenceId s,
                             LayerId l,
                             HeadId h,
                             std::span<std::int32_t> rows) noexcept {
  std::sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) {
    return view.position(s, l, h, a) < view.position(s, l, h, b);
  });
}

// One stage: the best rows by their scores.
struct OneStage {
  static constexpr std::int32_t first = 0;
  static constexpr void rescore() noexcept {}
};

class RowChoice : public PlanTables {
 public:
  using PlanTables::PlanTables;

 protected:
  // Order and choice of one KV head by `scratch.scores`. `restricted`: the rows of locked entries stay, of dropped ones go.
  // Two stages: of the rows that stay, `stage.first` are the best; `stage.rescore()` then rewrites the scores by which the
  // others are chosen.
  template <class Stage = OneStage>
  void choose_rows(SequenceId s,
                   LayerId l,
                   HeadId h,
                   std::int32_t t,
                   const Demand& demand,
                   SelectScratch& scratch,
                   std::int64_t& nan,
                   bool restricted,
                   const Stage& stage = {}) noexcept {
    const TablePlan& plan = table(s, t);
    const SequenceState state = view_.state(s, l, h);
    const std::int32_t live = plan.live_before;
    const auto scores = scratch.scores.first(index(plan.extent_before));
    const CandidateRange range = candidates(demand.protection, live);
    if (plan.removal == Removal::overwrite_slot && !restricted &&
        find_victim(s, l, h, state, plan, demand, scratch, nan)) {
      return;
    }

    const std::int32_t hole = state.append_row;
    if (!state.ordered) {
      std::int32_t n = 0;
      for (std::int32_t r = 0; r < plan.extent_before; ++r) {
        if (r != hole) { scratch.order[index(n++)] = r; }
      }
      sort_by_position(view_, s, l, h, scratch.order.first(index(n)));
    }
    const auto row_of = [&](std::int32_t rank) {
      return !state.ordered ? scratch.order[index(rank)]
                            : rank + (hole >= 0 && rank >= hole ? 1 : 0);
    };
    const auto entry_kind = [&](std::int32_t rank) {
      return restricted ? static_cast<Entry>(entries(s, t)[entry_of(s, row_of(rank))]) : Entry::own;
    };
    std::int32_t wanted = demand.keep;
    std::int32_t competing = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      const bool candidate = rank >= range.begin && rank < range.end;
      const Entry kind = entry_kind(rank);
      const bool stays = kind == Entry::locked || (!candidate && kind == Entry::own);
      scratch.keep[index(rank)] = stays ? 1 : 0;
      if (stays) { --wanted; }
      if (candidate && kind == Entry::own) { scratch.ranks[index(competing++)] = rank; }
    }
    for (std::int32_t i = 0; i < competing; ++i) {
      const float score = scores[index(row_of(scratch.ranks[index(i)]))];
      scratch.keys[index(i)] = order_key(score);
      if (!restricted && is_nan(score)) { ++nan; }
    }
    const auto pick = [&](std::int32_t rows) {
      const auto picked = scratch.picked.first(index(std::clamp(rows, 0, competing)));
      top_k(scratch.keys.first(index(competing)), picked);
      for (const std::int32_t i : picked) { scratch.keep[index(scratch.ranks[index(i)])] = 1; }
      wanted -= static_cast<std::int32_t>(picked.size());
    };
    if constexpr (!std::is_same_v<Stage, OneStage>) {
      pick(std::min(stage.first - (live - range.count()), wanted));
      stage.rescore();
      const std::int32_t all = std::exchange(competing, 0);
      for (std::int32_t i = 0; i < all; ++i) {
        const std::int32_t rank = scratch.ranks[index(i)];
        if (scratch.keep[index(rank)] != 0) { continue; }
        scratch.keys[index(competing)] = order_key(scores[index(row_of(rank))]);
        scratch.ranks[index(competing++)] = rank;
      }
    }
    pick(wanted);
    list(s, l, h, state, live, plan.extent_before, scratch, row_of);
  }

  // Writes kept rows (ascending), their ranks and the evicted positions into the plan.
  template <class RowOf>
  void list(SequenceId s,
            LayerId l,
            HeadId h,
            const SequenceState& state,
            std::int32_t live,
            std::int32_t extent,
            SelectScratch& scratch,
            RowOf row_of) noexcept {
    HeadPlan& head = plan_.head(s, l, h);
    std::int32_t* const rows = plan_.rows(s, l, h);
    std::int32_t kept = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] == 0) { continue; }
      if (state.ordered) { rows[kept] = row_of(rank); }
      ++kept;
    }
    head = {};
    head.kept = kept;
    head.has_ranks = state.ordered ? 0 : 1;
    std::int32_t evicted = kept;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] == 0) {
        rows[evicted++] = raw(view_.position(s, l, h, row_of(rank)));
      }
    }
    head.evicted = evicted - kept;
    if (state.ordered) { return; }
    std::fill_n(scratch.rank_of.begin(), extent, -1);
    std::int32_t next = 0;
    for (std::int32_t rank = 0; rank < live; ++rank) {
      if (scratch.keep[index(rank)] != 0) { scratch.rank_of[index(row_of(rank))] = next++; }
    }
    const auto ranks = plan_.ranks(s, l, h);
    std::int32_t n = 0;
    for (std::int32_t r = 0; r < extent; ++r) {
      if (scratch.rank_of[index(r)] < 0) { continue; }
      rows[n] = r;
      ranks[index(n++)] = scratch.rank_of[index(r)];
    }
  }

  // One row too many: the lowest candidate, without sorting. False where there is none.
  [[nodiscard]] bool find_victim(SequenceId s,
                                 LayerId l,
                                 HeadId h,
                                 const SequenceState& state,
                                 const TablePlan& plan,
                                 const Demand& demand,
                                 SelectScratch& scratch,
                                 std::int64_t& nan) noexcept {
    const std::int32_t live = plan.live_before;
    const CandidateRange range = candidates(demand.protection, live);
    if (range.count() < 1) { return false; }
    // Where rows are out of order: sinks are the positions below `range.begin`, recent ones the last positions, if so
    // many of them are live; else both borders are looked for.
    const std::int32_t* positions = nullptr;
    std::int32_t first = range.begin;
    std::int32_t last = range.end;
    std::int32_t sink_end = range.begin;
    std::int32_t recent_begin = state.next_position - (live - range.end);
    if (!state.ordered) {
      first = 0;
      last = live;
      positions = view_.positions.array<std::int32_t>(s, l, h);
      if (positions == nullptr) {
        for (std::int32_t r = 0; r < live; ++r) {
          scratch.rank_of[index(r)] = raw(view_.position(s, l, h, r));
        }
        positions = scratch.rank_of.data();
      }
      std::int32_t sinks = 0;
      std::int32_t recent = 0;
      for (std::int32_t r = 0; r < live; ++r) {
        sinks += positions[r] < sink_end ? 1 : 0;
        recent += positions[r] >= recent_begin ? 1 : 0;
      }
      if (sinks != range.begin || recent != live - range.end) {
        const auto begin = scratch.order.begin();
        std::copy_n(positions, live, begin);
        std::nth_element(begin, begin + range.begin, begin + live);
        sink_end = scratch.order[index(range.begin)];
        std::nth_element(begin, begin + range.end - 1, begin + live);
        recent_begin = scratch.order[index(range.end - 1)] + 1;
      }
    }
    // The lowest key, then, among rows of that key, the last position. A block's keys are looked at again only where its
    // lowest is the lowest so far, so that the first look needs no branch.
    constexpr std::int32_t block = 512;
    constexpr std::uint32_t none = ~std::uint32_t{0};  // above every key
    std::uint32_t keys[block];
    std::uint32_t lowest = none;
    std::int32_t victim = -1;
    for (std::int32_t begin = first; begin < last; begin += block) {
      const std::int32_t n = std::min(block, last - begin);
      const float* const scores = scratch.scores.data() + begin;
      const std::int32_t* const at = positions == nullptr ? nullptr : positions + begin;
      std::uint32_t nans = 0;
      if (at == nullptr) {
        for (std::int32_t i = 0; i < n; ++i) {
          keys[i] = order_key(scores[i]);
          nans += is_nan(scores[i]) ? 1U : 0U;
        }
      } else {
        for (std::int32_t i = 0; i < n; ++i) {
          // No short circuit: a branch a row would cost more than the comparison.
          const bool candidate = static_cast<unsigned>(at[i] >= sink_end) &
                                 static_cast<unsigned>(at[i] < recent_begin);
          keys[i] = candidate ? order_key(scores[i]) : none;
          nans += static_cast<unsigned>(candidate) & static_cast<unsigned>(is_nan(scores[i]));
        }
      }
      nan += nans;
      std::uint32_t least = none;
      for (std::int32_t i = 0; i < n; ++i) { least = std::min(least, keys[i]); }
      if (least == none || least > lowest) { continue; }
      const auto position_of = [&](std::int32_t r) {
        return positions == nullptr ? r : positions[r];
      };
      for (std::int32_t i = 0; i < n; ++i) {
        if (keys[i] == least && (least < lowest || position_of(begin + i) > position_of(victim))) {
          lowest = least;
          victim = begin + i;
        }
      }
    }
    HeadPlan& head = plan_.head(s, l, h);
    head = {};
    head.evicted = 1;
    head.victim = victim;
    plan_.rows(s, l, h)[0] = raw(view_.position(s, l, h, victim));
    return true;
  }
};

}  // namespace kvtrim::detail
