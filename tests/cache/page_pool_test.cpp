// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/page_pool.hpp>

#include "catch.hpp"

#include <cstdint>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

using namespace kvtrim;

TEST_CASE("page_pool: hands out each page once, from 0, and then none", "[page_pool][edge]") {
  PagePool pool(3);
  CHECK(pool.try_acquire() == PageId{0});
  CHECK(pool.try_acquire() == PageId{1});
  CHECK(pool.try_acquire() == PageId{2});
  CHECK(pool.try_acquire() == std::nullopt);
  CHECK(pool.available() == 0);
  CHECK(pool.in_use() == 3);
  CHECK(pool.capacity() == 3);
}

TEST_CASE("page_pool: the page released last is handed out first", "[page_pool]") {
  PagePool pool(4);
  for (int i = 0; i < 4; ++i) { REQUIRE(pool.try_acquire()); }
  CHECK(pool.release(PageId{1}));
  CHECK(pool.release(PageId{3}));
  CHECK(pool.try_acquire() == PageId{3});
  CHECK(pool.try_acquire() == PageId{1});
}

TEST_CASE("page_pool: a shared page becomes free with its last owner only", "[page_pool]") {
  PagePool pool(2);
  const PageId page = *pool.try_acquire();
  pool.retain(page);
  pool.retain(page);
  CHECK(pool.ref_count(page) == 3);
  CHECK(pool.ref_counts()[raw(page)] == 3);
  CHECK(pool.in_use() == 1);  // counted once
  CHECK_FALSE(pool.release(page));
  CHECK_FALSE(pool.release(page));
  CHECK(pool.in_use() == 1);
  CHECK(pool.release(page));
  CHECK(pool.ref_count(page) == 0);
  CHECK(pool.available() == 2);
}

TEST_CASE("page_pool: no page is legal, a negative or too large count is refused with its number",
          "[page_pool][edge]") {
  PagePool none(0);
  CHECK(none.try_acquire() == std::nullopt);
  CHECK(none.capacity() == 0);
  CHECK_THROWS_AS(PagePool(-1), std::length_error);
  CHECK_THROWS_WITH(PagePool(2147483648),
                    Catch::Matchers::ContainsSubstring("2147483648") &&
                        Catch::Matchers::ContainsSubstring("PagePool"));
}

TEST_CASE("page_pool: after any order of acquire, retain and release, counts equal the owners",
          "[page_pool][property]") {
  std::mt19937 rng(11);
  constexpr std::int32_t capacity = 7;
  PagePool pool(capacity);
  std::vector<std::int32_t> owners(capacity, 0);
  std::int32_t wrong = 0;
  for (int step = 0; step < 5000; ++step) {
    const auto p = static_cast<std::int32_t>(rng() % capacity);
    std::int32_t& count = owners[static_cast<std::size_t>(p)];
    switch (rng() % 3U) {
      case 0:
        if (const auto page = pool.try_acquire()) {
          wrong += owners[static_cast<std::size_t>(raw(*page))]++ == 0 ? 0 : 1;  // it was free
        }
        break;
      case 1:
        if (count > 0) { pool.retain(PageId{p}), ++count; }
        break;
      default:
        if (count > 0) { wrong += pool.release(PageId{p}) == (--count == 0) ? 0 : 1; }
    }
    std::int32_t free = 0;
    for (std::int32_t q = 0; q < capacity; ++q) {
      const std::int32_t expected = owners[static_cast<std::size_t>(q)];
      wrong += pool.ref_count(PageId{q}) == expected ? 0 : 1;
      free += expected == 0 ? 1 : 0;
    }
    wrong += pool.available() == free && pool.in_use() == capacity - free ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE(
    "B089 page_pool: freed pages can be given out at once while somebody still looks at the counts",
    "[page_pool][fault]") {
  // Adapted: a view is a pointer to the counts and does not hold pages.
  PagePool pool(8);
  for (int i = 0; i < 8; ++i) { REQUIRE(pool.try_acquire()); }
  const std::int32_t* const seen_by_a_view = pool.ref_counts();
  std::set<std::int32_t> freed;
  for (std::int32_t p = 7; p >= 2; --p) {
    CHECK(pool.release(PageId{p}));
    freed.insert(p);
  }
  CHECK(pool.available() == 6);
  std::set<std::int32_t> given;
  for (int i = 0; i < 6; ++i) {
    const auto page = pool.try_acquire();
    REQUIRE(page);
    given.insert(raw(*page));
  }
  CHECK(given == freed);
  CHECK(pool.try_acquire() == std::nullopt);
  CHECK(seen_by_a_view == pool.ref_counts());
}
