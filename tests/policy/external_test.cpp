// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/external.hpp>

#include <kvtrim/score/external.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using test::MethodWorld;

TEST_CASE("external policy: without scores nothing is planned", "[external][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  CHECK(world.evict(External({.budget = 9}), world.observation()).status ==
        Status::bad_observation);
  CHECK(world.kept(0)[0].size() == 40);
}

TEST_CASE("external policy: the caller's best rows stay, whatever the cache holds", "[external]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  REQUIRE(world.evict(External({.budget = 9}), world.observation(true)).status == Status::ok);
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) {
      std::vector<std::int32_t> order(40);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        const float x = world.given(0, l, h, a);
        const float y = world.given(0, l, h, b);
        return x != y ? x > y : a < b;
      });
      std::sort(order.begin(), order.begin() + 9);
      CHECK(world.kept(0)[static_cast<std::size_t>(2 * l + h)] ==
            std::vector<std::int32_t>(order.begin(), order.begin() + 9));
    }
  }
}

TEST_CASE("external_params: there is nothing to set", "[external]") {
  STATIC_REQUIRE(std::is_empty_v<ExternalParams>);
  STATIC_REQUIRE(std::is_aggregate_v<ExternalParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<ExternalParams>);
}
