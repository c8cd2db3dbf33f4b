// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/cur_kv.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("cur_kv: four sinks and no window are protected", "[cur]") {
  CHECK(CurKV::name == "curkv");
  DemandInput in;
  in.live = 3000;
  const Demand demand = CurKV().demand(in);
  CHECK(demand.keep == 1024);
  CHECK(demand.protection.sinks == 4);
  CHECK(demand.protection.recent == 0);
}

TEST_CASE("cur_kv: parameters out of range are refused by name and value", "[cur][edge]") {
  CurKV::Params p;
  p.scores.window = -2;
  CHECK_THROWS_WITH(CurKV(p), "kvtrim::CurKV: scores.window -2 must be at least 0");
  p.scores.window = 0;
  p.scores.form = static_cast<CurForm>(9);
  CHECK_THROWS_WITH(CurKV(p), "kvtrim::CurKV: scores.form 9 is none of CurForm");
}

TEST_CASE("cur_params: the defaults are kvpress's", "[cur]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<CurParams>);
  constexpr CurParams p;
  STATIC_REQUIRE(p.window == 16);
  STATIC_REQUIRE(p.form == CurForm::product);
}
