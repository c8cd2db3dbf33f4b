// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/parallel/rebalance.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

using namespace kvtrim;

namespace {

std::int32_t sent(const std::vector<PageMove>& moves) {
  return std::accumulate(
      moves.begin(), moves.end(), 0, [](std::int32_t n, const PageMove& m) { return n + m.pages; });
}

// Pages afterwards; requires that each move can be made.
std::vector<std::int32_t> after(std::vector<std::int32_t> pages,
                                const std::vector<PageMove>& moves) {
  std::set<std::pair<std::int32_t, std::int32_t>> pairs;
  for (const PageMove& m : moves) {
    REQUIRE(m.pages > 0);
    REQUIRE(m.from != m.to);
    REQUIRE(pairs.insert({m.from, m.to}).second);
    REQUIRE((pages[static_cast<std::size_t>(m.from)] -= m.pages) >= 0);
    pages[static_cast<std::size_t>(m.to)] += m.pages;
  }
  return pages;
}

// The fewest pages that any even end costs, by trying all ends.
std::int32_t fewest(const std::vector<std::int32_t>& pages) {
  const std::int32_t total = std::accumulate(pages.begin(), pages.end(), 0);
  const auto ranks = static_cast<std::int32_t>(pages.size());
  std::int32_t best = std::numeric_limits<std::int32_t>::max();
  const std::function<void(std::size_t, std::int32_t, std::int32_t)> next =
      [&](std::size_t rank, std::int32_t left, std::int32_t cost) {
        if (rank == pages.size()) {
          if (left == 0) { best = std::min(best, cost); }
          return;
        }
        for (const std::int32_t share : {total / ranks, total / ranks + 1}) {
          next(rank + 1, left - share, cost + std::max(0, pages[rank] - share));
        }
      };
  next(0, total, 0);
  return best;
}

}  // namespace

TEST_CASE("rebalance: no two ranks differ by more than a page, and no plan sends fewer",
          "[parallel][property]") {
  test::Random random(3);
  for (std::int32_t i = 0; i < 300; ++i) {
    std::vector<std::int32_t> pages(static_cast<std::size_t>(1 + random.below(6)));
    for (std::int32_t& x : pages) { x = random.below(i % 3 == 0 ? 3 : 12); }
    const auto moves = rebalance(pages);
    const auto even = after(pages, moves);
    const auto [least, most] = std::ranges::minmax(even);
    CHECK(most - least <= 1);
    CHECK(sent(moves) == fewest(pages));
    CHECK(moves.size() < pages.size());
  }
}

TEST_CASE("rebalance: even ranks send nothing, and one that is empty gets its share",
          "[parallel][edge]") {
  CHECK(rebalance({}).empty());
  CHECK(rebalance(std::vector<std::int32_t>{7}).empty());
  CHECK(rebalance(std::vector<std::int32_t>{3, 2, 3}).empty());
  CHECK(rebalance(std::vector<std::int32_t>{0, 0}).empty());
  CHECK(rebalance(std::vector<std::int32_t>{9, 0, 0}) ==
        std::vector<PageMove>{{0, 2, 3}, {0, 1, 3}});
}
