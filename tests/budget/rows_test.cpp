// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/budget/rows.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;

namespace {

struct NotNoexcept {
  std::int32_t rows(std::int32_t live) const { return live; }
};
struct NotConst {
  std::int32_t rows(std::int32_t live) noexcept { return live; }
};
struct Nothing {
  void rows(std::int32_t) const noexcept {}
};
struct Wide {
  std::int64_t rows(std::int32_t live) const noexcept { return live; }
};
static_assert(Budget<Wide>);
static_assert(!Budget<NotNoexcept>);
static_assert(!Budget<NotConst>);
static_assert(!Budget<Nothing>);
static_assert(!Budget<std::int32_t>);

// rows * (units_kept / units), halves up, at least 1: in integers of any size.
std::int32_t exact(std::int32_t rows, std::int64_t units_kept, std::int64_t units) {
  if (rows == 0) { return 0; }
  __extension__ using Big = __int128;
  const Big kept =
      (2 * static_cast<Big>(rows) * units_kept + units) / (2 * static_cast<Big>(units));
  return std::max(1, static_cast<std::int32_t>(kept));
}

}  // namespace

TEST_CASE("rows_kept: reads the fraction as a decimal", "[budget]") {
  STATIC_REQUIRE(rows_kept(15, 0.9) == 2);  // 1.5, halves up
  STATIC_REQUIRE(rows_kept(1000, 0.9) == 100);
  STATIC_REQUIRE(rows_kept(2, 0.6) == 1);
  STATIC_REQUIRE(rows_kept(10, 0.9) == 1);
  STATIC_REQUIRE(rows_kept(1000, 0.8) == 200);
  STATIC_REQUIRE(rows_kept(5, 0.9) == 1);   // 0.5, halves up
  STATIC_REQUIRE(rows_kept(5, 0.7) == 2);   // 1.5, halves up
  STATIC_REQUIRE(rows_kept(5, 0.5) == 3);   // 2.5, halves up, not to even
  STATIC_REQUIRE(rows_kept(3, 0.99) == 1);  // never 0 rows if there are any
}

TEST_CASE("rows_kept: equals integer arithmetic for every length below 2,000 and every thousandth",
          "[budget][property]") {
  std::int64_t wrong = 0;
  for (std::int32_t k = 0; k <= 1000; ++k) {
    const double removed = k / 1000.0;
    std::int32_t before = 0;
    for (std::int32_t n = 0; n < 2000; ++n) {
      const std::int32_t kept = rows_kept(n, removed);
      wrong += kept != exact(n, 1000 - k, 1000) || kept > n || (n > 0 && kept < 1) || kept < before
                   ? 1
                   : 0;
      before = kept;  // more rows never keep fewer
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("rows_kept: removing more never keeps more", "[budget][property]") {
  std::int64_t wrong = 0;
  for (const std::int32_t n :
       {0, 1, 2, 3, 15, 1024, 131072, std::numeric_limits<std::int32_t>::max()}) {
    std::int32_t before = n;
    for (std::int32_t k = 0; k <= 10'000; ++k) {
      const std::int32_t kept = rows_kept(n, k / 10'000.0);
      wrong += kept > before ? 1 : 0;
      before = kept;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("rows_kept: is exact to nine decimals and to 31 bits of rows", "[budget][edge]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  STATIC_REQUIRE(rows_kept(most, 0.0) == most);
  STATIC_REQUIRE(rows_kept(most, 1.0) == 1);
  for (const std::int32_t n : {1, 7, 999'999'999, 2'000'000'001, most}) {
    // 15, 126,614,242 and 507,069,464 billionths are below their integer when multiplied by 1e9.
    for (const std::int64_t units : std::vector<std::int64_t>{
             1, 15, 126'614'242, 123'456'789, 333'333'333, 500'000'000, 507'069'464, 999'999'999}) {
      const double removed = static_cast<double>(units) / 1e9;
      CHECK(rows_kept(n, removed) == exact(n, 1'000'000'000 - units, 1'000'000'000));
    }
  }
}

TEST_CASE("rows_kept: no rows stay no rows, and a fraction beyond 0 and 1 is cut to them",
          "[budget][edge]") {
  STATIC_REQUIRE(rows_kept(0, 0.5) == 0);
  STATIC_REQUIRE(rows_kept(0, 1.0) == 0);
  STATIC_REQUIRE(rows_kept(-3, 0.5) == 0);
  STATIC_REQUIRE(rows_kept(10, -0.5) == 10);
  STATIC_REQUIRE(rows_kept(10, 1.5) == 1);
}

TEST_CASE("kvpress_rows: truncates, and so loses a row where the product is not exact",
          "[budget][parity]") {
  CHECK(kvpress_rows(10, 0.9) == 0);
  CHECK(kvpress_rows(100, 0.9) == 9);
  CHECK(kvpress_rows(100, 0.8) == 19);
  CHECK(kvpress_rows(1000, 0.8) == 199);
  CHECK(kvpress_rows(1000, 0.0) == 1000);
  CHECK(kvpress_rows(1000, 1.0) == 0);
}

TEST_CASE("budget: FixedBudget keeps at most what lives, FractionBudget keeps rows_kept",
          "[budget]") {
  for (std::int32_t live = 0; live < 50; ++live) {
    CHECK(FixedBudget{20}.rows(live) == std::min(20, live));
    CHECK(FractionBudget{0.9}.rows(live) == exact(live, 1, 10));
  }
}
