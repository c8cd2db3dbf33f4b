// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/parallel/placement.hpp>

#include "catch.hpp"

#include <cstdint>
#include <set>
#include <vector>

using namespace kvtrim;

TEST_CASE("placement: where each token of a small prompt is", "[parallel]") {
  const auto owners = [](Spread spread, std::int32_t tokens, std::int32_t page_size) {
    const Placement placement(spread, 3, tokens, page_size);
    std::vector<std::int32_t> out;
    for (std::int32_t p = 0; p < tokens; ++p) { out.push_back(placement.owner(Position{p})); }
    return out;
  };
  using V = std::vector<std::int32_t>;
  CHECK(owners(Spread::contiguous, 12, 1) == V{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2});
  CHECK(owners(Spread::contiguous, 10, 2) == V{0, 0, 0, 0, 1, 1, 1, 1, 2, 2});
  CHECK(owners(Spread::zigzag, 12, 1) == V{0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0});
  CHECK(owners(Spread::page_striped, 8, 2) == V{0, 0, 1, 1, 2, 2, 0, 0});
  CHECK(owners(Spread::token_striped, 8, 2) == V{0, 1, 2, 0, 1, 2, 0, 1});
}

TEST_CASE("placement: pages lie on one rank, runs are counted, later tokens have a place",
          "[parallel][edge]") {
  for (const Spread spread :
       {Spread::contiguous, Spread::zigzag, Spread::page_striped, Spread::token_striped}) {
    for (const std::int32_t ranks : {1, 2, 3, 8}) {
      for (const std::int32_t tokens : {0, 1, 5, 64, 200}) {
        const Placement placement(spread, ranks, tokens, 4);
        std::vector<std::set<std::int32_t>> runs(static_cast<std::size_t>(ranks));
        for (std::int32_t p = 0; p < tokens + 9; ++p) {
          const std::int32_t run = placement.run(Position{p});
          const std::int32_t owner = placement.owner(Position{p});
          REQUIRE(owner >= 0);
          REQUIRE(owner < ranks);
          REQUIRE(owner == placement.owner_of_run(run));
          if (p > 0) { REQUIRE(run >= placement.run(Position{p - 1})); }
          if (p % 4 != 0 && spread != Spread::token_striped) {
            REQUIRE(owner == placement.owner(Position{p - 1}));
          }
          runs[static_cast<std::size_t>(owner)].insert(run);
        }
        for (const auto& own : runs) {
          REQUIRE(static_cast<std::int32_t>(own.size()) <= placement.runs_per_rank(tokens + 9));
        }
      }
    }
  }
}

TEST_CASE("placement: sizes that cannot be are refused with their numbers", "[parallel][edge]") {
  CHECK_THROWS_WITH(Placement(Spread::zigzag, 0, 5, 4),
                    Catch::Matchers::ContainsSubstring("0 ranks, 5 tokens, page size 4"));
  CHECK_THROWS_AS(Placement(Spread::zigzag, 1, -1, 4), std::invalid_argument);
  CHECK_THROWS_AS(Placement(Spread::zigzag, 1, 1, 0), std::invalid_argument);
}
