// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>

#include <string_view>

namespace kvtrim {

/// Parameters of `KeyDiffScorer`: none.
///
/// \par Source
/// Park et al., 2025, arXiv:2504.15364
struct KeyDiffParams {
  static constexpr std::string_view name = "keydiff";
  static constexpr std::string_view title = "kvtrim::KeyDiff";
  static constexpr Protection protects{0, 0};

  /// Nothing to check.
  constexpr void check(std::string_view) const noexcept {}
};
static_assert(ScoreParams<KeyDiffParams>);

/// Keeps the rows whose keys point away from the mean key of their KV head.
///
/// Needs keys only, so the question may come after the eviction. Use it at the end of a prompt, block by block, or while
/// generating.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `KeyDiffScorer`
/// \par Source
/// Park et al., 2025, arXiv:2504.15364, as written; kvpress protects nothing either
using KeyDiff = TopRows<KeyDiffParams>;
static_assert(Policy<KeyDiff>);

}  // namespace kvtrim
