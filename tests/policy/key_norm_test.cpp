// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/key_norm.hpp>

#include <kvtrim/score/key_norm.hpp>

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

TEST_CASE("key_norm policy: the rows with the shortest keys of each head stay", "[key_norm]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  const KeyNorm policy({.budget = 12, .sinks = 1, .recent = 2});
  REQUIRE(world.evict(policy, {}).status == Status::ok);
  const auto kept = world.kept(0);
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto squares = [&](std::int32_t p) {
        double sum = 0;
        for (const float x : world.key(0, l, h, p)) { sum += static_cast<double>(x * x); }
        return sum;  // exact: ties show
      };
      std::vector<std::int32_t> order(40);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin() + 1, order.begin() + 38, [&](std::int32_t a, std::int32_t b) {
        return squares(a) != squares(b) ? squares(a) < squares(b) : a < b;
      });
      std::vector<std::int32_t> expected(order.begin(), order.begin() + 10);
      expected.insert(expected.end(), {38, 39});
      std::sort(expected.begin(), expected.end());
      CHECK(kept[static_cast<std::size_t>(2 * l + h)] == expected);
    }
  }
}

TEST_CASE("key_norm_params: there is nothing to set", "[key_norm]") {
  STATIC_REQUIRE(std::is_empty_v<KeyNormParams>);
  STATIC_REQUIRE(std::is_aggregate_v<KeyNormParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<KeyNormParams>);
}
