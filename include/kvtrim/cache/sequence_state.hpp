// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <cstdint>
#include <type_traits>

namespace kvtrim {

/// What must be known about one sequence under one page table beyond its rows. Forked, truncated and reset with it.
///
/// Three numbers that are never mixed: slots come from `live_rows`, the position of the next token from
/// `next_position`, its rotation from `next_rope_position`.
struct SequenceState {
  std::int32_t live_rows = 0;           ///< rows in the cache
  std::int32_t next_position = 0;       ///< tokens seen, evicted ones included
  std::int32_t next_rope_position = 0;  ///< what the next key and query are rotated to
  std::int32_t append_row =
      -1;  ///< row of the next append if it is a hole among the live rows; otherwise -1
  std::int32_t steps = 0;             ///< extends since the last eviction
  std::int32_t rows_at_eviction = 0;  ///< live rows just after the last eviction; 0: never evicted
  bool ordered = true;                ///< slot order is position order
  bool open = false;                  ///< extended, and not yet written in every layer of the table
  bool applied = false;               ///< an eviction was applied and not committed
  std::uint64_t generation = 0;       ///< incremented by every change

  /// Rows of the table that are or were in use: the live ones and the hole.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t extent() const noexcept {
    return live_rows + (append_row >= 0 ? 1 : 0);
  }
};
static_assert(std::is_trivially_copyable_v<SequenceState>);

}  // namespace kvtrim
