// SPDX-License-Identifier: Apache-2.0
#pragma once

// Everything that a view keeps in pages, one plane after the other: what lies where, and what may lie together. Plain integer
// arithmetic, so that host and device apply the same rules.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/region.hpp>
#include <kvtrim/core/saturating.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvtrim::detail {

[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t address_of(const std::byte* p) noexcept {
  return std::bit_cast<std::int64_t>(p);
}

// Pages of a pool: every `id_step`th id is one.
KVTRIM_HOST_DEVICE constexpr void add_pages(Region& r,
                                            const CacheView& view,
                                            std::int64_t page_stride) noexcept {
  const std::int32_t step = view.table.id_step > 1 ? view.table.id_step : 1;
  // No stride is trusted yet. By shifts: a division of 64 bits is a call in a kernel.
  std::int64_t most = too_large;
  for (std::int32_t rest = step - 1; rest > 0; rest /= 2) { most /= 2; }
  const std::int64_t stride = page_stride > most    ? too_large
                              : page_stride < -most ? -too_large
                                                    : page_stride * step;
  r.add(AxisName::page, stride, view.pages / step + (view.pages % step != 0 ? 1 : 0));
}

// Where elements of `p` lie; with `layer_bases`, those of one layer.
KVTRIM_HOST_DEVICE constexpr void fill(Region& r, const CacheView& view, const Plane& p) noexcept {
  const bool whole = p.contiguous_rows();
  r.clear(whole ? p.row_bytes() : element_bytes(p.dtype));
  if (!whole && p.pack == 1) { r.add(AxisName::feature, p.feature_stride, p.head_dim); }
  if (!whole && p.pack != 1) {
    r.add(AxisName::feature, p.feature_stride, p.pack < p.head_dim ? p.pack : p.head_dim);
    r.add(AxisName::pack, p.pack_stride, (std::int64_t{p.head_dim} + p.pack - 1) / p.pack);
  }
  const bool common_heads = view.scope == TableScope::head && p.head_stride == 0;
  r.add(AxisName::token, p.token_stride, view.page_size);
  r.add(AxisName::head, p.head_stride, common_heads ? 1 : view.kv_heads);
  add_pages(r, view, p.page_stride);
  const bool one_layer = p.layer_bases != nullptr || p.layer_stride == 0;
  r.add(AxisName::layer, p.layer_stride, one_layer ? 1 : view.layers);
  r.close();
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
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t value_offset(const CacheView& view,
                                                                     LayerId l) noexcept {
  return address_of(view.v.row(l, PageId{0}, HeadId{0}, Slot{0})) -
         address_of(view.k.row(l, PageId{0}, HeadId{0}, Slot{0}));
}
// The same for one layer, wherever its rows begin.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool values_in_keys(const CacheView& view,
                                                               LayerId l) noexcept {
  return view.k && view.v && values_in_keys(view, value_offset(view, l));
}

// Whether each layer, or each head, has a pool of pages of its own: the same page is then other memory.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool has_own_layers(const Plane& p) noexcept {
  return p.layer_stride != 0 || p.layer_bases != nullptr;
}
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool has_own_heads(const CacheView& view) noexcept {
  return view.scope == TableScope::head && view.k.head_stride != 0;
}
// Whether a plane keeps apart the layers and heads whose pages the keys keep apart.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool follows_pools(const CacheView& view,
                                                              bool own_layers,
                                                              bool own_heads) noexcept {
  const bool layers = view.layers > 1 && view.scope != TableScope::group && has_own_layers(view.k);
  const bool heads = view.kv_heads > 1 && has_own_heads(view);
  return (own_layers || !layers) && (own_heads || !heads);
}

KVTRIM_HOST_DEVICE constexpr void fill(Region& r,
                                       const CacheView& view,
                                       const PagePlane& p) noexcept {
  r.clear(p.row_bytes);
  const std::int32_t each = p.rows_per_entry(view.page_size);
  r.add(AxisName::token, p.token_stride, (std::int64_t{view.page_size} + each - 1) / each);
  r.add(AxisName::head, p.head_stride, p.head_stride == 0 ? 1 : view.kv_heads);
  if (!p.constant()) { add_pages(r, view, p.page_stride); }
  r.add(AxisName::layer, p.layer_stride, p.layer_stride == 0 ? 1 : view.layers);
  r.close();
}
// Whether a plane's entries are where rows may look for them: one for the page, or one for whole rows of a page.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool has_sound_entries(const CacheView& view,
                                                                  const PagePlane& p) noexcept {
  const std::int32_t most = p.token_stride == 0 ? 1 : view.page_size;
  return p.tokens_per_entry >= 1 &&
         (p.tokens_per_entry <= most || p.tokens_per_entry == view.page_size);
}
// How many rows a plane has is not said: two, unless the table has room for one.
KVTRIM_HOST_DEVICE constexpr void fill(Region& r,
                                       const CacheView& view,
                                       const SequencePlane& p) noexcept {
  const bool one_row =
      view.table.indptr == nullptr && view.table.max_pages <= 1 && view.page_size <= 1;
  r.clear(p.element_bytes);
  r.add(AxisName::row, p.row_stride, one_row ? 1 : 2);
  r.add(AxisName::head, p.head_stride, p.head_stride == 0 ? 1 : view.kv_heads);
  r.add(AxisName::layer, p.layer_stride, p.layer_stride == 0 ? 1 : view.layers);
  r.add(AxisName::sequence, p.sequence_stride, view.sequences);
  r.close();
}
template <class P>
[[nodiscard]] constexpr Region region_of(const CacheView& view, const P& p) noexcept {
  Region r{};
  fill(r, view, p);
  return r;
}

// The planes in pages by number: keys, values, un-rotated keys, page planes. `f(plane)` is called with a copy.
inline constexpr std::int32_t first_page_plane = 3;
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t parts_of(const CacheView& view) noexcept {
  return first_page_plane + view.page_plane_count;
}
KVTRIM_HOST_DEVICE constexpr Plane plane_of(const CacheView& view, std::int32_t i) noexcept {
  return i == 0 ? view.k : i == 1 ? view.v : view.unrotated_keys;
}
KVTRIM_HOST_DEVICE constexpr void fill_part(Region& r,
                                            const CacheView& view,
                                            std::int32_t i) noexcept {
  if (i < first_page_plane) { return fill(r, view, plane_of(view, i)); }
  fill(r, view, view.page_planes[i - first_page_plane]);
}
// How many bases it has: one, one for each layer, or none: there is no such plane.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t bases_of(const CacheView& view,
                                                                 std::int32_t i) noexcept {
  if (i >= first_page_plane) { return 1; }
  const Plane p = plane_of(view, i);
  return p.layer_bases != nullptr ? view.layers : p ? 1 : 0;
}
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t base_of(const CacheView& view,
                                                                std::int32_t i,
                                                                std::int32_t l) noexcept {
  if (i >= first_page_plane) { return address_of(view.page_planes[i - first_page_plane].base); }
  const Plane p = plane_of(view, i);
  return address_of(p.layer_bases != nullptr ? p.layer_bases[l] : p.base);
}
// Whether planes `i` and `j` can have bytes in common at all: K's and V's ids name different pages where they are separate.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool share_pages(const CacheView& view,
                                                            std::int32_t i,
                                                            std::int32_t j) noexcept {
  const auto of_values = [&](std::int32_t part) {
    return part >= first_page_plane ? view.page_planes[part - first_page_plane].of_values
                                    : part == 1;
  };
  return view.table.v_offset == 0 || of_values(i) == of_values(j);
}
// Whether base `l` of plane `i` and base `m` of plane `j` are keys and the values that are part of them.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool is_contained(const CacheView& view,
                                                             std::int32_t i,
                                                             std::int32_t l,
                                                             std::int32_t j,
                                                             std::int32_t m) noexcept {
  if (i != 0 || j != 1 || l != m) { return false; }
  const bool layer_by_layer = view.k.layer_bases != nullptr && view.v.layer_bases != nullptr;
  const bool in_step =
      view.layers <= 1 || (view.k.layer_bases == nullptr && view.v.layer_bases == nullptr &&
                           view.k.layer_stride == view.v.layer_stride);
  return (layer_by_layer || in_step) && values_in_keys(view, LayerId{l});
}

}  // namespace kvtrim::detail
