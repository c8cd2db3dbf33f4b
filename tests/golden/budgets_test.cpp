// SPDX-License-Identifier: Apache-2.0
// The compatibility budgets against kvpress 0.5.5. The file: tests/data/golden/budgets.txt.
#include <kvtrim/budget/pyramid.hpp>
#include <kvtrim/budget/rows.hpp>

#include "catch.hpp"

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

// The lines that start with `word`, without it.
std::vector<std::string> lines_of(const std::string& word) {
  std::ifstream in(KVTRIM_TEST_DATA "/golden/budgets.txt");
  REQUIRE(in.good());
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(word + ' ', 0) == 0) { lines.push_back(line.substr(word.size())); }
  }
  return lines;
}

}  // namespace

TEST_CASE("golden: kvpress_rows truncates as kvpress does", "[golden][budget][parity]") {
  const auto lines = lines_of("kept");
  CHECK(lines.size() == 154);
  for (const std::string& line : lines) {
    std::istringstream in(line);
    std::int32_t rows = 0;
    double removed = 0;
    std::int32_t kept = -1;
    in >> rows >> removed >> kept;
    INFO("kept" << line);
    REQUIRE(in);
    CHECK(kvpress_rows(rows, removed) == kept);
  }
}

TEST_CASE("golden: kvpress_pyramid_rows gives kvpress's budget for every layer",
          "[golden][budget][parity]") {
  const auto lines = lines_of("pyramid");
  CHECK(lines.size() == 300);
  for (const std::string& line : lines) {
    std::istringstream in(line);
    std::int32_t tokens = 0;
    double removed = 0;
    std::int32_t window = 0;
    std::int32_t beta = 0;
    std::int32_t layers = 0;
    in >> tokens >> removed >> window >> beta >> layers;
    INFO("pyramid" << line);
    REQUIRE(in);
    std::vector<std::int32_t> expected;
    std::vector<std::int32_t> got;
    for (std::int32_t l = 0; l < layers; ++l) {
      std::int32_t rows = -1;
      in >> rows;
      expected.push_back(rows);
      got.push_back(kvpress_pyramid_rows(tokens, removed, window, beta, layers, l));
    }
    REQUIRE(in);
    CHECK(got == expected);
  }
}
