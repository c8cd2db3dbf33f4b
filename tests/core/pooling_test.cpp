// SPDX-License-Identifier: Apache-2.0
#include "score/score_fixture.hpp"

#include <kvtrim/core/pooling.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace score_test;

namespace {

std::vector<float> pooled(const std::vector<float>& in, Pooling pooling, std::int32_t kernel) {
  std::vector<float> out(in.size(), -7.0F);
  pool(in, pooling, kernel, out);
  return out;
}

}  // namespace

TEST_CASE("pooling: equals the definition for every length, also where the kernel is longer",
          "[pooling][property]") {
  std::mt19937 rng(1);
  for (std::int64_t n = 0; n < 20; ++n) {
    for (std::int64_t half = 0; half < 12; ++half) {
      std::vector<float> in;
      for (std::int64_t i = 0; i < n; ++i) {
        in.push_back(static_cast<float>(static_cast<std::int32_t>(rng() % 64) - 32) / 8);
      }
      std::vector<double> average;
      std::vector<double> largest;
      for (std::int64_t i = 0; i < n; ++i) {
        double sum = 0;
        double most = -HUGE_VAL;
        for (std::int64_t j = i - half; j <= i + half; ++j) {
          const bool outside = j < 0 || j >= n;
          sum += outside ? 0.0 : static_cast<double>(in[at(j)]);
          most = outside ? most : std::fmax(most, static_cast<double>(in[at(j)]));
        }
        average.push_back(sum / static_cast<double>(2 * half + 1));
        largest.push_back(most);
      }
      const auto kernel = static_cast<std::int32_t>(2 * half + 1);
      CHECK(error_of(pooled(in, Pooling::average, kernel), average) < 1e-6);
      CHECK(error_of(pooled(in, Pooling::max, kernel), largest) == 0);
    }
  }
}

TEST_CASE("pooling: a kernel of 1 changes no bit", "[pooling][edge]") {
  const std::vector<float> in{1.5F, -0.0F, nan_f, inf_f, -inf_f, 1e-40F, 3.1F};
  CHECK(bits_of(pooled(in, Pooling::average, 1)) == bits_of(in));
  CHECK(bits_of(pooled(in, Pooling::max, 1)) == bits_of(in));
}

TEST_CASE("pooling: the borders are under-weighted by average and ignored by max",
          "[pooling][paper]") {
  CHECK(pooled({5, 5, 5, 5}, Pooling::average, 5) == std::vector<float>{3, 4, 4, 3});
  CHECK(pooled({-5, -5, -5, -5}, Pooling::max, 5) == std::vector<float>{-5, -5, -5, -5});
}

TEST_CASE("pooling: average spreads NaN over its windows, max passes it by", "[pooling][nan]") {
  const std::vector<float> in{1, 2, nan_f, 4, 5};
  const auto average = pooled(in, Pooling::average, 3);
  CHECK(average[0] == 1.0F);
  CHECK((is_nan(average[1]) && is_nan(average[2]) && is_nan(average[3])));
  CHECK(average[4] == 3.0F);
  CHECK(pooled(in, Pooling::max, 3) == std::vector<float>{2, 2, 4, 5, 5});
  CHECK(is_nan(pooled({nan_f, nan_f}, Pooling::max, 3)[0]));
  // NaN and -inf are one class of the order; a number beats both.
  CHECK(pooled({nan_f, -1, nan_f}, Pooling::max, 3) == std::vector<float>{-1, -1, -1});
}
