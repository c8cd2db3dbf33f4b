// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plane says where an element lies, by strides in bytes, and nothing about shapes: two layouts with equal shapes
// differ in their strides, so neither can be mistaken for the other. Every offset is 64 bits wide.

#include <kvtrim/core/block_format.hpp>
#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/sequence_plane.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvtrim {

/// Extents of a cache whose rows are all of one size; what the layout factories need.
struct PlaneShape {
  std::int32_t page_size = 0;  ///< rows per page
  std::int32_t kv_heads = 0;   ///< KV heads per layer
  std::int32_t head_dim = 0;   ///< features of a row
  DType dtype = DType::f32;    ///< element type
};

/// What quantised elements (fp8, int8) are multiplied by: fp32, one a tensor, a layer, a head or a row.
///
/// Scales of rows move with them: those inside the rows do, others must be a page plane of the view as well (`PagePlane`, which
/// `check_layout` looks for).
struct Scales {
  const std::byte* base = nullptr;  ///< layer 0, page 0, head 0, slot 0; null: 1, or in the rows
  std::int64_t layer_stride = 0;    ///< bytes; 0: common to the layers
  std::int64_t page_stride = 0;     ///< bytes; 0: common to the pages
  std::int64_t token_stride = 0;    ///< bytes; 0: common to the slots of a page
  std::int64_t head_stride = 0;     ///< bytes; 0: common to the heads
  /// Bytes from a row's first to its own scale, behind its elements and part of the row (vLLM's per-token-head caches); 0: not
  /// there.
  std::int32_t in_row = 0;

  /// Whether rows have scales of their own in a plane of their own.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool beside_rows() const noexcept {
    return base != nullptr && (page_stride != 0 || token_stride != 0);
  }
};

/// The keys, or the values, of a paged cache: where element (layer, page, KV head, slot, feature) lies.
///
/// Non-owning and trivially copyable. Strides are in bytes and may be anything as long as elements do not overlap.
struct Plane {
  std::byte* base = nullptr;  ///< layer 0, page 0, head 0, slot 0, feature 0
  std::byte* const* layer_bases =
      nullptr;                      ///< [layers] where layers are separate buffers; otherwise null
  std::int64_t layer_stride = 0;    ///< bytes between layers; unused with `layer_bases`
  std::int64_t page_stride = 0;     ///< bytes between pages
  std::int64_t token_stride = 0;    ///< bytes between slots of a page
  std::int64_t head_stride = 0;     ///< bytes between KV heads; 0 if each head has its own pages
  std::int64_t feature_stride = 0;  ///< bytes between features (within a pack)
  std::int64_t pack_stride = 0;     ///< bytes between packs of features; unused when `pack` is 1
  std::int32_t pack = 1;            ///< features per pack (legacy vLLM keys: 16 / element bytes)
  std::int32_t head_dim = 0;        ///< features of a row
  DType dtype = DType::f32;         ///< element type
  std::int32_t opaque_row_bytes = 0;       ///< bytes of a row when `dtype` is `opaque`
  BlockFormat format = BlockFormat::none;  ///< of `opaque` rows that are to be scored
  Scales scales{};                         ///< of fp8 and int8 elements

  /// Whether the plane is there.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr explicit operator bool() const noexcept {
    return base != nullptr || layer_bases != nullptr;
  }

  /// First byte of a row: one token of one KV head.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::byte* row(LayerId l,
                                                            PageId p,
                                                            HeadId h,
                                                            Slot s) const noexcept {
    std::byte* layer = layer_bases != nullptr ? layer_bases[raw(l)] : base + raw(l) * layer_stride;
    return layer + raw(p) * page_stride + raw(h) * head_stride + raw(s) * token_stride;
  }

  /// Byte offset of feature `d` inside its row.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t feature_offset(
      std::int32_t d) const noexcept {
    return pack == 1 ? d * feature_stride : d / pack * pack_stride + d % pack * feature_stride;
  }

  /// Whether a row is one block of `row_bytes()` bytes.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool contiguous_rows() const noexcept {
    return dtype == DType::opaque || (pack == 1 && feature_stride == element_bytes(dtype));
  }

  /// Bytes of the values of a row, and of the scale behind them.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t row_bytes() const noexcept {
    return dtype == DType::opaque ? opaque_row_bytes
           : scales.in_row > 0    ? scales.in_row + 4
                                  : static_cast<std::int64_t>(head_dim) * element_bytes(dtype);
  }

  /// Scale of a row.
  [[nodiscard]] float scale(LayerId l, PageId p, HeadId h, Slot s) const noexcept {
    if (scales.base == nullptr && scales.in_row == 0) { return 1; }
    const std::byte* const from =
        scales.in_row > 0
            ? row(l, p, h, s) + scales.in_row
            : scales.base + raw(l) * scales.layer_stride + raw(p) * scales.page_stride +
                  raw(h) * scales.head_stride + raw(s) * scales.token_stride;
    float x = 0;
    std::memcpy(&x, from, sizeof x);
    return x;
  }

  /// Rows of a block-quantised format of llama.cpp, of `row_stride` bytes a cell: `[cells, kv_heads, head_dim]`.
  /// \throws std::invalid_argument if an extent is below 1, head_dim is no multiple of 32, or there is no format
  [[nodiscard]] static constexpr Plane blocks(void* data,
                                              BlockFormat format,
                                              std::int32_t kv_heads,
                                              std::int32_t head_dim) {
    if (kv_heads < 1 || head_dim < 1 || head_dim % block_features != 0 ||
        format == BlockFormat::none) {
      throw_invalid_argument(
          "kvtrim::Plane: {} KV heads of {} features as {}: blocks have {} features",
          kv_heads,
          head_dim,
          to_string(format),
          block_features);
    }
    Plane p;
    p.base = static_cast<std::byte*>(data);
    p.dtype = DType::opaque;
    p.format = format;
    p.head_dim = head_dim;
    p.opaque_row_bytes = head_dim / block_features * block_bytes(format);
    p.head_stride = p.opaque_row_bytes;
    p.page_stride = std::int64_t{kv_heads} * p.opaque_row_bytes;
    return p;
  }

  /// `[pages, page_size, kv_heads, head_dim]`, C order: vLLM, FlashInfer NHD; SGLang and llama.cpp with page size 1.
  /// \throws std::invalid_argument if an extent is below 1
  [[nodiscard]] static constexpr Plane nhd(void* data, const PlaneShape& s) {
    return strided(data, s, s.kv_heads * row(s), row(s));
  }

  /// `[pages, kv_heads, page_size, head_dim]`, C order: FlashInfer HND, TensorRT-LLM.
  /// \throws std::invalid_argument if an extent is below 1
  [[nodiscard]] static constexpr Plane hnd(void* data, const PlaneShape& s) {
    return strided(data, s, row(s), s.page_size * row(s));
  }

  /// `[pages, kv_heads, head_dim / x, page_size, x]`, x elements = 16 bytes: keys of legacy vLLM.
  /// \throws std::invalid_argument if an extent is below 1 or head_dim is not a multiple of x
  [[nodiscard]] static constexpr Plane vllm_packed_keys(void* data, const PlaneShape& s) {
    Plane p = strided(data, s, 16, s.page_size * row(s));
    p.pack = static_cast<std::int32_t>(16 / element_bytes(s.dtype));
    if (s.head_dim % p.pack != 0) {
      throw_invalid_argument(
          "kvtrim::Plane: head_dim {} is no multiple of the packing width {}", s.head_dim, p.pack);
    }
    p.pack_stride = 16 * static_cast<std::int64_t>(s.page_size);
    return p;
  }

  /// `[pages, kv_heads, head_dim, page_size]`: values of legacy vLLM, llama.cpp's transposed values.
  /// \throws std::invalid_argument if an extent is below 1
  [[nodiscard]] static constexpr Plane transposed(void* data, const PlaneShape& s) {
    Plane p = strided(data, s, element_bytes(s.dtype), s.page_size * row(s));
    p.feature_stride = static_cast<std::int64_t>(s.page_size) * element_bytes(s.dtype);
    return p;
  }

 private:
  static constexpr std::int64_t row(const PlaneShape& s) noexcept {
    return static_cast<std::int64_t>(s.head_dim) * element_bytes(s.dtype);
  }

  static constexpr Plane strided(void* data,
                                 const PlaneShape& s,
                                 std::int64_t token,
                                 std::int64_t head) {
    if (s.page_size < 1 || s.kv_heads < 1 || s.head_dim < 1) {
      throw_invalid_argument(
          "kvtrim::Plane: page_size {}, kv_heads {} and head_dim {} must be at least 1",
          s.page_size,
          s.kv_heads,
          s.head_dim);
    }
    if (s.dtype == DType::opaque) {
      throw_invalid_argument(
          "kvtrim::Plane: opaque rows have no layout; fill the strides and opaque_row_bytes");
    }
    Plane p;
    p.base = static_cast<std::byte*>(data);
    p.page_stride = static_cast<std::int64_t>(s.page_size) * s.kv_heads * row(s);
    p.token_stride = token;
    p.head_stride = head;
    p.feature_stride = element_bytes(s.dtype);
    p.head_dim = s.head_dim;
    p.dtype = s.dtype;
    return p;
  }
};

/// Whether the plane is there and its rows can be read as floats: int8 needs scales, opaque rows a format.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool readable(const Plane& plane) noexcept {
  if (!plane || plane.head_dim < 1) { return false; }
  if (plane.dtype == DType::opaque) {
    return plane.format != BlockFormat::none && plane.head_dim % block_features == 0 &&
           plane.opaque_row_bytes == plane.head_dim / block_features * block_bytes(plane.format);
  }
  return plane.dtype != DType::i8 || plane.scales.base != nullptr || plane.scales.in_row > 0;
}

namespace detail {
inline constexpr struct Float8Tables {
  float e4m3[256]{};
  float e5m2[256]{};
  constexpr Float8Tables() noexcept {
    for (std::size_t i = 0; i < 256; ++i) {
      e4m3[i] = f8e4m3_to_float(static_cast<std::uint8_t>(i));
      e5m2[i] = f8e5m2_to_float(static_cast<std::uint8_t>(i));
    }
  }
} float8_tables;

// Reads a quantised row: elements times `scale`, or blocks.
inline void widen_row(const Plane& plane, const std::byte* from, float scale, float* out) noexcept {
  if (plane.dtype == DType::opaque) {
    return widen_blocks(plane.format, from, plane.head_dim, out);
  }
  const bool side_by_side = plane.contiguous_rows();
  const auto run = [&](auto value) {
    if (side_by_side) {
      for (std::int32_t d = 0; d < plane.head_dim; ++d) { out[d] = value(from[d]) * scale; }
    } else {
      for (std::int32_t d = 0; d < plane.head_dim; ++d) {
        out[d] = value(from[plane.feature_offset(d)]) * scale;
      }
    }
  };
  if (plane.dtype == DType::i8) {
    run([](std::byte b) { return static_cast<float>(static_cast<std::int8_t>(b)); });
  } else {
    const float* const table =
        plane.dtype == DType::f8e4m3 ? float8_tables.e4m3 : float8_tables.e5m2;
    run([table](std::byte b) { return table[static_cast<std::uint8_t>(b)]; });
  }
}
}  // namespace detail

/// Reads row `from` of `plane` as floats.
///
/// \param[out] out [head_dim]
/// \param scale  of quantised elements (`Plane::scale`)
/// \pre `readable(plane)`
inline void load_row(const Plane& plane,
                     const std::byte* from,
                     float* out,
                     float scale = 1) noexcept {
  if (!readable(plane.dtype)) { return detail::widen_row(plane, from, scale, out); }
  if (plane.contiguous_rows() && plane.dtype == DType::f32) {
    std::memcpy(out, from, static_cast<std::size_t>(plane.row_bytes()));
    return;
  }
  for (std::int32_t d = 0; d < plane.head_dim; ++d) {
    out[d] = load_element(from + plane.feature_offset(d), plane.dtype);
  }
}

/// Writes row `to` of `plane` from floats, rounded to nearest even.
///
/// \param values [head_dim]
/// \pre `readable(plane.dtype)`
inline void store_row(const Plane& plane, std::byte* to, const float* values) noexcept {
  if (plane.contiguous_rows() && plane.dtype == DType::f32) {
    std::memcpy(to, values, static_cast<std::size_t>(plane.row_bytes()));
    return;
  }
  for (std::int32_t d = 0; d < plane.head_dim; ++d) {
    store_element(to + plane.feature_offset(d), plane.dtype, values[d]);
  }
}

/// Copies one row byte for byte. `from` and `to` do not overlap.
inline void copy_row(const Plane& plane, const std::byte* from, std::byte* to) noexcept {
  if (plane.contiguous_rows()) {
    std::memcpy(to, from, static_cast<std::size_t>(plane.row_bytes()));
    return;
  }
  const auto bytes = static_cast<std::size_t>(element_bytes(plane.dtype));
  for (std::int32_t d = 0; d < plane.head_dim; ++d) {
    std::memcpy(to + plane.feature_offset(d), from + plane.feature_offset(d), bytes);
  }
}

/// Side data of a page, shared with it and moved with its rows: scales, un-rotated keys, anything.
///
/// An entry may belong to several rows: `tokens_per_entry` slots of a page from a multiple of it on, or the whole page. Such
/// an entry stays where it is. A row may move among the rows of its entry; a plan that moves it to another one is refused
/// (`Status::planes_disagree`), since it would be read with another row's entry from then on. Pages can always be dropped.
struct PagePlane {
  std::byte* base = nullptr;      ///< layer 0, page 0, head 0, slot 0
  std::int64_t layer_stride = 0;  ///< bytes
  std::int64_t page_stride = 0;   ///< bytes; 0 with `token_stride` 0: one value for all pages
  std::int64_t token_stride = 0;  ///< bytes between entries of a page; 0: one for the whole page
  std::int64_t head_stride = 0;  ///< bytes; 0: common to all heads, so they must keep the same rows
  std::int64_t row_bytes = 0;    ///< bytes of an entry
  bool of_values = false;        ///< follows the V page ids where K and V have their own
  std::int32_t tokens_per_entry = 1;  ///< slots that share an entry; unused with `token_stride` 0

  /// First byte of a row's entry.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::byte* row(LayerId l,
                                                            PageId p,
                                                            HeadId h,
                                                            Slot s) const noexcept {
    const std::int32_t entry = tokens_per_entry == 1 ? raw(s) : raw(s) / tokens_per_entry;
    return base + raw(l) * layer_stride + raw(p) * page_stride + raw(h) * head_stride +
           entry * token_stride;
  }

  /// Whether all rows have one value in common: it fits them wherever they are.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool constant() const noexcept {
    return token_stride == 0 && page_stride == 0;
  }
  /// Rows of a page that an entry belongs to.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t rows_per_entry(
      std::int32_t page_size) const noexcept {
    return token_stride == 0 ? page_size : tokens_per_entry;
  }
};

}  // namespace kvtrim
