// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/types.hpp>

#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <type_traits>

using namespace kvtrim;

// A page cannot be passed where a head is meant, nor a count where a page is.
template <class From, class... To>
constexpr bool converts_to_any = (std::is_convertible_v<From, To> || ...);
static_assert(!converts_to_any<PageId, Slot, Position, SequenceId, LayerId, HeadId, std::int32_t>);
static_assert(!converts_to_any<Slot, PageId, Position, SequenceId, LayerId, HeadId, std::int32_t>);
static_assert(!converts_to_any<Position, PageId, Slot, SequenceId, LayerId, HeadId, std::int64_t>);
static_assert(!converts_to_any<HeadId, PageId, Slot, Position, SequenceId, LayerId, bool>);
static_assert(!converts_to_any<std::int32_t, PageId, Slot, Position, SequenceId, LayerId, HeadId>);

TEST_CASE("types: an index type keeps its integer, and the null page is not a page of a pool",
          "[types]") {
  CHECK(raw(PageId{7}) == 7);
  CHECK(raw(Position{std::numeric_limits<std::int32_t>::max()}) == 2147483647);
  CHECK(raw(null_page) < 0);
}

TEST_CASE("types: pages_for is the least number of pages that holds the rows", "[types][edge]") {
  for (std::int32_t page_size = 1; page_size <= 17; ++page_size) {
    for (std::int32_t rows = 0; rows <= 70; ++rows) {
      std::int32_t pages = 0;
      while (pages * page_size < rows) { ++pages; }
      CHECK(pages_for(rows, page_size) == pages);
    }
  }
}

TEST_CASE("types: pages_for does not wrap at the largest count", "[types][edge]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  CHECK(pages_for(most, 1) == most);
  CHECK(pages_for(most, 16) == 134217728);
  CHECK(pages_for(most, most) == 1);
  CHECK(pages_for(1, most) == 1);
}
