// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim {

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
  /// \pre the plane, if it is there, holds `T`
  template <class T>
  [[nodiscard]] T* array(SequenceId s, LayerId l, HeadId h) const noexcept {
    const bool dense = base != nullptr && row_stride == static_cast<std::int64_t>(sizeof(T));
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
