// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/compensated.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

using kvtrim::add_compensated;

namespace {

constexpr std::size_t steps = 1'000'000;

struct Sums {
  double exact = 0;  // double: 29 more bits than the addends
  double pair = 0;   // what is under test
  float plain = 0;   // what it replaces
};

Sums sum_of(const std::vector<float>& addends) {
  Sums out;
  float sum = 0;
  float compensation = 0;
  for (const float x : addends) {
    out.exact += static_cast<double>(x);
    out.plain += x;
    add_compensated(sum, compensation, x);
  }
  out.pair = static_cast<double>(sum) + static_cast<double>(compensation);
  return out;
}

double error_of(double value, double exact) {
  return std::fabs(value - exact) / exact;
}

enum class Order { as_drawn, ascending, descending };

// Softmax-like addends, most of them small, behind one heavy one (the column sum of a long prompt).
std::vector<float> addends_of(float heavy, Order order, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
  std::vector<float> out(steps);
  for (float& x : out) { x = std::pow(uniform(rng), 8.0F); }
  if (order == Order::ascending) { std::sort(out.begin(), out.end()); }
  if (order == Order::descending) { std::sort(out.begin(), out.end(), std::greater<>()); }
  out.front() = heavy;
  return out;
}

}  // namespace

TEST_CASE("compensated: a million adds behind one heavy addend stay within 1e-6 of double",
          "[compensated][property]") {
  for (const float heavy : {0.0F, 1.0F, 4096.0F, 32768.0F, 1e6F, 16777216.0F, 1e9F}) {
    for (const Order order : {Order::as_drawn, Order::ascending, Order::descending}) {
      const Sums sums = sum_of(addends_of(heavy, order, 7));
      INFO("heavy " << heavy << ", order " << static_cast<int>(order));
      CHECK(error_of(sums.pair, sums.exact) < 1e-6);
    }
  }
}

TEST_CASE("compensated: addends too small to move the sum are not lost, nor their own sum rounded",
          "[compensated][property]") {
  // All of them go into the compensation: if that is a plain sum, it drifts as one.
  for (const float x : {0.3F, 0.1F, 0.001F}) {
    std::vector<float> addends(steps, x);
    addends.front() = x * 16777216.0F * 2;
    const Sums sums = sum_of(addends);
    INFO("addend " << x);
    CHECK(error_of(sums.pair, sums.exact) < 1e-6);
  }
}

TEST_CASE("compensated: plain float fails the same sums, so they can fail",
          "[compensated][property]") {
  const Sums late = sum_of(addends_of(32768.0F, Order::descending, 7));
  CHECK(error_of(static_cast<double>(late.plain), late.exact) > 1e-6);
  const Sums lost = sum_of(std::vector<float>(steps, 0.3F));
  CHECK(error_of(static_cast<double>(lost.plain), lost.exact) > 1e-4);
  CHECK(error_of(lost.pair, lost.exact) < 1e-6);
}

TEST_CASE("compensated: probabilities that are multiples of 2^-12 are summed exactly",
          "[compensated][property]") {
  std::mt19937 rng(8);
  std::int64_t units = 4096 * std::int64_t{30'000};
  float sum = 30'000.0F;
  float compensation = 0;
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < steps; ++i) {
    const auto unit = static_cast<std::int32_t>(rng() % 4097U);
    units += unit;
    add_compensated(sum, compensation, std::ldexp(static_cast<float>(unit), -12));
    const double value = static_cast<double>(sum) + static_cast<double>(compensation);
    if (value != std::ldexp(static_cast<double>(units), -12)) { ++wrong; }
  }
  CHECK(wrong == 0);
}

TEST_CASE("compensated: works in a constant expression and starts exact", "[compensated]") {
  constexpr float rest = [] {
    float sum = 16777216.0F;  // 2^24: plain float stops growing by ones here
    float compensation = 0;
    for (int i = 0; i < 3; ++i) { add_compensated(sum, compensation, 1.0F); }
    return sum - 16777216.0F + compensation;
  }();
  STATIC_REQUIRE(rest == 3.0F);
}
