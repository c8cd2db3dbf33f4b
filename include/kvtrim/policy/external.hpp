// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/external_params.hpp>

#include <string_view>

namespace kvtrim {

/// External's defaults.
template <>
struct Method<ExternalParams> {
  static constexpr std::string_view name = "external";
  static constexpr std::string_view title = "kvtrim::External";
  static constexpr int sinks = 0;
  static constexpr int recent = 0;
  static constexpr void check(const ExternalParams&) noexcept {}
};

/// Keeps the rows that the caller scored highest: any fp32 number a row, in `Observation::scores`.
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
