// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/config.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace kvtrim::detail {

/// Which block of memory belongs to which slot. Forked slots share a block until one of them is to be written; there are as
/// many blocks as slots, so that a block is free whenever one is shared.
///
/// \par Allocation
/// in the constructor only
class SlotBlocks {
 public:
  explicit SlotBlocks(std::int32_t slots) : blocks_(index(slots)), users_(index(slots), 1) {
    std::iota(blocks_.begin(), blocks_.end(), 0);
  }
  [[nodiscard]] static constexpr std::size_t bytes(std::int32_t slots) noexcept {
    return index(slots) * 2 * sizeof(std::int32_t);
  }

  [[nodiscard]] bool has(std::int32_t slot) const noexcept {
    return slot >= 0 && index(slot) < blocks_.size();
  }
  [[nodiscard]] std::int32_t operator[](std::int32_t slot) const noexcept {
    return blocks_[index(slot)];
  }
  [[nodiscard]] std::span<const std::int32_t> all() const noexcept { return blocks_; }

  /// `to` shares the block of `from`.
  void fork(std::int32_t from, std::int32_t to) noexcept {
    ++users_[index(blocks_[index(from)])];
    --users_[index(blocks_[index(to)])];
    blocks_[index(to)] = blocks_[index(from)];
  }

  /// Gives `slot` a block of its own; `leave(shared, block)` is called if it had to leave a shared one.
  template <class F>
  std::int32_t own(std::int32_t slot, F&& leave) noexcept {
    const std::int32_t shared = blocks_[index(slot)];
    if (users_[index(shared)] == 1) { return shared; }
    const auto free = std::find(users_.begin(), users_.end(), 0);
    KVTRIM_ASSERT(free != users_.end());
    const auto block = static_cast<std::int32_t>(free - users_.begin());
    --users_[index(shared)];
    *free = 1;
    blocks_[index(slot)] = block;
    leave(shared, block);
    return block;
  }

 private:
  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }

  std::vector<std::int32_t> blocks_;  // [slots]
  std::vector<std::int32_t> users_;   // [blocks] slots that share it
};

}  // namespace kvtrim::detail
