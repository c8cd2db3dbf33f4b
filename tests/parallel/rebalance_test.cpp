// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/parallel/rebalance.hpp>

#include "catch.hpp"
#include "parallel/ranks.hpp"
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

#if defined(KVTRIM_TEST_MPI)
TEST_CASE("rebalance: the pages' bytes go from rank to rank", "[parallel]") {
  if (test::mpi == nullptr) { return; }
  int rank = 0;
  int ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  constexpr int page_bytes = 1000;
  // After an eviction: rank r has 7 r modulo 11 pages, whose bytes say whose they were.
  std::vector<std::int32_t> counts;
  for (std::int32_t r = 0; r < ranks; ++r) { counts.push_back(7 * r % 11); }
  std::vector<std::vector<unsigned char>> pages;
  for (std::int32_t p = 0; p < counts[static_cast<std::size_t>(rank)]; ++p) {
    pages.emplace_back(page_bytes, static_cast<unsigned char>(16 * rank + p));
  }
  const auto moves = rebalance(counts);
  std::vector<MPI_Request> requests;
  std::vector<std::vector<unsigned char>> sent;
  std::vector<std::vector<unsigned char>> received;
  for (const PageMove& m : moves) {
    for (std::int32_t i = 0; i < m.pages; ++i) {
      if (m.from == rank) {
        sent.push_back(pages.back());
        pages.pop_back();
      } else if (m.to == rank) {
        received.emplace_back(page_bytes);
      }
    }
  }
  std::size_t next_sent = 0;
  std::size_t next_received = 0;
  for (const PageMove& m : moves) {
    for (std::int32_t i = 0; i < m.pages; ++i) {
      if (m.from == rank) {
        MPI_Isend(sent[next_sent++].data(),
                  page_bytes,
                  MPI_BYTE,
                  m.to,
                  5,
                  MPI_COMM_WORLD,
                  &requests.emplace_back());
      } else if (m.to == rank) {
        MPI_Irecv(received[next_received++].data(),
                  page_bytes,
                  MPI_BYTE,
                  m.from,
                  5,
                  MPI_COMM_WORLD,
                  &requests.emplace_back());
      }
    }
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  pages.insert(pages.end(), received.begin(), received.end());
  CHECK(static_cast<std::int32_t>(pages.size()) ==
        after(counts, moves)[static_cast<std::size_t>(rank)]);
  // Every page is somewhere, once and whole.
  std::vector<int> seen(256);
  for (const auto& page : pages) {
    CHECK(std::ranges::count(page, page.front()) == page_bytes);
    ++seen[page.front()];
  }
  MPI_Allreduce(MPI_IN_PLACE, seen.data(), 256, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  for (std::int32_t r = 0; r < ranks; ++r) {
    for (std::int32_t p = 0; p < 16; ++p) {
      CHECK(seen[static_cast<std::size_t>(16 * r + p)] ==
            (p < counts[static_cast<std::size_t>(r)] ? 1 : 0));
    }
  }
}
#endif
