// SPDX-License-Identifier: Apache-2.0
#pragma once

// `check_layout` for views of device memory, as far as the host can see: what it throws for is refused before any launch.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Whether no byte belongs to two rows or planes; layer bases, which are on the device, are not looked at.
[[nodiscard]] inline bool planes_fit(const CacheView& view) noexcept {
  using kvtrim::detail::part;
  using kvtrim::detail::Part;
  const bool contained = values_in_keys(view);
  for (std::int32_t i = 0; i < kvtrim::detail::first_page_plane; ++i) {
    const Part a = part(view, i);
    if (a.base == nullptr && a.layer_bases == nullptr) { continue; }
    if (a.region.overlap() >= 0) { return false; }
    for (std::int32_t j = i + 1; j < kvtrim::detail::first_page_plane; ++j) {
      const Part b = part(view, j);
      if (a.layer_bases != nullptr || b.layer_bases != nullptr || b.base == nullptr ||
          (i == 0 && j == 1 && contained) ||
          (view.table.v_offset != 0 && a.of_values != b.of_values)) {
        continue;
      }
      const std::int64_t delta =
          kvtrim::detail::address_of(b.base) - kvtrim::detail::address_of(a.base);
      if (!kvtrim::detail::apart(a.region, b.region, delta)) { return false; }
    }
  }
  return true;
}

}  // namespace kvtrim::cuda::detail
