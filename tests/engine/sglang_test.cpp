// SPDX-License-Identifier: Apache-2.0
// Layouts and evictions: layouts_test.cpp.
#include <kvtrim/engine/sglang.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

using namespace kvtrim;

namespace {

struct Pool {
  std::vector<float> memory = std::vector<float>(24 * 2 * 3);
  Tensor<3> slots = Tensor<3>::contiguous(memory.data(), {24, 2, 3}, DType::f32);
  CacheView view = sglang::view(slots, slots.narrow(2, 0, 2), 4);
  std::vector<std::int32_t> req_to_token{0, 0, 0, 0, 0, 0, 8, 9, 10, 11, 20, 21};
  std::vector<std::int32_t> rows{1}, lengths{6};
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(2);
  sglang::Requests batch() { return {req_to_token.data(), 6, rows, lengths}; }
};

}  // namespace

TEST_CASE("sglang: pages of a request are those of its slots", "[sglang]") {
  Pool p;
  CHECK(p.view.pages == 6);
  CHECK(p.view.page_size == 4);
  REQUIRE(sglang::set_tables(p.view, p.batch(), p.ids) == Status::ok);
  CHECK((p.ids == std::vector<std::int32_t>{2, 5}));
  CHECK(p.view.live_rows({}, {}, {}) == 6);
  CHECK(p.view.key({}, {}, {}, 5) == reinterpret_cast<std::byte*>(p.memory.data() + 21 * 6));
}

TEST_CASE("sglang: slots that make no pages, or lengths beyond a row, are refused",
          "[sglang][edge]") {
  for (const std::size_t i : {6U, 7U, 9U, 10U, 11U}) {
    Pool p;
    p.req_to_token[i] += 1;
    CHECK(sglang::set_tables(p.view, p.batch(), p.ids) == Status::page_out_of_range);
    CHECK(p.view.table.ids == nullptr);
  }
  Pool p;
  p.lengths[0] = 7;
  CHECK(sglang::set_tables(p.view, p.batch(), p.ids) == Status::length_beyond_table);
  p.lengths[0] = 9;
  CHECK_THROWS_AS(sglang::set_tables(p.view, p.batch(), p.ids), std::invalid_argument);
  p.lengths = {};
  CHECK_THROWS_AS(sglang::set_tables(p.view, p.batch(), p.ids), std::invalid_argument);
  CHECK_THROWS_AS(sglang::view(p.slots, p.slots, 0), std::invalid_argument);
  CHECK_THROWS_AS(sglang::view(p.slots, p.slots, 25), std::invalid_argument);
}
