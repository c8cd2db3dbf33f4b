// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything that a view keeps in pages, one plane after the other: keys, values, un-rotated keys, page planes. Plain
// integer arithmetic, so that host and device apply the same rules.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/region.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::detail {

[[nodiscard]] inline KVTRIM_HOST_DEVICE std::int64_t address_of(const std::byte* p) noexcept {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p));
}

// Where elements of `p` lie; with `layer_bases`, those of one layer.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr Region region_of(const CacheView& view,
                                                            const Plane& p) noexcept {
  const bool whole = p.contiguous_rows();
  Region r(whole ? p.row_bytes() : element_bytes(p.dtype));
  if (!whole && p.pack == 1) { r.add(AxisName::feature, p.feature_stride, p.head_dim); }
  if (!whole && p.pack != 1) {
    r.add(AxisName::feature, p.feature_stride, p.pack < p.head_dim ? p.pack : p.head_dim);
    r.add(AxisName::pack, p.pack_stride, (p.head_dim + p.pack - 1) / p.pack);
  }
  const bool common_heads = view.scope == TableScope::head && p.head_stride == 0;
  r.add(AxisName::token, p.token_stride, view.page_size);
  r.add(AxisName::head, p.head_stride, common_heads ? 1 : view.kv_heads);
  r.add(AxisName::page, p.page_stride, view.pages);
  const bool one_layer = p.layer_bases != nullptr || p.layer_stride == 0;
  r.add(AxisName::layer, p.layer_stride, one_layer ? 1 : view.layers);
  return r;
}

// Whether the values are part of the keys' rows, `offset` bytes behind each row's first (MLA: one buffer, in which the first
// features of a key are its value). They then move with the keys, once.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool values_in_keys(const CacheView& view,
                                                               std::int64_t offset) noexcept {
  const Plane& k = view.k;
  const Plane& v = view.v;
  return k && v && view.table.v_offset == 0 && k.contiguous_rows() && v.contiguous_rows() &&
         offset >= 0 && offset + v.row_bytes() <= k.row_bytes() &&
         (view.pages <= 1 || k.page_stride == v.page_stride) &&
         (view.page_size <= 1 || k.token_stride == v.token_stride) &&
         (view.kv_heads <= 1 || k.head_stride == v.head_stride);
}
// Bytes from a key of layer `l` to its value.
[[nodiscard]] inline KVTRIM_HOST_DEVICE std::int64_t value_offset(const CacheView& view,
                                                                  LayerId l) noexcept {
  return address_of(view.v.row(l, PageId{0}, HeadId{0}, Slot{0})) -
         address_of(view.k.row(l, PageId{0}, HeadId{0}, Slot{0}));
}
// The same for one layer, wherever its rows begin.
[[nodiscard]] inline KVTRIM_HOST_DEVICE bool values_in_keys(const CacheView& view,
                                                            LayerId l) noexcept {
  return view.k && view.v && values_in_keys(view, value_offset(view, l));
}

// One plane of a view, as far as it matters who shares its bytes.
struct Part {
  Region region;
  const std::byte* base = nullptr;          // null: there is no such plane
  std::byte* const* layer_bases = nullptr;  // [layers], or null: `base` is that of all layers
  bool of_values = false;                   // follows V's page ids where they are separate
};

inline constexpr std::int32_t first_page_plane = 3;
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t parts_of(const CacheView&) noexcept {
  return first_page_plane;
}
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr Part part(const CacheView& view,
                                                     std::int32_t i) noexcept {
  const Plane& p = i == 0 ? view.k : i == 1 ? view.v : view.unrotated_keys;
  return {region_of(view, p), p.base, p.layer_bases, i == 1};
}

}  // namespace kvtrim::detail
