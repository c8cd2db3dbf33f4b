// SPDX-License-Identifier: Apache-2.0
#pragma once

// Three numbers of a row: its row in the table, its index among the live rows (a hole left out), and its rank by
// position.

#include <kvtrim/cache/head_ref.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Which rows of one KV head are live. A length beyond the table counts as what the table has room for, so that nothing is
/// read by it; `check_tables` is where it is refused.
///
/// \par Complexity
/// O(1) to make; no allocation
class LiveRows {
 public:
  /// Reads length and state once.
  explicit LiveRows(const HeadRef& head) noexcept : head_(head) {
    const SequenceState state = head.state();
    const CacheView& view = head.view;
    const std::int64_t room =
        static_cast<std::int64_t>(view.table.capacity(head.sequence, head.layer, head.head)) *
            view.page_size -
        view.first_row(head.sequence);
    const std::int64_t live = head.live_rows();
    const std::int64_t used = std::max<std::int64_t>(0, live) + (state.append_row >= 0 ? 1 : 0);
    extent_ = static_cast<std::int32_t>(std::clamp<std::int64_t>(
        used, 0, std::clamp<std::int64_t>(room, 0, std::numeric_limits<std::int32_t>::max())));
    hole_ = state.append_row < extent_ ? state.append_row : -1;
    ordered_ = state.ordered;
  }

  /// How many there are.
  [[nodiscard]] std::int32_t count() const noexcept { return extent_ - (hole_ >= 0 ? 1 : 0); }
  /// Rows of the table in use: the live ones and the hole.
  [[nodiscard]] std::int32_t extent() const noexcept { return extent_; }
  /// Row of the hole; -1: none.
  [[nodiscard]] std::int32_t hole() const noexcept { return hole_; }
  /// Whether rows are in the order of their positions.
  [[nodiscard]] bool ordered() const noexcept { return ordered_; }
  /// Row of live index `i`.
  [[nodiscard]] std::int32_t row(std::int32_t i) const noexcept {
    return i + (hole_ >= 0 && i >= hole_ ? 1 : 0);
  }
  /// Live rows before row `r` of the table: the live index of a row that is live.
  [[nodiscard]] std::int32_t before(std::int32_t r) const noexcept {
    return r - (hole_ >= 0 && hole_ < r ? 1 : 0);
  }

  /// Writes the live indices in the order of their positions.
  ///
  /// \param[out] order  [count]
  /// \par Complexity
  /// O(rows), O(rows log rows) where they are out of order; no allocation
  void order(std::span<std::int32_t> order) const noexcept {
    std::int32_t next = 0;
    for (std::int32_t& x : order) { x = next++; }
    if (ordered_) { return; }
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return head_.position(row(a)) < head_.position(row(b));
    });
  }

 private:
  HeadRef head_;
  std::int32_t extent_ = 0;
  std::int32_t hole_ = -1;
  bool ordered_ = true;
};

}  // namespace kvtrim
