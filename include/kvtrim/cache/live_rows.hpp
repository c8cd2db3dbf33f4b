// SPDX-License-Identifier: Apache-2.0
#pragma once

// Three numbers of a row: its row in the table, its index among the live rows (a hole left out), and its rank by
// position. `for_each_run` is the one way to the rows' bytes.

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
    const auto& [view, s, l, h] = head;
    const SequenceState state = head.state();
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    const std::int64_t capacity = view.table.capacity(s, l, h);
    const std::int64_t room = std::min(most, capacity * view.page_size) - view.first_row(s);
    const std::int64_t live = std::max(0, head.live_rows());
    const std::int64_t used = live + (state.append_row >= 0 ? 1 : 0);
    extent_ = static_cast<std::int32_t>(std::clamp<std::int64_t>(std::min(used, room), 0, most));
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

  /// Row of the table at position `p`; -1: it is not live.
  ///
  /// \par Complexity
  /// O(rows); no allocation
  [[nodiscard]] std::int32_t row_at(Position p) const noexcept {
    const Int32View positions = head_.positions();
    std::int32_t r = 0;
    if (positions != nullptr && hole_ < 0) {  // side by side: many are compared at once
      constexpr std::int32_t block = 64;
      const std::int32_t wanted = raw(p);
      for (; r + block <= extent_; r += block) {
        std::int32_t hits = 0;
        for (std::int32_t i = 0; i < block; ++i) { hits += positions[r + i] == wanted ? 1 : 0; }
        if (hits != 0) { break; }
      }
      while (r < extent_ && positions[r] != raw(p)) { ++r; }
    } else {
      while (r < extent_ && (r == hole_ || head_.position(r) != p)) { ++r; }
    }
    return r < extent_ ? r : -1;
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

/// Consecutive rows in one page.
struct Run {
  std::int32_t row;    ///< first row
  std::int32_t count;  ///< rows, at least 1
  PageId k_page;       ///< page of the keys
  PageId v_page;       ///< page of the values
  Slot slot;           ///< slot of the first row
};

/// Calls `f(Run)` for all live rows of a KV head, ascending, one page at a time; a hole is skipped.
///
/// \param from  first row looked at
/// \param to    one past the last row looked at
/// \pre the table names a page for every live row
/// \par Complexity
/// O(pages of the rows looked at); no allocation. Nothing beyond the live rows is read, nor any table entry beyond them.
template <class F>
void for_each_run(
    const HeadRef& head,
    F&& f,
    std::int32_t from = 0,
    std::int32_t to = std::numeric_limits<std::int32_t>::max()) noexcept(noexcept(f(Run{}))) {
  const CacheView& view = head.view;
  const LiveRows rows(head);
  const std::int32_t extent = std::min(rows.extent(), to);
  const std::int32_t hole = rows.hole();
  const std::int32_t first = view.first_row(head.sequence);
  const std::int32_t* const entries = view.table.row(head.sequence, head.layer, head.head);
  for (std::int32_t r = from; r < extent;) {
    const std::int32_t page = (r + first) / view.page_size;
    const std::int32_t slot = (r + first) % view.page_size;
    std::int32_t count = std::min(view.page_size - slot, extent - r);
    if (r == hole) {
      ++r;
      continue;
    }
    if (hole > r && hole < r + count) { count = hole - r; }
    f(Run{r,
          count,
          view.table.page(entries[page]),
          view.table.page(entries[page + view.table.v_offset]),
          Slot{slot}});
    r += count;
  }
}

}  // namespace kvtrim
