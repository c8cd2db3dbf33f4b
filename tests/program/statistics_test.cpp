// SPDX-License-Identifier: Apache-2.0
#include "evaluate/statistics.hpp"

#include <cmath>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <vector>

#include "catch.hpp"

using Catch::Matchers::WithinAbs;
using evaluate::bootstrap;
using evaluate::holm;
using evaluate::mcnemar;
using evaluate::Weighted;
using evaluate::wilson;

TEST_CASE("wilson: agrees with published intervals", "[statistics][paper]") {
  // Newcombe 1998, Table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
  CHECK_THAT(wilson(81, 263).low, WithinAbs(0.2553, 5e-5));
  CHECK_THAT(wilson(81, 263).high, WithinAbs(0.3662, 5e-5));
  CHECK_THAT(wilson(15, 148).low, WithinAbs(0.0624, 5e-5));
  CHECK_THAT(wilson(15, 148).high, WithinAbs(0.1605, 5e-5));
  CHECK(wilson(0, 20).low == 0);
  CHECK_THAT(wilson(0, 20).high, WithinAbs(0.1611, 5e-5));
  CHECK_THAT(wilson(1, 29).low, WithinAbs(0.0061, 5e-5));
  CHECK_THAT(wilson(1, 29).high, WithinAbs(0.1718, 5e-5));
}

TEST_CASE("wilson: a share of all is bounded by 1, of none by nothing", "[statistics][edge]") {
  CHECK(wilson(20, 20).high == 1);
  CHECK_THAT(wilson(20, 20).low, WithinAbs(1 - wilson(0, 20).high, 1e-12));
  CHECK(wilson(0, 0).low == 0);
  CHECK(wilson(0, 0).high == 1);
  CHECK_THROWS_AS(wilson(3, 2), std::invalid_argument);
  CHECK_THROWS_AS(wilson(-1, 2), std::invalid_argument);
  CHECK_THROWS_AS(wilson(std::nan(""), 2), std::invalid_argument);
}

TEST_CASE("wilson: covers the mean of values within 0 and 1 at least as often as asked",
          "[statistics][property]") {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> values(0, 1);
  int inside = 0;
  for (int i = 0; i < 200; ++i) {
    double sum = 0;
    for (int n = 0; n < 12; ++n) sum += values(random);
    const auto [low, high] = wilson(sum, 12);
    inside += low <= 0.5 && 0.5 <= high ? 1 : 0;
  }
  CHECK(inside >= 190);
}

TEST_CASE("mcnemar: the exact tail of fair coins", "[statistics]") {
  CHECK(mcnemar(0, 0) == 1);
  CHECK_THAT(mcnemar(0, 5), WithinAbs(2.0 / 32, 1e-12));
  CHECK_THAT(mcnemar(6, 0), WithinAbs(2.0 / 64, 1e-12));
  CHECK_THAT(mcnemar(1, 7), WithinAbs(2 * (1 + 8) / 256.0, 1e-12));
  CHECK(mcnemar(4, 4) == 1);  // the two tails overlap
  CHECK_THAT(mcnemar(3, 9), WithinAbs(mcnemar(9, 3), 1e-12));
  CHECK(mcnemar(0, 5000) < 1e-300);
  CHECK_THAT(mcnemar(2500, 2500), WithinAbs(1, 1e-9));
  CHECK_THROWS_AS(mcnemar(-1, 2), std::invalid_argument);
}

TEST_CASE("holm: steps down, never below the one before", "[statistics]") {
  const std::vector<double> p{0.01, 0.04, 0.03, 0.005};
  const auto adjusted = holm(p);
  REQUIRE(adjusted.size() == 4);
  CHECK_THAT(adjusted[3], WithinAbs(0.02, 1e-12));
  CHECK_THAT(adjusted[0], WithinAbs(0.03, 1e-12));
  CHECK_THAT(adjusted[2], WithinAbs(0.06, 1e-12));
  CHECK_THAT(adjusted[1], WithinAbs(0.06, 1e-12));  // not 0.04
  CHECK(holm(std::vector{0.9, 0.8}) == std::vector{1.0, 1.0});
  CHECK(holm({}).empty());
  CHECK_THROWS_AS(holm(std::vector{0.5, std::nan("")}), std::invalid_argument);
  CHECK_THROWS_AS(holm(std::vector{1.5}), std::invalid_argument);
}

TEST_CASE("bootstrap: covers the mean of normal values about as often as asked",
          "[statistics][property]") {
  std::mt19937_64 random(5);
  std::normal_distribution<double> values(3, 1);
  int inside = 0;
  for (int i = 0; i < 200; ++i) {
    std::vector<Weighted> sample(30);
    for (auto& s : sample) s.value = values(random);
    const auto [low, high] = bootstrap(sample, 400, 0.95, static_cast<std::size_t>(i));
    inside += low <= 3 && 3 <= high ? 1 : 0;
  }
  CHECK(inside > 174);  // 0.95 x 200 = 190, less 4 standard deviations and what 30 values lack
  CHECK(inside < 200);
}

TEST_CASE("bootstrap: weights count, and the same seed gives the same interval", "[statistics]") {
  const std::vector<Weighted> values{{1, 3}, {5, 1}, {2, 0}};
  CHECK(evaluate::mean(values) == 2);
  const auto first = bootstrap(values, 500), again = bootstrap(values, 500);
  CHECK(first.low == again.low);
  CHECK(first.high == again.high);
  CHECK(first.low == 1);  // of draws without the second prompt
  CHECK(first.high > 2);
  const std::vector<Weighted> one{{4, 1}};
  CHECK(bootstrap(one).low == 4);
  CHECK(bootstrap(one).high == 4);
  CHECK_THROWS_AS(bootstrap({}), std::invalid_argument);
  CHECK_THROWS_AS(bootstrap(std::vector<Weighted>{{1, 0}}), std::invalid_argument);
  CHECK_THROWS_AS(bootstrap(one, 0), std::invalid_argument);
}
