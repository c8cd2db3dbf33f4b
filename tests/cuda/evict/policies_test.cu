// SPDX-License-Identifier: Apache-2.0
// Every policy through both sides, by the same scores.

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/every_policy.hpp"

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>

namespace {

using namespace kvtrim;
using kvtrim::test::same;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

template <class F>
void for_each_policy(F&& f) {
  std::apply([&](const auto&... policy) { (f(policy), ...); }, kvtrim::test::every_policy());
}

/// Some scores of every kind that a page's score treats in its own way.
void plant_hard_scores(World& world) {
  auto& sums = world.host().sums;
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(),
                       -2.5F,
                       -0.0F,
                       std::numeric_limits<float>::denorm_min(),
                       3e38F};
  for (std::size_t i = 0; i < sums.size(); i += 5) { sums[i] = odd[i / 5 % 7]; }
  world.device().sums.upload(sums);
  auto& rest = world.host().compensations;
  std::fill(rest.begin(), rest.end(), 0.0F);
  world.device().compensations.upload(rest);
}

}  // namespace

TEST_CASE("cuda::plan: every policy keeps, moves and releases what the host does",
          "[cuda][parity]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = GENERATE(false, true);
  shape.layers = 3;
  for_each_policy([&](const auto& policy) {
    using P = std::remove_cvref_t<decltype(policy)>;
    INFO(std::string(P::name) << ", scope " << static_cast<int>(shape.scope));
    World world(shape);
    same(world, policy);
  });
}

TEST_CASE("cuda::plan: every policy, out of order, with holes", "[cuda][parity]") {
  WorldShape shape;
  shape.scope = TableScope::layer;
  shape.shuffled = true;
  shape.holes = GENERATE(false, true);
  for_each_policy([&](const auto& policy) {
    INFO(std::string(std::remove_cvref_t<decltype(policy)>::name));
    World world(shape);
    same(world, policy);
  });
}

TEST_CASE("cuda::plan: pages by every reduction, norm and unit, bit for bit",
          "[cuda][parity][ties][nan]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = GENERATE(false, true);
  shape.page_size = GENERATE(1, 5);
  shape.max_pages = shape.page_size == 1 ? 40 : 9;
  const bool hard = GENERATE(false, true);
  for (const PageReduction reduction :
       {PageReduction::max, PageReduction::mean, PageReduction::top_m}) {
    for (const HeadNorm norm : {HeadNorm::none, HeadNorm::sum}) {
      for (const PageUnit unit : {PageUnit::per_table, PageUnit::per_layer, PageUnit::per_group}) {
        CAPTURE(static_cast<int>(shape.scope),
                shape.padding,
                shape.page_size,
                hard,
                static_cast<int>(reduction),
                static_cast<int>(norm),
                static_cast<int>(unit));
        const PageScoreParams pages{norm, reduction, 3, Reduction::max};
        {
          World world(shape);
          if (hard) { plant_hard_scores(world); }
          same(world, kvtrim::test::best_pages<ExternalParams>(pages, unit));
        }
        World world(shape);
        if (hard) { plant_hard_scores(world); }
        same(world, kvtrim::test::best_pages<AccumulateParams>(pages, unit));
      }
    }
  }
}

TEST_CASE("cuda::plan: more pages than threads, and than fit, equal scores keep the lower page",
          "[cuda][parity][ties]") {
  WorldShape shape;
  shape.sequences = 1;
  shape.layers = 1;
  shape.page_size = 2;
  shape.max_pages = 700;
  const std::int64_t budget = GENERATE(31, 700, 1399);
  PageSelector<AccumulateParams>::Params p;
  p.budget = budget;
  p.sinks = 3;
  p.window = 7;
  World world(shape);
  same(world, PageSelector<AccumulateParams>(p));
}

TEST_CASE("cuda::plan: protected pages over the budget stay, as on the host", "[cuda][parity]") {
  WorldShape shape;
  PageSelector<AccumulateParams>::Params p;
  p.budget = 12;
  p.sinks = 6;
  p.window = 6;
  World world(shape);
  same(world, PageSelector<AccumulateParams>(p));
}

TEST_CASE("cuda::plan: page scores of several heads are not added, one head's are",
          "[cuda][fault]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  World world(shape);
  const auto policy = kvtrim::test::best_pages<AccumulateParams>({.heads = Reduction::sum});
  kvtrim::test::DeviceSide side(world, policy);
  const bool alone = shape.scope == TableScope::head;
  CHECK(cuda::plan(policy, world.device_view(), {}, side.workspace, nullptr) ==
        (alone ? cudaSuccess : cudaErrorInvalidValue));
  CHECK(world.difference() == "");
  if (alone) { same(world, policy); }
}

TEST_CASE("cuda::plan: pages leave tables and do nothing else", "[cuda][parity][fault]") {
  WorldShape shape;
  World world(shape);
  same(world,
       kvtrim::test::best_pages<AccumulateParams>(),
       GENERATE(Removal::stable_pack, Removal::drop_pages));
}
