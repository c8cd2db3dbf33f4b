// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/rkv.hpp>

#include "catch.hpp"

#include <limits>
#include <stdexcept>

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
  CHECK_THROWS_WITH(with([](auto& p) { p.window = 0; }),
                    "kvtrim::RKV: scores.window 0 must be at least 1, scores.kernel 7 odd and at "
                    "least 1");
  CHECK_THROWS_WITH(with([](auto& p) { p.kernel = 6; }),
                    "kvtrim::RKV: scores.window 8 must be at least 1, scores.kernel 6 odd and at "
                    "least 1");
  CHECK_THROWS_WITH(with([](auto& p) { p.lambda = 1.5F; }),
                    "kvtrim::RKV: scores.lambda 1.5 and scores.threshold 0.5 must be between 0 and "
                    "1");
  CHECK_THROWS_AS(with([](auto& p) { p.threshold = -0.1F; }), std::invalid_argument);
  CHECK_THROWS_AS(with([](auto& p) { p.lambda = std::numeric_limits<float>::quiet_NaN(); }),
                  std::invalid_argument);
  CHECK_THROWS_WITH(with([](auto& p) { p.group = static_cast<RKVGroup>(7); }),
                    "kvtrim::RKV: scores.group 7 is none of RKVGroup");
}
