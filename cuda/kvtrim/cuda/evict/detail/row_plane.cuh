// SPDX-License-Identifier: Apache-2.0
#pragma once

// A plane as the movers see it: rows of equal units, whatever the elements are. On the fast path a unit is 16 bytes.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/cuda/detail/device.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda::detail {

/// Rows of `units` units each.
struct RowPlane {
  std::byte* base = nullptr;
  std::byte* const* layer_bases = nullptr;
  std::int64_t layer_stride = 0;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t unit_stride = 0;  // between units (of one pack)
  std::int64_t pack_stride = 0;
  std::int32_t pack = 1;
  std::int32_t units = 0;
  std::int32_t unit = 0;  // bytes: 1, 2, 4, 8 or 16
  bool of_values = false;

  KVTRIM_HOST_DEVICE std::byte* row(LayerId l, PageId p, HeadId h, Slot s) const {
    std::byte* const layer =
        layer_bases != nullptr ? layer_bases[raw(l)] : base + raw(l) * layer_stride;
    return layer + raw(p) * page_stride + raw(h) * head_stride + raw(s) * token_stride;
  }
  KVTRIM_HOST_DEVICE std::int64_t offset(std::int32_t u) const {
    return pack == 1 ? u * unit_stride : u / pack * pack_stride + u % pack * unit_stride;
  }
};

/// The keys and values of a view, and its un-rotated keys; packed K|V rows are one plane, and so are keys that hold values.
struct RowPlanes {
  RowPlane at[3];
  std::int32_t count = 0;
  bool fast = true;  // all in units of 16 bytes
};

/// Largest power of two up to 16 that divides all of these bits.
KVTRIM_HOST_DEVICE constexpr std::int32_t common_unit(std::uint64_t bits) {
  std::int32_t unit = 16;
  while (unit > 1 && (bits & static_cast<std::uint64_t>(unit - 1)) != 0) { unit /= 2; }
  return unit;
}
__host__ KVTRIM_DEVICE std::uint64_t address_bits(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p);
}
KVTRIM_HOST_DEVICE constexpr std::uint64_t stride_bits(std::int64_t a,
                                                       std::int64_t b,
                                                       std::int64_t c,
                                                       std::int64_t d) {
  return static_cast<std::uint64_t>(a) | static_cast<std::uint64_t>(b) |
         static_cast<std::uint64_t>(c) | static_cast<std::uint64_t>(d);
}

/// `p` in the largest units that its addresses allow; `unit` is 0 if they are not even multiples of the element.
///
/// `layer_bases` are on the device: the plan kernel checks whether they are aligned.
[[nodiscard]] inline RowPlane row_plane(const Plane& p, bool of_values) noexcept {
  RowPlane r;
  r.base = p.base;
  r.layer_bases = p.layer_bases;
  r.layer_stride = p.layer_bases != nullptr ? 0 : p.layer_stride;
  r.page_stride = p.page_stride;
  r.token_stride = p.token_stride;
  r.head_stride = p.head_stride;
  r.of_values = of_values;
  const std::uint64_t bits =
      (p.layer_bases != nullptr ? 0U : address_bits(p.base)) |
      stride_bits(r.layer_stride, p.page_stride, p.token_stride, p.head_stride);
  if (p.contiguous_rows()) {
    r.unit = common_unit(bits | static_cast<std::uint64_t>(p.row_bytes()));
    if (r.unit < element_bytes(p.dtype)) {
      r.unit = 0;
      return r;
    }
    r.units = static_cast<std::int32_t>(p.row_bytes() / r.unit);
    r.unit_stride = r.unit;
    return r;
  }
  r.unit = element_bytes(p.dtype);
  r.units = p.head_dim;
  r.unit_stride = p.feature_stride;
  r.pack_stride = p.pack == 1 ? 0 : p.pack_stride;
  r.pack = p.pack;
  if (common_unit(bits | stride_bits(r.unit_stride, r.pack_stride, 0, 0)) < r.unit) { r.unit = 0; }
  return r;
}

/// Whether the values are part of the keys' rows, as far as the host can see: layer bases are on the device.
[[nodiscard]] inline bool values_in_keys(const CacheView& view) noexcept {
  const Plane& k = view.k;
  const Plane& v = view.v;
  if (k.layer_bases != nullptr || v.layer_bases != nullptr) {
    return k.layer_bases == v.layer_bases && kvtrim::detail::values_in_keys(view, 0);
  }
  return (view.layers <= 1 || k.layer_stride == v.layer_stride) &&
         kvtrim::detail::values_in_keys(view, LayerId{0});
}

/// All planes that `view` keeps in pages, except for its `page_planes`; count 0 if one is misaligned or there are no keys.
[[nodiscard]] inline RowPlanes row_planes(const CacheView& view) noexcept {
  RowPlanes all;
  const Plane& k = view.k;
  const Plane& v = view.v;
  if (!k) { return {}; }
  RowPlane keys = row_plane(k, false);
  const bool alone = !v || values_in_keys(view);
  RowPlane values = alone ? RowPlane{} : row_plane(v, true);
  const bool packed = !alone && k.contiguous_rows() && v.contiguous_rows() &&
                      k.layer_bases == nullptr && v.layer_bases == nullptr &&
                      view.table.v_offset == 0 && v.base == k.base + k.row_bytes() &&
                      v.layer_stride == k.layer_stride && v.page_stride == k.page_stride &&
                      v.token_stride == k.token_stride && v.head_stride == k.head_stride &&
                      keys.unit == values.unit;
  if (packed) {
    keys.units += values.units;
    all.at[all.count++] = keys;
  } else {
    all.at[all.count++] = keys;
    if (!alone) { all.at[all.count++] = values; }
  }
  if (view.unrotated_keys) { all.at[all.count++] = row_plane(view.unrotated_keys, false); }
  for (std::int32_t i = 0; i < all.count; ++i) {
    if (all.at[i].unit == 0) { return {}; }
    all.fast = all.fast && all.at[i].unit == 16 && all.at[i].pack == 1;
  }
  return all;
}

/// A page plane in units.
KVTRIM_DEVICE RowPlane row_plane(const PagePlane& p) {
  RowPlane r;
  r.base = p.base;
  r.layer_stride = p.layer_stride;
  r.page_stride = p.page_stride;
  r.token_stride = p.token_stride;
  r.head_stride = p.head_stride;
  r.of_values = p.of_values;
  r.unit = common_unit(address_bits(p.base) |
                       stride_bits(p.layer_stride, p.page_stride, p.token_stride, p.head_stride) |
                       static_cast<std::uint64_t>(p.row_bytes));
  r.units = static_cast<std::int32_t>(p.row_bytes / r.unit);
  r.unit_stride = r.unit;
  return r;
}

/// Number `i` of the view's sequence planes: positions, rope positions, sums, compensations, then `more_planes`.
__host__ KVTRIM_DEVICE SequencePlane sequence_plane(const CacheView& view, int i) {
  return i == 0   ? view.positions
         : i == 1 ? view.rope_positions
         : i == 2 ? view.score_sums
         : i == 3 ? view.score_compensations
                  : view.more_planes[i - 4];
}
__host__ KVTRIM_DEVICE int sequence_plane_count(const CacheView& view) {
  return 4 + view.more_plane_count;
}
/// Largest unit of an element of `p`.
KVTRIM_DEVICE std::int32_t unit_of(const SequencePlane& p) {
  return common_unit(address_bits(p.base) |
                     stride_bits(p.sequence_stride, p.layer_stride, p.head_stride, p.row_stride) |
                     static_cast<std::uint64_t>(p.element_bytes));
}

/// Calls `f(T{})` with the unsigned type of `unit` bytes.
template <class F>
KVTRIM_DEVICE void with_unit(std::int32_t unit, F&& f) {
  switch (unit) {
    case 16:
      return f(uint4{});
    case 8:
      return f(static_cast<unsigned long long>(0));
    case 4:
      return f(0U);
    case 2:
      return f(static_cast<unsigned short>(0));
    default:
      return f(static_cast<unsigned char>(0));
  }
}

}  // namespace kvtrim::cuda::detail
