// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/saturating.hpp>

#include <kvtrim/core/arena.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;

TEST_CASE("saturating: products, sums and arenas stop at the largest number", "[core]") {
  static_assert(saturated_product({}) == 1 && saturated_product({3, 0, too_large}) == 0);
  static_assert(saturated_product({too_large, 1}) == too_large);
  static_assert(saturated_product({std::int64_t{1} << 32, std::int64_t{1} << 31}) == too_large);
  static_assert(saturated_product({std::int64_t{1} << 31, std::int64_t{1} << 31}) == std::int64_t{1}
                                                                                         << 62);
  static_assert(saturated_product({0x7FFF'FFFF, 0x7FFF'FFFF, 0x7FFF'FFFF}) == too_large);
  static_assert(saturated_sum({too_large - 1, 1}) == too_large);
  static_assert(saturated_sum({too_large, too_large, 5}) == too_large);
  static_assert(saturated_sum({1, 2, 3}) == 6);

  Arena arena;
  static_cast<void>(arena.take<double>(too_large / 8));
  static_cast<void>(arena.take<double>(too_large));
  for (int i = 0; i < 100; ++i) { static_cast<void>(arena.take<double>(too_large / 16)); }
  CHECK(arena.bytes() > std::size_t{1} << 61U);
  std::vector<std::byte> small(4096);
  Arena full(small);
  CHECK(full.take<double>(too_large / 4).empty());
  CHECK(full.take<double>(1).empty());
  CHECK_FALSE(full.ok());
}
