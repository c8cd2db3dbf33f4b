// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <string_view>

namespace kvtrim {

/// Parameters of `ExternalScorer`: none.
///
/// \par Source
/// none: the scores are the caller's
struct ExternalParams {
  static constexpr std::string_view name = "external";
  static constexpr std::string_view title = "kvtrim::External";
  static constexpr Protection protects{0, 0};

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
  /// The scores.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.token_scores = true}; }
};
static_assert(ScoreParams<ExternalParams>);

/// Keeps the rows that the caller scored highest: any fp32 number per row, in `Observation::scores`.
///
/// For methods whose scores come from the model (KVzip's second pass, a trained gate), and for scores made step by step
/// (`score_new_rows`). Without scores the plan is `bad_observation`.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// O(rows)
/// \par Source
/// none: the scores are the caller's
using External = TopRows<ExternalParams>;
static_assert(Policy<External>);

}  // namespace kvtrim
