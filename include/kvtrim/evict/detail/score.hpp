// SPDX-License-Identifier: Apache-2.0
#pragma once

// Second stage of a plan: one number per row. Most scores are made when the rows of their head are chosen, in the
// worker's scratch; those that a layer's heads have in common, or compete by, are made first and saved.

#include <kvtrim/evict/detail/plan_draft.hpp>
#include <kvtrim/score/external.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail::stage {

// Scores of one head: the policy's own, or those that came with the observation.
template <Policy P>
void score_head(const P& policy,
                const Observation& obs,
                const HeadRef& head,
                std::span<std::byte> scratch,
                std::span<float> out) noexcept {
  if (rows_given<P>(obs)) {
    ExternalScorer{}.score(head, obs, scratch, out);
  } else {
    PolicyScorer<P>(policy.scorer()).score(head, obs, scratch, out);
  }
}

// Saved scores of one head. Where a layer's heads have one list in common, it is head 0's.
template <Policy P>
[[nodiscard]] std::span<float> saved_scores(const PlanDraft& draft, const HeadRef& head) noexcept {
  const bool common = LayerScorer<PolicyScorer<P>> && !AdaptivePolicy<P>;
  const std::size_t heads = common ? 1 : static_cast<std::size_t>(head.view.kv_heads);
  const std::size_t list =
      draft.head_index(head) / static_cast<std::size_t>(head.view.kv_heads) * heads +
      (common ? 0 : static_cast<std::size_t>(raw(head.head)));
  const auto rows = static_cast<std::size_t>(draft.header().max_rows);
  return draft.memory.saved_scores.subspan(list * rows,
                                           static_cast<std::size_t>(LiveRows(head).extent()));
}

// Makes and saves the scores of the heads that are wanted; scores that are common to a layer once for all its heads.
template <Policy P, Executor E, class Wanted>
void save_scores(const P& policy,
                 const Observation& obs,
                 const PlanDraft& draft,
                 const E& executor,
                 Wanted&& wanted) noexcept {
  const bool common = LayerScorer<PolicyScorer<P>> && !rows_given<P>(obs);
  draft.for_each_item(executor, [&](const HeadRef& head, SelectScratch& scratch) {
    if ((common && raw(head.head) > 0) || !wanted(head)) { return; }
    const auto scores = saved_scores<P>(draft, head);
    score_head(policy, obs, head, scratch.scorer, scores);
    if (!common || !AdaptivePolicy<P>) { return; }
    for (std::int32_t h = 1; h < head.view.kv_heads; ++h) {
      const auto copy =
          saved_scores<P>(draft, HeadRef{head.view, head.sequence, head.layer, HeadId{h}});
      std::copy_n(scores.begin(), std::min(scores.size(), copy.size()), copy.begin());
    }
  });
}

/// Saves the scores that a layer's heads have in common, for the layers that a table evicts from. (Heads that share a
/// budget were scored when it was shared.)
template <Policy P, Executor E>
void score(const P& policy,
           const Observation& obs,
           const PlanDraft& draft,
           const E& executor) noexcept {
  if constexpr (LayerScorer<PolicyScorer<P>> && !AdaptivePolicy<P>) {
    if (rows_given<P>(obs) || pages_given<P>(obs)) { return; }
    save_scores(policy, obs, draft, executor, [&](const HeadRef& head) {
      bool any = false;
      for (std::int32_t h = 0; h < head.view.kv_heads; ++h) {
        any = any ||
              draft.plan.table(head.sequence, head.view.table_of(head.layer, HeadId{h})).evicts;
      }
      return any;
    });
  }
}

// Scores by which the rows of `head` are chosen, in the worker's scratch. None are made where all candidates go.
template <Policy P>
[[nodiscard]] std::span<float> scores_of(const P& policy,
                                         const Observation& obs,
                                         const PlanDraft& draft,
                                         const HeadRef& head,
                                         const Demand& demand,
                                         SelectScratch& scratch) noexcept {
  const TablePlan& plan = draft.plan.table(head.sequence, head.table());
  const auto scores = scratch.scores.first(static_cast<std::size_t>(plan.extent_before));
  const std::int32_t fixed =
      plan.live_before - candidates(demand.protection, plan.live_before).count();
  if (!AdaptivePolicy<P> && demand.keep <= fixed) {
    std::fill(scores.begin(), scores.end(), 0.0F);
  } else if (AdaptivePolicy<P> || (LayerScorer<PolicyScorer<P>> && !rows_given<P>(obs))) {
    std::copy_n(saved_scores<P>(draft, head).begin(), scores.size(), scores.begin());
  } else {
    score_head(policy, obs, head, scratch.scorer, scores);
  }
  return scores;
}

}  // namespace kvtrim::detail::stage
