// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/order_key.hpp>

#include "catch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

using namespace kvtrim;

namespace {

float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// The rule of the design, in double: NaN counts as -inf, and doubles know that -0 == +0.
double reference(float score) {
  return std::isnan(score) ? -std::numeric_limits<double>::infinity() : static_cast<double>(score);
}

int sign_of(double a, double b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
int sign_of(std::uint64_t a, std::uint64_t b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

// Zeros, subnormals, borders of binades, the largest, infinities, NaN with both signs and payloads.
std::vector<float> special_scores() {
  std::vector<float> out;
  for (const std::uint32_t magnitude : {0x0000'0000U,
                                        0x0000'0001U,
                                        0x0000'0002U,
                                        0x007F'FFFFU,
                                        0x0080'0000U,
                                        0x0080'0001U,
                                        0x3F7F'FFFFU,
                                        0x3F80'0000U,
                                        0x3F80'0001U,
                                        0x4B80'0000U,
                                        0x7F7F'FFFEU,
                                        0x7F7F'FFFFU,
                                        0x7F80'0000U,
                                        0x7F80'0001U,
                                        0x7FBF'FFFFU,
                                        0x7FC0'0000U,
                                        0x7FFF'FFFFU}) {
    out.push_back(from_bits(magnitude));
    out.push_back(from_bits(magnitude | 0x8000'0000U));
  }
  return out;
}

// The order of `key` is the order of the doubles, for each pair.
std::int64_t disagreements(const std::vector<float>& scores) {
  std::int64_t wrong = 0;
  for (const float a : scores) {
    for (const float b : scores) {
      const int expected = sign_of(reference(a), reference(b));
      if (sign_of(std::uint64_t{order_key(a)}, std::uint64_t{order_key(b)}) != expected) {
        ++wrong;
      }
    }
  }
  return wrong;
}

}  // namespace

TEST_CASE("order_key: sorts all special values as double does", "[order_key][nan][edge]") {
  CHECK(disagreements(special_scores()) == 0);
}

TEST_CASE("order_key: sorts random bit patterns as double does", "[order_key][property]") {
  std::mt19937 rng(1);
  std::vector<float> scores = special_scores();
  while (scores.size() < 1500) {
    const std::uint32_t bits = static_cast<std::uint32_t>(rng());
    scores.push_back(from_bits(bits));
    scores.push_back(from_bits(bits + 1));  // its neighbour: differs in the last bit
    scores.push_back(from_bits(bits ^ 0x8000'0000U));
  }
  CHECK(disagreements(scores) == 0);
}

TEST_CASE("order_key: NaN of any sign and -inf are one lowest class", "[order_key][nan]") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float score : special_scores()) {
    const bool lowest = std::isnan(score) || score == -inf;
    CHECK((order_key(score) == 0) == lowest);
    CHECK(is_nan(score) == std::isnan(score));
  }
  CHECK(order_key(-std::numeric_limits<float>::max()) > 0);
}

TEST_CASE("order_key: -0 equals +0, and both lie between the smallest subnormals",
          "[order_key][edge]") {
  CHECK(order_key(-0.0F) == order_key(0.0F));
  CHECK(order_key(from_bits(1)) > order_key(-0.0F));
  CHECK(order_key(from_bits(0x8000'0001U)) < order_key(0.0F));
}

TEST_CASE("order_key: +inf is above the largest finite score", "[order_key][edge]") {
  CHECK(order_key(std::numeric_limits<float>::infinity()) >
        order_key(std::numeric_limits<float>::max()));
}

TEST_CASE("order_key: is usable in a constant expression", "[order_key]") {
  static_assert(order_key(1.0F) > order_key(0.5F));
  static_assert(order_key(-1.0F) < order_key(-0.5F));
  static_assert(row_key(1.0F, Position{0}) > row_key(1.0F, Position{1}));
  SUCCEED();
}

TEST_CASE("row_key: equal scores prefer the lower position, however they are written",
          "[order_key][ties][nan]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(row_key(0.0F, Position{3}) > row_key(-0.0F, Position{4}));
  CHECK(row_key(-0.0F, Position{3}) > row_key(0.0F, Position{4}));
  CHECK(row_key(nan, Position{3}) > row_key(-inf, Position{4}));
  CHECK(row_key(-inf, Position{3}) > row_key(-nan, Position{4}));
  CHECK(row_key(nan, Position{2147483647}) < row_key(-1e38F, Position{2147483647}));
  CHECK(row_key(2.0F, Position{2147483647}) > row_key(1.0F, Position{0}));
}

TEST_CASE("row_key: is unique among rows and independent of their order",
          "[order_key][ties][property]") {
  std::mt19937 rng(2);
  std::vector<std::pair<float, std::int32_t>> rows;
  const std::vector<float> few = special_scores();
  for (std::int32_t p = 0; p < 500; ++p) { rows.emplace_back(few[rng() % few.size()], p); }
  std::shuffle(rows.begin(), rows.end(), rng);

  auto expected = rows;
  std::sort(expected.begin(), expected.end(), [](const auto& a, const auto& b) {
    if (reference(a.first) != reference(b.first)) {
      return reference(a.first) > reference(b.first);
    }
    return a.second < b.second;
  });
  auto actual = rows;
  std::sort(actual.begin(), actual.end(), [](const auto& a, const auto& b) {
    return row_key(a.first, Position{a.second}) > row_key(b.first, Position{b.second});
  });
  std::int32_t differ = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (actual[i].second != expected[i].second) { ++differ; }
  }
  CHECK(differ == 0);
}

TEST_CASE("order_key: a key's score has that key again, and is the score itself unless NaN or -0",
          "[order_key]") {
  const auto check = [](float score) {
    const float back = score_of_key(order_key(score));
    return order_key(back) == order_key(score) &&
           (std::isnan(score) ? back == -std::numeric_limits<float>::infinity() : back == score);
  };
  for (const float x : special_scores()) { CHECK(check(x)); }
  std::mt19937 rng(3);
  bool all = true;
  for (int i = 0; i < 100'000; ++i) {
    all = all && check(from_bits(static_cast<std::uint32_t>(rng())));
  }
  CHECK(all);
  static_assert(score_of_key(order_key(-2.5F)) == -2.5F);
}
