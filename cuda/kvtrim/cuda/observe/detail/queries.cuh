// SPDX-License-Identifier: Apache-2.0
#pragma once

// What score kernels are given besides the cache. Every pointer is a device pointer: before the launch only bounds,
// strides and alignments are looked at, never the data.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/observe/observation.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// A `QueryBlock` on the device, its `slots` too, with queries in whatever type attention uses.
struct DeviceQueries {
  QueryBlock block{};        ///< `data` points to elements of `dtype`; strides count those elements
  DType dtype = DType::f32;  ///< f32, f16 or bf16
};

/// What the host promises about numbers that lie on the device. Grids and workspaces depend on these alone, so that a
/// launch can be captured into a graph and replayed while lengths change.
struct ScoreBounds {
  std::int32_t max_rows = 0;  ///< most rows of a table; what lies beyond is not looked at
  std::int32_t min_rows =
      0;  ///< tables with at most this many live rows are left out: nothing is written for them
  const std::int32_t* active =
      nullptr;  ///< on the device, [sequences, tables per sequence]; tables with 0 are left out too; null: none are
  /// Rows of all sequences, each by its longest table, at most; 0: max_rows each. What a workspace by rows is sized for.
  std::int64_t total_rows = 0;
  /// On the device, [1]; becomes `workspace_too_small` if there are more rows than that: nothing is written then. May be null.
  Status* status = nullptr;
};

namespace detail {

/// Where sequence `s` lies in the arrays.
KVTRIM_DEVICE std::int32_t query_slot(const QueryBlock& b, SequenceId s) {
  return b.slots == nullptr ? raw(s) : b.slots[raw(s)];
}
/// First row of slot `slot` in its arrays.
KVTRIM_DEVICE std::int64_t first_query(const QueryBlock& b, std::int32_t slot) {
  return b.row_firsts == nullptr ? 0 : b.row_firsts[slot];
}
/// Rows of sequence `s`.
KVTRIM_DEVICE std::int32_t query_count(const QueryBlock& b, SequenceId s) {
  return b.row_counts == nullptr ? b.rows : b.row_counts[query_slot(b, s)];
}
/// Elements from `data` to row `i`.
KVTRIM_DEVICE std::int64_t query_offset(
    const QueryBlock& b, SequenceId s, LayerId l, std::int32_t head, std::int32_t i) {
  const std::int32_t slot = query_slot(b, s);
  return slot * b.sequence_stride + raw(l) * b.layer_stride + head * b.head_stride +
         (first_query(b, slot) + i) * b.row_stride;
}
/// LSE of row `i`, base 2.
KVTRIM_DEVICE float query_lse2(
    const QueryBlock& b, SequenceId s, LayerId l, std::int32_t head, std::int32_t i) {
  const std::int32_t slot = query_slot(b, s);
  const float lse = b.lse[slot * b.lse_sequence_stride + raw(l) * b.lse_layer_stride +
                          head * b.lse_head_stride + first_query(b, slot) + i];
  return b.lse_base == LseBase::two ? lse : lse * 1.44269504088896340736F;
}
/// Position of row `i`.
KVTRIM_DEVICE std::int32_t query_position(const QueryBlock& b,
                                          SequenceId s,
                                          std::int32_t i,
                                          std::int32_t next_position) {
  if (b.positions == nullptr) { return next_position - query_count(b, s) + i; }
  const std::int32_t slot = query_slot(b, s);
  return raw(b.positions[slot * b.position_sequence_stride + first_query(b, slot) + i]);
}

KVTRIM_DEVICE bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7F80'0000U) != 0x7F80'0000U;
}

/// Four elements of type `dtype` as floats; with one load if `vector`.
KVTRIM_DEVICE float4 load_query_4(const void* data, std::int64_t offset, DType dtype, bool vector) {
  if (dtype == DType::f32) {
    const float* const p = static_cast<const float*>(data) + offset;
    if (vector) { return __ldg(reinterpret_cast<const float4*>(p)); }
    return make_float4(p[0], p[1], p[2], p[3]);
  }
  const std::uint16_t* const p = static_cast<const std::uint16_t*>(data) + offset;
  uint2 bits;
  if (vector) {
    bits = __ldg(reinterpret_cast<const uint2*>(p));
  } else {
    bits.x = p[0] | static_cast<unsigned>(p[1]) << 16U;
    bits.y = p[2] | static_cast<unsigned>(p[3]) << 16U;
  }
  if (dtype == DType::bf16) {
    return make_float4(__uint_as_float(bits.x << 16U),
                       __uint_as_float(bits.x & 0xFFFF'0000U),
                       __uint_as_float(bits.y << 16U),
                       __uint_as_float(bits.y & 0xFFFF'0000U));
  }
  return make_float4(half_to_float(bits.x),
                     half_to_float(bits.x >> 16U),
                     half_to_float(bits.y),
                     half_to_float(bits.y >> 16U));
}

/// Whether four elements can be loaded at once wherever a row begins.
[[nodiscard]] inline bool queries_aligned(const DeviceQueries& q, std::size_t bytes) noexcept {
  const std::int64_t element = element_bytes(q.dtype);
  const std::int64_t strides[] = {
      q.block.sequence_stride, q.block.layer_stride, q.block.head_stride, q.block.row_stride};
  bool good = aligned_to(bytes, q.block.data);
  for (const std::int64_t s : strides) {
    good = good && s * element % static_cast<std::int64_t>(bytes) == 0;
  }
  return good;
}

/// Whether keys have a shape that the kernels know.
[[nodiscard]] inline bool keys_readable(const CacheView& view) noexcept {
  const Plane& k = view.k;
  const std::int64_t element = element_bytes(k.dtype);
  if (element == 0 || k.dtype == DType::i8 || k.pack < 1 || view.page_size < 1 ||
      view.kv_heads < 1 || view.layers < 1 || view.sequences < 0) {
    return false;
  }
  if ((k.base == nullptr && k.layer_bases == nullptr) || view.table.ids == nullptr ||
      !aligned_to(static_cast<std::size_t>(element), k.base)) {
    return false;
  }
  const std::int64_t strides[] = {k.layer_bases != nullptr ? 0 : k.layer_stride,
                                  k.page_stride,
                                  k.token_stride,
                                  k.head_stride,
                                  k.feature_stride,
                                  k.pack == 1 ? 0 : k.pack_stride};
  for (const std::int64_t s : strides) {
    if (s % element != 0) { return false; }
  }
  // A tile has one scale: of the tensor, the layer or the head.
  const Scales& scales = k.scales;
  return scales.in_row == 0 && !scales.beside_rows() && aligned_to(sizeof(float), scales.base) &&
         scales.layer_stride % 4 == 0 && scales.head_stride % 4 == 0;
}

/// Scale of the keys of a tile.
KVTRIM_DEVICE float tile_scale(const Scales& scales, LayerId l, HeadId h) {
  return scales.base == nullptr
             ? 1.0F
             : *reinterpret_cast<const float*>(scales.base + raw(l) * scales.layer_stride +
                                               raw(h) * scales.head_stride);
}

/// Whether keys and queries have a shape that the kernels know.
[[nodiscard]] inline bool readable_on_device(const CacheView& view,
                                             const DeviceQueries& queries) noexcept {
  const QueryBlock& b = queries.block;
  return keys_readable(view) && b.data != nullptr && readable(queries.dtype) &&
         b.query_heads >= view.kv_heads && b.query_heads % view.kv_heads == 0 && b.rows >= 0 &&
         aligned_to(static_cast<std::size_t>(element_bytes(queries.dtype)), b.data);
}

/// Bytes from one 16-byte chunk of a key's features to the next, or 0 if a chunk is not 16 aligned bytes. Separate layer
/// buffers are checked by the kernel.
[[nodiscard]] inline std::int64_t key_chunk_stride(const Plane& k) noexcept {
  const std::int64_t element = element_bytes(k.dtype);
  const bool packed = k.pack > 1 && k.pack * element == 16;
  if (k.feature_stride != element || (k.pack != 1 && !packed)) { return 0; }
  const std::int64_t strides[] = {k.layer_bases != nullptr ? 0 : k.layer_stride,
                                  k.page_stride,
                                  k.token_stride,
                                  k.head_stride,
                                  packed ? k.pack_stride : 16};
  for (const std::int64_t s : strides) {
    if (s % 16 != 0) { return 0; }
  }
  return packed ? k.pack_stride : 16;
}

}  // namespace detail

}  // namespace kvtrim::cuda
