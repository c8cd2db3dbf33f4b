// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/select/choose_rows.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace kvtrim;

namespace {

struct Chooser {
  std::vector<float> scores;
  std::vector<RowKind> kinds{};
  std::int64_t nan = 0;

  std::vector<std::int32_t> kept(const Protection& protection,
                                 std::int32_t keep,
                                 std::int32_t first_stage = -1,
                                 const std::vector<float>& second = {}) {
    const auto n = static_cast<std::int32_t>(scores.size());
    const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };
    std::vector<std::uint32_t> keys(scores.size());
    std::vector<std::int32_t> ranks(scores.size()), picked(scores.size());
    std::vector<std::uint8_t> stays(scores.size());
    nan = choose_rows(
        n,
        candidates(protection, n),
        keep,
        [&](std::int32_t rank) { return kinds.empty() ? RowKind::free : kinds[at(rank)]; },
        [&](std::int32_t rank) { return scores[at(rank)]; },
        first_stage,
        [&] { scores = second; },
        {keys, ranks, picked, stays});
    std::vector<std::int32_t> out;
    for (std::int32_t r = 0; r < n; ++r) {
      if (stays[at(r)] != 0) { out.push_back(r); }
    }
    return out;
  }
};
using Rows = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("choose_rows: protected rows, then the best, the lower rank among equals",
          "[choose_rows][ties]") {
  Chooser c{{0, 0, 5, 1, 5, 5, 2, 5}};
  CHECK(c.kept({0, 0}, 3) == Rows{2, 4, 5});
  CHECK(c.kept({1, 1}, 4) == Rows{0, 2, 4, 7});
  CHECK(c.kept({2, 2}, 3) == Rows{0, 1, 6, 7});  // never below what is protected
  CHECK(c.kept({0, 0}, 8).size() == 8);
  CHECK(c.kept({0, 0}, 0).empty());
}

TEST_CASE("choose_rows: NaN goes first and is counted among the candidates alone",
          "[choose_rows][nan]") {
  Chooser c{{std::nanf(""), 1, std::nanf(""), 3, -2}};
  CHECK(c.kept({0, 0}, 3) == Rows{1, 3, 4});
  CHECK(c.nan == 2);
  CHECK(c.kept({1, 0}, 3) == Rows{0, 1, 3});
  CHECK(c.nan == 1);
}

TEST_CASE("choose_rows: locked rows stay and count, dropped ones go, protected or not",
          "[choose_rows]") {
  Chooser c{{9, 8, 7, 6, 5, 4}};
  c.kinds = {RowKind::dropped,
             RowKind::free,
             RowKind::free,
             RowKind::locked,
             RowKind::free,
             RowKind::dropped};
  CHECK(c.kept({0, 0}, 2) == Rows{1, 3});
  CHECK(c.kept({1, 1}, 3) == Rows{1, 2, 3});
  CHECK(c.kept({0, 0}, 0) == Rows{3});
}

TEST_CASE("choose_rows: a second stage chooses the rest by its own scores", "[choose_rows]") {
  const std::vector<float> first{9, 8, 7, 6, 5, 4};
  const std::vector<float> second{0, 0, 0, 1, 2, 3};
  CHECK(Chooser{first}.kept({0, 0}, 4, 2, second) == Rows{0, 1, 4, 5});
  CHECK(Chooser{first}.kept({0, 0}, 4, 0, second) == Rows{0, 3, 4, 5});
  CHECK(Chooser{first}.kept({0, 0}, 4, 4, second) == Rows{0, 1, 2, 3});
  CHECK(Chooser{first}.kept({1, 0}, 4, 2, second) == Rows{0, 1, 4, 5});  // protected ones count
}
