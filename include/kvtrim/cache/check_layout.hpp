// SPDX-License-Identifier: Apache-2.0
#pragma once

// What must hold of a view's strides, checked once, where the view is created. Rows move plane by plane, so no byte may
// belong to two planes, or to two rows of one: it would be moved twice, from where it no longer is.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/core/error.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

namespace detail {

[[nodiscard]] constexpr std::string_view name_of_part(std::int32_t i) noexcept {
  constexpr std::string_view names[]{"keys", "values", "unrotated keys"};
  return names[i];
}

// Each stride must step over everything that the smaller ones reach.
inline void check_region(std::string_view plane, const Region& region) {
  const std::int32_t i = region.overlap();
  if (i < 0) { return; }
  throw_invalid_argument(
      "kvtrim::CacheView: {} overlap: {} stride of {} bytes, but its elements reach over {} bytes",
      plane,
      to_string(region.axis(i).name),
      region.axis(i).stride,
      region.reach(i + 1));
}

inline void check_plane(const CacheView& view, const Plane& p, std::string_view name) {
  if (p.dtype == DType::opaque ? p.opaque_row_bytes < 1 : p.head_dim < 1 || p.pack < 1) {
    throw_invalid_argument("kvtrim::CacheView: {}: head_dim {}, pack {}, opaque_row_bytes {}",
                           name,
                           p.head_dim,
                           p.pack,
                           p.opaque_row_bytes);
  }
  check_region(name, region_of(view, p));
}

// Which of the planes there may be are there.
inline void check_presence(const CacheView& view) {
  if (view.table.ids == nullptr) { throw_invalid_argument("kvtrim::CacheView: page ids are null"); }
  for (std::int32_t i = 0; i < 2; ++i) {
    const Plane& p = i == 0 ? view.k : view.v;
    if (!p && p.head_dim != 0) {
      throw_invalid_argument(
          "kvtrim::CacheView: {} are null, but have head_dim {}; a cache without them says 0",
          name_of_part(i),
          p.head_dim);
    }
  }
  if (!view.k && (view.v || view.unrotated_keys)) {
    throw_invalid_argument("kvtrim::CacheView: {}, but no keys",
                           view.v ? "values" : "unrotated keys");
  }
  if (view.lengths == nullptr && view.last_page_len == nullptr && view.states == nullptr) {
    throw_invalid_argument("kvtrim::CacheView: no lengths, last_page_len or states");
  }
}

// Whether heads and layers that share a table have elements of their own.
inline void check_strides(const CacheView& view) {
  if (view.scope != TableScope::head && view.kv_heads > 1 &&
      ((view.k && view.k.head_stride == 0) || (view.v && view.v.head_stride == 0))) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} KV heads share a table, so they need a head stride", view.kv_heads);
  }
  const auto one_layer = [](const Plane& p) {
    return p && p.layer_stride == 0 && p.layer_bases == nullptr;
  };
  if (view.scope == TableScope::group && view.layers > 1 &&
      (one_layer(view.k) || one_layer(view.v))) {
    throw_invalid_argument(
        "kvtrim::CacheView: {} layers share a table, so they need a layer stride", view.layers);
  }
}

// Whether the values are part of the keys in all layers.
[[nodiscard]] inline bool values_in_keys(const CacheView& view) noexcept {
  bool all = true;
  for (std::int32_t l = 0; l < view.layers; ++l) { all = all && values_in_keys(view, LayerId{l}); }
  return all;
}

// Whether any byte belongs to two planes.
inline void check_sharing(const CacheView& view) {
  const bool contained = values_in_keys(view);
  const auto check_pair = [&](std::int32_t i, std::int32_t j) {
    const Part a = part(view, i);
    const Part b = part(view, j);
    if (a.base == nullptr || b.base == nullptr) { return; }
    // K's and V's ids name different pages of one pool.
    if (view.table.v_offset != 0 && a.of_values != b.of_values) { return; }
    if (apart(a.region, b.region, address_of(b.base) - address_of(a.base))) { return; }
    throw_invalid_argument(
        "kvtrim::CacheView: {} and {} overlap: the {} begin {} bytes behind the {}, which reach "
        "over {} bytes",
        name_of_part(i),
        name_of_part(j),
        name_of_part(j),
        address_of(b.base) - address_of(a.base),
        name_of_part(i),
        a.region.reach(0));
  };
  for (std::int32_t i = 0; i < parts_of(view); ++i) {
    for (std::int32_t j = i + 1; j < parts_of(view); ++j) {
      if (!(i == 0 && j == 1 && contained)) { check_pair(i, j); }
    }
  }
}

}  // namespace detail

/// Throws unless the extents and strides of `view` can be those of a cache. Call it once, where the view is created, on the
/// host: the arrays of layer bases and of planes are read.
///
/// A cache without values (`v` null, of head_dim 0) is one, and so is a view without keys and values: rows are then chosen by
/// scores that are given, and pages dropped. Values may be part of the keys' rows.
///
/// \throws std::invalid_argument if an extent is below 1, a base is null, elements overlap, or a layer of one table
///   has no stride of its own (the message gives the numbers)
/// \par Complexity
/// O(planes^2)
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
  detail::check_presence(view);
  detail::check_strides(view);
  if (view.k) { detail::check_plane(view, view.k, "keys"); }
  if (view.v) { detail::check_plane(view, view.v, "values"); }
  if (view.unrotated_keys) { detail::check_plane(view, view.unrotated_keys, "unrotated keys"); }
  detail::check_sharing(view);
}

}  // namespace kvtrim
