// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/random.hpp>

#include <kvtrim/score/random.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <cstdint>
#include <type_traits>

using namespace kvtrim;
using test::MethodWorld;

TEST_CASE("random policy: a seed is a choice, every head has its own", "[random]") {
  const auto kept = [](std::uint64_t seed) {
    MethodWorld world({});
    static_cast<void>(world.append(0, 40));
    const Random policy({.budget = 20, .scores = {.seed = seed}});
    static_cast<void>(world.evict(policy, {}));
    return world.kept(0);
  };
  const auto first = kept(1);
  CHECK(kept(1) == first);
  CHECK(kept(2) != first);
  CHECK(first[0] != first[1]);
  CHECK(first[0] != first[2]);
  CHECK(first[0].size() == 20);
}

TEST_CASE(
    "random policy: rows that were kept stay best: what a cut keeps does not depend on cuts before",
    "[random][property]") {
  MethodWorld once({});
  MethodWorld often({});
  REQUIRE(once.append(0, 60) == Status::ok);
  for (std::int32_t step = 0; step < 6; ++step) {
    REQUIRE(often.append(0, 10) == Status::ok);
    REQUIRE(often.evict(Random({.budget = 15}), {}).status == Status::ok);
  }
  REQUIRE(once.evict(Random({.budget = 15}), {}).status == Status::ok);
  CHECK(once.kept(0) == often.kept(0));
}

TEST_CASE("random_params: the seed is 0 unless given", "[random]") {
  STATIC_REQUIRE(std::is_aggregate_v<RandomParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<RandomParams>);
  STATIC_REQUIRE(RandomParams{}.seed == 0);
}
