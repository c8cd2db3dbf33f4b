// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <string_view>

namespace kvtrim {

/// Parameters of `QFilterScorer`: none; the filters come with the observation.
///
/// \par Source
/// Godey et al., 2025, arXiv:2503.02812
struct QFilterParams {
  static constexpr std::string_view name = "qfilter";
  static constexpr std::string_view title = "kvtrim::QFilter";
  static constexpr Protection protects{0, 0};

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
  /// The filters.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.filters = true}; }
};
static_assert(ScoreParams<QFilterParams>);

/// Keeps the rows whose keys lie on the side that the queries of their KV head lean towards, according to calibrated
/// filters.
///
/// Needs keys and `Observation::filters`: without filters, or with filters of another head dim, the plan is
/// `bad_observation`. Use it at the end of a prompt, or while generating (`score_new_rows` scores each row once).
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `QFilterScorer`
/// \par Source
/// Godey et al., 2025, arXiv:2503.02812, as written; kvpress downloads filters by model name, here the caller provides
/// them
using QFilter = TopRows<QFilterParams>;
static_assert(Policy<QFilter>);

}  // namespace kvtrim
