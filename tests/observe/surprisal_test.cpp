// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/surprisal.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

// Log-softmax as a textbook writes it.
double reference(const std::vector<float>& logits, std::size_t token) {
  double top = -HUGE_VAL;
  for (const float x : logits) { top = std::max(top, static_cast<double>(x)); }
  double sum = 0;
  for (const float x : logits) { sum += std::exp(static_cast<double>(x) - top); }
  return top + std::log(sum) - static_cast<double>(logits[token]);
}

std::vector<float> random_logits(std::size_t n, float spread, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> logits(n);
  for (float& x : logits) { x = spread * random.uniform(); }
  return logits;
}

}  // namespace

TEST_CASE("surprisal: equals minus the log-softmax in double, for every vocabulary and spread",
          "[surprisal]") {
  for (const std::size_t n : {1U, 2U, 7U, 64U, 4095U, 4096U, 4097U, 8192U, 49'152U}) {
    for (const float spread : {0.01F, 1.0F, 20.0F, 300.0F}) {
      const auto logits = random_logits(n, spread, n);
      for (const std::size_t token : {std::size_t{0}, n / 2, n - 1}) {
        const double expected = reference(logits, token);
        const double got = static_cast<double>(surprisal(logits, static_cast<std::int32_t>(token)));
        INFO("vocabulary " << n << ", spread " << spread << ", token " << token);
        CHECK(std::abs(got - expected) <= 1e-6 + 1e-6 * expected);
        CHECK(got >= 0);
      }
    }
  }
}

TEST_CASE("surprisal: a vocabulary of 2^20 equal logits loses nothing", "[surprisal][edge]") {
  const std::vector<float> logits(std::size_t{1} << 20U, 3.25F);
  CHECK(surprisal(logits, 777) == Catch::Approx(20 * std::log(2.0)).epsilon(1e-7));
  // One logit far above many: the many still count. e^-12 * 2^20 = 6.44.
  std::vector<float> peak(std::size_t{1} << 20U, -12.0F);
  peak[5] = 0;
  CHECK(surprisal(peak, 5) == Catch::Approx(reference(peak, 5)).epsilon(1e-6));
}

TEST_CASE("surprisal: a certain token surprises by 0, one logit alone too", "[surprisal][edge]") {
  CHECK(surprisal(std::vector<float>{-5}, 0) == 0.0F);
  CHECK(surprisal(std::vector<float>{200, 0, -200}, 0) == 0.0F);
  CHECK(surprisal(std::vector<float>{200, 0, -200}, 1) == 200.0F);
  CHECK(surprisal(std::vector<float>{3e38F, -3e38F}, 0) == 0.0F);
}

TEST_CASE("surprisal: a NaN logit gives NaN, wherever it stands", "[surprisal][nan]") {
  for (const std::size_t n : {1U, 2U, 3U, 8U, 9U, 16U, 17U, 33U, 5000U}) {
    for (const float nan : {nan_f, -nan_f, std::bit_cast<float>(0x7F80'0001U)}) {
      const std::vector<float> plain = random_logits(n, 5, 3);
      std::size_t missed = 0;
      for (std::size_t i = 0; i < n; i += n > 100 ? 37 : 1) {
        std::vector<float> logits = plain;
        logits[i] = nan;
        for (const std::size_t token : {std::size_t{0}, i, n - 1}) {
          missed += std::isnan(surprisal(logits, static_cast<std::int32_t>(token))) ? 0 : 1;
        }
      }
      INFO("vocabulary " << n);
      CHECK(missed == 0);
    }
  }
}

TEST_CASE("surprisal: a masked token (-inf) takes no part, and surprises without bound",
          "[surprisal][nan]") {
  std::vector<float> logits = random_logits(5000, 5, 4);
  std::vector<float> masked = logits;
  for (std::size_t i = 1000; i < 4999; ++i) { masked[i] = -inf_f; }
  CHECK(surprisal(masked, 10) == Catch::Approx(reference(masked, 10)).epsilon(1e-6));
  CHECK(surprisal(masked, 2000) == inf_f);
  CHECK(std::isnan(surprisal(std::vector<float>{-inf_f, -inf_f}, 0)));
  CHECK(std::isnan(surprisal(std::vector<float>{0, inf_f, 1}, 0)));
  CHECK(std::isnan(surprisal(std::vector<float>{0, inf_f, 1}, 1)));
}

TEST_CASE("surprisal: no bit depends on where the logits lie in memory", "[surprisal][property]") {
  const auto logits = random_logits(4999, 8, 6);
  const float expected = surprisal(logits, 17);
  for (std::size_t shift = 1; shift < 17; ++shift) {
    std::vector<float> moved(shift);
    moved.insert(moved.end(), logits.begin(), logits.end());
    CHECK(std::bit_cast<std::uint32_t>(surprisal(std::span(moved).subspan(shift), 17)) ==
          std::bit_cast<std::uint32_t>(expected));
  }
}
