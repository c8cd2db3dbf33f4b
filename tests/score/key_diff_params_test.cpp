// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/key_diff_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("key_diff_params: there is nothing to set", "[key_diff]") {
  STATIC_REQUIRE(std::is_empty_v<KeyDiffParams>);
  STATIC_REQUIRE(std::is_aggregate_v<KeyDiffParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<KeyDiffParams>);
}
