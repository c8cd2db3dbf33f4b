// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the value-norm and the output-norm decorators share: (score + epsilon) * factor.

#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

template <template <class> class Params, class Scores, Scorer Factor>
class RescaledScorer {
 public:
  using Inner = typename ScorerOf<Scores>::type;
  static constexpr bool reads_given_scores = kvtrim::reads_given_scores<Inner>;

  explicit constexpr RescaledScorer(const Params<Scores>& params) noexcept
      : inner_(params.scores), epsilon_(params.epsilon) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return Arena::bytes_for([&](Arena& arena) { return arena.take<float>(shape.max_rows); }) +
           std::max(inner_.scratch_bytes(shape), factor_.scratch_bytes(shape));
  }
  /// `bad_observation` if the scorer or the factor says so.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const Status status = inner_.check(view, obs);
    return status != Status::ok ? status : factor_.check(view, obs);
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const auto score = [&](const auto& scorer, auto memory, auto scores) {
      scorer.score(head, obs, memory, scores);
    };
    rescale(score, head.state().append_row, scratch, out);
  }

  /// The same for the rows from `first` on; `out.size()` of them.
  void score_rows(const HeadRef& head,
                  const Observation& obs,
                  std::int32_t first,
                  std::span<std::byte> scratch,
                  std::span<float> out) const noexcept
    requires RowLocalScorer<Inner> && RowLocalScorer<Factor>
  {
    const auto score = [&](const auto& scorer, auto memory, auto scores) {
      scorer.score_rows(head, obs, first, memory, scores);
    };
    rescale(score, head.state().append_row - first, scratch, out);
  }

 private:
  // Of the rows that `score` scores by a scorer, `hole` among them.
  template <class Score>
  void rescale(const Score& score,
               std::int32_t hole,
               std::span<std::byte> scratch,
               std::span<float> out) const noexcept {
    Arena arena(scratch);
    const auto factors = arena.take<float>(static_cast<std::int64_t>(out.size()));
    const auto rest = arena.rest();
    KVTRIM_ASSERT(arena.ok());
    score(inner_, rest, out);
    score(factor_, rest, factors);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::int32_t>(i) == hole ? 0.0F : (out[i] + epsilon_) * factors[i];
    }
  }

  Inner inner_;
  Factor factor_{};
  float epsilon_;
};

}  // namespace kvtrim::detail
