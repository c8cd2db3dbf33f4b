// SPDX-License-Identifier: Apache-2.0
#pragma once

// Engines hold their caches as tensors and hand out pointer, extents and strides of them. What is an axis of what, one letter
// per axis says; the strides say the rest. So a layout is a word, and physical orders (NHD, HND, layers inside a page, padded
// pages) are no cases.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/error.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>

namespace kvtrim {

/// A tensor as frameworks describe it (`data_ptr()`, `shape`, `stride()`): extents and strides in elements. Non-owning.
template <std::size_t Rank>
struct Tensor {
  void* data = nullptr;
  std::array<std::int64_t, Rank> extents{};
  std::array<std::int64_t, Rank> strides{};  ///< elements
  DType dtype = DType::f32;

  /// In C order, without gaps.
  [[nodiscard]] static constexpr Tensor contiguous(void* data,
                                                   const std::array<std::int64_t, Rank>& extents,
                                                   DType dtype) noexcept {
    Tensor t{data, extents, {}, dtype};
    std::int64_t stride = 1;
    for (std::size_t i = Rank; i-- > 0; stride *= extents[i]) { t.strides[i] = stride; }
    return t;
  }
  /// The part at `index` of an axis, which is gone then: plane 0 of `[2, pages, ...]` is the keys.
  /// \throws std::invalid_argument if there is no such axis, or index
  [[nodiscard]] constexpr Tensor<Rank - 1> at(std::size_t axis, std::int64_t index) const {
    const Tensor from = narrow(axis, index, 1);
    Tensor<Rank - 1> t{from.data, {}, {}, dtype};
    for (std::size_t i = 0; i + 1 < Rank; ++i) {
      t.extents[i] = extents[i < axis ? i : i + 1];
      t.strides[i] = strides[i < axis ? i : i + 1];
    }
    return t;
  }
  /// `count` indices of an axis, from `first` on.
  /// \throws std::invalid_argument if there is no such axis, or not as many indices
  [[nodiscard]] constexpr Tensor narrow(std::size_t axis,
                                        std::int64_t first,
                                        std::int64_t count) const {
    if (axis >= Rank || first < 0 || count < 1 || first > extents[axis] - count) {
      throw_invalid_argument("kvtrim::Tensor: indices {} to {} of axis {} of {}, which has {}",
                             first,
                             first + count,
                             axis,
                             Rank,
                             axis < Rank ? extents[axis] : 0);
    }
    Tensor t = *this;
    t.extents[axis] = count;
    t.data = static_cast<std::byte*>(data) + first * strides[axis] * element_bytes(dtype);
    return t;
  }
};

namespace detail {

struct TensorAxis {
  std::int64_t extent = 1;
  std::int64_t stride = 0;  // bytes
};

// The axis called `name`; one index without a stride where there is none.
template <std::size_t Rank>
[[nodiscard]] constexpr TensorAxis axis_of(const Tensor<Rank>& tensor,
                                           std::string_view axes,
                                           char name) noexcept {
  const std::size_t i = axes.find(name);
  if (i >= Rank) { return {}; }
  return {tensor.extents[i], tensor.strides[i] * element_bytes(tensor.dtype)};
}

template <std::size_t Rank>
void check_tensor(std::string_view what, const Tensor<Rank>& tensor, std::string_view axes) {
  bool known = axes.size() == Rank && axes.find('P') < Rank && axes.find('D') < Rank;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    known = known && std::string_view("LPNHDx").find(axes[i]) != std::string_view::npos &&
            axes.find(axes[i], i + 1) == std::string_view::npos;
  }
  if (!known || element_bytes(tensor.dtype) == 0) {
    throw_invalid_argument(
        "kvtrim::tensor_view: {} of rank {} and dtype {} with axes \"{}\": one letter each of "
        "LPNHDx, P and D among them, and elements of a known size",
        what,
        Rank,
        to_string(tensor.dtype),
        axes);
  }
  for (std::size_t i = 0; i < Rank; ++i) {
    if (tensor.extents[i] < 1 || tensor.extents[i] > std::numeric_limits<std::int32_t>::max()) {
      throw_invalid_argument("kvtrim::tensor_view: extent {} of axis {} of {} (\"{}\")",
                             tensor.extents[i],
                             i,
                             what,
                             axes);
    }
  }
}

template <std::size_t Rank>
[[nodiscard]] Plane plane_of_tensor(const Tensor<Rank>& tensor, std::string_view axes) noexcept {
  const auto axis = [&](char name) { return axis_of(tensor, axes, name); };
  const TensorAxis pack = axis('x');
  const bool packed = axes.find('x') < Rank;
  Plane p;
  p.base = static_cast<std::byte*>(tensor.data);
  p.layer_stride = axis('L').stride;
  p.page_stride = axis('P').stride;
  p.token_stride = axis('N').stride;
  p.head_stride = axis('H').stride;
  p.feature_stride = packed ? pack.stride : axis('D').stride;
  p.pack_stride = packed ? axis('D').stride : 0;
  p.pack = static_cast<std::int32_t>(pack.extent);
  p.head_dim = static_cast<std::int32_t>(axis('D').extent * pack.extent);
  p.dtype = tensor.dtype;
  return p;
}

}  // namespace detail

/// A view of keys and values that are tensors: planes and extents; tables come with `set_tables`.
///
/// \param keys        all layers, or one
/// \param key_axes    what each axis is: L layer, P page, N slot of a page, H KV head, D feature, x feature within a pack
///   (legacy vLLM: "PHDNx"); an axis that is missing has one index
/// \param values      of the same layers, pages, slots and heads; may be part of the same memory
/// \param value_axes  the same for the values
/// \throws std::invalid_argument if an axis has no name, or extents of keys and values differ (the message gives the numbers).
///   Whether strides overlap, `check_layout` says, once tables are set
/// \par Complexity
/// O(1); no allocation
template <std::size_t K, std::size_t V>
[[nodiscard]] CacheView tensor_view(const Tensor<K>& keys,
                                    std::string_view key_axes,
                                    const Tensor<V>& values,
                                    std::string_view value_axes) {
  detail::check_tensor("keys", keys, key_axes);
  detail::check_tensor("values", values, value_axes);
  for (const char name : {'L', 'P', 'N', 'H'}) {
    const std::int64_t k = detail::axis_of(keys, key_axes, name).extent;
    const std::int64_t v = detail::axis_of(values, value_axes, name).extent;
    if (k != v) {
      throw_invalid_argument(
          "kvtrim::tensor_view: axis {} of the keys (\"{}\") has {} indices, of the values "
          "(\"{}\") {}",
          std::string_view(&name, 1),
          key_axes,
          k,
          value_axes,
          v);
    }
  }
  const auto extent = [&](char name) {
    return static_cast<std::int32_t>(detail::axis_of(keys, key_axes, name).extent);
  };
  CacheView view;
  view.k = detail::plane_of_tensor(keys, key_axes);
  view.v = detail::plane_of_tensor(values, value_axes);
  view.layers = extent('L');
  view.pages = extent('P');
  view.page_size = extent('N');
  view.kv_heads = extent('H');
  return view;
}

/// One view of layers whose tensors are buffers of their own, as most engines allocate them.
///
/// \param layers      one view each, of one layer, alike but for their bases
/// \param[out] bases  [2 * layers.size()] the view refers to it
/// \throws std::invalid_argument if there is no layer, `bases` is of another size, or a layer differs (which, and in what)
[[nodiscard]] inline CacheView stack_layers(std::span<const CacheView> layers,
                                            std::span<std::byte*> bases) {
  if (layers.empty() || bases.size() != 2 * layers.size()) {
    throw_invalid_argument("kvtrim::stack_layers: {} layers and room for {} bases, two for each",
                           layers.size(),
                           bases.size());
  }
  CacheView view = layers.front();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const CacheView& other = layers[l];
    const auto check = [&](std::string_view what, std::int64_t a, std::int64_t b) {
      if (a == b) { return; }
      throw_invalid_argument("kvtrim::stack_layers: layer {} has {} {}, layer 0 {}", l, what, b, a);
    };
    check("layers", 1, other.layers);
    check("pages", view.pages, other.pages);
    check("page size", view.page_size, other.page_size);
    check("KV heads", view.kv_heads, other.kv_heads);
    check("page planes", 0, other.page_plane_count);
    for (const bool keys : {true, false}) {
      const Plane& p = keys ? view.k : view.v;
      const Plane& q = keys ? other.k : other.v;
      check("features", p.head_dim, q.head_dim);
      check("dtype", static_cast<int>(p.dtype), static_cast<int>(q.dtype));
      check("bytes a row", p.opaque_row_bytes, q.opaque_row_bytes);
      check("page stride", p.page_stride, q.page_stride);
      check("token stride", p.token_stride, q.token_stride);
      check("head stride", p.head_stride, q.head_stride);
      check("feature stride", p.feature_stride, q.feature_stride);
      check("pack stride", p.pack_stride, q.pack_stride);
    }
    bases[l] = other.k.base;
    bases[layers.size() + l] = other.v.base;
  }
  view.layers = static_cast<std::int32_t>(layers.size());
  view.k.layer_bases = bases.data();
  view.v.layer_bases = bases.data() + layers.size();
  return view;
}

/// An engine's dense page table and lengths.
struct DenseTable {
  const std::int32_t* ids = nullptr;      ///< [sequences, row_stride], `max_pages` of each used
  const std::int32_t* lengths = nullptr;  ///< [sequences] live rows
  std::int32_t sequences = 0;
  std::int64_t row_stride = 0;  ///< ids between sequences
  std::int32_t max_pages = 0;   ///< entries of a sequence
};

/// An engine's page table in compressed rows.
struct CsrTable {
  const std::int32_t* indptr = nullptr;         ///< [sequences + 1]
  const std::int32_t* indices = nullptr;        ///< [indptr[sequences]]
  const std::int32_t* last_page_len = nullptr;  ///< [sequences] 1..page_size; 0 without pages
  std::int32_t sequences = 0;
};

/// Shows `view` a batch whose one table a sequence serves all of its layers.
/// \throws std::invalid_argument if rows of the table overlap, or a pointer is null
inline void set_tables(CacheView& view, const DenseTable& table) {
  if (table.ids == nullptr || table.lengths == nullptr || table.sequences < 0 ||
      table.max_pages < 0 || (table.sequences > 1 && table.row_stride < table.max_pages)) {
    throw_invalid_argument(
        "kvtrim::set_tables: {} sequences of {} entries at a stride of {}{}",
        table.sequences,
        table.max_pages,
        table.row_stride,
        table.ids == nullptr || table.lengths == nullptr ? "; ids or lengths are null" : "");
  }
  view.sequences = table.sequences;
  view.scope = TableScope::group;
  view.table.ids = table.ids;
  view.table.indptr = nullptr;
  view.table.rows = {1, 0, 0};
  view.table.row_stride = table.row_stride;
  view.table.max_pages = table.max_pages;
  view.lengths = table.lengths;
  view.last_page_len = nullptr;
  view.length_rows = {1, 0, 0};
}

/// The same for compressed rows: the length of a sequence is that of its full pages and `last_page_len`.
/// \throws std::invalid_argument if a pointer is null
inline void set_tables(CacheView& view, const CsrTable& table) {
  if (table.indptr == nullptr || table.indices == nullptr || table.last_page_len == nullptr ||
      table.sequences < 0) {
    throw_invalid_argument("kvtrim::set_tables: {} sequences; indptr, indices or last_page_len {}",
                           table.sequences,
                           table.sequences < 0 ? "do not matter" : "are null");
  }
  view.sequences = table.sequences;
  view.scope = TableScope::group;
  view.table.ids = table.indices;
  view.table.indptr = table.indptr;
  view.table.rows = {1, 0, 0};
  view.lengths = nullptr;
  view.last_page_len = table.last_page_len;
}

}  // namespace kvtrim
