// SPDX-License-Identifier: Apache-2.0
#pragma once

// `check_layout` for views of device memory: the host refuses what it can see before any launch; layer bases and arrays of
// planes lie on the device and are checked there, before a plan is made.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Whether the layers and heads that a table, or the keys, keep apart have strides of their own in plane `i`, and its rows
/// share no byte.
[[nodiscard]] inline bool plane_fits(const CacheView& view, std::int32_t i) noexcept {
  namespace cache = kvtrim::detail;
  const Plane p = cache::plane_of(view, i);
  const bool heads = p.head_stride != 0;
  const bool layers = cache::has_own_layers(p);
  return !p ||
         ((view.scope == TableScope::head || view.kv_heads <= 1 || heads) &&
          (view.scope != TableScope::group || view.layers <= 1 || layers) &&
          cache::follows_pools(view, layers, heads) && cache::region_of(view, p).overlap() < 0);
}

/// Whether the named sequence planes hold 4 bytes a row, share no byte, and rows have bytes of their own.
[[nodiscard]] inline bool sequence_planes_fit(const CacheView& view) noexcept {
  namespace cache = kvtrim::detail;
  for (int i = 0; i < 4; ++i) {
    const SequencePlane p = sequence_plane(view, i);
    if (!p) { continue; }
    if (p.element_bytes != 4 || cache::region_of(view, p).overlap() >= 0) { return false; }
    for (int j = 0; j < i; ++j) {
      const SequencePlane q = sequence_plane(view, j);
      const std::int64_t delta = cache::address_of(p.base) - cache::address_of(q.base);
      if (q && !cache::apart(cache::region_of(view, q), cache::region_of(view, p), delta)) {
        return false;
      }
    }
  }
  return true;
}

/// What the host can see of `check_layout`.
[[nodiscard]] inline bool layout_fits(const CacheView& view) noexcept {
  namespace cache = kvtrim::detail;
  if (cache::has_own_heads(view) && view.layers > 1 && !cache::has_own_layers(view.k)) {
    return false;
  }
  const bool contained = values_in_keys(view);
  for (std::int32_t i = 0; i < cache::first_page_plane; ++i) {
    if (!plane_fits(view, i)) { return false; }
    for (std::int32_t j = 0; j < i; ++j) {
      const Plane a = cache::plane_of(view, j);
      const Plane b = cache::plane_of(view, i);
      const bool apart_anyway = view.table.v_offset != 0 && (i == 1 || j == 1);
      if (!a || !b || a.layer_bases != nullptr || b.layer_bases != nullptr || apart_anyway ||
          (i == 1 && contained)) {
        continue;
      }
      if (!cache::apart(cache::region_of(view, a),
                        cache::region_of(view, b),
                        cache::address_of(b.base) - cache::address_of(a.base))) {
        return false;
      }
    }
  }
  return sequence_planes_fit(view);
}

/// Bytes that a layer's base must be a multiple of, of keys, values and un-rotated keys: each plane's own unit.
struct BaseUnits {
  std::int32_t of[kvtrim::detail::first_page_plane];
};
[[nodiscard]] inline BaseUnits base_units(const CacheView& view) noexcept {
  BaseUnits units{};
  for (std::int32_t i = 0; i < kvtrim::detail::first_page_plane; ++i) {
    const Plane p = kvtrim::detail::plane_of(view, i);
    const bool own = p && !(i == 1 && values_in_keys(view));  // those of the keys otherwise
    units.of[i] = own ? row_plane(p, i == 1).unit : 1;
  }
  return units;
}

struct LayoutShared {
  kvtrim::detail::Region at[2];
};

/// How many of such checks there are.
KVTRIM_HOST_DEVICE constexpr std::int32_t device_layout_checks(const CacheView& view) noexcept {
  const bool any = view.k.layer_bases != nullptr || view.v.layer_bases != nullptr ||
                   view.unrotated_keys.layer_bases != nullptr || view.page_plane_count > 0;
  const std::int32_t parts = kvtrim::detail::parts_of(view);
  return (any ? parts * parts : 0) + view.more_plane_count;
}

/// Whether one of `more_planes` is bad by itself, or beside the sequence planes before it. One thread.
KVTRIM_DEVICE bool bad_more_plane(const CacheView& view, std::int32_t k, LayoutShared& shared) {
  namespace cache = kvtrim::detail;
  const SequencePlane p = view.more_planes[k];
  if (!p) { return false; }
  cache::fill(shared.at[0], view, p);
  bool bad = p.element_bytes < 1 || shared.at[0].overlap() >= 0;
  for (int q = 0; q < 4 + k && !bad; ++q) {
    const SequencePlane other = sequence_plane(view, q);
    if (!other) { continue; }
    cache::fill(shared.at[1], view, other);
    bad = !cache::apart(
        shared.at[1], shared.at[0], cache::address_of(p.base) - cache::address_of(other.base));
  }
  return bad;
}

/// Whether two of the planes in pages, or one of them beside itself, are bad, as far as this thread of the block finds.
template <int Threads>
KVTRIM_DEVICE bool bad_planes(const CacheView& view,
                              std::int32_t i,
                              std::int32_t j,
                              const BaseUnits& units,
                              LayoutShared& shared) {
  namespace cache = kvtrim::detail;
  if (threadIdx.x < 2) { cache::fill_part(shared.at[threadIdx.x], view, threadIdx.x == 0 ? i : j); }
  __syncthreads();
  bool bad = false;
  if (i == j && i >= cache::first_page_plane) {
    const PagePlane p = view.page_planes[i - cache::first_page_plane];
    bad = p.base == nullptr || p.row_bytes < 1 || shared.at[0].overlap() >= 0 ||
          !cache::has_sound_entries(view, p) ||
          (!p.constant() && !cache::follows_pools(view, p.layer_stride != 0, p.head_stride != 0));
  }
  const std::int32_t n = cache::bases_of(view, i);
  // Not by index: a parameter that is indexed would be copied to local memory.
  const std::int32_t unit = i == 0 ? units.of[0] : i == 1 ? units.of[1] : units.of[2];
  for (std::int32_t x = static_cast<std::int32_t>(threadIdx.x);
       i == j && i < cache::first_page_plane && x < n;
       x += Threads) {
    bad = bad || cache::base_of(view, i, x) % unit != 0;
  }
  const std::int32_t m = cache::share_pages(view, i, j) ? cache::bases_of(view, j) : 0;
  for (std::int32_t x = static_cast<std::int32_t>(threadIdx.x); x < n * m && !bad; x += Threads) {
    const std::int32_t l = x / m;
    const std::int32_t k = x % m;
    // With bases of their own, the movers take values for a plane of its own.
    const bool contained =
        view.k.layer_bases == view.v.layer_bases && cache::is_contained(view, i, l, j, k);
    if ((i == j && k <= l) || contained) { continue; }
    bad = !cache::apart(
        shared.at[0], shared.at[1], cache::base_of(view, j, k) - cache::base_of(view, i, l));
  }
  __syncthreads();
  return bad;
}

/// Whether one of the block's share of the checks of what only the device can see fails; all threads get the answer.
template <int Threads>
KVTRIM_DEVICE bool bad_device_layout(const CacheView& view,
                                     const BaseUnits& units,
                                     LayoutShared& shared) {
  const std::int32_t checks = device_layout_checks(view);
  const std::int32_t parts = kvtrim::detail::parts_of(view);
  bool bad = false;
  for (std::int32_t c = static_cast<std::int32_t>(blockIdx.x); c < checks;
       c += static_cast<std::int32_t>(gridDim.x)) {
    const std::int32_t k = c - (checks - view.more_plane_count);
    if (k >= 0) {
      if (threadIdx.x == 0) { bad = bad_more_plane(view, k, shared) || bad; }
      __syncthreads();
    } else if (c % parts >= c / parts) {
      bad = bad_planes<Threads>(view, c / parts, c % parts, units, shared) || bad;
    }
  }
  return __syncthreads_or(bad) != 0;
}

}  // namespace kvtrim::cuda::detail
