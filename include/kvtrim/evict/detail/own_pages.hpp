// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/cache/head_ref.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::detail {

// Whether the pages of entry `e` of a head's table may be written.
[[nodiscard]] inline bool owns_entry(const HeadRef& head, std::int32_t e) noexcept {
  const auto& [view, s, l, h] = head;
  return view.writable.all() || (view.writable(view.k_page(s, l, h, e), l, h) &&
                                 view.writable(view.v_page(s, l, h, e), l, h));
}

// Whether page `p` may be written in every pool.
[[nodiscard]] inline bool owns_page(const CacheView& view, PageId p) noexcept {
  const std::int32_t layers = view.writable.layer_stride == 0 ? 1 : view.layers;
  const std::int32_t heads = view.writable.head_stride == 0 ? 1 : view.kv_heads;
  bool own = true;
  for (std::int32_t i = 0; !view.writable.all() && i < layers * heads; ++i) {
    own = own && view.writable(p, LayerId{i / heads}, HeadId{i % heads});
  }
  return own;
}

// Whether spare pages are the caller's own: writable, in no table, none twice. O(entries) only where there are any.
//
// `scratch`: as for `check_entries`, which found nothing in `view`
[[nodiscard]] inline bool are_spare(const CacheView& view,
                                    std::span<const PageId> spares,
                                    std::span<std::uint64_t> scratch) noexcept {
  if (spares.empty()) { return true; }
  std::ranges::fill(scratch, std::uint64_t{0});
  const auto word = [](PageId p) { return static_cast<std::size_t>(raw(p)) / 64; };
  const auto bit = [](PageId p) { return std::uint64_t{1} << static_cast<unsigned>(raw(p) % 64); };
  const auto listed = [&](PageId p) { return (scratch[word(p)] & bit(p)) != 0; };
  for (const PageId p : spares) {
    if (raw(p) < 0 || raw(p) >= view.pages || listed(p) || !owns_page(view, p)) { return false; }
    scratch[word(p)] |= bit(p);
  }
  bool in_table = false;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const SequenceId id{s};
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const std::int64_t end = used_entries(view, id, l, h) + view.reserved(id, t);
      for (std::int32_t e = view.first_row(id) / view.page_size; e < end; ++e) {
        in_table = in_table || listed(view.k_page(id, l, h, e)) || listed(view.v_page(id, l, h, e));
      }
    }
  }
  return !in_table;
}

}  // namespace kvtrim::detail
