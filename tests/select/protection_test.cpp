// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/select/protection.hpp>

#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;

TEST_CASE("protection: the candidates are the rows that are neither first nor last",
          "[protection][property]") {
  for (std::int32_t live = 0; live < 20; ++live) {
    for (std::int32_t sinks = 0; sinks < 25; ++sinks) {
      for (std::int32_t recent = 0; recent < 25; ++recent) {
        std::vector<std::int32_t> expected;
        for (std::int32_t rank = 0; rank < live; ++rank) {
          if (rank >= sinks && rank < live - recent) { expected.push_back(rank); }
        }
        const CandidateRange range = candidates({sinks, recent}, live);
        std::vector<std::int32_t> got;
        for (std::int32_t rank = range.begin; rank < range.end; ++rank) { got.push_back(rank); }
        if (got != expected || range.count() != static_cast<std::int32_t>(expected.size()) ||
            range.begin < 0 || range.end > live) {
          FAIL_CHECK("sinks " << sinks << ", recent " << recent << ", live " << live << ": ["
                              << range.begin << ", " << range.end << ")");
        }
      }
    }
  }
  SUCCEED();
}

TEST_CASE("protection: sizes up to 31 bits do not overflow", "[protection][edge]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  STATIC_REQUIRE(candidates({most, most}, most).count() == 0);
  STATIC_REQUIRE(candidates({most, most}, 5).count() == 0);
  STATIC_REQUIRE(candidates({0, 0}, most).count() == most);
  STATIC_REQUIRE(candidates({1, most}, 5).count() == 0);
  STATIC_REQUIRE(candidates({}, 5).count() == 5);
  STATIC_REQUIRE(candidates({2, 3}, 0).count() == 0);
}
