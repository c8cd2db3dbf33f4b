// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Parameters of `TovaScorer`.
///
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104
struct TovaParams {
  static constexpr std::string_view name = "tova";
  static constexpr std::string_view title = "kvtrim::Tova";
  static constexpr Protection protects{0, 1};  // the last query's own token

  Sums sums = Sums::floating;  ///< of softmax and heads: `exact` for runs over ranks

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
  /// The last query, which sees the rows up to its own position.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.window = 1, .positions = true}; }
};
static_assert(ScoreParams<TovaParams>);

/// Keeps the rows that the last query attends to, one set for all KV heads of a layer; the last row always stays.
///
/// Use it at the end of a prompt, and after each decode step with that step's query.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `TovaScorer`
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104; differs: the last row is protected (`recent` 1), as in kvpress. The authors' code
/// lets it compete: `tova_unprotected`
using Tova = TopRows<TovaParams>;
static_assert(Policy<Tova>);

/// Parameters of Tova as in its authors' code: the newest token competes with the others and may go at once.
///
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104, as written
[[nodiscard]] constexpr Tova::Params tova_unprotected(std::int64_t budget) noexcept {
  Tova::Params p;
  p.budget = budget;
  p.recent = 0;
  return p;
}

}  // namespace kvtrim
