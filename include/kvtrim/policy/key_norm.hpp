// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>

#include <string_view>

namespace kvtrim {

/// Parameters of `KeyNormScorer`: none.
///
/// \par Source
/// Devoto et al., 2024, arXiv:2406.11430
struct KeyNormParams {
  static constexpr std::string_view name = "keynorm";
  static constexpr std::string_view title = "kvtrim::KeyNorm";
  static constexpr Protection protects{0, 0};

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
};
static_assert(ScoreParams<KeyNormParams>);

/// Keeps the rows with the shortest keys of their KV head.
///
/// Needs keys only. Use it at the end of a prompt, or while generating: a row's score never changes, so `score_new_rows`
/// can score each row once.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `KeyNormScorer`
/// \par Source
/// Devoto et al., 2024, arXiv:2406.11430, as written; the authors leave the first two layers alone: give those a budget
/// of their own (`Observation::budgets`). kvpress (Knorm) treats all layers alike
using KeyNorm = TopRows<KeyNormParams>;
static_assert(Policy<KeyNorm>);

}  // namespace kvtrim
