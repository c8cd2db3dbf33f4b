// SPDX-License-Identifier: Apache-2.0
#pragma once

// One page set for many layers needs all their scores, but not at the same time: each layer adds its own to a small array
// when it is done, and its queries can then be forgotten.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/page_scores.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Working space of `accumulate_page_scores`.
template <class TokenScores>
[[nodiscard]] std::size_t page_accumulate_bytes(const PageSelector<TokenScores>& policy,
                                                const PlanShape& shape) noexcept {
  Arena arena;
  const auto rows = arena.take<float>(shape.max_rows);
  const auto pages = arena.take<float>(pages_for(shape.max_rows, shape.page_size));
  static_cast<void>(rows), static_cast<void>(pages);
  return arena.bytes() + detail::ScorerFor<TokenScores>(policy.scorer()).scratch_bytes(shape);
}

/// Adds the page scores of one layer to `sums`. Call it when the layer's attention is done, layer 0 first; after the last
/// layer, pass the array to `plan` as `Observation::page_scores`.
///
/// \param layer    of the view; the first layer of a page set overwrites what the array held
/// \param obs      what the token scorer needs for this layer (a `QueryBlock` with layer stride 0 may hold just one layer)
/// \param sums     [sequences, page sets, pages of the longest table]
/// \param scratch  [page_accumulate_bytes(policy, plan_shape(view, obs))]
/// \returns `ok`; `bad_observation` (also for exact sums over heads, which floats cannot carry from layer to layer) or
///   `workspace_too_small`: nothing was added
/// \par Complexity
/// the token scorer's, for all sequences and KV heads of the layer; no allocation. The sums are those of a plan that scores
/// all layers itself, bit for bit
/// \par Source
/// own rule, as `page_scores`
template <class TokenScores>
Status accumulate_page_scores(const PageSelector<TokenScores>& policy,
                              const CacheView& view,
                              LayerId layer,
                              const Observation& obs,
                              const PageScoreArray& sums,
                              std::span<std::byte> scratch) noexcept {
  const detail::ScorerFor<TokenScores> scorer(policy.scorer());
  const bool given = static_cast<bool>(obs.scores);
  if (const Status status = given ? ExternalScorer{}.check(view, obs) : scorer.check(view, obs);
      status != Status::ok) {
    return status;
  }
  const PageScoreParams params = policy.page_scores();
  if (params.sums == Sums::exact && params.heads != Reduction::max) {
    return Status::bad_observation;  // an array of floats cannot hold such a sum in parts
  }
  if (scratch.size() < page_accumulate_bytes(policy, plan_shape(view, obs))) {
    return Status::workspace_too_small;
  }
  for (std::int32_t i = 0; i < view.sequences; ++i) {
    const SequenceId s{i};
    for (std::int32_t h = 0; h < view.kv_heads; ++h) {
      const HeadRef head{view, s, layer, HeadId{h}};
      const std::int32_t extent = LiveRows(head).extent();
      const std::int32_t pages =
          head.live_rows() == 0 ? 0 : pages_for(extent + view.first_row(s), view.page_size);
      Arena arena(scratch);
      const auto rows = arena.take<float>(extent);
      const auto own = arena.take<float>(pages);
      const auto rest = arena.rest();
      KVTRIM_ASSERT(arena.ok());
      if (given) {
        ExternalScorer{}.score(head, obs, rest, rows);
      } else {
        scorer.score(head, obs, rest, rows);
      }
      page_scores(params, rows, view.first_row(s), view.page_size, rows, own);
      const std::int32_t t = head.table();
      const auto sum = sums.of(s, unit_of(policy.unit(), view, t), pages);
      const bool first = view.scope == TableScope::group || policy.unit() == PageUnit::per_group
                             ? raw(layer) == 0 && h == 0
                         : view.scope == TableScope::layer || policy.unit() == PageUnit::per_layer
                             ? h == 0
                             : true;
      if (first) {
        std::copy(own.begin(), own.end(), sum.begin());
      } else {
        add_page_scores(params, own, sum);
      }
    }
  }
  return Status::ok;
}

}  // namespace kvtrim
