// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_tables.hpp>

#include "cache/engine_view.hpp"
#include "catch.hpp"
#include "support/generation.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;
using kvtrim::test::Engine;
using kvtrim::test::generation_of;
using kvtrim::test::pages;

TEST_CASE("check_tables: a sound view has no fault, whatever lies beyond the live rows",
          "[check_tables]") {
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
    "[check_tables][edge]") {
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
    "[check_tables][edge]") {
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
          "[check_tables][edge]") {
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
          "[check_tables][edge]") {
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
          "[check_tables][edge]") {
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

TEST_CASE("check_tables: a hole needs its page too", "[check_tables][edge]") {
  Engine e;
  e.view.lengths = nullptr;
  e.view.states = e.states.data();
  e.states[0].live_rows = e.states[0].next_position = 8;
  e.states[1].live_rows = e.states[1].next_position = 9;
  std::vector<std::int32_t> positions(2 * 2 * 3 * 16);
  e.view.positions = SequencePlane::dense(positions.data(), 2, 3, 16);
  CHECK(e.check().status == Status::ok);
  e.states[0].append_row = 3;  // 9 rows in use
  CHECK(e.check().status == Status::page_out_of_range);
  CHECK(e.check().entry == 2);
}

TEST_CASE("check_tables: K and V with their own ids must not share a page", "[check_tables]") {
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
          "[check_tables][edge]") {
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
          "[check_tables][edge]") {
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

TEST_CASE("check_tables: lengths come before entries, and sequences in their order",
          "[check_tables]") {
  Engine e;
  e.ids[0] = 99;
  e.ids[5] = 98;
  CHECK(e.check().sequence == 0);
  CHECK(e.check().value == 99);
  e.lengths[1] = -4;
  CHECK(e.check().sequence == 1);
  CHECK(e.check().value == -4);
}
