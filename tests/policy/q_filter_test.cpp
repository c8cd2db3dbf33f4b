// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/q_filter.hpp>

#include <kvtrim/score/q_filter.hpp>

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

TEST_CASE("q_filter policy: rows on the far side of the filter stay, by head", "[q_filter]") {
  MethodWorld world({.layers = 1, .dim = 2});
  REQUIRE(world.append(0, 40) == Status::ok);
  Observation obs;
  const std::vector<float> filters{1, 0, 0, -1};  // [heads, dim]
  obs.filters = {filters.data(), 2, 0, 2};
  const QFilter policy({.budget = 9});
  REQUIRE(world.evict(policy, obs).status == Status::ok);
  for (std::int32_t h = 0; h < 2; ++h) {
    // The score is minus the first feature in head 0, the second feature in head 1.
    const auto score = [&](std::int32_t p) {
      const auto key = world.key(0, 0, h, p);
      return h == 0 ? -key[0] : key[1];
    };
    std::vector<std::int32_t> order(40);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return score(a) != score(b) ? score(a) > score(b) : a < b;
    });
    std::sort(order.begin(), order.begin() + 9);
    CHECK(world.kept(0)[static_cast<std::size_t>(h)] ==
          std::vector<std::int32_t>(order.begin(), order.begin() + 9));
  }
}

TEST_CASE("q_filter policy: no filters, or filters of another head dim, change nothing",
          "[q_filter][edge]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 40) == Status::ok);
  Observation obs = world.observation();
  obs.filters.dim = 16;
  CHECK(world.evict(QFilter({.budget = 9}), obs).status == Status::bad_observation);
  obs.filters = {};
  CHECK(world.evict(QFilter({.budget = 9}), obs).status == Status::bad_observation);
  CHECK(world.kept(0)[0].size() == 40);
}

TEST_CASE("q_filter_params: there is nothing to set", "[q_filter]") {
  STATIC_REQUIRE(std::is_empty_v<QFilterParams>);
  STATIC_REQUIRE(std::is_aggregate_v<QFilterParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<QFilterParams>);
}
