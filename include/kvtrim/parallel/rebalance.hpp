// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace kvtrim {

/// Pages that one rank sends to another.
struct PageMove {
  std::int32_t from = 0;   ///< rank
  std::int32_t to = 0;     ///< rank
  std::int32_t pages = 0;  ///< how many

  friend constexpr bool operator==(const PageMove&, const PageMove&) = default;
};

/// How to even out the pages that ranks are left with after an eviction: afterwards no two ranks differ by more than one
/// page. As few pages are sent as that allows. Which pages, and the sending, are the engine's own.
///
/// \param pages  [ranks] pages that each has: the same list on all ranks, which then make the same plan
/// \returns moves, at most ranks - 1, each pair of ranks at most once
/// \par Ties
/// of ranks with as many pages, the lower one keeps the page more
/// \par Complexity
/// O(ranks log ranks); allocates
[[nodiscard]] inline std::vector<PageMove> rebalance(std::span<const std::int32_t> pages) {
  const auto ranks = static_cast<std::int64_t>(pages.size());
  if (ranks == 0) { return {}; }
  const std::int64_t total = std::accumulate(pages.begin(), pages.end(), std::int64_t{0});
  std::vector<std::int32_t> order(pages.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](std::int32_t rank) { return pages[static_cast<std::size_t>(rank)]; };
  std::ranges::sort(order, {}, [&](std::int32_t rank) { return std::pair(-at(rank), rank); });
  // The page more goes to those that have most: any other rank would have to be sent it.
  const auto share = [&](std::size_t place) {
    return total / ranks + (static_cast<std::int64_t>(place) < total % ranks ? 1 : 0);
  };
  std::vector<PageMove> moves;
  std::size_t taker = order.size() - 1;
  std::int64_t missing = share(taker) - at(order[taker]);
  for (std::size_t giver = 0; giver < order.size(); ++giver) {
    std::int64_t surplus = at(order[giver]) - share(giver);
    while (surplus > 0) {
      while (missing <= 0) {
        --taker;
        missing = share(taker) - at(order[taker]);
      }
      const std::int64_t n = std::min(surplus, missing);
      moves.push_back({order[giver], order[taker], static_cast<std::int32_t>(n)});
      surplus -= n;
      missing -= n;
    }
  }
  return moves;
}

}  // namespace kvtrim
