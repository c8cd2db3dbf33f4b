// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/key_norm_params.hpp>

#include <string_view>

namespace kvtrim {

/// KeyNorm's defaults.
template <>
struct Method<KeyNormParams> {
  static constexpr std::string_view name = "knorm";
  static constexpr std::string_view title = "kvtrim::KeyNorm";
  static constexpr int sinks = 0;
  static constexpr int recent = 0;
  static constexpr void check(const KeyNormParams&) noexcept {}
};

/// Keeps the rows with the shortest keys of their KV head.
///
/// Needs keys only. At the end of a prompt, or while generating: a row's score never changes, so `score_new_rows` can
/// score each row once.
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
