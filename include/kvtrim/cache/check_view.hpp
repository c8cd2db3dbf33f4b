// SPDX-License-Identifier: Apache-2.0
#pragma once

// What must hold before a byte of a view is trusted: strides, checked once. What changes with every step is checked by
// check_tables.hpp.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/error.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

namespace kvtrim {

namespace detail {

// Strides with their extents, sorted by stride: each must step over everything that the smaller ones reach.
struct Axis {
  std::int64_t stride;
  std::int64_t extent;
  std::string_view name;
};

template <std::size_t N>
constexpr void check_axes(std::string_view plane, std::array<Axis, N> axes, std::int64_t reach) {
  std::sort(
      axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.stride < b.stride; });
  for (const Axis& axis : axes) {
    if (axis.extent <= 1) { continue; }
    if (axis.stride < reach) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} overlap: {} stride of {} bytes, but its elements reach over {} "
          "bytes",
          plane,
          axis.name,
          axis.stride,
          reach);
    }
    reach += (axis.extent - 1) * axis.stride;
  }
}

inline void check_plane(const CacheView& view, const Plane& p, std::string_view name) {
  if (p.dtype == DType::opaque ? p.opaque_row_bytes < 1 : p.head_dim < 1 || p.pack < 1) {
    throw_invalid_argument("kvtrim::CacheView: {}: head_dim {}, pack {}, opaque_row_bytes {}",
                           name,
                           p.head_dim,
                           p.pack,
                           p.opaque_row_bytes);
  }
  const std::int64_t layers = p.layer_bases != nullptr || p.layer_stride == 0 ? 1 : view.layers;
  const std::int64_t heads =
      view.scope == TableScope::head && p.head_stride == 0 ? 1 : view.kv_heads;
  const bool whole = p.dtype == DType::opaque;
  check_axes<6>(
      name,
      {Axis{p.feature_stride,
            whole ? 1 : std::min(p.pack == 1 ? p.head_dim : p.pack, p.head_dim),
            "feature"},
       Axis{p.pack_stride, whole || p.pack == 1 ? 1 : (p.head_dim + p.pack - 1) / p.pack, "pack"},
       Axis{p.token_stride, view.page_size, "token"},
       Axis{p.head_stride, heads, "head"},
       Axis{p.page_stride, view.pages, "page"},
       Axis{p.layer_stride, layers, "layer"}},
      whole ? p.opaque_row_bytes : element_bytes(p.dtype));
}

}  // namespace detail

/// Throws unless the extents and strides of `view` can be those of a cache. Call it once, where the view is created.
///
/// \throws std::invalid_argument if an extent is below 1, a base is null, elements overlap, or a layer of one table
///   has no stride of its own (the message gives the numbers)
/// \par Complexity
/// O(1)
inline void check_layout(const CacheView& view) {
  if (view.page_size < 1 || view.kv_heads < 1 || view.layers < 1 || view.sequences < 0 ||
      view.pages < 0) {
    throw_invalid_argument(
        "kvtrim::CacheView: page_size {}, kv_heads {} and layers {} must be at least 1, sequences "
        "{} and pages {} at least 0",
        view.page_size,
        view.kv_heads,
        view.layers,
        view.sequences,
        view.pages);
  }
  if (view.table.ids == nullptr || (view.k.base == nullptr && view.k.layer_bases == nullptr) ||
      (view.v.base == nullptr && view.v.layer_bases == nullptr)) {
    throw_invalid_argument("kvtrim::CacheView: keys, values or page ids are null");
  }
  if (view.lengths == nullptr && view.last_page_len == nullptr && view.states == nullptr) {
    throw_invalid_argument("kvtrim::CacheView: no lengths, last_page_len or states");
  }
  if (view.scope != TableScope::head && view.kv_heads > 1 &&
      (view.k.head_stride == 0 || view.v.head_stride == 0)) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} KV heads share a table, so they need a head stride", view.kv_heads);
  }
  const auto one_layer = [](const Plane& p) {
    return p.layer_stride == 0 && p.layer_bases == nullptr;
  };
  if (view.scope == TableScope::group && view.layers > 1 &&
      (one_layer(view.k) || one_layer(view.v))) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} layers share a table, so they need a layer stride", view.layers);
  }
  detail::check_plane(view, view.k, "keys");
  detail::check_plane(view, view.v, "values");
  if (view.unrotated_keys.base != nullptr) {
    detail::check_plane(view, view.unrotated_keys, "unrotated keys");
  }
}

}  // namespace kvtrim
