// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/select/victim.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

using namespace kvtrim;

namespace {

// The rule in words: of the candidates by rank, the lowest score; NaN and -inf below all; of equal ones the last position.
std::int32_t expected(const std::vector<float>& scores,
                      const std::vector<std::int32_t>& positions,
                      const CandidateRange& range) {
  std::vector<std::int32_t> rows(scores.size());
  std::iota(rows.begin(), rows.end(), 0);
  const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };
  std::sort(rows.begin(), rows.end(), [&](std::int32_t a, std::int32_t b) {
    return positions[at(a)] < positions[at(b)];
  });
  const auto value = [&](std::int32_t r) {
    const float x = scores[at(r)];
    return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
  };
  std::int32_t victim = rows[at(range.begin)];
  for (std::int32_t rank = range.begin; rank < range.end; ++rank) {
    if (value(rows[at(rank)]) <= value(victim)) { victim = rows[at(rank)]; }
  }
  return victim;
}

}  // namespace

TEST_CASE("victim: the lowest score of the candidates, the last position among equals",
          "[victim][ties][nan][property]") {
  test::Random random(3);
  for (std::int32_t round = 0; round < 400; ++round) {
    const std::int32_t n = 1 + random.below(round % 10 == 0 ? 1500 : 40);
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> scores(size);
    for (float& x : scores) {
      const std::int32_t kind = random.below(12);
      x = kind == 0   ? std::nanf("")
          : kind == 1 ? -std::numeric_limits<float>::infinity()
          : kind == 2 ? -0.0F
                      : static_cast<float>(random.below(6));
    }
    // Positions with gaps, or without; in order, or shuffled.
    std::vector<std::int32_t> positions(size);
    std::int32_t next = 0;
    for (std::int32_t& p : positions) {
      if (round % 3 == 1) { next += random.below(3); }
      p = next++;
    }
    const bool ordered = round % 2 == 0;
    for (std::size_t i = size; !ordered && i > 1; --i) {
      std::swap(positions[i - 1],
                positions[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(i)))]);
    }
    const std::int32_t begin = random.below(n);
    const CandidateRange range{begin, begin + 1 + random.below(n - begin)};
    std::vector<std::int32_t> scratch(size);
    const Victim victim =
        lowest_row(scores, ordered ? nullptr : positions.data(), range, next, scratch);
    INFO("round " << round << ", " << n << " rows, ranks " << range.begin << " to " << range.end);
    REQUIRE(victim.row == expected(scores, positions, range));
    std::vector<std::int32_t> sorted(positions);
    std::sort(sorted.begin(), sorted.end());
    std::int64_t nan = 0;
    for (std::size_t r = 0; r < size; ++r) {
      const auto rank = std::find(sorted.begin(), sorted.end(), positions[r]) - sorted.begin();
      nan += rank >= range.begin && rank < range.end && std::isnan(scores[r]) ? 1 : 0;
    }
    REQUIRE(victim.nan_count == nan);
  }
}
