// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's own arrays on the device, which `commit`, `step` and `extend` write.

#include <cstdint>

namespace kvtrim::cuda {

/// A stack of free pages on the device: `extend` takes from its end, `commit` and `step` put the pages there that lost their last
/// owner. What is on the stack is decided by the order of calls on one stream alone.
struct DevicePages {
  std::int32_t* ids = nullptr;  ///< [capacity]
  /// [2]: how many there are; then a number that `extend` counts its blocks in, 0 at first.
  std::int32_t* count = nullptr;
  std::int32_t capacity =
      0;  ///< room in `ids`; what is beyond it is not put back: the pages of the pool are enough

  /// Whether there is such a list.
  explicit operator bool() const noexcept { return ids != nullptr && count != nullptr; }
};

/// The engine's own arrays on the device, writable.
struct DeviceTables {
  std::int32_t* ids = nullptr;      ///< the same array as `view.table.ids`
  std::int32_t* lengths = nullptr;  ///< the same array as `view.lengths`; null: none
  std::int32_t* ref_counts =
      nullptr;  ///< the same array as `view.writable.ref_counts`; null: every released page is free
  std::int32_t* freed =
      nullptr;  ///< receives the pages without any owner left, in the order of `released`
  std::int32_t* freed_count = nullptr;  ///< [1]: how many
  std::int32_t* indptr = nullptr;       ///< compressed rows: the same array as `view.table.indptr`
  std::int32_t* last_page_len = nullptr;  ///< the same array as `view.last_page_len`; null: none
  DevicePages free{};                     ///< receives them too; none: the engine sees to it
};

}  // namespace kvtrim::cuda
