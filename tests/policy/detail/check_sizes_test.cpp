// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/window_params.hpp>

#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <stdexcept>

using namespace kvtrim::detail;

TEST_CASE("check_sizes: the one that is wrong, its limit and the others are named", "[policy]") {
  CHECK_THROWS_WITH(check_sizes("x", Sizes{{"lag", 0, 1}}), "x: lag 0 must be at least 1");
  CHECK_THROWS_WITH(check_sizes("x", Sizes{{"sinks", 4}, {"lag", 0, 1}}),
                    "x: lag 0 must be at least 1 (sinks 4, lag 0)");
  CHECK_THROWS_WITH(check_sizes("x", Sizes{{"keep", 9, 0, 8}}), "x: keep 9 must be at most 8");
  CHECK_THROWS_WITH(
      check_sizes("x", Sizes{{.name = "kernel", .value = 4, .least = 1, .odd = true}}),
      "x: kernel 4 must be odd");
  CHECK_THROWS_WITH(
      check_sizes("x", Sizes{{.name = "kernel", .value = 0, .least = 1, .odd = true}}),
      "x: kernel 0 must be at least 1");
  CHECK_THROWS_WITH(check_sizes("x", Sizes{{"sinks", -1}, {"recent", -2}}),
                    "x: sinks -1 must be at least 0 (sinks -1, recent -2)");
}

TEST_CASE("check_sizes: rows fit 31 bits unless another limit is given", "[policy][edge]") {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  CHECK_NOTHROW(check_sizes("x", Sizes{{"rows", 0}, {"rows", most}, {"keep", 8, 8, 8}}));
  CHECK_THROWS_WITH(check_sizes("x", Sizes{{"rows", most + 1}}),
                    "x: rows 2147483648 must be at most 2147483647");
  constexpr auto at_compile_time = [] {
    check_sizes("x", Sizes{{"rows", 1}, {.name = "kernel", .value = 3, .odd = true}});
    return true;
  };
  STATIC_REQUIRE(at_compile_time());
}

TEST_CASE("check_budget: a budget holds at least one row and what is protected", "[policy][edge]") {
  CHECK_NOTHROW(check_budget("x", 8, Sizes{{"sinks", 3}, {"recent", 5}}));
  CHECK_THROWS_WITH(check_budget("x", 7, Sizes{{"sinks", 3}, {"recent", 5}}),
                    "x: budget 7 must be at least sinks 3 + recent 5");
  CHECK_THROWS_WITH(check_budget("x", 0, Sizes{{"sinks", 0}}), "x: budget 0 must be at least 1");
}

TEST_CASE("check_unscored: rows without a score are counted", "[policy]") {
  CHECK_NOTHROW(check_unscored("x", Size{"recent", 32}, kvtrim::WindowParams{}));
  CHECK_THROWS_WITH(
      check_unscored("x", Size{"recent", 31}, kvtrim::WindowParams{}),
      "x: recent 31 must be at least 32: the scores leave so many of the last rows without one");
}

TEST_CASE("check_share, check_finite: NaN is out of range", "[policy][nan]") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK_NOTHROW(check_share("x", "share", 1));
  CHECK_THROWS_WITH(check_share("x", "share", 1.5), "x: share 1.5 must be within 0 and 1");
  CHECK_THROWS_AS(check_share("x", "share", nan), std::invalid_argument);
  CHECK_NOTHROW(check_finite("x", "epsilon", std::numeric_limits<float>::max()));
  CHECK_THROWS_WITH(check_finite("x", "epsilon", -1),
                    "x: epsilon -1 must be at least 0 and finite");
  CHECK_THROWS_AS(check_finite("x", "epsilon", std::numeric_limits<float>::infinity()),
                  std::invalid_argument);
  CHECK_THROWS_AS(check_finite("x", "epsilon", nan), std::invalid_argument);
}
