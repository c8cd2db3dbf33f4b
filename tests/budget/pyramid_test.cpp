// SPDX-License-Identifier: Apache-2.0
// All of kvpress's values: tests/golden/budgets_test.cpp.
#include <kvtrim/budget/pyramid.hpp>

#include "catch.hpp"

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
  // Average 1,000 of 4,000; the last has a tenth, the first 2 * 1,000 minus that.
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
