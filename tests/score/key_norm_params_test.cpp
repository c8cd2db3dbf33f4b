// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/key_norm_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("key_norm_params: there is nothing to set", "[key_norm]") {
  STATIC_REQUIRE(std::is_empty_v<KeyNormParams>);
  STATIC_REQUIRE(std::is_aggregate_v<KeyNormParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<KeyNormParams>);
}
