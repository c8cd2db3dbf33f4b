// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/key_diff_params.hpp>

#include <string_view>

namespace kvtrim {

/// KeyDiff's defaults.
template <>
struct Method<KeyDiffParams> {
  static constexpr std::string_view name = "keydiff";
  static constexpr std::string_view title = "kvtrim::KeyDiff";
  static constexpr int sinks = 0;
  static constexpr int recent = 0;
  static constexpr void check(const KeyDiffParams&) noexcept {}
};

/// Keeps the rows whose keys point elsewhere than the mean key of their KV head.
///
/// Needs keys only, so the question may come after the eviction. At the end of a prompt, block by block, or while
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
