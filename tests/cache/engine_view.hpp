// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_tables.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrim::test {

inline constexpr std::int32_t pages = 10;

// Two sequences of 6 and 9 rows in pages of 4, two layers, three heads; nothing wrong with it.
struct Engine {
  // Keys, and from its middle on values; never read: only strides are checked.
  std::vector<std::byte> memory = std::vector<std::byte>(std::size_t{1} << 14);
  std::vector<std::int32_t> ids{5, 3, -1, -1, 8, 2, 9, -1};
  std::vector<std::int32_t> lengths{6, 9};
  std::vector<std::int32_t> counts = std::vector<std::int32_t>(10, 1);
  std::vector<std::uint64_t> bits{~std::uint64_t{0}};
  std::vector<SequenceState> states = std::vector<SequenceState>(2);
  CacheView view;

  Engine() {
    view.k = Plane::nhd(memory.data(), {4, 3, 8, DType::f16});
    view.v = Plane::hnd(memory.data() + (1 << 13), {4, 3, 6, DType::f16});
    view.k.layer_stride = pages * view.k.page_stride;
    view.v.layer_stride = pages * view.v.page_stride;
    view.page_size = 4;
    view.pages = pages;
    view.kv_heads = 3;
    view.layers = 2;
    view.sequences = 2;
    view.table.ids = ids.data();
    view.table.row_stride = 4;
    view.table.max_pages = 4;
    view.lengths = lengths.data();
    view.writable.ref_counts = counts.data();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  ViewFault check() const {
    std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(view.pages)),
                                       ~std::uint64_t{0});  // garbage is legal
    return check_tables(view, scratch);
  }
};

}  // namespace kvtrim::test
