// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim::detail {

/// Whether the KV heads of each layer hold the same tokens in the same rows, so that one set of scores can serve them all.
/// They do as long as no policy with one set per head has cut the sequence.
///
/// A length beyond its table is left for the plan to refuse: nothing is read for it.
///
/// \par Complexity
/// O(1) per head if heads share their positions, O(rows) otherwise
[[nodiscard]] inline bool heads_hold_same_rows(const CacheView& view) noexcept {
  constexpr HeadId first{0};
  const auto same = [&](SequenceId s, LayerId l, HeadId h) {
    const std::int32_t live = view.live_rows(s, l, first);
    const std::int32_t hole = view.state(s, l, first).append_row;
    if (view.live_rows(s, l, h) != live || view.state(s, l, h).append_row != hole) { return false; }
    if (!view.positions || view.positions.head_stride == 0) { return true; }
    const std::int64_t room =
        static_cast<std::int64_t>(view.table.capacity(s, l, h)) * view.page_size;
    const std::int64_t extent = static_cast<std::int64_t>(live) + (hole >= 0 ? 1 : 0);
    for (std::int32_t r = 0; r < std::min(extent, room); ++r) {
      if (r != hole && view.position(s, l, h, r) != view.position(s, l, first, r)) { return false; }
    }
    return true;
  };
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 1; h < view.kv_heads; ++h) {
        if (!same(SequenceId{s}, LayerId{l}, HeadId{h})) { return false; }
      }
    }
  }
  return true;
}

}  // namespace kvtrim::detail
