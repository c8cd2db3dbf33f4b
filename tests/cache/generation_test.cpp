// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/generation.hpp>

#include "cache/engine_view.hpp"
#include "catch.hpp"
#include "support/generation.hpp"

#include <array>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using kvtrim::test::Engine;
using kvtrim::test::generation_of;

TEST_CASE("table_generation: a length, a used entry, a writable bit and an append each change it",
          "[generation]") {
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

TEST_CASE("table_generation: an unused entry, an unused page and foreign data do not change it",
          "[generation]") {
  Engine e;
  const std::uint64_t before = generation_of(e.view);
  e.ids[2] = 7;
  e.ids[3] = -5;
  e.ids[7] = 1'000'000;
  e.counts[7] = 9;
  e.counts[5] = 0;  // an engine that does not count a page of which it is the only owner
  CHECK(generation_of(e.view) == before);
}

TEST_CASE("table_generation: the state's generation, its hole and the V ids count",
          "[generation]") {
  Engine e;
  for (const std::size_t s : {0U, 1U}) {
    e.states[s].live_rows = e.states[s].next_position = e.lengths[s];
  }
  e.view.states = e.states.data();
  std::vector<std::int32_t> positions(2 * 2 * 3 * 16);
  e.view.positions = SequencePlane::dense(positions.data(), 2, 3, 16);
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

TEST_CASE("table_generation: a length that the table cannot hold does not cause reads beyond it",
          "[generation][edge]") {
  Engine e;
  e.ids.shrink_to_fit();  // ASan guards what follows the last entry
  e.view.table.ids = e.ids.data();
  e.lengths = {6, 17};
  const std::uint64_t first = generation_of(e.view);
  e.lengths[1] = -1;
  CHECK(generation_of(e.view) != first);
}
