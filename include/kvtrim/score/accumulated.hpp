// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Scores a row by its accumulated attention.
///
/// \par Shapes
/// planes and scores [live rows]
/// \par Complexity
/// O(live rows); no allocation
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048; with `age_normalised` as kvpress's ObservedAttention: the sum divided by the
/// number of queries that saw the row
class AccumulatedScorer {
 public:
  explicit constexpr AccumulatedScorer(const AccumulateParams& params) noexcept : params_(params) {}

  /// None.
  [[nodiscard]] constexpr std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  /// `bad_observation` without score planes.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    const bool ages = !params_.age_normalised || knows_positions(view);
    return ages && view.score_sums && view.score_compensations ? Status::ok
                                                               : Status::bad_observation;
  }
  /// Sum plus compensation, divided by `next position - position` with `age_normalised`.
  void score(const HeadRef& head,
             const Observation&,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    const auto [view, s, l, h] = head;
    const float* const sums = view.score_sums.array<float>(s, l, h);
    const float* const compensations = view.score_compensations.array<float>(s, l, h);
    if (!params_.age_normalised && sums != nullptr && compensations != nullptr) {
      const auto n = static_cast<Eigen::Index>(out.size());
      Eigen::Map<Eigen::ArrayXf>(out.data(), n) =
          Eigen::Map<const Eigen::ArrayXf>(sums, n) +
          Eigen::Map<const Eigen::ArrayXf>(compensations, n);
      return;
    }
    const std::int32_t next = head.state().next_position;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto r = static_cast<std::int32_t>(i);
      const float total =
          view.score_sums.at<float>(s, l, h, r) + view.score_compensations.at<float>(s, l, h, r);
      const std::int32_t age = next - raw(head.position(r));
      out[i] = params_.age_normalised && age > 0 ? total / static_cast<float>(age) : total;
    }
  }

 private:
  AccumulateParams params_;
};
static_assert(Scorer<AccumulatedScorer>);

/// `AccumulateParams` are scored by `AccumulatedScorer`.
AccumulatedScorer scorer_of(ScoreTag<AccumulateParams>);

}  // namespace kvtrim
