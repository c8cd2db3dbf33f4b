// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/rkv.hpp>

#include "catch.hpp"

#include <limits>
#include <stdexcept>
#include <type_traits>

using namespace kvtrim;

TEST_CASE("rkv: the window that votes is protected", "[rkv]") {
  CHECK(RKV::name == "rkv");
  DemandInput in;
  in.live = 3000;
  const Demand demand = RKV().demand(in);
  CHECK(demand.keep == 1024);
  CHECK(demand.protection.sinks == 0);
  CHECK(demand.protection.recent == RKV().params().scores.window);
}

TEST_CASE("rkv: parameters out of range are refused by name and value", "[rkv][edge]") {
  const auto with = [](auto change) {
    RKV::Params p;
    change(p.scores);
    return RKV(p);
  };
  CHECK_THROWS_WITH(
      with([](auto& p) { p.window = 0; }),
      "kvtrim::RKV: scores.window 0 must be at least 1 (scores.window 0, scores.kernel 7)");
  CHECK_THROWS_WITH(with([](auto& p) { p.kernel = 6; }),
                    "kvtrim::RKV: scores.kernel 6 must be odd (scores.window 8, scores.kernel 6)");
  CHECK_THROWS_WITH(with([](auto& p) { p.lambda = 1.5F; }),
                    "kvtrim::RKV: scores.lambda 1.5 must be within 0 and 1");
  CHECK_THROWS_AS(with([](auto& p) { p.threshold = -0.1F; }), std::invalid_argument);
  CHECK_THROWS_AS(with([](auto& p) { p.lambda = std::numeric_limits<float>::quiet_NaN(); }),
                  std::invalid_argument);
  CHECK_THROWS_WITH(with([](auto& p) { p.group = static_cast<RKVGroup>(7); }),
                    "kvtrim::RKV: scores.group 7 is none of RKVGroup");
}

TEST_CASE("rkv_params: the paper's values, and the code's by name", "[rkv]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<RKVParams>);
  constexpr RKVParams paper;
  STATIC_REQUIRE(paper.window == 8);
  STATIC_REQUIRE(paper.kernel == 7);
  STATIC_REQUIRE(paper.lambda == 0.1F);
  STATIC_REQUIRE(paper.threshold == 0.5F);
  STATIC_REQUIRE(paper.group == RKVGroup::probabilities);
  constexpr RKVParams code = RKVParams::authors_code();
  STATIC_REQUIRE(code.window == 8);
  STATIC_REQUIRE(code.kernel == 7);
  STATIC_REQUIRE(code.lambda == 0.07F);
  STATIC_REQUIRE(code.group == RKVGroup::logits);
}
