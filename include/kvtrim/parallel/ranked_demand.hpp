// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/select/protection.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim {

/// What is to stay of the rows that one (sequence, layer, KV head), or one set of pages, has on all ranks together. Every
/// rank gives the same.
struct RankedDemand {
  std::int32_t live = 0;           ///< live rows on all ranks
  std::int32_t next_position = 0;  ///< position of the sequence's next token: above all others
  std::int32_t keep = 0;           ///< rows that stay (`Demand::keep` for `live` rows)
  Protection protection{};         ///< of all ranks' rows, in position order

  /// Ranks, in position order, of the rows that compete.
  [[nodiscard]] constexpr CandidateRange range() const noexcept {
    return candidates(protection, live);
  }
  /// Rows that compete and stay.
  [[nodiscard]] constexpr std::int32_t wanted() const noexcept {
    return std::clamp(keep - (live - range().count()), 0, range().count());
  }
};

}  // namespace kvtrim
