// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/random.hpp>

#include "catch.hpp"

#include <cstdint>
#include <set>
#include <vector>

using namespace score_test;

TEST_CASE("random: no bit depends on page size, page place, batch or thread",
          "[random][property]") {
  const RandomScorer scorer(RandomParams{.seed = 3});
  check_bits(scorer);
  check_ranges(scorer);
  check_hole(scorer);
  check_scratch(scorer);
}

TEST_CASE("random: scores are uniform over [0, 1) and differ by seed, layer, head and position",
          "[random]") {
  MethodWorld world({.sequences = 2, .max_rows = 4100});
  REQUIRE(world.append(0, 4000) == Status::ok);
  REQUIRE(world.append(1, 4000) == Status::ok);
  std::set<std::vector<float>> different;
  for (const std::uint64_t seed : {0U, 1U, 2U}) {
    const RandomScorer scorer(RandomParams{.seed = seed});
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto x = scores_in(scorer, world.view(), {}, 0, l, h);
        different.insert(x);
        CHECK(x == scores_in(scorer, world.view(), {}, 1, l, h));  // whichever sequence it is
        std::vector<std::int32_t> tenths(10);
        double sum = 0;
        for (const float v : x) {
          REQUIRE((v >= 0 && v < 1));
          sum += static_cast<double>(v);
          ++tenths[at(static_cast<std::int32_t>(v * 10))];
        }
        CHECK(std::abs(sum / 4000 - 0.5) < 0.02);  // four standard errors
        for (const std::int32_t n : tenths) { CHECK(std::abs(n - 400) < 80); }
        CHECK(std::set<float>(x.begin(), x.end()).size() > 3990);
      }
    }
  }
  CHECK(different.size() == 12);
}

TEST_CASE("random: a score is of the position, not of the row", "[random]") {
  const RandomScorer scorer(RandomParams{});
  MethodWorld world({});
  REQUIRE(world.append(0, 20) == Status::ok);
  const auto before = scores_in(scorer, world.view(), {}, 0, 0, 1);
  world.view().positions.at<Position>(SequenceId{0}, LayerId{0}, HeadId{1}, 3) = Position{17};
  CHECK(scores_in(scorer, world.view(), {}, 0, 0, 1)[3] == before[17]);
}
