// SPDX-License-Identifier: Apache-2.0
#pragma once

// The policy must protect exactly the rows that the scorer does not score, so both cut the rows by one function.

#include <kvtrim/cache/sequence_state.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim {

/// Parameters of `LagKVScorer`.
///
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704; sizes as kvpress
struct LagKVParams {
  std::int32_t sinks = 4;      ///< first rows, in no partition
  std::int32_t lag = 128;      ///< rows of a partition; each is scored by the one behind it
  bool cross_scoring = false;  ///< compare rows of different partitions by their scores, not ranks
  bool judged_once = false;    ///< rows before the last eviction's last partition are left alone
};

/// How rows are cut, by ranks in position order: `begin` rows are in no partition, then `partitions` full ones follow,
/// then a remainder. All but the last partition are scored.
struct LagLayout {
  std::int32_t begin = 0;       ///< sinks, or the rows that were judged
  std::int32_t partitions = 0;  ///< full partitions behind them

  /// Rows that are scored.
  [[nodiscard]] constexpr std::int32_t scored(std::int32_t lag) const noexcept {
    return partitions < 2 ? 0 : (partitions - 1) * lag;
  }
};

/// Cuts `live` rows of a table in `state`.
///
/// With `judged_once` the borders are those of the whole sequence, sinks + k * lag: what was scored at the last
/// eviction is counted from the rows that it left and the positions since then.
///
/// \par Complexity
/// O(1)
[[nodiscard]] constexpr LagLayout lag_layout(const LagKVParams& params,
                                             const SequenceState& state,
                                             std::int32_t live) noexcept {
  const std::int32_t lag = params.lag;
  LagLayout layout{std::min(params.sinks, live), 0};
  if (params.judged_once && state.rows_at_eviction > 0) {
    const std::int64_t next = state.next_position - (live - state.rows_at_eviction);  // of then
    if (next - params.sinks >= 2 * static_cast<std::int64_t>(lag)) {
      const std::int64_t border = params.sinks + lag * ((next - params.sinks) / lag - 1);
      const std::int64_t judged = state.rows_at_eviction - (next - border);
      layout.begin =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(judged, layout.begin, live));
    }
  }
  layout.partitions = (live - layout.begin) / lag;
  return layout;
}

}  // namespace kvtrim
