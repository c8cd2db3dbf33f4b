// SPDX-License-Identifier: Apache-2.0
#pragma once

// No generator and no state: a score is a hash of what identifies the row, so it does not change from step to step, with
// the batch, or on another machine.

#include <kvtrim/policy/random.hpp>
#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

namespace detail {

/// A bijection of 64 bits in which every input bit flips about half of the output bits.
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
  x += 0x9E37'79B9'7F4A'7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58'476D'1CE4'E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D0'49BB'1331'11EBU;
  return x ^ (x >> 31U);
}

}  // namespace detail

/// Scores a row by a number that looks random: a hash of (seed, layer of the model, KV head, position), uniform over [0, 1).
///
/// Sequences of a batch, and forks, have equal scores at equal positions.
///
/// \par Shapes
/// scores [live rows]; keys are not read
/// \par Ties
/// none broken here; 2^24 values. NaN: never
/// \par Complexity
/// O(live rows); no allocation. Row-local
/// \par Source
/// none: a baseline. The mixing function is SplitMix64's: Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195
class RandomScorer : public detail::RowByRow<RandomScorer> {
 public:
  explicit constexpr RandomScorer(RandomParams params) noexcept : params_(params) {}

  /// None.
  [[nodiscard]] constexpr std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  /// Always ok.
  [[nodiscard]] constexpr Status check(const CacheView&, const Observation&) const noexcept {
    return Status::ok;
  }

  /// Writes the score of each live row from `first` on, as many as `out` has elements; a hole's is 0.
  void score_rows(const HeadRef& head,
                  const Observation&,
                  std::int32_t first,
                  std::span<std::byte>,
                  std::span<float> out) const noexcept {
    const auto layer = static_cast<std::uint64_t>(raw(head.view.model_layer(head.layer)));
    const std::uint64_t seed = detail::mixed(detail::mixed(params_.seed) ^ (layer << 32U) ^
                                             static_cast<std::uint64_t>(raw(head.head)));
    const std::int32_t hole = head.state().append_row;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::int32_t r = first + static_cast<std::int32_t>(i);
      if (r == hole) {
        out[i] = 0.0F;
        continue;
      }
      const auto position = static_cast<std::uint64_t>(raw(head.position(r)));
      out[i] = static_cast<float>(detail::mixed(seed ^ position) >> 40U) * 0x1p-24F;
    }
  }

 private:
  RandomParams params_;
};
static_assert(RowLocalScorer<RandomScorer>);

/// `RandomParams` are scored by `RandomScorer`.
RandomScorer scorer_of(ScoreTag<RandomParams>);

}  // namespace kvtrim
