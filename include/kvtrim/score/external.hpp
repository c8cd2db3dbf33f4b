// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/external.hpp>
#include <kvtrim/score/scorer.hpp>

#include <span>

namespace kvtrim {

/// Scores that the caller computed: `Observation::scores`, by row.
///
/// \par Source
/// none: any fp32 array, such as KVzip's scores
struct ExternalScorer {
  static constexpr bool reads_given_scores = true;

  constexpr ExternalScorer() noexcept = default;
  explicit constexpr ExternalScorer(ExternalParams) noexcept {}

  /// None.
  [[nodiscard]] constexpr std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  /// `bad_observation` without scores.
  [[nodiscard]] Status check(const CacheView&, const Observation& obs) const noexcept {
    return obs.scores && obs.scores.element_bytes == 4 ? Status::ok : Status::bad_observation;
  }
  /// Copies them.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    const auto [view, s, l, h] = head;
    for (std::size_t r = 0; r < out.size(); ++r) {
      out[r] = obs.scores.at<float>(s, l, h, static_cast<std::int32_t>(r));
    }
  }
};
static_assert(Scorer<ExternalScorer>);

/// `ExternalParams` are scored by `ExternalScorer`.
ExternalScorer scorer_of(ScoreTag<ExternalParams>);

}  // namespace kvtrim
