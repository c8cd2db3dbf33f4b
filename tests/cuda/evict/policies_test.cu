// SPDX-License-Identifier: Apache-2.0
// Policies that keep pages, and workspaces, through both sides.

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/every_policy.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using namespace kvtrim;
using kvtrim::test::same;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

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

TEST_CASE("cuda::plan: pages by every reduction, norm and unit, bit for bit",
          "[cuda][parity][ties][nan]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = GENERATE(false, true);
  shape.page_size = GENERATE(1, 5);
  shape.max_pages = shape.page_size == 1 ? 40 : 9;
  const bool hard = GENERATE(false, true);
  constexpr PageReduction reductions[] = {
      PageReduction::max, PageReduction::mean, PageReduction::top_m};
  constexpr PageUnit units[] = {PageUnit::per_table, PageUnit::per_layer, PageUnit::per_group};
  // Each reduction with each unit, scope, page size, and both norms; not all of them at once.
  for (int i = 0; i < 3; ++i) {
    const int turn = i + static_cast<int>(shape.scope) + (shape.padding ? 1 : 0);
    const HeadNorm norm = (turn + (hard ? 1 : 0)) % 2 == 0 ? HeadNorm::sum : HeadNorm::none;
    const PageUnit unit = units[turn % 3];
    CAPTURE(static_cast<int>(shape.scope),
            shape.padding,
            shape.page_size,
            hard,
            i,
            static_cast<int>(norm),
            static_cast<int>(unit));
    const PageScoreParams pages{norm, reductions[i], 3, Reduction::max};
    World world(shape);
    if (hard) { plant_hard_scores(world); }
    if (i == 0) {
      same(world, kvtrim::test::best_pages<AccumulateParams>(pages, unit));
    } else {
      same(world, kvtrim::test::best_pages<ExternalParams>(pages, unit));
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

TEST_CASE("cuda::plan: workspaces follow the rows that there are, not the longest sequence",
          "[cuda][edge]") {
  // 256 sequences, 32 layers, 8 KV heads; 1,048,576 tokens in all, none above 131,072.
  PlanShape shape;
  shape.sequences = 256;
  shape.layers = 32;
  shape.kv_heads = 8;
  shape.page_size = 16;
  shape.max_rows = 131'072;
  shape.pages = 65'536 + 256;
  const cuda::PlanBounds bounds(shape, 1'048'576);
  constexpr std::size_t mebi = std::size_t{1} << 20U;
  CHECK(cuda::plan_workspace_bytes(StreamingSink(), bounds) <= 32 * mebi);
  // A step of HeavyHitter lists the rows that go, 4 bytes for each, not those that stay.
  constexpr std::size_t tables = 7'808'768;                                       // of a plan
  const std::size_t shared = cuda::top_k_workspace_bytes({256, 32, 8, 131'072});  // histograms
  CHECK(shared == 2'116'608);
  const cuda::PlanBounds step(shape, 1'048'576, 128);
  CHECK(cuda::plan_workspace_bytes(StreamingSink(), bounds) == tables);
  CHECK(cuda::plan_workspace_bytes(HeavyHitter(), step) ==
        tables + shared + std::size_t{4} * 65'536 * 128);
  CHECK(cuda::plan_workspace_bytes(HeavyHitter(), {shape, 1'048'576, 960}) <= 256 * mebi);
  // Without such a bound all rows are listed once, rounded up to pages.
  const std::size_t lists = std::size_t{4} * 256 * (1'048'576 + 256 * 16);
  CHECK(cuda::plan_workspace_bytes(HeavyHitter(), bounds) == tables + shared + lists);
  // Histograms only for heads that several blocks share.
  CHECK(cuda::top_k_workspace_bytes({256, 32, 8, 131'072}) <= 4 * mebi);
  CHECK(cuda::top_k_workspace_bytes({256, 32, 8, 16'384}) == 0);
  // Monotone in every field.
  const auto bytes = [](const PlanShape& x, std::int64_t total) {
    return cuda::plan_workspace_bytes(HeavyHitter(), cuda::PlanBounds(x, total));
  };
  const std::size_t before = bytes(shape, 1'048'576);
  CHECK(bytes(shape, 2'000'000) > before);
  CHECK(bytes(shape, 0) > before);
  for (std::int32_t PlanShape::* const field :
       {&PlanShape::sequences, &PlanShape::layers, &PlanShape::kv_heads, &PlanShape::pages}) {
    PlanShape more = shape;
    more.*field *= 2;
    CHECK(bytes(more, 1'048'576) > before);
  }
}

TEST_CASE("cuda::plan: a total is enough if the rows fit, and one that is exceeded is a status",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.reserved = GENERATE(0, 1);
  World world(shape);
  const CacheView view = world.device_view();
  std::int64_t total = 0;  // of the longest table of each sequence
  const auto tables = static_cast<std::size_t>(view.tables_per_sequence());
  for (std::size_t s = 0; s < 3; ++s) {
    std::int64_t longest = 0;
    for (std::size_t t = 0; t < tables; ++t) {
      const std::int64_t rows = world.host().states[s * tables + t].extent();
      longest = std::max(longest, rows);
    }
    total += longest + std::int64_t{shape.reserved} * shape.page_size;
  }
  const bool enough = GENERATE(true, false);
  const PlanShape bounds = plan_shape(world.host_view());
  const cuda::PlanBounds given(bounds, enough ? total : 4);
  const auto policy = kvtrim::test::best_pages<AccumulateParams>();
  const HeavyHitter rows({.heavy = 4, .recent = 2});
  const auto check = [&](const auto& chosen) {
    const std::size_t bytes = cuda::plan_workspace_bytes(chosen, given);
    CHECK((bytes < cuda::plan_workspace_bytes(chosen, bounds) || enough));
    kvtrim::test::DeviceBuffer<std::byte> memory(bytes, "workspace");
    const cuda::PlanWorkspace workspace{given, memory.data(), bytes};
    REQUIRE(cuda::plan(chosen, view, {}, workspace, nullptr) == cudaSuccess);
    REQUIRE(cuda::apply(workspace, view, nullptr) == cudaSuccess);
    cuda::DeviceReport report;
    const auto all = memory.download();
    std::memcpy(&report, all.data(), sizeof report);
    const bool fits = enough || given.entries() == cuda::PlanBounds(bounds).entries();
    CHECK(to_string(report.status) == (fits ? "ok" : "workspace_too_small"));
    if (!fits) {
      CHECK(world.difference() == "");
      return;
    }
    const CacheView host = world.host_view();
    Plan wanted = kvtrim::test::host_plan(chosen, host, {}, Removal::automatic);
    CHECK(report.evicted == wanted.view().evicted_rows());
    CHECK(apply(wanted.ref(), host) == Status::ok);
    CHECK(world.difference() == "");
  };
  if (GENERATE(true, false)) {
    check(policy);
  } else {
    check(rows);
  }
}
