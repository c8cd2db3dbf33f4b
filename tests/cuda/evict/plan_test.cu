// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/plan.cuh>

#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/page_selector.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/rows_case.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::ok;
using kvtrim::test::same;
using kvtrim::test::World;
using kvtrim::test::WorldLayout;
using kvtrim::test::WorldShape;

}  // namespace

TEST_CASE("cuda::plan: StreamingSink drops the pages that the host drops", "[cuda][parity]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.padding = GENERATE(false, true);
  World world(shape);
  same(world, StreamingSink({.sinks = 2, .recent = 9}));
}

TEST_CASE("cuda::plan: StreamingSink exact packs in order, one more row overwrites a slot",
          "[cuda][parity]") {
  WorldShape shape;
  shape.holes = GENERATE(false, true);
  shape.padding = GENERATE(false, true);
  shape.seed = GENERATE(1U, 2U);
  World world(shape);
  const std::int64_t recent = GENERATE(8, 29);
  same(world, StreamingSink<SinkForm::exact>({.sinks = 2, .recent = recent}));
}

TEST_CASE("cuda::plan: HeavyHitter keeps, moves and releases what the host does",
          "[cuda][parity][ties]") {
  WorldShape shape;
  shape.shuffled = GENERATE(false, true);
  shape.holes = GENERATE(false, true);
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.scales = shape.shuffled;
  const Removal removal =
      GENERATE(Removal::overwrite_slot, Removal::stable_pack, Removal::fill_holes);
  const std::int64_t heavy = GENERATE(5, 28);
  shape.seed = static_cast<std::uint32_t>(heavy);
  CAPTURE(
      shape.shuffled, shape.holes, static_cast<int>(shape.scope), static_cast<int>(removal), heavy);
  World world(shape);
  same(world, HeavyHitter({.heavy = heavy, .recent = 3, .sinks = 1, .removal = removal}));
}

TEST_CASE("cuda::plan: HeavyHitter's modes, age and grace", "[cuda][parity]") {
  WorldShape shape;
  shape.shuffled = true;
  World world(shape);
  switch (GENERATE(0, 1, 2)) {
    case 0:
      return same(world, HeavyHitter<AccumulateParams, HeavyMode::greedy>({.heavy = 9}));
    case 1:
      return same(world,
                  HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 9, .recent = 4}));
    default:
      return same(world,
                  HeavyHitter({.heavy = 9, .recent = 4, .grace = 6, .age_normalised = true}));
  }
}

TEST_CASE("cuda::plan: ready-made scores, in every layout", "[cuda][parity]") {
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::nhd,
                          WorldLayout::hnd,
                          WorldLayout::packed,
                          WorldLayout::legacy,
                          WorldLayout::layer_bases);
  shape.v_dim = shape.layout == WorldLayout::nhd ? 24 : 16;
  shape.scales = true;
  shape.separate_values = shape.layout == WorldLayout::hnd;
  const Removal removal = GENERATE(Removal::automatic, Removal::fill_holes);
  CAPTURE(static_cast<int>(shape.layout), static_cast<int>(removal));
  World world(shape);
  same(world, kvtrim::test::ByScore{11, {2, 4}, Removal::stable_pack}, removal);
}

TEST_CASE("C08 cuda::plan: values that are part of the keys move once, and none at all are none",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::latent, WorldLayout::latent_bases, WorldLayout::keys_only);
  shape.v_dim = GENERATE(8, 7);
  shape.scales = true;
  const Removal removal =
      GENERATE(Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  CAPTURE(static_cast<int>(shape.layout), shape.v_dim, static_cast<int>(removal));
  World world(shape);
  same(world,
       kvtrim::test::ByScore{
           removal == Removal::overwrite_slot ? 31 : 11, {2, 4}, Removal::stable_pack},
       removal);
}

TEST_CASE("C08 cuda::plan: keys and values that overlap, or no keys, are refused before any launch",
          "[cuda][fault]") {
  WorldShape shape;
  shape.layout = WorldLayout::latent;
  shape.v_dim = 8;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  const CacheView sound = world.device_view();
  ok(cuda::plan(policy, sound, {}, side.workspace, nullptr));
  const auto refused = [&](auto&& change) {
    CacheView view = sound;
    change(view);
    return cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue &&
           cuda::apply(side.workspace, view, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](CacheView& v) { v.v.base += 20; }));  // two features are beyond the row
  CHECK(refused([](CacheView& v) { v.v.layer_stride *= 2; }));
  CHECK(refused([](CacheView& v) { v.unrotated_keys = v.k; }));
  CHECK(refused([](CacheView& v) { v.k.page_stride -= 2, v.v.page_stride -= 2; }));
  CHECK(refused([](CacheView& v) { v.k = v.v = {}; }));
  ok(kvtrim::test::finish());
  CHECK(world.difference() == "");
}

TEST_CASE("C09 cuda::plan: what the host refuses of a layout, the device refuses before it moves",
          "[cuda][fault]") {
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::nhd, WorldLayout::layer_bases);
  shape.scales = true;
  shape.layers = 3;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  const CacheView sound = world.device_view();
  const bool by_bases = shape.layout == WorldLayout::layer_bases;
  const auto refused_at_once = [&](auto&& change) {
    CacheView view = sound;
    change(view);
    return cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused_at_once(
      [](CacheView& v) { v.unrotated_keys = v.k, v.unrotated_keys.head_stride = 0; }));
  CHECK(refused_at_once([](CacheView& v) { v.rope_positions = v.positions; }));
  CHECK(refused_at_once([](CacheView& v) { v.positions.sequence_stride = 0; }));
  CHECK(refused_at_once([](CacheView& v) { v.score_sums.row_stride = 2; }));
  CHECK(refused_at_once([](CacheView& v) { v.score_sums.element_bytes = 8; }));
  if (!by_bases) {
    CHECK(refused_at_once([](CacheView& v) { v.v.layer_stride = 0; }));
    CHECK(refused_at_once([](CacheView& v) { v.k.page_stride /= 2; }));
  }
  // What lies on the device.
  const auto status = [&](auto&& change, std::vector<SequencePlane> more = {}) {
    auto planes = world.device().page_planes.download();
    auto bases = world.device().layer_bases.download();
    const auto sound_planes = planes;
    const auto sound_bases = bases;
    change(planes[0], bases);
    world.device().page_planes.upload(planes);
    world.device().layer_bases.upload(bases);
    CacheView view = sound;
    const DeviceBuffer<SequencePlane> device_more(more, "more planes");
    view.more_planes = device_more.data();
    view.more_plane_count = static_cast<std::int32_t>(more.size());
    ok(cuda::plan(policy, view, {}, side.workspace, nullptr));
    const Status found = side.report().status;
    if (found != Status::ok) { ok(cuda::apply(side.workspace, view, nullptr)); }
    ok(kvtrim::test::finish());
    world.device().page_planes.upload(sound_planes);
    world.device().layer_bases.upload(sound_bases);
    return to_string(found);
  };
  using Bases = std::vector<std::byte*>;
  CHECK(status([](PagePlane&, Bases&) {}) == "ok");
  CHECK(status([](PagePlane& p, Bases&) { p.head_stride = 5; }) == "bad_observation");
  CHECK(status([](PagePlane& p, Bases&) { p.row_bytes = 0; }) == "bad_observation");
  CHECK(status([](PagePlane& p, Bases&) { p.page_stride -= 1; }) == "bad_observation");
  CHECK(status([](PagePlane& p, Bases&) { p.base = nullptr; }) == "bad_observation");
  CHECK(status([&](PagePlane& p, Bases&) { p.base = world.device().pool.data(); }) ==
        "bad_observation");
  SequencePlane more = sound.score_sums;
  CHECK(status([](PagePlane&, Bases&) {}, {more}) == "bad_observation");
  DeviceBuffer<float> memory(world.host().sums.size(), "more sums");
  more.base = reinterpret_cast<std::byte*>(memory.data());
  CHECK(status([](PagePlane&, Bases&) {}, {more}) == "ok");
  CHECK(status([](PagePlane&, Bases&) {}, {more, more}) == "bad_observation");
  more.row_stride = 0;
  CHECK(status([](PagePlane&, Bases&) {}, {more}) == "bad_observation");
  if (by_bases) {
    CHECK(status([](PagePlane&, Bases& b) { b[2] = b[0]; }) == "bad_observation");  // keys
    CHECK(status([](PagePlane&, Bases& b) { b[5] = b[3]; }) == "bad_observation");  // values
    CHECK(status([](PagePlane&, Bases& b) { b[4] = b[2]; }) == "bad_observation");  // both
    CHECK(status([](PagePlane&, Bases& b) { b[1] += 16; }) == "bad_observation");
    CHECK(status([](PagePlane&, Bases& b) { b[3] = b[0], b[4] = b[1], b[5] = b[2]; }) ==
          "bad_observation");  // values are the keys, by an array of their own
  }
  CHECK(world.difference() == "");
}

TEST_CASE(
    "C07 cuda::plan: rows stay with an entry that they share, or the plan is refused as the host's",
    "[cuda][parity][fault]") {
  WorldShape shape;
  shape.scales = true;
  shape.tokens_per_scale = GENERATE(0, 2, 4);
  shape.padding = GENERATE(false, true);
  shape.separate_values = shape.padding;
  const Removal removal = GENERATE(
      Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot, Removal::drop_pages);
  const std::int32_t keep = removal == Removal::overwrite_slot ? 31 : GENERATE(11, 30);
  CAPTURE(shape.tokens_per_scale, shape.padding, static_cast<int>(removal), keep);
  World world(shape);
  same(world, kvtrim::test::ByScore{keep, {2, 4}, Removal::stable_pack}, removal);
}

TEST_CASE("C07 cuda::plan: moves inside an entry's rows are legal, others are not",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.sequences = 1;
  shape.kv_heads = shape.layers = 1;
  shape.page_size = shape.max_pages = 4;
  shape.scales = true;
  shape.tokens_per_scale = GENERATE(0, 2);
  // The last row but one goes, or the last but two, or one of the page before it.
  const std::int32_t gone = GENERATE(14, 13, 11);
  const Removal removal = GENERATE(Removal::stable_pack, Removal::fill_holes);
  CAPTURE(shape.tokens_per_scale, gone, static_cast<int>(removal));
  World world(shape);
  auto& sums = world.host().sums;
  for (std::size_t r = 0; r < sums.size(); ++r) {
    sums[r] = static_cast<std::int32_t>(r) == gone ? 0.0F : 1.0F;
  }
  world.device().sums.upload(sums);
  const kvtrim::test::ByScore policy{15, {0, 0}, Removal::stable_pack};
  Observation obs;
  obs.scores = world.host_view().score_sums;
  const Plan plan = kvtrim::test::host_plan(policy, world.host_view(), obs, removal);
  const bool legal = gone == 14 || (gone == 13 && shape.tokens_per_scale == 0);
  CHECK(to_string(plan.view().status()) == (legal ? "ok" : "planes_disagree"));
  same(world, policy, removal);
}

TEST_CASE("C07 cuda::plan: an entry that is no whole part of a page is refused, so is a way out",
          "[cuda][fault]") {
  WorldShape shape;
  shape.scales = true;
  shape.spare_pages = 40;
  shape.tokens_per_scale = GENERATE(5, 4);
  World world(shape);
  const HeavyHitter policy({.heavy = 6, .recent = 3, .removal = Removal::stable_pack});
  DeviceSide side(world, policy);
  const DeviceBuffer<std::int32_t> spares(world.spares(), "spare pages");
  const DeviceBuffer<std::int32_t> there(std::vector<std::int32_t>{40}, "spare count");
  cuda::DevicePlanOptions options;
  options.out_of_place = true;
  options.spare_pages = spares.data();
  options.spare_count = there.data();
  const CacheView device = world.device_view();
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr, options));
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(to_string(side.report().status) ==
        (shape.tokens_per_scale == 5 ? "bad_observation" : "planes_disagree"));
  CHECK(world.difference() == "");
}

TEST_CASE(
    "C12 cuda::plan: a policy is told the model's layer, and layers it does not have are refused",
    "[cuda][parity][fault]") {
  WorldShape shape;
  shape.scope = TableScope::layer;
  shape.layers = 3;
  World world(shape);
  CacheView view = world.device_view();
  view.layer_offset = 2;
  view.model_layers = 4;
  {
    const HeavyHitter policy({.heavy = 4, .recent = 2});
    DeviceSide side(world, policy);
    CHECK(cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue);
    CHECK(cuda::apply(side.workspace, view, nullptr) == cudaErrorInvalidValue);
  }
  const std::int32_t offset = GENERATE(0, 2);
  same(
      world, kvtrim::test::ByScore{8, {2, 4}, Removal::stable_pack, 3}, Removal::automatic, offset);
}

TEST_CASE("C15 cuda::commit: entries that stay keep their flag bits", "[cuda][parity][fault]") {
  WorldShape shape;
  shape.flags = true;
  shape.separate_values = GENERATE(false, true);
  shape.padding = GENERATE(false, true);
  shape.max_pages = GENERATE(8, 300);  // more than a block has threads
  shape.sequences = shape.max_pages == 8 ? 3 : 1;
  shape.page_size = shape.max_pages == 8 ? 4 : 2;
  const Removal removal = GENERATE(Removal::drop_pages, Removal::stable_pack);
  World world(shape);
  const std::int32_t keep = shape.max_pages;
  same(world, kvtrim::test::ByScore{keep, {2, 4}, Removal::stable_pack}, removal);
  const auto& ids = world.host().ids;
  CHECK(std::count_if(ids.begin(), ids.end(), [](std::int32_t e) { return e < -1; }) > 0);
}

TEST_CASE("cuda::plan: a list of the rows that go is enough for every way of removal",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.shuffled = GENERATE(false, true);
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.holes = shape.shuffled && shape.scope == TableScope::head;
  shape.padding = !shape.shuffled;
  shape.scales = shape.padding;
  shape.spare_pages = 40;
  const Removal removal = GENERATE(
      Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot, Removal::drop_pages);
  const std::int32_t capacity = shape.max_pages * shape.page_size;
  const std::int32_t longest = capacity - (shape.padding ? shape.page_size + 1 : 0);
  const std::int32_t keep = removal == Removal::overwrite_slot ? longest - 1 : GENERATE(7, 24);
  CAPTURE(shape.shuffled, static_cast<int>(shape.scope), static_cast<int>(removal), keep);
  const kvtrim::test::ByScore policy{keep, {2, 4}, Removal::stable_pack};
  std::int32_t gone = 0;
  {
    World world(shape);
    for (const SequenceState& state : world.host().states) {
      if (state.live_rows > keep) { gone = std::max(gone, state.extent() - keep); }
    }
    same(world, policy, removal, 0, ReservedPages::follow, gone);
  }
  if (gone < 2) { return; }
  World world(shape);
  const CacheView view = world.device_view();
  const cuda::GivenScores given(view.score_sums);
  DeviceSide side(policy, cuda::PlanBounds(plan_shape(world.host_view()), 0, gone - 1));
  ok(cuda::plan(policy, view, given, side.workspace, nullptr));
  CHECK(to_string(side.report().status) == "workspace_too_small");
  ok(cuda::apply(side.workspace, view, nullptr));
  CHECK(side.report().evicted == 0);
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::plan: a second apply, a changed table or a commit too early are refused",
          "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = 6});
  const CacheView device = world.device_view();
  DeviceSide side(world, policy);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr));
  const int what = GENERATE(0, 1, 2);
  if (what == 0) {  // commit before apply
    ok(cuda::commit(side.workspace, device, tables, nullptr));
    CHECK(side.report().status == Status::not_applied);
    CHECK(world.difference() == "");
    return;
  }
  if (what == 1) {  // a page of the table was exchanged
    auto ids = world.host().ids;
    std::swap(ids[0], ids[1]);
    world.device().ids.upload(ids);
    world.host().ids = ids;
    ok(cuda::apply(side.workspace, device, nullptr));
    CHECK(side.report().status == Status::stale_plan);
    CHECK(world.difference() == "");
    return;
  }
  ok(cuda::apply(side.workspace, device, nullptr));
  const auto once = world.device().pool.download();
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(side.report().status == Status::stale_plan);
  CHECK(world.device().pool.download() == once);
}

TEST_CASE("C01 cuda::commit: other sequences go on after apply, a changed table is refused",
          "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  std::int32_t longest = 0;
  for (const SequenceState& state : world.host().states) {
    longest = std::max(longest, state.live_rows);
  }
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = longest - 2});
  DeviceSide side(world, policy);
  const CacheView device = world.device_view();
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, device, nullptr));
  auto states = world.device().states.download();
  std::size_t evicting = 0, other = 0;
  for (std::size_t i = 0; i < states.size(); ++i) { (states[i].applied ? evicting : other) = i; }
  REQUIRE(states[evicting].applied);
  REQUIRE_FALSE(states[other].applied);
  const bool torn = GENERATE(false, true);
  ++states[torn ? evicting : other].generation;
  world.device().states.upload(states);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  CHECK(side.report().status == (torn ? Status::torn : Status::ok));
  const auto after = world.device().states.download();
  CHECK(after[evicting].live_rows == (torn ? longest : longest - 1));
}

TEST_CASE("C04 C05 C11 cuda::plan: states and orders that the host refuses, the device refuses",
          "[cuda][parity][fault]") {
  WorldShape shape;
  World world(shape);
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  SequenceState& state = world.host().states[1];
  const int what = GENERATE(0, 1, 2, 3, 4);
  Removal removal = Removal::automatic;
  if (what == 0) { state.open = true; }
  if (what == 1) { state.applied = true; }
  if (what == 2) { state.next_position = state.live_rows - 1; }
  if (what == 3) { state.append_row = state.live_rows + 1; }
  if (what == 4) {
    removal = Removal::fill_holes;
    host.positions = device.positions = {};
  }
  world.device().states.upload(world.host().states);
  World sound(shape);  // the bounds are those of the cache as it should be
  const HeavyHitter policy({.heavy = 1, .recent = 0, .grace = 1});
  const Plan wanted = kvtrim::test::host_plan(policy, host, {}, removal);
  CHECK_FALSE(usable(wanted.view().status()));
  DeviceSide side(sound, policy);
  cuda::DevicePlanOptions options;
  options.removal = removal;
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr, options));
  CHECK(to_string(side.report().status) == to_string(wanted.view().status()));
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(side.report().refused == (what == 4 ? 3 : 1));
  if (what == 4) { CHECK(world.difference() == ""); }
}

TEST_CASE("C10 C13 cuda::plan: reserved pages and counters per table, as on the host",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.reserved = GENERATE(1, 3);
  shape.counters = true;
  shape.padding = shape.reserved == 3;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.separate_values = shape.padding;
  const Removal removal = GENERATE(Removal::drop_pages, Removal::stable_pack, Removal::fill_holes);
  const ReservedPages reserved = GENERATE(ReservedPages::follow, ReservedPages::release);
  CAPTURE(shape.reserved,
          shape.counters,
          shape.padding,
          static_cast<int>(shape.scope),
          static_cast<int>(removal),
          static_cast<int>(reserved));
  World world(shape);
  same(world, kvtrim::test::ByScore{6, {2, 2}, Removal::stable_pack}, removal, 0, reserved);
}

TEST_CASE("C10 cuda::plan: reserved entries that are bad, or beyond the table, are found",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.reserved = 2;
  World world(shape);
  const int what = GENERATE(0, 1, 2);
  const SequenceState& state = world.host().states[1];
  const std::int32_t used = pages_for(state.extent(), shape.page_size);
  auto& ids = world.host().ids;
  const auto entry = static_cast<std::size_t>(shape.max_pages + used);
  if (what == 0) { ids[entry] = world.pages(); }
  if (what == 1) { ids[entry] = ids[0]; }
  if (what == 2) { world.host().reserved[1] = shape.max_pages; }
  world.device().ids.upload(ids);
  world.device().reserved.upload(world.host().reserved);
  World sound(shape);
  const HeavyHitter policy({.heavy = 2, .recent = 1});
  const Plan wanted = kvtrim::test::host_plan(policy, world.host_view(), {}, Removal::automatic);
  CHECK_FALSE(usable(wanted.view().status()));
  DeviceSide side(sound, policy);
  ok(cuda::plan(policy, world.device_view(), {}, side.workspace, nullptr));
  CHECK(to_string(side.report().status) == to_string(wanted.view().status()));
  CHECK(side.report().refused == (what == 1 ? 2 : 1));  // one page, two sequences
}

TEST_CASE(
    "C01 cuda::commit: a sequence that ended is left out, a torn table is lost, the rest goes on",
    "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = 2});
  for (const SequenceState& state : world.host().states) { REQUIRE(state.live_rows > 4); }
  DeviceSide side(world, policy);
  const CacheView device = world.device_view();
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, device, nullptr));
  const cuda::DeviceReport planned = side.report();
  const auto before = world.device().states.download();
  auto states = before;
  // Which sequences end, and which is written to by somebody else.
  const int ended = GENERATE(0b000, 0b010, 0b111);
  const int torn = GENERATE(0b000, 0b001);
  std::int64_t gone = 0;
  for (std::size_t s = 0; s < 3; ++s) {
    const bool ends = (ended >> s & 1) != 0;
    const bool changes = (torn >> s & 1) != 0;
    if (ends) { states[s].applied = false; }
    if (changes) { ++states[s].generation; }
    if (!ends && !changes) { gone += (before[s].live_rows - 3) * 4; }
  }
  world.device().states.upload(states);
  const bool any_torn = torn != 0 && (ended & torn) == 0;
  DeviceBuffer<std::int32_t> freed(static_cast<std::size_t>(world.pages()), "freed pages");
  DeviceBuffer<std::int32_t> count(1, "freed count");
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  tables.freed = freed.data();
  tables.freed_count = count.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  const cuda::DeviceReport report = side.report();
  CHECK(to_string(report.status) == to_string(any_torn         ? Status::torn
                                              : ended == 0b111 ? Status::stale_plan
                                                               : Status::ok));
  CHECK(report.evicted == gone);
  const auto after = world.device().states.download();
  std::int32_t pages = 0;
  for (std::size_t s = 0; s < 3; ++s) {
    const bool committed = ((ended | torn) >> s & 1) == 0;
    CHECK(after[s].live_rows == (committed ? 3 : before[s].live_rows));
    CHECK(after[s].generation == states[s].generation + (committed ? 1 : 0));
    if (committed) { pages += pages_for(before[s].extent(), shape.page_size) - 1; }
  }
  CHECK(report.released == pages);
  CHECK(count.download()[0] == pages);
  CHECK(planned.released >= pages);
  const auto list = freed.download();
  const auto& ids = world.host().ids;
  for (std::int32_t i = 0; i < pages; ++i) {  // of tables that were committed
    const auto at = std::find(ids.begin(), ids.end(), list[static_cast<std::size_t>(i)]);
    const auto s = static_cast<int>((at - ids.begin()) / shape.max_pages);
    CHECK(((ended | torn) >> s & 1) == 0);
  }
  // A second time, nothing.
  const auto once = world.device().ids.download();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  CHECK(count.download()[0] == 0);
  CHECK(world.device().ids.download() == once);
}

TEST_CASE("C01 cuda::apply: other sequences go on after plan, and a plan of nothing is never stale",
          "[cuda][parity][fault]") {
  WorldShape shape;
  World world(shape);
  std::int32_t longest = 0;
  for (const SequenceState& state : world.host().states) {
    longest = std::max(longest, state.live_rows);
  }
  const bool nothing = GENERATE(false, true);
  const StreamingSink<SinkForm::exact> policy(
      {.sinks = 1, .recent = nothing ? longest : longest - 2});
  const CacheView device = world.device_view();
  const CacheView host = world.host_view();
  DeviceSide side(world, policy);
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr));
  Plan wanted = kvtrim::test::host_plan(policy, host, {}, Removal::automatic);
  auto& states = world.host().states;
  const bool itself = GENERATE(false, true);
  for (SequenceState& state : states) {
    if ((state.live_rows == longest) == itself) { ++state.generation; }
  }
  world.device().states.upload(states);
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(to_string(side.report().status) == to_string(apply(wanted.ref(), host)));
  CHECK(world.difference() == "");
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(to_string(side.report().status) == to_string(apply(wanted.ref(), host)));
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::plan: entries are looked at only if something goes, states always",
          "[cuda][parity][fault]") {
  WorldShape shape;
  World world(shape);
  world.host().ids[2] = world.pages();
  world.device().ids.upload(world.host().ids);
  const bool states = GENERATE(false, true);
  if (states) { world.host().states[2].next_position = 0; }
  world.device().states.upload(world.host().states);
  const StreamingSink<> policy({.sinks = 1, .recent = 100});
  const Plan wanted = kvtrim::test::host_plan(policy, world.host_view(), {}, Removal::automatic);
  DeviceSide side(world, policy);
  ok(cuda::plan(policy, world.device_view(), {}, side.workspace, nullptr));
  CHECK(to_string(side.report().status) == to_string(wanted.view().status()));
  CHECK(usable(wanted.view().status()) == !states);
}

TEST_CASE("C09 cuda::plan: every base is a multiple of its own plane's unit, no more",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.layout = WorldLayout::layer_bases;
  shape.scope = GENERATE(TableScope::group, TableScope::layer);
  shape.layers = 3;
  shape.unrotated = true;
  shape.k_dim = 16;  // units of 16 bytes
  shape.v_dim = 12;  // of 8
  shape.value_base_shift = 8;
  {
    World world(shape);
    same(world, HeavyHitter({.heavy = 4, .recent = 2, .removal = Removal::stable_pack}));
  }
  // Any base of any layer that is off by half a unit is found on the device.
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2, .removal = Removal::stable_pack});
  DeviceSide side(world, policy);
  const auto sound = world.device().layer_bases.download();
  for (std::size_t i = 0; i < sound.size(); ++i) {
    auto bases = sound;
    bases[i] += i / 3 == 1 ? 4 : 8;
    world.device().layer_bases.upload(bases);
    CAPTURE(i);
    ok(cuda::plan(policy, world.device_view(), {}, side.workspace, nullptr));
    CHECK(to_string(side.report().status) == "bad_observation");
  }
  world.device().layer_bases.upload(sound);
  CHECK(world.difference() == "");
}

#if defined(KVTRIM_EMULATED)
namespace {

namespace emulator = kvtrim::emulator;

/// A step as an engine captures it.
template <class P>
cudaError_t step(const P& policy,
                 const CacheView& view,
                 const DeviceSide& side,
                 const cuda::DeviceTables& tables,
                 cudaStream_t stream) {
  cudaError_t e = cuda::plan(policy, view, {}, side.workspace, stream);
  if (e == cudaSuccess) { e = cuda::apply(side.workspace, view, stream); }
  if (e == cudaSuccess) { e = cuda::commit(side.workspace, view, tables, stream); }
  return e;
}
void begin_anew() {
  emulator::unload_kernels();
  for (auto& known : cuda::detail::raised_limits) { known = 0; }
  emulator::launches().clear();
}

template <class P>
void passes_once_prepared(const P& policy, const WorldShape& shape) {
  World world(shape);
  DeviceSide side(world, policy);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  const CacheView view = world.device_view();
  begin_anew();
  emulator::Graph graph;
  emulator::capture = &graph;
  CHECK(step(policy, view, side, tables, nullptr) == cudaErrorStreamCaptureUnsupported);
  CHECK(emulator::launches().empty());
  emulator::capture = nullptr;
  ok(cuda::prepare(policy, view, {}, side.workspace.shape));
  emulator::capture = &graph;
  ok(step(policy, view, side, tables, nullptr));
  emulator::capture = nullptr;
  CHECK(world.difference() == "");  // nothing ran yet
  ok(graph.run());
  CHECK(usable(side.report().status));
  CHECK(side.report().evicted > 0);
}

}  // namespace

TEST_CASE("cuda::prepare: a step that was prepared can be captured, one that was not cannot",
          "[cuda][fault]") {
  WorldShape shape;
  switch (GENERATE(0, 1, 2, 3)) {
    case 0:
      return passes_once_prepared(StreamingSink({.sinks = 2, .recent = 9}), shape);
    case 1:
      shape.layout = WorldLayout::layer_bases;
      return passes_once_prepared(HeavyHitter({.heavy = 4, .recent = 2}), shape);
    case 2:  // more dynamic shared memory than without asking
      shape.sequences = shape.layers = 1;
      shape.page_size = 64;
      shape.max_pages = 200;
      return passes_once_prepared(HeavyHitter({.heavy = 4, .recent = 2}), shape);
    default:
      PageSelector<AccumulateParams>::Params p;
      p.budget = 12;
      p.window = 4;
      return passes_once_prepared(PageSelector<AccumulateParams>(p), shape);
  }
}

TEST_CASE("cuda: every launch is on the stream given, within grid, memory and parameters",
          "[cuda]") {
  emulator::multiprocessors = 132;
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::nhd, WorldLayout::layer_bases);
  shape.scales = true;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  const auto stream = reinterpret_cast<cudaStream_t>(&side);
  begin_anew();
  ok(step(policy, world.device_view(), side, tables, stream));
  const std::size_t launched = emulator::launches().size();
  for (const emulator::Launch& l : emulator::launches()) {
    CHECK(l.stream == stream);
    CHECK(l.grid.x <= 4 * 132);
    CHECK(l.grid.y * l.grid.z == 1);
    CHECK(l.parameter_bytes <= 4096);
    CHECK(l.static_bytes + l.dynamic_bytes <= 48U * 1024U);
  }
  // The same number whatever there is to do.
  emulator::launches().clear();
  ok(step(policy, world.device_view(), side, tables, stream));
  CHECK(side.report().evicted == 0);
  CHECK(emulator::launches().size() == launched);
  emulator::multiprocessors = 4;
}
#endif

TEST_CASE("cuda::plan: into spare pages, all old ones are released", "[cuda]") {
  WorldShape shape;
  shape.spare_pages = 40;
  shape.padding = GENERATE(false, true);
  shape.separate_values = GENERATE(false, true);
  shape.scales = true;
  World world(shape);
  const HeavyHitter policy({.heavy = 6, .recent = 3, .removal = Removal::stable_pack});
  // The host packs in place: kept rows in the same order, on other pages.
  const CacheView host = world.host_view();
  Plan wanted = kvtrim::test::host_plan(policy, host, {}, Removal::automatic);
  const PlanRef want = wanted.ref();
  const std::vector<std::byte> before = world.host().pool;

  const DeviceBuffer<std::int32_t> spares(world.spares(), "spare pages");
  const bool enough = GENERATE(true, false);
  const DeviceBuffer<std::int32_t> count(std::vector<std::int32_t>{enough ? 40 : 3}, "spare count");
  cuda::PlanBounds bounds(plan_shape(world.host_view()));
  if (GENERATE(false, true)) {
    bounds.max_evicted = kvtrim::test::most_evicted(want, host);
    bounds.total_rows = kvtrim::test::total_rows(host);
  }
  cuda::DevicePlanOptions options;
  options.out_of_place = true;
  options.spare_pages = spares.data();
  options.spare_count = count.data();
  DeviceSide side(policy, bounds, options);
  const CacheView device = world.device_view();
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr, options));
  const cuda::DeviceReport report = side.report();
  CHECK(report.spares_needed > 3);
  ok(cuda::apply(side.workspace, device, nullptr));
  if (!enough) {
    CHECK(report.status == Status::out_of_pages);
    CHECK(world.difference() == "");
    return;
  }
  CHECK(report.status == Status::ok);
  CHECK(report.kept == want.kept_rows());
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  ok(kvtrim::test::finish());
  REQUIRE(apply(want, host) == Status::ok);
  std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
  DenseTables sink(host, world.host().ids.data(), nullptr, nullptr, freed);
  CHECK(usable(commit(want, host, sink).status));
  // Row by row, by each side's own tables.
  const auto pool = world.device().pool.download();
  const auto ids = world.device().ids.download();
  const auto scales = world.device().scales.download();
  CacheView got = host;
  got.k.base = const_cast<std::byte*>(pool.data());
  got.v.base = const_cast<std::byte*>(pool.data()) + (host.v.base - host.k.base);
  got.table.ids = ids.data();
  for (std::int32_t s = 0; s < host.sequences; ++s) {
    for (std::int32_t l = 0; l < host.layers; ++l) {
      for (std::int32_t h = 0; h < host.kv_heads; ++h) {
        const SequenceId q{s};
        const std::int32_t live = host.live_rows(q, LayerId{l}, HeadId{h});
        for (std::int32_t r = 0; r < live; ++r) {
          CHECK(std::memcmp(got.key(q, LayerId{l}, HeadId{h}, r),
                            host.key(q, LayerId{l}, HeadId{h}, r),
                            static_cast<std::size_t>(host.k.row_bytes())) == 0);
          CHECK(std::memcmp(got.value(q, LayerId{l}, HeadId{h}, r),
                            host.value(q, LayerId{l}, HeadId{h}, r),
                            static_cast<std::size_t>(host.v.row_bytes())) == 0);
          const std::int32_t at = r + host.first_row(q);
          const PagePlane p = host.page_planes[0];
          const auto place = [&](const CacheView& v, const std::byte* base) {
            return base + (p.row(LayerId{l},
                                 v.v_page(q, LayerId{l}, HeadId{h}, at / v.page_size),
                                 HeadId{h},
                                 Slot{at % v.page_size}) -
                           p.base);
          };
          CHECK(std::memcmp(
                    place(got, scales.data()), place(host, world.host().scales.data()), 6) == 0);
        }
      }
    }
  }
  CHECK(world.device().positions.download() == world.host().positions);
}

TEST_CASE("cuda::plan: what the host can see is refused before any launch", "[cuda]") {
  WorldShape shape;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  CacheView view = world.device_view();
  cuda::PlanWorkspace small = side.workspace;
  small.bytes -= 256;
  CHECK(cuda::plan(policy, view, {}, small, nullptr) == cudaErrorInvalidValue);
  cuda::PlanWorkspace askew = side.workspace;
  askew.memory = static_cast<std::byte*>(askew.memory) + 16;
  CHECK(cuda::plan(policy, view, {}, askew, nullptr) == cudaErrorInvalidValue);
  view.k.base += 1;
  CHECK(cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::apply(side.workspace, view, nullptr) == cudaErrorInvalidValue);
  view = world.device_view();
  view.score_sums = {};
  CHECK(cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue);
  view = world.device_view();
  view.sequences = 2;
  CHECK(cuda::plan(policy, view, {}, side.workspace, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE(
    "cuda::plan: a shared page behind a table's own is refused if it must stay, else it leaves",
    "[cuda][fault]") {
  WorldShape shape;
  shape.spare_pages = 40;
  World world(shape);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(world.pages()), 1);
  const bool written = GENERATE(true, false);
  const auto& ids = world.host().ids;
  counts[static_cast<std::size_t>(ids[written ? 1 : 7])] =
      2;  // of sequence 0, which uses all 8 pages
  DeviceBuffer<std::int32_t> device_counts(counts, "ref counts");
  CacheView device = world.device_view();
  device.writable.ref_counts = device_counts.data();
  const HeavyHitter policy({.heavy = 6, .recent = 3, .removal = Removal::stable_pack});
  DeviceSide side(world, policy);
  const bool out_of_place = GENERATE(false, true);
  const SharedPages shared = GENERATE(SharedPages::leave, SharedPages::copy);
  const DeviceBuffer<std::int32_t> spares(world.spares(), "spare pages");
  const DeviceBuffer<std::int32_t> there(std::vector<std::int32_t>{40}, "spare count");
  cuda::DevicePlanOptions options;
  options.out_of_place = out_of_place;
  options.spare_pages = spares.data();
  options.spare_count = there.data();
  options.shared = shared;
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr, options));
  ok(cuda::apply(side.workspace, device, nullptr));
  const cuda::DeviceReport report = side.report();
  if (shared == SharedPages::copy && !out_of_place) {
    CHECK(report.spares_needed == (written ? 1 : 0));
  }
  if (shared == SharedPages::leave && !out_of_place) {
    CHECK(report.status == Status::shared_page);
    CHECK(report.refused == 1);
    CHECK(report.first_refused == 0);
    return;
  }
  REQUIRE(report.status == Status::ok);
  DeviceBuffer<std::int32_t> freed(static_cast<std::size_t>(world.pages()), "freed pages");
  DeviceBuffer<std::int32_t> count(1, "freed count");
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  tables.ref_counts = device_counts.data();
  tables.freed = freed.data();
  tables.freed_count = count.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  // The shared page left one table and has one holder still.
  CHECK(count.download()[0] == report.released - 1);
  CHECK(device_counts.download()[static_cast<std::size_t>(ids[written ? 1 : 7])] == 1);
}

TEST_CASE("cuda::plan: unequal budgets in one table, and planes common to heads, are refused",
          "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const HeavyHitter policy({.heavy = 6, .recent = 3, .removal = Removal::stable_pack});
  DeviceSide side(world, policy);
  CacheView device = world.device_view();
  cuda::DeviceObservation obs;
  DeviceBuffer<std::int32_t> budgets(std::vector<std::int32_t>(12, 10), "budgets");
  Status want = Status::unequal_budget;
  if (GENERATE(true, false)) {
    std::vector<std::int32_t> values(12, 10);
    values[3] = values[7] = values[11] = 11;
    budgets.upload(values);
    obs.budgets = budgets.data();
    obs.budget_rows = {4, 2, 1};
  } else {  // the heads keep different rows
    device.positions.head_stride = 0;
    want = Status::planes_disagree;
  }
  ok(cuda::plan(policy, device, obs, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(to_string(side.report().status) == to_string(want));
  CHECK(side.report().released == 0);
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::plan: lengths instead of states, and CSR tables", "[cuda][parity]") {
  WorldShape shape;
  World world(shape);
  std::vector<std::int32_t> lengths;
  for (const SequenceState& s : world.host().states) { lengths.push_back(s.live_rows); }
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  const DeviceBuffer<std::int32_t> device_lengths(lengths, "lengths");
  const std::vector<std::int32_t> starts{0, 8, 16, 24};
  const DeviceBuffer<std::int32_t> device_starts(starts, "indptr");
  host.states = nullptr;
  device.states = nullptr;
  host.lengths = lengths.data();
  device.lengths = device_lengths.data();
  if (GENERATE(false, true)) {
    host.table.indptr = starts.data();
    device.table.indptr = device_starts.data();
  }
  const StreamingSink<SinkForm::exact> policy({.sinks = 3, .recent = 7});
  Plan wanted = kvtrim::test::host_plan(policy, host, {}, Removal::automatic);
  DeviceSide side(world, policy);
  ok(cuda::prepare(policy, device, {}, side.workspace.shape));
  ok(cuda::plan(policy, device, {}, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, device, nullptr));
  CHECK(side.report().status == Status::ok);
  CHECK(side.report().evicted == wanted.view().evicted_rows());
  REQUIRE(apply(wanted.ref(), host) == Status::ok);
  CHECK(world.difference() == "");
}
