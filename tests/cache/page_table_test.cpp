// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/page_table.hpp>

#include "catch.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

using namespace kvtrim;

static_assert(std::is_trivially_copyable_v<PageTable> && std::is_trivially_copyable_v<Writable>);

TEST_CASE("page_table: a row map indexes the engine's C-order arrays, whatever their axes",
          "[page_table]") {
  constexpr std::int32_t sequences = 3;
  constexpr std::int32_t layers = 2;
  constexpr std::int32_t heads = 5;
  const RowMap by_sequence{layers * heads, heads, 1};  // [sequences, layers, heads]
  const RowMap by_layer{heads, sequences * heads, 1};  // [layers, sequences, heads]: KV-Compress
  const RowMap common{1, 0, 0};                        // [sequences]
  const RowMap per_layer{layers, 1, 0};                // [sequences, layers]
  std::int32_t i = 0;
  for (std::int32_t s = 0; s < sequences; ++s) {
    for (std::int32_t l = 0; l < layers; ++l) {
      CHECK(per_layer(SequenceId{s}, LayerId{l}, HeadId{4}) == s * layers + l);
      for (std::int32_t h = 0; h < heads; ++h, ++i) {
        CHECK(by_sequence(SequenceId{s}, LayerId{l}, HeadId{h}) == i);
        CHECK(by_layer(SequenceId{s}, LayerId{l}, HeadId{h}) == (l * sequences + s) * heads + h);
        CHECK(common(SequenceId{s}, LayerId{l}, HeadId{h}) == s);
      }
    }
  }
}

TEST_CASE("page_table: an index of a large batch of per-head tables does not wrap at 2^31",
          "[page_table][edge]") {
  const RowMap rows{1'000'000, 10'000, 1};
  CHECK(rows(SequenceId{3000}, LayerId{99}, HeadId{7}) == 3'000'990'007);
}

TEST_CASE("page_table: a dense row starts at its stride and has max_pages entries",
          "[page_table]") {
  std::vector<std::int32_t> ids(40);
  std::iota(ids.begin(), ids.end(), 100);
  PageTable table;
  table.ids = ids.data();
  table.rows = {2, 1, 0};  // [sequences, 2 layers]
  table.row_stride = 8;    // entries between rows: more than are used
  table.max_pages = 6;
  CHECK(*table.row(SequenceId{0}, LayerId{0}, HeadId{0}) == 100);
  CHECK(*table.row(SequenceId{1}, LayerId{0}, HeadId{0}) == 116);
  CHECK(*table.row(SequenceId{1}, LayerId{1}, HeadId{3}) == 124);
  CHECK(table.capacity(SequenceId{1}, LayerId{1}, HeadId{0}) == 6);
}

TEST_CASE("page_table: a CSR row lies between two indptr, and may be empty", "[page_table][edge]") {
  const std::array<std::int32_t, 5> ids{7, 3, 9, 1, 4};
  const std::array<std::int32_t, 4> indptr{0, 2, 2, 5};
  PageTable table;
  table.ids = ids.data();
  table.indptr = indptr.data();
  const auto capacity = [&](std::int32_t s) {
    return table.capacity(SequenceId{s}, LayerId{0}, HeadId{0});
  };
  CHECK(capacity(0) == 2);
  CHECK(capacity(1) == 0);
  CHECK(capacity(2) == 3);
  CHECK(table.row(SequenceId{0}, LayerId{0}, HeadId{0}) == ids.data());
  CHECK(table.row(SequenceId{2}, LayerId{0}, HeadId{0}) == ids.data() + 2);
}

TEST_CASE("page_table: an entry is a page, a page with flags, or the engine's null page",
          "[page_table]") {
  PageTable table;
  CHECK(table.page(0) == PageId{0});
  CHECK(table.page(2147483647) == PageId{2147483647});
  CHECK(table.page(-1) == null_page);

  table.null_id = 0;  // vLLM reserves page 0
  CHECK(table.page(0) == null_page);
  CHECK(table.page(1) == PageId{1});

  table.null_id = -1;
  table.id_mask = 0x7FFF'FFFF;  // TensorRT-LLM: the top bit names the secondary pool
  CHECK(table.page(std::numeric_limits<std::int32_t>::min() + 5) == PageId{5});
  CHECK(table.page(5) == PageId{5});
  CHECK(table.page(-1) == null_page);  // the null page is compared before the flags are cut off
}

TEST_CASE("page_table: pages are writable by ref count, by bit, and where neither is known",
          "[page_table]") {
  Writable all;
  CHECK(all(PageId{123456}, LayerId{0}, HeadId{0}));

  const std::array<std::int32_t, 4> counts{0, 1, 2, 9};
  Writable counted;
  counted.ref_counts = counts.data();
  CHECK(counted(PageId{0}, LayerId{0}, HeadId{0}));
  CHECK(counted(PageId{1}, LayerId{0}, HeadId{0}));
  CHECK_FALSE(counted(PageId{2}, LayerId{0}, HeadId{0}));
  CHECK_FALSE(counted(PageId{3}, LayerId{0}, HeadId{0}));

  std::vector<std::uint64_t> bits(3, 0);
  Writable masked;
  masked.bits = bits.data();
  for (std::int32_t p = 0; p < 192; ++p) {
    std::fill(bits.begin(), bits.end(), 0);
    bits[static_cast<std::size_t>(p) / 64] = std::uint64_t{1} << (p % 64);
    CHECK(masked(PageId{p}, LayerId{0}, HeadId{0}));
    CHECK_FALSE(masked(PageId{(p + 1) % 192}, LayerId{0}, HeadId{0}));
    CHECK_FALSE(masked(PageId{(p + 64) % 192}, LayerId{0}, HeadId{0}));
  }

  Writable both{counts.data(), bits.data()};
  bits[0] = 0b0110;
  CHECK_FALSE(both(PageId{0}, LayerId{0}, HeadId{0}));  // the bit says no
  CHECK(both(PageId{1}, LayerId{0}, HeadId{0}));
  CHECK_FALSE(both(PageId{2}, LayerId{0}, HeadId{0}));  // the count says no

  // Layers and KV heads with pools of their own have counts of their own.
  Writable pools{counts.data(), nullptr, 2, 1};
  CHECK(pools(PageId{0}, LayerId{0}, HeadId{1}));
  CHECK_FALSE(pools(PageId{0}, LayerId{1}, HeadId{0}));
  CHECK(pools.index(PageId{1}, LayerId{1}, HeadId{1}) == 4);
}

TEST_CASE("page_table: CSR starts that descend, or are too far apart, leave no room that fits",
          "[page_table][edge]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  const std::array<std::int32_t, 6> indptr{0, 7, 3, most, -most, most};
  PageTable table;
  table.indptr = indptr.data();
  const auto room = [&](std::int32_t s) { return table.capacity(SequenceId{s}, {}, {}); };
  CHECK(room(0) == 7);
  CHECK(room(1) == -1);
  CHECK(room(2) == most - 3);
  CHECK(room(3) == -1);
  CHECK(room(4) == -1);  // 2^32 - 2 entries
}
