// SPDX-License-Identifier: Apache-2.0
#pragma once

// One function lays out a workspace; run without memory, it says how much it would take. So the size that is reported
// and the memory that is used cannot drift apart.

#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// Hands out aligned arrays from a caller's buffer, one after the other; without a buffer it only counts.
///
/// \par Thread-safety
/// one thread
class Arena {
 public:
  /// Every array starts at a multiple of this, counted from the first aligned byte of the buffer.
  static constexpr std::size_t alignment = 64;

  /// An arena that only counts.
  constexpr Arena() noexcept = default;

  /// An arena over `buffer`, which need not be aligned.
  explicit Arena(std::span<std::byte> buffer) noexcept
      : base_(buffer.data()), size_(buffer.size()) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(base_) % alignment;
    if (base_ != nullptr && misaligned != 0) { used_ = alignment - misaligned; }
  }

  /// Takes `count` elements; the memory is not initialised.
  ///
  /// \returns the array, or an empty span when only counting or when the buffer is too small (`ok()` tells)
  template <class T>
  [[nodiscard]] std::span<T> take(std::int64_t count) noexcept {
    static_assert(alignof(T) <= alignment && std::is_trivially_destructible_v<T>);
    const std::int64_t elements = count < 0 ? 0 : count;
    const auto bytes =
        static_cast<std::size_t>(saturated_product({elements, static_cast<int>(sizeof(T))}));
    const std::size_t begin = used_;
    const bool fits = bytes < most && used_ < most - bytes;
    used_ = fits ? used_ + (bytes + alignment - 1) / alignment * alignment : most;
    if (base_ == nullptr || !ok()) { return {}; }
    return {reinterpret_cast<T*>(base_ + begin), static_cast<std::size_t>(elements)};
  }

  /// Takes what is left of the buffer, down to the last byte; an empty span if the buffer is already too small.
  [[nodiscard]] std::span<std::byte> rest() noexcept {
    if (!ok()) { return {}; }
    const std::size_t begin = used_;
    used_ = size_;
    return {base_ + begin, size_ - begin};
  }

  /// Whether everything taken so far fits the buffer.
  [[nodiscard]] constexpr bool ok() const noexcept { return base_ != nullptr && used_ <= size_; }

  /// Bytes that a buffer of any alignment needs for everything taken so far; beyond 2^62, more than any buffer has.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept { return used_ + alignment; }

  /// The same for what `take(arena)` takes.
  template <class Take>
  [[nodiscard]] static std::size_t bytes_for(const Take& take) noexcept {
    Arena arena;
    static_cast<void>(take(arena));
    return arena.bytes();
  }

 private:
  static constexpr std::size_t most = std::size_t{1} << 62U;  // far from where sums wrap around

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
};

}  // namespace kvtrim
