// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_view.hpp>

#include "catch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::int32_t pages = 10;

// Two sequences of 6 and 9 rows in pages of 4, two layers, three heads; nothing wrong with it.
struct Engine {
  std::vector<std::byte> memory = std::vector<std::byte>(
      std::size_t{1}
      << 14);  // keys, and from its middle on values; never read: only strides are checked
  std::vector<std::int32_t> ids{5, 3, -1, -1, 8, 2, 9, -1};
  std::vector<std::int32_t> lengths{6, 9};
  std::vector<std::int32_t> counts = std::vector<std::int32_t>(pages, 1);
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

// What check_layout says about the engine after `change`; empty: nothing.
std::string refusal(const std::function<void(CacheView&)>& change) {
  Engine e;
  change(e.view);
  try {
    check_layout(e.view);
  } catch (const std::invalid_argument& error) { return error.what(); }
  return "";
}

}  // namespace

TEST_CASE("check_layout: a sound view passes in every scope", "[check_view]") {
  CHECK(refusal([](CacheView&) {}) == "");
  CHECK(refusal([](CacheView& v) {
          v.scope = TableScope::layer;
          v.k.layer_stride = v.v.layer_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) {
          v.scope = TableScope::head;
          v.k = Plane::hnd(v.k.base, {4, 1, 8, DType::f16});
          v.v = Plane::hnd(v.v.base, {4, 1, 6, DType::f16});
          v.k.head_stride = v.v.head_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) { v.sequences = 0; }) == "");
}

TEST_CASE("check_layout: page size 0, and every other extent below 1, is refused with its number",
          "[check_view][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.page_size = 0; }), ContainsSubstring("page_size 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.page_size = -16; }), ContainsSubstring("page_size -16"));
  CHECK_THAT(refusal([](CacheView& v) { v.kv_heads = 0; }), ContainsSubstring("kv_heads 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.layers = 0; }), ContainsSubstring("layers 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.sequences = -1; }), ContainsSubstring("sequences -1"));
  CHECK_THAT(refusal([](CacheView& v) { v.pages = -2; }), ContainsSubstring("pages -2"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_dim = 0; }),
             ContainsSubstring("keys: head_dim 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.pack = 0; }),
             ContainsSubstring("values: head_dim 6, pack 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.dtype = DType::opaque; }),
             ContainsSubstring("opaque_row_bytes 0"));
}

TEST_CASE("check_layout: missing keys, values, ids or lengths are refused", "[check_view][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.k.base = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.base = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.table.ids = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.lengths = nullptr; }), ContainsSubstring("no lengths"));
}

TEST_CASE("check_layout: strides that overlap are refused with the axis and the bytes",
          "[check_view][edge]") {
  // Keys are [pages, 4, 3, 8] of 2 bytes: 16, 48, 192.
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = 47; }),
             ContainsSubstring("keys overlap") && ContainsSubstring("token stride of 47") &&
                 ContainsSubstring("48 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_stride = 8; }), ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.page_stride = 191; }),
             ContainsSubstring("page stride of 191") && ContainsSubstring("192 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.layer_stride -= 1; }),
             ContainsSubstring("values overlap") && ContainsSubstring("layer stride of 1439"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.feature_stride = 1; }),
             ContainsSubstring("feature stride of 1") && ContainsSubstring("2 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = 0; }),
             ContainsSubstring("token stride of 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.page_stride = 0; }),
             ContainsSubstring("page stride of 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = -48; }), ContainsSubstring("-48"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = v.k.head_stride; }),
             ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.unrotated_keys = v.k;
               v.unrotated_keys.page_stride = 64;
             }),
             ContainsSubstring("unrotated keys overlap"));
}

TEST_CASE("check_layout: gaps, and strides of axes with one element, do not overlap",
          "[check_view]") {
  CHECK(refusal([](CacheView& v) { v.k.page_stride += 64, v.k.layer_stride += 640; }) == "");
  CHECK(refusal([](CacheView& v) {
          v.page_size = 1;
          v.k.token_stride = v.v.token_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) {
          v.layers = 1;
          v.k.layer_stride = v.v.layer_stride = 0;
        }) == "");
}

TEST_CASE("check_layout: packs are an axis, the last one as well where it is partly filled",
          "[check_view][edge]") {
  const auto packed = [](std::int32_t dim, std::int64_t pack_stride) {
    return refusal([=](CacheView& v) {
      v.layers = 1;
      v.k = Plane::vllm_packed_keys(v.k.base, {4, 3, 16, DType::f16});
      v.k.head_dim = dim;
      v.k.pack_stride = pack_stride;
    });
  };
  CHECK(packed(16, 64) == "");
  CHECK_THAT(packed(16, 63), ContainsSubstring("pack stride of 63"));
  CHECK(packed(12, 64) == "");
  CHECK_THAT(packed(12, 0), ContainsSubstring("pack stride of 0"));
}

TEST_CASE("check_layout: heads and layers that share a table need strides of their own, K and V",
          "[check_view][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_stride = 0; }), ContainsSubstring("3 KV heads"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.head_stride = 0; }), ContainsSubstring("3 KV heads"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.layer_stride = 0; }), ContainsSubstring("2 layers"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.layer_stride = 0; }), ContainsSubstring("2 layers"));
}

TEST_CASE("check_tables: a sound view has no fault, whatever lies beyond the live rows",
          "[check_view]") {
  Engine e;
  CHECK(e.check().sequence == -1);
  CHECK(e.check().status == Status::ok);
  e.ids[2] = 1'000'000;
  e.ids[3] = 5;  // a page of the same sequence, but unused
  e.ids[7] = 5;
  CHECK(e.check().status == Status::ok);
  e.lengths = {0, 0};
  e.ids.assign(8, 77);
  CHECK(e.check().status == Status::ok);
}

TEST_CASE(
    "check_tables: a page out of range or null within the live rows is reported with its place",
    "[check_view][edge]") {
  for (const std::int32_t bad : {pages, -1, -2, 2147483647}) {
    Engine e;
    e.ids[5] = bad;
    const ViewFault fault = e.check();
    CHECK(fault.status == Status::page_out_of_range);
    CHECK(fault.sequence == 1);
    CHECK(fault.table == 0);
    CHECK(fault.entry == 1);
    CHECK(fault.value == (bad < 0 && bad != -2 ? -1 : bad));
  }
  Engine e;
  e.view.table.null_id = 3;  // the engine's null page is a page of the pool
  CHECK(e.check().status == Status::page_out_of_range);
}

TEST_CASE(
    "check_tables: null pages are legal where only left padding would lie, any number of times",
    "[check_view][edge]") {
  Engine e;
  const std::array<std::int32_t, 2> padding{8, 11};
  e.view.first_rows = padding.data();
  e.view.table.max_pages = 6;
  e.view.table.row_stride = 6;
  e.ids = {-1, -1, 5, 3, 77, 77, -1, -1, 8, 2, 9, 77};
  e.view.table.ids = e.ids.data();
  CHECK(e.check().status == Status::ok);
  CHECK(generation_of(e.view) == generation_of(e.view));
  e.ids[8] = -1;  // the page of 3 rows of padding and the first row
  CHECK(e.check().status == Status::page_out_of_range);
  CHECK(e.check().entry == 2);
}

TEST_CASE("check_tables: a page twice in one sequence is a fault, also where it is not writable",
          "[check_view][edge]") {
  for (const std::int32_t count : {1, 2}) {
    Engine e;
    e.ids[6] = 8;
    e.counts[8] = count;
    const ViewFault fault = e.check();
    CHECK(fault.status == Status::page_twice);
    CHECK(fault.sequence == 1);
    CHECK(fault.entry == 2);
    CHECK(fault.value == 8);
  }
}

TEST_CASE("check_tables: a page in two sequences is a fault while writable and legal while shared",
          "[check_view][edge]") {
  Engine e;
  e.ids[4] = 5;
  const ViewFault fault = e.check();
  CHECK(fault.status == Status::page_twice);
  CHECK(fault.sequence == 1);
  CHECK(fault.entry == 0);
  CHECK(fault.value == 5);
  e.counts[5] = 2;
  CHECK(e.check().status == Status::ok);

  e.view.writable = {};  // no counts are known: everything is writable
  CHECK(e.check().status == Status::page_twice);
  e.view.writable.bits = e.bits.data();
  CHECK(e.check().status == Status::page_twice);
  e.bits[0] &= ~(std::uint64_t{1} << 5U);  // a hashed page
  CHECK(e.check().status == Status::ok);
}

TEST_CASE("check_tables: a length that is negative or beyond the table is reported",
          "[check_view][edge]") {
  Engine e;
  e.lengths[1] = 17;  // five pages of a row of four
  CHECK(e.check().status == Status::length_beyond_table);
  CHECK(e.check().sequence == 1);
  CHECK(e.check().value == 17);
  e.lengths[1] = 2147483647;
  CHECK(e.check().status == Status::length_beyond_table);
  e.lengths[1] = -1;
  CHECK(e.check().status == Status::length_beyond_table);
  CHECK(e.check().value == -1);

  Engine padded;  // 9 rows fit, with 8 rows of padding they do not
  const std::array<std::int32_t, 2> padding{0, 8};
  padded.view.first_rows = padding.data();
  CHECK(padded.check().status == Status::length_beyond_table);

  Engine csr;
  const std::array<std::int32_t, 3> indptr{0, 2, 5};
  csr.view.table.indptr = indptr.data();
  csr.ids = {5, 3, 8, 2, 9};
  csr.view.table.ids = csr.ids.data();
  CHECK(csr.check().status == Status::ok);
  csr.lengths[0] = 9;
  CHECK(csr.check().status == Status::length_beyond_table);
  CHECK(csr.check().sequence == 0);
}

TEST_CASE("check_tables: a hole needs its page too", "[check_view][edge]") {
  Engine e;
  e.view.lengths = nullptr;
  e.view.states = e.states.data();
  e.states[0].live_rows = 8;
  e.states[1].live_rows = 9;
  CHECK(e.check().status == Status::ok);
  e.states[0].append_row = 3;  // 9 rows in use
  CHECK(e.check().status == Status::page_out_of_range);
  CHECK(e.check().entry == 2);
}

TEST_CASE("check_tables: K and V with their own ids must not share a page", "[check_view]") {
  Engine e;
  e.view.sequences = 1;
  e.view.table.v_offset = 2;
  e.ids = {5, 3, 4, 6};
  CHECK(e.check().status == Status::ok);
  e.ids[3] = 5;
  CHECK(e.check().status == Status::page_twice);
  e.ids[3] = 10;
  CHECK(e.check().status == Status::page_out_of_range);
}

TEST_CASE("check_tables: tables of other layers or heads over the same pages may not share one",
          "[check_view][edge]") {
  Engine e;
  e.view.scope = TableScope::layer;
  e.view.table.rows = {2, 1, 0};
  e.view.table.row_stride = 2;
  e.view.table.max_pages = 2;
  e.lengths = {6, 6};
  e.ids = {5, 3, 8, 5, 1, 2, 6, 7};  // page 5: sequence 0, layers 0 and 1
  e.view.table.ids = e.ids.data();
  // Each layer in memory of its own: the same number is another page.
  CHECK(e.check().status == Status::ok);
  // One pool for the layers: the same number is the same page.
  e.view.k.layer_stride = e.view.v.layer_stride = 0;
  CHECK(e.check().status == Status::page_twice);
  CHECK(e.check().table == 1);
  CHECK(e.check().value == 5);
  e.ids[3] = 4;
  CHECK(e.check().status == Status::ok);
  e.ids[6] = 3;  // sequence 1, layer 1, and sequence 0, layer 0
  CHECK(e.check().status == Status::page_twice);
  e.counts[3] = 2;
  CHECK(e.check().status == Status::ok);
}

TEST_CASE("check_tables: heads share a pool of pages unless they have a stride",
          "[check_view][edge]") {
  Engine e;
  e.view.scope = TableScope::head;
  e.view.kv_heads = 2;
  e.view.sequences = 1;
  e.view.table.rows = {4, 2, 1};
  e.view.table.row_stride = 1;
  e.view.table.max_pages = 1;
  e.lengths = {4};
  const auto twice_at =
      [&](std::vector<std::int32_t> of_layer_and_head, std::int64_t layer, std::int64_t head) {
        e.ids = std::move(of_layer_and_head);
        e.view.table.ids = e.ids.data();
        e.view.k.layer_stride = e.view.v.layer_stride = layer;
        e.view.k.head_stride = e.view.v.head_stride = head;
        return e.check().table;
      };
  CHECK(twice_at({1, 2, 3, 4}, 0, 0) == -1);
  CHECK(twice_at({1, 1, 3, 4}, 0, 0) == 1);
  CHECK(twice_at({1, 2, 3, 1}, 0, 0) == 3);
  CHECK(twice_at({1, 2, 1, 2}, 10'000, 0) == -1);
  CHECK(twice_at({1, 2, 2, 2}, 10'000, 0) == 3);
  CHECK(twice_at({1, 1, 1, 1}, 10'000, 64) == -1);
  CHECK(twice_at({1, 2, 2, 4}, 0, 64) == -1);  // the second head's page 2 and the first's
}

TEST_CASE("check_tables: the first fault in the order of sequences is reported", "[check_view]") {
  Engine e;
  e.ids[0] = 99;
  e.lengths[1] = -4;
  CHECK(e.check().sequence == 0);
  CHECK(e.check().value == 99);
}

TEST_CASE("generation_of: a length, a used entry, a writable bit and an append each change it",
          "[check_view]") {
  Engine e;
  const std::uint64_t before = generation_of(e.view);
  CHECK(generation_of(e.view) == before);

  for (std::size_t s = 0; s < 2; ++s) {  // an append or a removal, within the page and beyond
    for (const std::int32_t change : {-1, 1, 2}) {
      e.lengths[s] += change;
      CHECK(generation_of(e.view) != before);
      e.lengths[s] -= change;
    }
  }
  for (const std::size_t entry : {0U, 1U, 4U, 5U, 6U}) {
    const std::int32_t id = e.ids[entry];
    e.ids[entry] = 0;
    CHECK(generation_of(e.view) != before);
    e.ids[entry] = id;
  }
  for (const std::size_t page : {5U, 3U, 8U, 2U, 9U}) {
    e.counts[page] = 2;
    CHECK(generation_of(e.view) != before);
    e.counts[page] = 1;
  }
  e.view.writable.bits = e.bits.data();
  CHECK(generation_of(e.view) == before);
  e.bits[0] &= ~(std::uint64_t{1} << 9U);
  CHECK(generation_of(e.view) != before);
  e.bits[0] = ~std::uint64_t{0};
  CHECK(generation_of(e.view) == before);

  std::swap(e.ids[0], e.ids[1]);  // the order of pages is the order of rows
  CHECK(generation_of(e.view) != before);
}

TEST_CASE("generation_of: an unused entry, an unused page and foreign data do not change it",
          "[check_view]") {
  Engine e;
  const std::uint64_t before = generation_of(e.view);
  e.ids[2] = 7;
  e.ids[3] = -5;
  e.ids[7] = 1'000'000;
  e.counts[7] = 9;
  e.counts[5] = 0;  // an engine that does not count a page of which it is the only owner
  CHECK(generation_of(e.view) == before);
}

TEST_CASE("generation_of: the state's generation, its hole and the V ids count", "[check_view]") {
  Engine e;
  e.view.states = e.states.data();
  const std::uint64_t before = generation_of(e.view);
  e.states[1].generation = 1;
  CHECK(generation_of(e.view) != before);
  e.states[1].generation = 0;
  e.states[0].append_row = 2;
  CHECK(generation_of(e.view) != before);
  e.states[0].append_row = -1;
  CHECK(generation_of(e.view) == before);

  e.view.sequences = 1;
  e.view.table.v_offset = 2;
  e.ids = {5, 3, 4, 6};
  const std::uint64_t split = generation_of(e.view);
  e.ids[3] = 7;
  CHECK(generation_of(e.view) != split);
}

TEST_CASE("generation_of: a length that the table cannot hold does not cause reads beyond it",
          "[check_view][edge]") {
  Engine e;
  e.ids.shrink_to_fit();  // ASan guards what follows the last entry
  e.view.table.ids = e.ids.data();
  e.lengths = {6, 17};
  const std::uint64_t first = generation_of(e.view);
  e.lengths[1] = -1;
  CHECK(generation_of(e.view) != first);
}
