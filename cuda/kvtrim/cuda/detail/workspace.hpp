// SPDX-License-Identifier: Apache-2.0
#pragma once

// The device's counterpart of `Arena`: one function lays out a workspace; run without memory, it only counts. The pointers
// are device pointers and are never followed here.

#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim::cuda::detail {

/// Hands out arrays of a workspace, each at a multiple of 256 bytes.
class WorkspaceLayout {
 public:
  static constexpr std::size_t alignment = 256;

  /// Only counts.
  constexpr WorkspaceLayout() noexcept = default;
  /// Over device memory.
  WorkspaceLayout(void* memory, std::size_t bytes) noexcept
      : base_(static_cast<std::byte*>(memory)), size_(bytes) {}

  /// Takes `count` elements; null when only counting.
  template <class T>
  [[nodiscard]] T* take(std::int64_t count) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::size_t begin = used_;
    const auto bytes = static_cast<std::size_t>(count < 0 ? 0 : count) * sizeof(T);
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return base_ == nullptr || used_ > size_ ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }

  /// Whether the memory is aligned and everything taken so far fits.
  [[nodiscard]] bool ok() const noexcept {
    return base_ != nullptr && reinterpret_cast<std::uintptr_t>(base_) % alignment == 0 &&
           used_ <= size_;
  }
  /// Bytes taken so far.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
};

}  // namespace kvtrim::cuda::detail
