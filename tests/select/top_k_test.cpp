// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/select/top_k.hpp>

#include "catch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

// Rule 1 in floating point: NaN and -inf lowest and equal, -0 equals +0, equal scores by index.
double rank_of(float x) {
  return std::isnan(x) ? -HUGE_VAL : x == 0 ? 0.0 : static_cast<double>(x);
}
std::vector<std::int32_t> reference(const std::vector<float>& scores, std::size_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  // A stable sort: std::stable_sort itself is deprecated code for clang with libstdc++ 12.
  const auto rank = [&](std::int32_t r) { return rank_of(scores[static_cast<std::size_t>(r)]); };
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return rank(a) != rank(b) ? rank(a) > rank(b) : a < b;
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<std::int32_t> selected(const std::vector<float>& scores, std::size_t k) {
  std::vector<std::uint32_t> keys(scores.size());
  const std::int64_t nan = order_keys(scores, keys);
  REQUIRE(nan ==
          std::count_if(scores.begin(), scores.end(), [](float x) { return std::isnan(x); }));
  std::vector<std::int32_t> kept(k, -1);
  top_k(keys, kept);
  return kept;
}

struct Input {
  std::string name;
  std::vector<float> scores;
};

// One input of each kind, of `n` scores.
std::vector<Input> inputs_of(std::size_t n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  const auto make = [&](auto f) {
    std::vector<float> out(n);
    for (std::size_t i = 0; i < n; ++i) { out[i] = f(i); }
    return out;
  };
  const auto uniform = [&] { return static_cast<float>(rng() % 100'000) / 1000 - 50; };
  const auto any_bits = [&](std::size_t) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(rng()));
  };
  std::vector<Input> all;
  all.push_back({"random", make([&](std::size_t) { return uniform(); })});
  all.push_back({"random bits", make(any_bits)});
  all.push_back({"probabilities", make([&](std::size_t) { return std::exp(uniform()); })});
  all.push_back({"ascending", make([](std::size_t i) { return static_cast<float>(i); })});
  all.push_back({"descending", make([](std::size_t i) { return -static_cast<float>(i); })});
  all.push_back({"all equal", make([](std::size_t) { return 0.25F; })});
  all.push_back({"two values", make([&](std::size_t) { return rng() % 2 == 0 ? 1.0F : 2.0F; })});
  all.push_back({"few values", make([&](std::size_t) { return static_cast<float>(rng() % 5); })});
  // Differ in the highest, the middle and the lowest digit of the radix only.
  for (const std::uint32_t unit : {1U << 21U, 1U << 10U, 1U}) {
    all.push_back({"near 1 by " + std::to_string(unit), make([&](std::size_t) {
                     return std::bit_cast<float>(0x3F80'0000U +
                                                 static_cast<std::uint32_t>(rng() % 7) * unit);
                   })});
  }
  all.push_back({"all NaN", make([](std::size_t) { return nan_f; })});
  all.push_back(
      {"NaN among", make([&](std::size_t) { return rng() % 3 == 0 ? -nan_f : uniform(); })});
  all.push_back({"infinities", make([&](std::size_t) {
                   const auto d = rng() % 5;
                   return d == 0 ? inf_f : d == 1 ? -inf_f : d == 2 ? nan_f : uniform();
                 })});
  all.push_back({"zeros", make([&](std::size_t) { return rng() % 2 == 0 ? -0.0F : 0.0F; })});
  all.push_back({"tiny", make([&](std::size_t) {
                   const auto d = rng() % 5;
                   return d == 0   ? 1e-45F
                          : d == 1 ? -1e-45F
                          : d == 2 ? -0.0F
                          : d == 3 ? 0.0F
                                   : std::numeric_limits<float>::min();
                 })});
  return all;
}

}  // namespace

TEST_CASE("top_k: equals a stable sort for every k of short inputs",
          "[top_k][property][ties][nan]") {
  for (std::size_t n = 0; n <= 24; ++n) {
    for (const Input& input : inputs_of(n, static_cast<std::uint32_t>(n))) {
      for (std::size_t k = 0; k <= n; ++k) {
        INFO(input.name << ", n " << n << ", k " << k);
        CHECK(selected(input.scores, k) == reference(input.scores, k));
      }
    }
  }
}

TEST_CASE("top_k: equals a stable sort for long inputs", "[top_k][property][ties][nan]") {
  for (const std::size_t n : {1000U, 4097U}) {
    for (const Input& input : inputs_of(n, static_cast<std::uint32_t>(n))) {
      for (const std::size_t k : {std::size_t{1}, std::size_t{2}, n / 10, n / 2, n - 1, n}) {
        INFO(input.name << ", n " << n << ", k " << k);
        CHECK(selected(input.scores, k) == reference(input.scores, k));
      }
    }
  }
}

TEST_CASE("top_k: equal scores keep the lower index", "[top_k][ties]") {
  CHECK(selected({1, 2, 1, 2, 1}, 3) == std::vector<std::int32_t>{0, 1, 3});
  CHECK(selected({5, 5, 5, 5}, 2) == std::vector<std::int32_t>{0, 1});
  CHECK(selected({0.0F, -0.0F, 0.0F}, 2) == std::vector<std::int32_t>{0, 1});
}

TEST_CASE("top_k: NaN goes before all but -inf, which is its equal", "[top_k][nan]") {
  CHECK(selected({nan_f, -3, -nan_f, -std::numeric_limits<float>::max()}, 2) ==
        std::vector<std::int32_t>{1, 3});
  CHECK(selected({-inf_f, nan_f, -1}, 2) == std::vector<std::int32_t>{0, 2});
  CHECK(selected({nan_f, -inf_f, -1}, 2) == std::vector<std::int32_t>{0, 2});
  CHECK(selected({1, inf_f, nan_f}, 1) == std::vector<std::int32_t>{1});
}

TEST_CASE("top_k: keys at both ends of 32 bits are ordered as integers", "[top_k][edge]") {
  const std::vector<std::uint32_t> keys{0, ~0U, 1, ~0U - 1, 0x8000'0000U, 0x7FFF'FFFFU};
  std::vector<std::int32_t> kept(3);
  top_k(keys, kept);
  CHECK(kept == std::vector<std::int32_t>{1, 3, 4});
}

TEST_CASE("top_k: writes nothing beyond its output", "[top_k][edge]") {
  const std::vector<std::uint32_t> keys{9, 8, 7, 6, 5, 4, 3, 2, 1};
  std::vector<std::int32_t> memory(10, -1);
  for (std::size_t k = 0; k <= 9; ++k) {
    std::fill(memory.begin(), memory.end(), -1);
    top_k(keys, std::span(memory).first(k));
    CHECK(std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(k),
                      memory.end(),
                      [](std::int32_t i) { return i == -1; }));
  }
}

TEST_CASE("order_keys: keeps the order of the scores and counts NaN", "[top_k][nan]") {
  const std::vector<float> scores{-inf_f, -2, -1e-45F, 0, 1e-45F, 3, inf_f};
  std::vector<std::uint32_t> keys(scores.size());
  CHECK(order_keys(scores, keys) == 0);
  CHECK(std::is_sorted(keys.begin(), keys.end()));
  CHECK(std::adjacent_find(keys.begin(), keys.end()) == keys.end());
  const std::vector<float> odd{nan_f, -nan_f, -inf_f, -0.0F, 0.0F};
  keys.resize(odd.size());
  CHECK(order_keys(odd, keys) == 2);
  CHECK((keys[0] == keys[1] && keys[1] == keys[2] && keys[2] < keys[3] && keys[3] == keys[4]));
  CHECK(order_keys({}, {}) == 0);
}
