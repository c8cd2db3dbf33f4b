// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/live_rows.hpp>

#include <cstdint>

namespace kvtrim::detail {

/// Whether the KV heads of each layer hold the same tokens in the same rows, so that one set of scores can serve them all.
/// They do as long as no policy with one set per head has cut the sequence.
///
/// \par Complexity
/// O(1) per head if heads share their positions, O(rows) otherwise
[[nodiscard]] inline bool heads_hold_same_rows(const CacheView& view) noexcept {
  const auto same = [](const HeadRef& head, const HeadRef& like) {
    const LiveRows rows(head);
    const LiveRows others(like);
    if (rows.extent() != others.extent() || rows.hole() != others.hole()) { return false; }
    if (!head.view.positions || head.view.positions.head_stride == 0) { return true; }
    for (std::int32_t r = 0; r < rows.extent(); ++r) {
      if (r != rows.hole() && head.position(r) != like.position(r)) { return false; }
    }
    return true;
  };
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 1; h < view.kv_heads; ++h) {
        if (!same({view, SequenceId{s}, LayerId{l}, HeadId{h}},
                  {view, SequenceId{s}, LayerId{l}, HeadId{0}})) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace kvtrim::detail
