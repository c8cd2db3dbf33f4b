// SPDX-License-Identifier: Apache-2.0
// Every policy through both sides, by the same scores. All in one file: each policy has kernels of its own, and takes long to
// compile.

#include "cuda/evict/every_policy.hpp"

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/one_step.hpp"

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace {

using namespace kvtrim;
using kvtrim::test::AnyStep;
using kvtrim::test::same;
using kvtrim::test::same_step;
using kvtrim::test::StepOf;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

using Check = void (*)(const WorldShape& shape, const AnyStep& policy);

void for_each_policy(const WorldShape& shape, Check check) {
  const auto one = [&](std::string_view name, const AnyStep& policy) {
    INFO(std::string(name) << ", scope " << static_cast<int>(shape.scope));
    check(shape, policy);
  };
  std::apply(
      [&](const auto&... policy) {
        (one(policy.name, StepOf<std::remove_cvref_t<decltype(policy)>>(policy)), ...);
      },
      kvtrim::test::every_policy());
}

void plans_alike(const WorldShape& shape, const AnyStep& policy) {
  World world(shape);
  same(world, policy);
  World tight(shape);
  same(tight, policy, Removal::automatic, 0, ReservedPages::follow, kvtrim::test::as_many_as_go);
}

}  // namespace

TEST_CASE("cuda::plan: every policy keeps, moves and releases what the host does",
          "[cuda][parity]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = shape.scope != TableScope::layer;
  shape.layers = 3;
  for_each_policy(shape, plans_alike);
}

TEST_CASE("cuda::plan: every policy, out of order, with holes", "[cuda][parity]") {
  WorldShape shape;
  shape.scope = TableScope::layer;
  shape.shuffled = true;
  shape.holes = GENERATE(false, true);
  for_each_policy(shape, plans_alike);
}

TEST_CASE("cuda::step: every policy leaves what the three calls and the host leave",
          "[cuda][parity]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = shape.scope != TableScope::layer;
  shape.shuffled = shape.scope == TableScope::layer;
  shape.holes = shape.shuffled;
  shape.counters = true;
  for_each_policy(shape, [](const WorldShape& s, const AnyStep& policy) { same_step(s, policy); });
}
