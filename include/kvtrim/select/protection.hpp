// SPDX-License-Identifier: Apache-2.0
#pragma once

// Protection is a range of ranks, never a score: a sentinel of "maximum + 1" is lost in bf16 from 256 upwards, and in
// fp32 from 2^24 upwards.

#include <kvtrim/core/types.hpp>

#include <cstdint>

namespace kvtrim {

/// Rows that are not candidates for eviction, counted in position order: the lowest positions and the highest positions.
struct Protection {
  std::int32_t sinks = 0;   ///< first rows
  std::int32_t recent = 0;  ///< last rows
};

/// Ranks [begin, end) of the rows that compete; the others are protected.
struct CandidateRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  /// Number of rows that compete.
  [[nodiscard]] constexpr std::int32_t count() const noexcept { return end - begin; }
};

/// What `protection` leaves of `live` rows in position order; empty when it covers them all.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr CandidateRange candidates(const Protection& protection,
                                                                     std::int32_t live) noexcept {
  const std::int32_t begin = protection.sinks < live ? protection.sinks : live;
  const std::int32_t recent = protection.recent < live - begin ? protection.recent : live - begin;
  return {begin, live - recent};
}

}  // namespace kvtrim
