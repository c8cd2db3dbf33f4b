// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/live_rows.hpp>

#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;

namespace {
struct World {
  PagedCache cache{{.pages = 3, .page_size = 4, .key_dim = 1}};
  CacheView view;
  explicit World(std::int32_t rows) {
    REQUIRE(cache.try_create().has_value());
    REQUIRE(cache.try_extend(SequenceId{0}, rows) == Status::ok);
    view = cache.view();
  }
  LiveRows rows() const { return LiveRows(HeadRef{view, SequenceId{0}, LayerId{0}, HeadId{0}}); }
  std::vector<std::int32_t> order() const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(rows().count()));
    rows().order(out);
    return out;
  }
};
}  // namespace

TEST_CASE("live_rows: a hole is counted in the extent and left out of the indices", "[live_rows]") {
  World w(5);
  CHECK(w.rows().count() == 5);
  CHECK(w.rows().extent() == 5);
  CHECK(w.rows().hole() == -1);
  CHECK(w.rows().row(4) == 4);
  CHECK(w.rows().before(4) == 4);
  w.view.states[0].live_rows = 4;
  w.view.states[0].append_row = 2;
  CHECK(w.rows().count() == 4);
  CHECK(w.rows().extent() == 5);
  CHECK(w.rows().hole() == 2);
  CHECK(w.rows().row(1) == 1);
  CHECK(w.rows().row(2) == 3);
  CHECK(w.rows().row(3) == 4);
  for (std::int32_t i = 0; i < 4; ++i) { CHECK(w.rows().before(w.rows().row(i)) == i); }
}

TEST_CASE("live_rows: they come in the order of their positions", "[live_rows]") {
  World w(5);
  CHECK(w.order() == std::vector<std::int32_t>{0, 1, 2, 3, 4});
  // Four live rows and a hole at row 1, out of order: rows 0 2 3 4 are positions 7 2 9 3.
  w.view.states[0].live_rows = 4;
  w.view.states[0].append_row = 1;
  w.view.states[0].ordered = false;
  const std::int32_t positions[] = {7, 0, 2, 9, 3};
  for (std::int32_t r = 0; r < 5; ++r) {
    w.view.positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = Position{positions[r]};
  }
  CHECK(w.order() == std::vector<std::int32_t>{1, 3, 0, 2});
  CHECK(w.rows().row_at(Position{9}) == 3);
  CHECK(w.rows().row_at(Position{0}) == -1);  // the hole's
  CHECK(w.rows().row_at(Position{8}) == -1);
  w.view.states[0].append_row = -1;
  w.view.states[0].live_rows = 5;
  CHECK(w.rows().row_at(Position{0}) == 1);
  CHECK(w.rows().row_at(Position{8}) == -1);
  w.view.positions = {};
  CHECK(w.rows().row_at(Position{4}) == 4);
  CHECK(w.rows().row_at(Position{5}) == -1);
}

TEST_CASE("live_rows: a length beyond the table counts as the table's room", "[live_rows][fault]") {
  World w(5);
  const std::int32_t room = w.view.table.max_pages * 4;
  for (const std::int32_t length : {room, room + 1, std::numeric_limits<std::int32_t>::max()}) {
    w.view.states[0].live_rows = length;
    CHECK(w.rows().count() == room);
    w.view.states[0].append_row = 3;
    CHECK(w.rows().extent() == room);
    w.view.states[0].append_row = -1;
    const std::int32_t padding = 3;
    w.view.first_rows = &padding;
    CHECK(w.rows().extent() == room - 3);
    w.view.first_rows = nullptr;
  }
  w.view.states[0].live_rows = -7;
  CHECK(w.rows().count() == 0);
  CHECK(w.rows().extent() == 0);
  w.view.states[0].live_rows = 5;
  w.view.states[0].append_row = 9;  // not among the rows
  CHECK(w.rows().hole() == -1);
}

TEST_CASE("for_each_run: a hole is left out wherever it lies, and rows keep their numbers",
          "[live_rows][edge]") {
  std::vector<float> memory(64);
  const std::vector<std::int32_t> ids{3, 1, 0};
  CacheView view;
  view.k = view.v = Plane::nhd(memory.data(), {4, 1, 4, DType::f32});
  view.page_size = 4;
  view.pages = 4;
  view.kv_heads = 1;
  view.sequences = 1;
  view.table.ids = ids.data();
  view.table.max_pages = 3;
  view.table.row_stride = 3;
  SequenceState state;
  view.states = &state;
  for (std::int32_t live = 0; live <= 11; ++live) {
    for (std::int32_t hole = -1; hole <= live; ++hole) {
      for (std::int32_t pad = 0; pad + live < 12; ++pad) {
        state.live_rows = live;
        state.append_row = hole;
        view.first_rows = &pad;
        std::vector<std::int32_t> seen;
        std::vector<std::int32_t> expected;
        bool places_right = true;
        for_each_run({view, SequenceId{0}, LayerId{0}, HeadId{0}}, [&](const Run& run) {
          for (std::int32_t i = 0; i < run.count; ++i) {
            const std::int32_t place = run.row + i + pad;
            places_right = places_right && raw(run.slot) + i == place % 4 &&
                           raw(run.k_page) == ids[static_cast<std::size_t>(place / 4)];
            seen.push_back(run.row + i);
          }
        });
        for (std::int32_t r = 0; static_cast<std::int32_t>(expected.size()) < live; ++r) {
          if (r != hole) { expected.push_back(r); }
        }
        CHECK((seen == expected && places_right));
      }
    }
  }
}
