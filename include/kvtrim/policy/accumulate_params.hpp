// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/policy.hpp>

#include <string_view>

namespace kvtrim {

struct Needs;

/// How attention is accumulated.
///
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048 (the plain sum); age normalisation as kvpress; decay and squares are ours
struct AccumulateParams {
  static constexpr std::string_view name = "accumulated";
  static constexpr std::string_view title = "kvtrim::Accumulated";
  static constexpr Protection protects{0, 512};  // new rows have not had time to be attended to

  float decay = 1.0F;           ///< factor applied to the old sum at each query; 1: none
  bool squared = false;         ///< add squared probabilities
  bool age_normalised = false;  ///< rank by sum / number of queries that saw the row
  Sums sums =
      Sums::floating;  ///< over the queries and heads of one step: `exact` for runs over ranks

  /// \throws std::invalid_argument if the decay is not within (0, 1]
  constexpr void check(std::string_view who) const {
    if (!(decay > 0 && decay <= 1)) {
      throw_invalid_argument("{}: decay {} is not within (0, 1]", who, decay);
    }
  }
  /// Sums in the view; to rank by age, positions too. Defined in policy/needs.hpp.
  [[nodiscard]] constexpr Needs needs() const noexcept;

  /// Whether the sums are the same, however they are ranked.
  [[nodiscard]] constexpr bool adds_as(const AccumulateParams& other) const noexcept {
    return decay == other.decay && squared == other.squared && sums == other.sums;
  }

  friend constexpr bool operator==(const AccumulateParams&, const AccumulateParams&) = default;
};
static_assert(ScoreParams<AccumulateParams>);

}  // namespace kvtrim
