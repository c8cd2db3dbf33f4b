// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/config.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtrim {

/// 4-byte integers side by side, read byte by byte: engines write positions as `Position` or as `std::int32_t`, which a
/// compiler takes for different memory.
class Int32View {
 public:
  /// None.
  constexpr Int32View(std::nullptr_t = nullptr) noexcept {}
  /// Over an array.
  Int32View(const std::int32_t* data) noexcept : base_(reinterpret_cast<const std::byte*>(data)) {}
  /// Over any memory.
  explicit constexpr Int32View(const std::byte* base) noexcept : base_(base) {}

  /// Number `i`.
  [[nodiscard]] std::int32_t operator[](std::int64_t i) const noexcept {
    std::int32_t x = 0;
    std::memcpy(&x, base_ + i * 4, 4);
    return x;
  }
  /// Those from number `i` on.
  [[nodiscard]] constexpr Int32View operator+(std::int64_t i) const noexcept {
    return Int32View(base_ + i * 4);
  }
  /// Copies `n` of them from number `i` on.
  void copy(std::int64_t i, std::int64_t n, Position* out) const noexcept {
    std::memcpy(static_cast<void*>(out), base_ + i * 4, static_cast<std::size_t>(n) * 4);
  }
  /// Whether there are none.
  [[nodiscard]] friend constexpr bool operator==(Int32View a, std::nullptr_t) noexcept {
    return a.base_ == nullptr;
  }

 private:
  const std::byte* base_ = nullptr;
};

/// Side data of a sequence, one element per row, indexed [sequence, layer, KV head, row] and never shared: positions,
/// rope positions, accumulated scores. A null base means that the plane is absent.
struct SequencePlane {
  std::byte* base = nullptr;         ///< sequence 0, layer 0, head 0, row 0
  std::int64_t sequence_stride = 0;  ///< bytes
  std::int64_t layer_stride = 0;     ///< bytes; 0: common to the layers
  std::int64_t head_stride = 0;      ///< bytes; 0: common to the heads
  std::int64_t row_stride = 0;       ///< bytes
  std::int32_t element_bytes = 4;    ///< bytes per element

  /// Whether the plane is there.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr explicit operator bool() const noexcept {
    return base != nullptr;
  }

  /// First byte of an element.
  [[nodiscard]] KVTRIM_HOST_DEVICE std::byte* row(SequenceId s,
                                                  LayerId l,
                                                  HeadId h,
                                                  std::int32_t r) const noexcept {
    return base + raw(s) * sequence_stride + raw(l) * layer_stride + raw(h) * head_stride +
           r * row_stride;
  }

  /// Element as a `T`, copied: it may have been written as another type of the same bytes (`Position`, `std::int32_t`).
  /// \pre the plane's elements have the size of a `T`
  template <class T>
  [[nodiscard]] KVTRIM_HOST_DEVICE T
  load(SequenceId s, LayerId l, HeadId h, std::int32_t r) const noexcept {
    KVTRIM_ASSERT(element_bytes == static_cast<std::int32_t>(sizeof(T)));
    T value{};
    KVTRIM_LOAD(value, row(s, l, h, r));
    return value;
  }

  /// Element as a `T`.
  /// \pre the plane holds `T`
  template <class T>
  [[nodiscard]] KVTRIM_HOST_DEVICE T& at(SequenceId s,
                                         LayerId l,
                                         HeadId h,
                                         std::int32_t r) const noexcept {
    KVTRIM_ASSERT(element_bytes == static_cast<std::int32_t>(sizeof(T)));
    return *reinterpret_cast<T*>(row(s, l, h, r));
  }

  /// Elements of (sequence, layer, KV head) as an array of `T`; null if they are not contiguous.
  ///
  /// \tparam Bytes  bytes of an element, where `T` is `std::byte`
  /// \pre the plane, if it is there, holds `T`
  template <class T, std::size_t Bytes = sizeof(T)>
  [[nodiscard]] T* array(SequenceId s, LayerId l, HeadId h) const noexcept {
    const bool dense = base != nullptr && row_stride == static_cast<std::int64_t>(Bytes);
    return dense ? reinterpret_cast<T*>(row(s, l, h, 0)) : nullptr;
  }

  /// A plane over a C-order array [sequences, layers, kv_heads, rows].
  template <class T>
  [[nodiscard]] static SequencePlane dense(T* data,
                                           std::int32_t layers,
                                           std::int32_t kv_heads,
                                           std::int32_t rows) {
    SequencePlane p;
    p.base = reinterpret_cast<std::byte*>(data);
    p.element_bytes = static_cast<std::int32_t>(sizeof(T));
    p.row_stride = static_cast<std::int64_t>(sizeof(T));
    p.head_stride = rows * p.row_stride;
    p.layer_stride = kv_heads * p.head_stride;
    p.sequence_stride = layers * p.layer_stride;
    return p;
  }
};

}  // namespace kvtrim
