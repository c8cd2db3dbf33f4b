// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Parameters of `RandomScorer`.
///
/// \par Source
/// none: a baseline
struct RandomParams {
  static constexpr std::string_view name = "random";
  static constexpr std::string_view title = "kvtrim::Random";
  static constexpr Protection protects{0, 0};

  std::uint64_t seed = 0;  ///< a different seed gives a different choice

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
  /// Positions, of which the choice is a function.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.positions = true}; }
};
static_assert(ScoreParams<RandomParams>);

/// Keeps rows at random: the baseline that a method must beat.
///
/// The choice is a function of seed, layer, KV head and position: the same on every machine and in every batch. Use it at
/// the end of a prompt, or while generating.
///
/// \par Ties
/// the lower position is kept. NaN: never
/// \par Complexity
/// as `RandomScorer`
/// \par Source
/// none: a baseline, as kvpress's RandomPress, which draws anew at each call
using Random = TopRows<RandomParams>;
static_assert(Policy<Random>);

}  // namespace kvtrim
