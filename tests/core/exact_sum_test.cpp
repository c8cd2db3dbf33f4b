// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/exact_sum.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

// The nearest integer, ties to even, by the standard library.
std::uint64_t reference(float p) {
  return static_cast<std::uint64_t>(std::nearbyint(static_cast<double>(p) * exact_one));
}

std::vector<float> probabilities(std::size_t n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> exponent(-45, 0);
  std::vector<float> out(n);
  for (float& p : out) { p = std::exp2(exponent(rng)); }
  return out;
}

std::uint64_t sum_of(const std::vector<float>& p, std::size_t begin, std::size_t end) {
  std::uint64_t sum = 0;
  for (std::size_t i = begin; i < end; ++i) { sum += exact_units(p[i]); }
  return sum;
}

}  // namespace

TEST_CASE("exact_sum: a probability becomes the nearest number of units, ties to even",
          "[exact_sum]") {
  CHECK(exact_units(0.0F) == 0);
  CHECK(exact_units(1.0F) == std::uint64_t{1} << 40);
  CHECK(exact_units(0x1p-40F) == 1);
  CHECK(exact_units(0x1p-41F) == 0);         // half a unit: to even
  CHECK(exact_units(0x1.000002p-41F) == 1);  // just above half a unit
  CHECK(exact_units(0x1.8p-40F) == 2);       // one and a half: to even
  CHECK(exact_units(0x1.4p-39F) == 2);       // two and a half: to even
  CHECK(exact_units(std::numeric_limits<float>::denorm_min()) == 0);
  for (const float p : probabilities(100'000, 1)) {
    if (exact_units(p) != reference(p)) { FAIL_CHECK("p " << p); }
  }
  static_assert(exact_units(0.5F) == std::uint64_t{1} << 39);  // also where constants are computed
}

TEST_CASE("exact_sum: no addend is more than 1, and what is no probability counts as 0 or 1",
          "[exact_sum][edge][nan]") {
  for (const float above : {0x1.000002p0F, 2.0F, 1e30F, inf_f}) {
    CHECK(exact_units(above) == exact_units(1.0F));
  }
  for (const float below : {-0.0F, -1e-30F, -1.0F, -inf_f, nan_f, -nan_f}) {
    CHECK(exact_units(below) == 0);
  }
}

TEST_CASE(
    "exact_sum: any order and any parts give the same bits, within the stated error of double",
    "[exact_sum][property]") {
  std::mt19937 rng(2);
  for (const std::size_t n : {1U, 2U, 7U, 1000U, 100'000U}) {
    std::vector<float> p = probabilities(n, static_cast<std::uint32_t>(n));
    const std::uint64_t sum = sum_of(p, 0, n);
    const double exact = std::accumulate(
        p.begin(), p.end(), 0.0, [](double s, float x) { return s + static_cast<double>(x); });
    CHECK(std::abs(static_cast<double>(sum) / exact_one - exact) <=
          static_cast<double>(n) * 0x1p-41 + exact * 1e-12);
    for (int trial = 0; trial < 5; ++trial) {
      std::shuffle(p.begin(), p.end(), rng);
      const std::size_t a = rng() % (n + 1);
      const std::size_t b = a + rng() % (n + 1 - a);
      CHECK(sum_of(p, b, n) + sum_of(p, 0, a) + sum_of(p, a, b) == sum);
    }
  }
}

TEST_CASE("exact_sum: 64 bits hold the most addends, and one more is refused with both numbers",
          "[exact_sum][edge]") {
  const std::uint64_t most = static_cast<std::uint64_t>(exact_addends) * exact_units(1.0F);
  CHECK(most / exact_units(1.0F) == static_cast<std::uint64_t>(exact_addends));  // not wrapped
  CHECK(most + exact_units(1.0F) == 0);                                          // one more is
  CHECK(exact_mean(most, exact_addends) == 1.0F);
  CHECK_NOTHROW(check_exact_sum("who", 0));
  CHECK_NOTHROW(check_exact_sum("who", 16'777'215));
  try {
    check_exact_sum("who", 16'777'216);
    FAIL("not refused");
  } catch (const std::invalid_argument& e) {
    CHECK(std::string(e.what()) ==
          "who: an exact sum of 16777216 addends, but 64 bits hold at most 16777215");
  }
}

TEST_CASE("exact_sum: means, factors and scores come back as floats", "[exact_sum][nan]") {
  CHECK(exact_mean(exact_units(0.25F) + exact_units(0.5F), 1) == 0.75F);
  CHECK(exact_mean(exact_units(0.25F) + exact_units(0.5F), 3) == 0.25F);
  CHECK(exact_factor(4 * exact_units(1.0F)) == 0.25F);
  for (const float p :
       probabilities(1000, 3)) {  // a probability survives: 24 bits are kept down to 2^-16
    if (p >= 0x1p-16F) { CHECK(exact_mean(exact_units(p), 1) == p); }
  }
  // Among the most scores, NaN is seen whether one addend has it or all.
  const auto n = static_cast<std::uint64_t>(exact_scores);
  CHECK(exact_score_mean(n * exact_score_units(1.0F), exact_scores) == 1.0F);
  CHECK(std::isnan(exact_score_mean((n - 1) * exact_score_units(1.0F) + exact_score_units(nan_f),
                                    exact_scores)));
  CHECK(std::isnan(exact_score_mean(n * exact_score_units(nan_f), exact_scores)));
  CHECK(std::isnan(exact_score_mean(exact_score_units(-nan_f), 1)));
  CHECK(n * exact_score_units(nan_f) / n == exact_nan);  // not wrapped
}
