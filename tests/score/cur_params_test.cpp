// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/cur_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("cur_params: the defaults are kvpress's", "[cur]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<CurParams>);
  constexpr CurParams p;
  STATIC_REQUIRE(p.window == 16);
  STATIC_REQUIRE(p.form == CurForm::product);
}
