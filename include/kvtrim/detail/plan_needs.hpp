// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a policy's kind asks of the planner: scorers, and memory beside what every plan needs.

#include <kvtrim/detail/plan_memory.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace kvtrim::detail {

template <class P>
using PolicyScorer =
    typename ScorerOf<std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>>::type;

// What scales the scores of a two-stage policy's second stage.
template <class P>
struct FactorScorerOf {
  using type = NoScorer;
};
template <TwoStagePolicy P>
struct FactorScorerOf<P> {
  using type = typename ScorerOf<
      std::remove_cvref_t<decltype(std::declval<const P&>().second_stage())>>::type;
};
template <class P>
using FactorScorer = typename FactorScorerOf<P>::type;

template <Policy P>
[[nodiscard]] PlanNeeds plan_needs(const P& policy, const PlanShape& shape, bool given) noexcept {
  PlanNeeds needs;
  const std::int64_t layers = static_cast<std::int64_t>(shape.sequences) * shape.layers;
  if (!given) { needs.scorer_bytes = PolicyScorer<P>(policy.scorer()).scratch_bytes(shape); }
  if constexpr (TwoStagePolicy<P>) {
    needs.factors = true;
    needs.scorer_bytes =
        std::max(needs.scorer_bytes, FactorScorer<P>(policy.second_stage()).scratch_bytes(shape));
  }
  if constexpr (AdaptivePolicy<P>) {
    const bool all = policy.adaptive().over == AdaptiveOver::all_heads;
    needs.sharing_heads = static_cast<std::int64_t>(shape.kv_heads) * (all ? shape.layers : 1);
    needs.saved_scores = layers * shape.kv_heads;
  } else if constexpr (LayerScorer<PolicyScorer<P>>) {
    needs.saved_scores = given ? 0 : layers;
  }
  return needs;
}

}  // namespace kvtrim::detail
