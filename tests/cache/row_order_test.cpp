// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/row_order.hpp>

#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"

#include <cstdint>
#include <vector>

using namespace kvtrim;

TEST_CASE("row_order: a hole is left out of the live indices", "[row_order]") {
  STATIC_REQUIRE(detail::row_of(3, -1) == 3);
  STATIC_REQUIRE(detail::row_of(3, 4) == 3);
  STATIC_REQUIRE(detail::row_of(4, 4) == 5);
  STATIC_REQUIRE(detail::row_of(0, 0) == 1);
}

TEST_CASE("row_order: live rows come in the order of their positions", "[row_order]") {
  PagedCache cache({.pages = 2, .page_size = 4, .key_dim = 1});
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_extend(SequenceId{0}, 5) == Status::ok);
  CacheView view = cache.view();
  std::vector<std::int32_t> order(5);
  detail::order_rows(view, SequenceId{0}, LayerId{0}, HeadId{0}, order);
  CHECK(order == std::vector<std::int32_t>{0, 1, 2, 3, 4});

  // Four live rows and a hole at row 1, out of order: rows 0 2 3 4 are positions 7 2 9 3.
  view.states[0].live_rows = 4;
  view.states[0].append_row = 1;
  view.states[0].ordered = false;
  const std::int32_t positions[] = {7, 0, 2, 9, 3};
  for (std::int32_t r = 0; r < 5; ++r) {
    view.positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = Position{positions[r]};
  }
  order.resize(4);
  detail::order_rows(view, SequenceId{0}, LayerId{0}, HeadId{0}, order);
  CHECK(order == std::vector<std::int32_t>{1, 3, 0, 2});
}
