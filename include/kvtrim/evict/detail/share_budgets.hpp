// SPDX-License-Identifier: Apache-2.0
#pragma once

// Heads that share one budget: how many rows each may keep, before any row is chosen.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/evict/detail/plan_memory.hpp>
#include <kvtrim/evict/detail/row_choice.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/select/protection.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

// What the policy is told of (sequence, layer, KV head).
[[nodiscard]] inline DemandInput demand_input(
    const CacheView& view, const Observation& obs, SequenceId s, LayerId l, HeadId h) noexcept {
  DemandInput in;
  in.state = view.state(s, l, h);
  in.live = view.live_rows(s, l, h);
  in.page_size = view.page_size;
  in.first_row = view.first_row(s);
  in.budget = obs.budget(s, l, h);
  in.layer = l;
  in.layers = view.layers;
  return in;
}
// `row_key`s of the rows that compete; `order` has room for all rows.
inline void candidate_keys(const CacheView& view,
                           SequenceId s,
                           LayerId l,
                           HeadId h,
                           std::span<const float> scores,
                           const CandidateRange& range,
                           std::span<std::int32_t> order,
                           std::span<std::uint64_t> keys) noexcept {
  const SequenceState state = view.state(s, l, h);
  std::size_t n = 0;
  for (std::int32_t r = 0; static_cast<std::size_t>(r) < scores.size(); ++r) {
    if (r != state.append_row) { order[n++] = r; }
  }
  if (!state.ordered) { sort_by_position(view, s, l, h, order.first(n)); }
  for (std::int32_t i = range.begin; i < range.end; ++i) {
    const std::int32_t r = order[static_cast<std::size_t>(i)];
    keys[static_cast<std::size_t>(i - range.begin)] =
        row_key(scores[static_cast<std::size_t>(r)], view.position(s, l, h, r));
  }
}

template <AdaptivePolicy P>
class BudgetSharing {
 public:
  BudgetSharing(const P& policy,
                const CacheView& view,
                const Observation& obs,
                const PlanMemory& mem) noexcept
      : policy_(policy), view_(view), obs_(obs), mem_(mem) {}

  // Whether the heads that layer `l` shares its budget with must let go of rows.
  [[nodiscard]] bool exceeds_budget(SequenceId s, LayerId l) const noexcept {
    const std::int32_t layers = layers_of_share();
    const Share share{raw(l) / layers * layers, layers};
    return excess_of(s, share, longest_of(s, share)) > 0;
  }

  // Writes the rows of every head; `scores(s, l, h)` are those of a head's rows.
  template <class Scores>
  void share_budgets(const Scores& scores) const noexcept {
    for (std::int32_t s = 0; s < view_.sequences; ++s) {
      for_each_share([&](const Share& share) { share_budget(SequenceId{s}, share, scores); });
    }
  }

 private:
  // Layers whose heads share one budget.
  struct Share {
    std::int32_t first = 0;
    std::int32_t layers = 0;
  };
  [[nodiscard]] std::int32_t layers_of_share() const noexcept {
    return policy_.adaptive().over == AdaptiveOver::all_heads ? view_.layers : 1;
  }
  template <class F>
  void for_each_share(F&& f) const noexcept {
    const std::int32_t layers = layers_of_share();
    for (std::int32_t l = 0; l < view_.layers; l += layers) { f(Share{l, layers}); }
  }
  // Calls f(i, layer, head) for the heads of a share.
  template <class F>
  void for_each_head(const Share& share, F&& f) const noexcept {
    for (std::int32_t i = 0; i < share.layers * view_.kv_heads; ++i) {
      f(static_cast<std::size_t>(i),
        LayerId{share.first + i / view_.kv_heads},
        HeadId{i % view_.kv_heads});
    }
  }

  // What a head would keep if it did not share. It is the same for short and long heads: the longest one is asked for.
  [[nodiscard]] std::int32_t equal_share(SequenceId s,
                                         LayerId l,
                                         HeadId h,
                                         std::int32_t longest) const noexcept {
    DemandInput in = demand_input(view_, obs_, s, l, h);
    in.live = longest;
    return policy_.demand(in).keep;
  }
  [[nodiscard]] std::int32_t longest_of(SequenceId s, const Share& share) const noexcept {
    std::int32_t longest = 0;
    for_each_head(share, [&](std::size_t, LayerId l, HeadId h) {
      longest = std::max(longest, view_.live_rows(s, l, h));
    });
    return longest;
  }
  [[nodiscard]] std::int64_t excess_of(SequenceId s,
                                       const Share& share,
                                       std::int32_t longest) const noexcept {
    std::int64_t rows = 0;
    for_each_head(share, [&](std::size_t, LayerId l, HeadId h) {
      rows += view_.live_rows(s, l, h) - equal_share(s, l, h, longest);
    });
    return rows;
  }

  template <class Scores>
  void share_budget(SequenceId s, const Share& share, const Scores& scores) const noexcept {
    const std::int32_t longest = longest_of(s, share);
    const bool exceeds = excess_of(s, share, longest) > 0;
    const auto heads = mem_.sharing.first(static_cast<std::size_t>(share.layers * view_.kv_heads));
    const auto rows = static_cast<std::size_t>(mem_.header->max_rows);
    for_each_head(share, [&](std::size_t i, LayerId l, HeadId h) {
      AdaptiveHead& head = heads[i];
      head.rows = view_.live_rows(s, l, h);
      if (!exceeds) { return; }
      const DemandInput in = demand_input(view_, obs_, s, l, h);
      const CandidateRange range = candidates(policy_.demand(in).protection, head.rows);
      const auto keys =
          mem_.sharing_keys.subspan(i * rows, static_cast<std::size_t>(range.count()));
      candidate_keys(view_, s, l, h, scores(s, l, h), range, mem_.workers.front().order, keys);
      head = {keys, head.rows - range.count(), equal_share(s, l, h, longest), 0};
    });
    if (exceeds) { adaptive_rows(policy_.adaptive(), heads, mem_.adaptive); }
    const std::size_t begin =
        static_cast<std::size_t>(raw(s)) * static_cast<std::size_t>(view_.layers * view_.kv_heads) +
        static_cast<std::size_t>(share.first * view_.kv_heads);
    for (std::size_t i = 0; i < heads.size(); ++i) { mem_.budgets[begin + i] = heads[i].rows; }
  }

  const P& policy_;
  const CacheView& view_;
  const Observation& obs_;
  const PlanMemory& mem_;
};

}  // namespace kvtrim::detail
