// SPDX-License-Identifier: Apache-2.0
// All of kvpress's values: tests/golden/budgets_test.cpp.
#include <kvtrim/budget/pyramid.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using namespace kvtrim;

namespace {

std::vector<std::int32_t> pyramid(std::int32_t tokens,
                                  double removed,
                                  std::int32_t window,
                                  std::int32_t beta,
                                  std::int32_t layers) {
  std::vector<std::int32_t> rows;
  for (std::int32_t l = 0; l < layers; ++l) {
    rows.push_back(kvpress_pyramid_rows(tokens, removed, window, beta, layers, l));
  }
  return rows;
}

}  // namespace

TEST_CASE("pyramid: early layers keep more, in equal steps", "[budget][pyramid]") {
  // Average 1,000 of 4,000; the last layer has a tenth of it, the first 2 * 1,000 minus that.
  CHECK(pyramid(4000, 0.75, 20, 10, 4) == std::vector<std::int32_t>{1900, 1300, 700, 100});
}

TEST_CASE("pyramid: no layer keeps more than the rows before the window",
          "[budget][pyramid][edge]") {
  CHECK(pyramid(100, 0.4, 8, 20, 2) == std::vector<std::int32_t>{92, 28});
}

TEST_CASE("pyramid: where it does not fit, all layers keep the same", "[budget][pyramid][edge]") {
  CHECK(pyramid(64, 0.5, 64, 20, 3) == std::vector<std::int32_t>{32, 32, 32});
  CHECK(pyramid(100, 0.9, 8, 20, 3) == std::vector<std::int32_t>{10, 10, 10});
}

TEST_CASE("pyramid: one layer has no step to divide by", "[budget][pyramid][edge]") {
  CHECK(pyramid(4000, 0.75, 20, 10, 1) == std::vector<std::int32_t>{1900});
}

TEST_CASE("pyramid: halves go to the even number, as Python rounds", "[budget][pyramid][parity]") {
  // No pyramid fits (the window is the prompt): 5 * 0.5 = 2.5 and 7 * 0.5 = 3.5.
  CHECK(pyramid(5, 0.5, 5, 20, 1) == std::vector<std::int32_t>{2});
  CHECK(pyramid(7, 0.5, 7, 20, 1) == std::vector<std::int32_t>{4});
}

TEST_CASE("pyramid: the exact form falls from layer to layer, and its sum is what was asked for",
          "[budget][pyramid][property]") {
  for (const std::int32_t layers : {1, 2, 3, 30, 32, 80}) {
    for (const std::int32_t beta : {1, 2, 7, 20, 100}) {
      for (const std::int32_t window : {0, 1, 8, 32}) {
        for (std::int32_t budget = window; budget < window + 400; budget += 37) {
          for (const std::int32_t live :
               {1, budget - 1, budget, budget + 1, budget + 9, 2 * budget, 10 * budget + 5}) {
            if (live < 0) { continue; }
            const Pyramid p{budget, window, beta, layers, PyramidForm::exact};
            std::int64_t sum = 0;
            std::int32_t before = live;
            bool good = true;
            for (std::int32_t l = 0; l < layers; ++l) {
              const std::int32_t rows = p.rows(live, l);
              good = good && rows <= before && rows >= std::min({window, live, budget});
              before = rows;
              sum += rows;
            }
            INFO(layers << " layers, beta " << beta << ", window " << window << ", budget "
                        << budget << ", live " << live << ", sum " << sum);
            REQUIRE(good);
            REQUIRE(sum == std::int64_t{layers} * std::min(budget, live));
          }
        }
      }
    }
  }
}

TEST_CASE("pyramid: the exact form is the sequence of equal steps, rounded",
          "[budget][pyramid][paper]") {
  // share 100, beta 20: from 195 to 5 in four steps of 47.5; the two halves go to the upper layer first.
  const Pyramid p{110, 10, 20, 5, PyramidForm::exact};
  std::vector<std::int32_t> rows;
  for (std::int32_t l = 0; l < 5; ++l) { rows.push_back(p.rows(5000, l)); }
  CHECK(rows == std::vector<std::int32_t>{205, 158, 110, 62, 15});
}

TEST_CASE(
    "pyramid: KVCache-Factory's form keeps more than was asked for, by as much as its code does",
    "[budget][pyramid][parity]") {
  const auto excess = [](std::int32_t layers, std::int32_t budget) {
    const Pyramid p{budget, 8, 20, layers, PyramidForm::kvcache_factory};
    std::int64_t sum = 0;
    for (std::int32_t l = 0; l < layers; ++l) { sum += p.rows(100'000, l); }
    const double asked = static_cast<double>(layers) * budget;
    return std::round((static_cast<double>(sum) / asked - 1) * 1000) / 10;
  };
  CHECK(excess(32, 64) == 11.7);
  CHECK(excess(32, 96) == 6.8);
  CHECK(excess(32, 128) == 4.3);
  CHECK(excess(32, 1024) == 0.5);
  CHECK(excess(40, 64) == 23.4);
  CHECK(excess(80, 128) == 27.3);
  // A prompt shorter than twice the share: the same for all layers.
  const Pyramid p{128, 8, 20, 32, PyramidForm::kvcache_factory};
  CHECK(p.rows(239, 0) == 128);
  CHECK(p.rows(239, 31) == 128);
  CHECK(p.rows(128, 31) == 128);
  CHECK(p.rows(100, 31) == 100);
}

TEST_CASE("pyramid: kvpress's form from rows equals the one from a fraction",
          "[budget][pyramid][parity]") {
  const Pyramid p{2048, 64, 20, 32, PyramidForm::kvpress};
  CHECK(p.rows(4096, 0) == 3994);
  CHECK(p.rows(4096, 1) == 3868);
  CHECK(p.rows(4096, 15) == 2111);
  CHECK(p.rows(4096, 31) == 102);
}
