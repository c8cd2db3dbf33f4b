// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/step.cuh>

#include <kvtrim/cuda/evict/extend.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/policy/page_selector.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/one_step.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::EngineLists;
using kvtrim::test::ok;
using kvtrim::test::one_step;
using kvtrim::test::same_report;
using kvtrim::test::same_step;
using kvtrim::test::three_calls;
using kvtrim::test::World;
using kvtrim::test::WorldLayout;
using kvtrim::test::WorldShape;

std::vector<cuda::DeviceRefusal> refusals(const DeviceSide& side) {
  const cuda::DevicePlan plan = cuda::device_plan(side.workspace);
  return side.read(plan.refusals, plan.sequences);
}

}  // namespace

TEST_CASE("cuda::step: every way of removal, layout and reserved page, as the three calls",
          "[cuda][parity]") {
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::nhd, WorldLayout::layer_bases, WorldLayout::legacy);
  shape.scales = true;
  shape.separate_values = shape.layout == WorldLayout::nhd;
  shape.reserved = GENERATE(0, 2);
  shape.flags = shape.reserved == 0;
  const Removal removal = GENERATE(
      Removal::drop_pages, Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  const std::int32_t keep = removal == Removal::overwrite_slot ? 31 : 11;
  CAPTURE(static_cast<int>(shape.layout), shape.reserved, static_cast<int>(removal));
  same_step(shape,
            kvtrim::test::ByScore{keep, {2, 4}, Removal::stable_pack},
            removal,
            shape.reserved == 0 ? ReservedPages::follow : ReservedPages::release);
}

TEST_CASE("cuda::step: a page that others hold leaves a table and is not free", "[cuda]") {
  WorldShape shape;
  World by_calls(shape);
  World by_step(shape);
  const StreamingSink policy({.sinks = 2, .recent = 9});
  std::vector<std::int32_t> counts(static_cast<std::size_t>(by_step.pages()), 1);
  for (std::size_t e = 0; e < by_step.host().ids.size(); e += 3) {
    if (by_step.host().ids[e] >= 0) {
      counts[static_cast<std::size_t>(by_step.host().ids[e])] =
          static_cast<std::int32_t>(e % 2) * 2;
    }
  }
  EngineLists of_calls(by_calls, counts);
  EngineLists of_step(by_step, counts);
  DeviceSide calls(by_calls, policy);
  DeviceSide step(by_step, policy);
  CacheView view = by_calls.device_view();
  view.writable.ref_counts = of_calls.ref_counts.data();
  ok(three_calls(policy, view, calls, of_calls.tables));
  view = by_step.device_view();
  view.writable.ref_counts = of_step.ref_counts.data();
  ok(one_step(policy, view, step, of_step.tables));
  CHECK(step.report().released > 0);
  CHECK(of_step.freed_pages().size() < static_cast<std::size_t>(step.report().released));
  CHECK(of_step.freed_pages() == of_calls.freed_pages());
  CHECK(of_step.free_pages() == of_calls.free_pages());
  CHECK(of_step.ref_counts.download() == of_calls.ref_counts.download());
}

TEST_CASE("cuda::step: into spare pages, as the three calls", "[cuda][parity]") {
  WorldShape shape;
  shape.spare_pages = 40;
  shape.padding = GENERATE(false, true);
  shape.separate_values = shape.padding;
  World by_calls(shape);
  World by_step(shape);
  const HeavyHitter policy({.heavy = 6, .recent = 3, .removal = Removal::stable_pack});
  const DeviceBuffer<std::int32_t> spares(by_step.spares(), "spare pages");
  const bool enough = GENERATE(true, false);
  const DeviceBuffer<std::int32_t> count(std::vector<std::int32_t>{enough ? 40 : 3}, "spare count");
  cuda::DeviceStepOptions options;
  options.out_of_place = true;
  options.spare_pages = spares.data();
  options.spare_count = count.data();
  EngineLists of_calls(by_calls);
  EngineLists of_step(by_step);
  DeviceSide calls(by_calls, policy);
  DeviceSide step(by_step, policy);
  ok(three_calls(policy, by_calls.device_view(), calls, of_calls.tables, options));
  ok(one_step(policy, by_step.device_view(), step, of_step.tables, options));
  same_report(step.report(), calls.report());
  CHECK(step.report().status == (enough ? Status::ok : Status::out_of_pages));
  CHECK(step.report().refused == (enough ? 0 : 3));
  CHECK(of_step.freed_pages() == of_calls.freed_pages());
  CHECK(by_step.device().ids.download() == by_calls.device().ids.download());
  CHECK(by_step.device().pool.download() == by_calls.device().pool.download());
  CHECK(by_step.device().positions.download() == by_calls.device().positions.download());
  if (!enough) { CHECK(by_step.difference() == ""); }
}

TEST_CASE("cuda::step: an open step is closed if it is written, and refused otherwise",
          "[cuda][fault]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  World world(shape);
  for (SequenceState& state : world.host().states) { state.open = true; }
  world.device().states.upload(world.host().states);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  EngineLists lists(world);
  cuda::DeviceStepOptions options;
  options.written = GENERATE(false, true);
  ok(one_step(policy, world.device_view(), side, lists.tables, options));
  CHECK(to_string(side.report().status) == (options.written ? "ok" : "step_open"));
  CHECK((side.report().refused > 0) == !options.written);
  for (const SequenceState& state : world.device().states.download()) {
    CHECK(state.open != options.written);
  }
  if (!options.written) {
    CHECK(world.difference() == "");
    CHECK(lists.freed_count.download()[0] == 0);
  }
}

TEST_CASE("cuda::step: nothing is left to apply or to commit after it", "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  EngineLists lists(world);
  const CacheView view = world.device_view();
  ok(one_step(policy, view, side, lists.tables));
  CHECK(side.report().evicted > 0);
  const auto pool = world.device().pool.download();
  const auto ids = world.device().ids.download();
  const auto free = lists.free_pages();
  ok(cuda::apply(side.workspace, view, nullptr));
  CHECK(to_string(side.report().status) == "stale_plan");
  ok(cuda::commit(side.workspace, view, lists.tables, nullptr));
  CHECK(to_string(side.report().status) == "stale_plan");
  CHECK(world.device().pool.download() == pool);
  CHECK(world.device().ids.download() == ids);
  CHECK(lists.free_pages() == free);
}

// --- all or nothing per sequence ----------------------------------------------------------------------------------------

namespace {

/// What may be wrong with sequence 1, or with what it shares with sequence 0.
enum class Wrong {
  id_out_of_range,
  page_twice_in_it,
  page_of_another,
  step_open,
  eviction_open,
  position,
  length,
  hole,
  unequal_budget,
  shared_page,
};

/// The other sequences are evicted from as if the refused ones had nothing to give.
void refuses_alone(Wrong wrong, bool by_step, Removal removal) {
  WorldShape shape;
  shape.sequences = 4;
  World world(shape);
  const bool both = wrong == Wrong::page_of_another;
  const auto refused = [&](std::int32_t s) { return s == 1 || (both && s == 0); };
  // The host's side: the refused sequences keep all.
  const HeavyHitter policy({.heavy = 2, .recent = 1});
  const std::int32_t heads = shape.layers * shape.kv_heads;
  std::vector<std::int32_t> budgets;
  for (std::int32_t i = 0; i < shape.sequences * heads; ++i) {
    budgets.push_back(refused(i / heads) ? 1000 : -1);
  }
  Observation obs;
  obs.budgets = budgets.data();
  obs.budget_rows = {heads, shape.kv_heads, 1};
  for (const SequenceState& state : world.host().states) { REQUIRE(state.live_rows > 3); }
  const CacheView host = world.host_view();
  Plan wanted = kvtrim::test::host_plan(policy, host, obs, removal);
  REQUIRE(wanted.view().status() == Status::ok);
  REQUIRE(apply(wanted.ref(), host) == Status::ok);
  std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
  DenseTables sink(host, world.host().ids.data(), nullptr, nullptr, freed);
  const Report report = commit(wanted.ref(), host, sink);
  REQUIRE(report.status == Status::ok);
  // What is wrong, on both sides: the host has not touched these sequences.
  auto& ids = world.host().ids;
  auto& states = world.host().states;
  auto device_ids = world.device().ids.download();
  auto device_states = world.device().states.download();
  const auto at = static_cast<std::size_t>(shape.max_pages);
  const auto set_id = [&](std::int32_t id) { ids[at] = device_ids[at] = id; };
  const auto set_state = [&](auto&& change) { change(states[1]), change(device_states[1]); };
  Status want = Status::ok;
  CacheView view = world.device_view();
  std::vector<std::int32_t> counts(static_cast<std::size_t>(world.pages()), 1);
  DeviceBuffer<std::int32_t> device_budgets(budgets.size(), "budgets");
  cuda::DeviceObservation device_obs;
  switch (wrong) {
    case Wrong::id_out_of_range:
      want = Status::page_out_of_range;
      set_id(world.pages());
      break;
    case Wrong::page_twice_in_it:
      want = Status::page_twice;
      set_id(ids[at + 1]);
      break;
    case Wrong::page_of_another:
      want = Status::page_twice;
      set_id(ids[3]);
      break;
    case Wrong::step_open:
      want = Status::step_open;
      set_state([](SequenceState& s) { s.open = true; });
      break;
    case Wrong::eviction_open:
      want = Status::eviction_open;
      set_state([](SequenceState& s) { s.applied = true; });
      break;
    case Wrong::position:
      want = Status::states_disagree;
      set_state([](SequenceState& s) { s.next_position = 1; });
      break;
    case Wrong::length:
      want = Status::length_beyond_table;
      set_state([](SequenceState& s) { s.live_rows = 100000; });
      break;
    case Wrong::hole:
      want = Status::states_disagree;
      set_state([](SequenceState& s) { s.append_row = s.live_rows + 1; });
      break;
    case Wrong::unequal_budget: {
      want = Status::unequal_budget;
      std::vector<std::int32_t> values(budgets.size(), -1);
      values[static_cast<std::size_t>(heads) + 1] = 7;
      device_budgets.upload(values);
      device_obs.budgets = device_budgets.data();
      device_obs.budget_rows = obs.budget_rows;
      break;
    }
    case Wrong::shared_page:
      // The last page, which holds the most recent row: it would have to stay behind pages that close up.
      want = Status::shared_page;
      REQUIRE(states[1].live_rows > shape.page_size);
      counts[static_cast<std::size_t>(
          ids[at + static_cast<std::size_t>((states[1].live_rows - 1) / shape.page_size)])] = 2;
      break;
  }
  world.device().ids.upload(device_ids);
  world.device().states.upload(device_states);
  EngineLists lists(world, counts);
  if (wrong == Wrong::shared_page) { view.writable.ref_counts = lists.ref_counts.data(); }
  World sound(shape);  // the bounds are those of the cache as it should be
  DeviceSide side(sound, policy);
  cuda::DeviceStepOptions options;
  options.removal = removal;
  if (by_step) {
    ok(cuda::step(policy, view, device_obs, side.workspace, lists.tables, nullptr, options));
  } else {
    ok(cuda::plan(policy, view, device_obs, side.workspace, nullptr, options));
    CHECK(to_string(side.report().status) == to_string(want));
    ok(cuda::apply(side.workspace, view, nullptr));
    CHECK(to_string(side.report().status) == to_string(want));
    ok(cuda::commit(side.workspace, view, lists.tables, nullptr));
  }
  CHECK(world.difference() == "");
  const cuda::DeviceReport got = side.report();
  CHECK(to_string(got.status) == to_string(want));
  CHECK(got.refused == (both ? 2 : 1));
  CHECK(got.first_refused == (both ? 0 : 1));
  CHECK(got.first_table == 0);
  CHECK(got.evicted == report.evicted_rows);
  CHECK(got.bytes_moved == report.bytes_moved);
  CHECK(static_cast<std::size_t>(got.released) == sink.freed().size());
  CHECK(lists.freed_pages().size() == sink.freed().size());
  const auto why = refusals(side);
  for (std::int32_t s = 0; s < shape.sequences; ++s) {
    const cuda::DeviceRefusal& mine = why[static_cast<std::size_t>(s)];
    CHECK(to_string(mine.status) == (refused(s) ? to_string(want) : "ok"));
    CHECK(mine.table == (refused(s) ? 0 : -1));
  }
}

}  // namespace

TEST_CASE("cuda::plan, step: a refused sequence stays as it is, the others are evicted from",
          "[cuda][parity][fault]") {
  const Wrong wrong = GENERATE(Wrong::id_out_of_range,
                               Wrong::page_twice_in_it,
                               Wrong::page_of_another,
                               Wrong::step_open,
                               Wrong::eviction_open,
                               Wrong::position,
                               Wrong::length,
                               Wrong::hole,
                               Wrong::unequal_budget,
                               Wrong::shared_page);
  const bool by_step = GENERATE(false, true);
  const Removal removal = GENERATE(Removal::stable_pack, Removal::fill_holes);
  CAPTURE(static_cast<int>(wrong), by_step, static_cast<int>(removal));
  refuses_alone(wrong, by_step, removal);
}

TEST_CASE("cuda::plan: a fault of one table refuses the other tables of its sequence",
          "[cuda][fault]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::layer, TableScope::head);
  World world(shape);
  const auto tables = static_cast<std::size_t>(world.host_view().tables_per_sequence());
  const std::size_t bad = 2 * tables - 1;  // the last table of sequence 1
  const bool length = GENERATE(false, true);
  auto& states = world.host().states;
  if (length) {
    states[bad].next_position = 0;
  } else {
    world.host().ids[bad * static_cast<std::size_t>(shape.max_pages)] = -1;
  }
  world.device().states.upload(states);
  world.device().ids.upload(world.host().ids);
  const bool pages = GENERATE(false, true);
  EngineLists lists(world);
  const auto before = states;
  const auto check = [&](const auto& policy) {
    DeviceSide side(world, policy);
    ok(one_step(policy, world.device_view(), side, lists.tables));
    const cuda::DeviceReport report = side.report();
    CHECK(to_string(report.status) == (length ? "states_disagree" : "page_out_of_range"));
    CHECK(report.refused == 1);
    CHECK(report.first_refused == 1);
    CHECK(report.first_table == static_cast<std::int32_t>(tables) - 1);
    CHECK(report.evicted > 0);
    const auto after = world.device().states.download();
    for (std::size_t i = 0; i < after.size(); ++i) {
      const bool same_rows = after[i].live_rows == before[i].live_rows;
      CHECK((after[i].generation == before[i].generation) == same_rows);
      if (i / tables == 1) { CHECK(same_rows); }
      if (i / tables != 1 && before[i].live_rows > 14) { CHECK_FALSE(same_rows); }
    }
  };
  if (pages) {
    check(StreamingSink({.sinks = 1, .recent = 4}));
  } else {
    check(HeavyHitter({.heavy = 2, .recent = 1}));
  }
}

TEST_CASE("cuda::plan: what is wrong with the planes, or too long for the workspace, refuses all",
          "[cuda][fault]") {
  WorldShape shape;
  shape.layout = WorldLayout::layer_bases;
  World world(shape);
  const HeavyHitter policy({.heavy = 2, .recent = 1});
  DeviceSide side(world, policy);
  EngineLists lists(world);
  const bool bound = GENERATE(false, true);
  const bool by_step = GENERATE(false, true);
  Status want = Status::bad_observation;
  if (bound) {
    side.workspace.shape.max_rows = 20;  // sequence 0 has 32 rows
    want = Status::workspace_too_small;
  } else {
    auto bases = world.device().layer_bases.download();
    bases[1] += 2;
    world.device().layer_bases.upload(bases);
  }
  const CacheView view = world.device_view();
  if (by_step) {
    ok(one_step(policy, view, side, lists.tables));
  } else {
    ok(three_calls(policy, view, side, lists.tables));
  }
  const cuda::DeviceReport report = side.report();
  CHECK(to_string(report.status) == to_string(want));
  CHECK(report.refused == 3);
  CHECK(report.first_refused == -1);
  CHECK(report.evicted == 0);
  CHECK(lists.freed_count.download()[0] == 0);
  for (const cuda::DeviceRefusal& why : refusals(side)) {
    CHECK(to_string(why.status) == to_string(want));
  }
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::apply, commit: a workspace that holds another plan now moves nothing",
          "[cuda][fault]") {
  // Two caches with the same tables, lengths and states, as a target and its draft model have.
  WorldShape shape;
  World target(shape);
  World draft(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(target, policy);
  EngineLists of_target(target);
  EngineLists of_draft(draft);
  ok(cuda::plan(policy, target.device_view(), {}, side.workspace, nullptr));
  const bool applied = GENERATE(false, true);
  if (applied) { ok(cuda::apply(side.workspace, target.device_view(), nullptr)); }
  ok(cuda::plan(policy, draft.device_view(), {}, side.workspace, nullptr));
  if (!applied) {
    ok(cuda::apply(side.workspace, target.device_view(), nullptr));
    CHECK(to_string(side.report().status) == "stale_plan");
    CHECK(target.difference() == "");
    ok(cuda::apply(side.workspace, draft.device_view(), nullptr));  // the plan is for this one
    CHECK(to_string(side.report().status) == "ok");
    ok(cuda::commit(side.workspace, target.device_view(), of_target.tables, nullptr));
    CHECK(to_string(side.report().status) == "stale_plan");
    CHECK(target.difference() == "");
    ok(cuda::commit(side.workspace, draft.device_view(), of_draft.tables, nullptr));
    CHECK(to_string(side.report().status) == "ok");
    return;
  }
  ok(cuda::commit(side.workspace, target.device_view(), of_target.tables, nullptr));
  CHECK(to_string(side.report().status) == "stale_plan");
  CHECK(of_target.freed_count.download()[0] == 0);
  CHECK(target.device().ids.download() == target.host().ids);
  // It is known to be torn from itself: its rows moved, and no plan tells where.
  ok(cuda::plan(policy, target.device_view(), {}, side.workspace, nullptr));
  CHECK(to_string(side.report().status) == "eviction_open");
}

TEST_CASE("cuda::commit: a second apply does not spoil what the first one moved", "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  EngineLists lists(world);
  const CacheView view = world.device_view();
  ok(cuda::plan(policy, view, {}, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, view, nullptr));
  ok(cuda::apply(side.workspace, view, nullptr));
  CHECK(to_string(side.report().status) == "stale_plan");
  ok(cuda::commit(side.workspace, view, lists.tables, nullptr));
  CHECK(to_string(side.report().status) == "ok");
  for (const SequenceState& state : world.device().states.download()) {
    CHECK(state.live_rows <= 6);
    CHECK_FALSE(state.applied);
  }
}

TEST_CASE("cuda::step: what the host can see is refused before any launch", "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const HeavyHitter policy({.heavy = 4, .recent = 2});
  DeviceSide side(world, policy);
  EngineLists lists(world);
  const CacheView sound = world.device_view();
  const auto refused = [&](auto&& change) {
    CacheView view = sound;
    cuda::DeviceTables tables = lists.tables;
    cuda::PlanWorkspace workspace = side.workspace;
    change(view, tables, workspace);
    return cuda::step(policy, view, {}, workspace, tables, nullptr) == cudaErrorInvalidValue;
  };
  using View = CacheView;
  using Tables = cuda::DeviceTables;
  using Space = cuda::PlanWorkspace;
  CHECK(refused([](View&, Tables& t, Space&) { t.ids = nullptr; }));
  CHECK(refused([](View&, Tables& t, Space&) { t.free.count = nullptr; }));
  CHECK(refused([](View& v, Tables&, Space&) { v.lengths = v.table.ids; }));
  CHECK(refused([](View& v, Tables&, Space&) { v.table.indptr = v.table.ids; }));
  CHECK(refused([](View& v, Tables&, Space&) { v.score_sums = {}; }));
  CHECK(refused([](View&, Tables&, Space& w) { w.bytes -= 256; }));
  CHECK(world.difference() == "");
  // A workspace for one pool, and layers that have pools of their own.
  side.workspace.shape.pools = 1;
  CacheView layered = sound;
  layered.scope = side.workspace.shape.scope = TableScope::layer;
  CHECK(cuda::step(policy, layered, {}, side.workspace, lists.tables, nullptr) ==
        cudaErrorInvalidValue);
}

#if defined(KVTRIM_EMULATED)
namespace {
namespace emulator = kvtrim::emulator;

/// Launches of a step, all of them on the stream given.
template <class P>
std::size_t launches_of(const P& policy, World& world, const DeviceSide& side, EngineLists& lists) {
  const auto stream = reinterpret_cast<cudaStream_t>(&world);
  emulator::launches().clear();
  ok(one_step(policy, world.device_view(), side, lists.tables, {}, stream));
  for (const emulator::Launch& l : emulator::launches()) {
    CHECK(l.stream == stream);
    CHECK(l.parameter_bytes <= 4096);
    CHECK(l.grid.x <= 4U * static_cast<unsigned>(emulator::multiprocessors));
  }
  return emulator::launches().size();
}

template <class P>
void launches_at_most(std::size_t most, const P& policy, const WorldShape& shape) {
  World world(shape);
  DeviceSide side(world, policy);
  EngineLists lists(world);
  const std::size_t first = launches_of(policy, world, side, lists);
  CHECK(side.report().evicted > 0);
  CHECK(first <= most);
  // The same number if nothing goes, and if all is refused.
  CHECK(launches_of(policy, world, side, lists) == first);
  CHECK(side.report().evicted == 0);
  auto states = world.device().states.download();
  for (SequenceState& state : states) { state.live_rows = -1; }
  world.device().states.upload(states);
  CHECK(launches_of(policy, world, side, lists) == first);
  CHECK(side.report().refused == 3);
}

}  // namespace

TEST_CASE(
    "cuda::step: six launches for HeavyHitter, four for StreamingSink, whatever there is to do",
    "[cuda]") {
  WorldShape shape;
  shape.layout = GENERATE(WorldLayout::nhd, WorldLayout::layer_bases);
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.scales = shape.layout == WorldLayout::layer_bases;
  launches_at_most(6, HeavyHitter({.heavy = 4, .recent = 2}), shape);
  launches_at_most(6, StreamingSink<SinkForm::exact>({.sinks = 1, .recent = 4}), shape);
  launches_at_most(4, StreamingSink({.sinks = 1, .recent = 4}), shape);
}

TEST_CASE("cuda::prepare: extend, written and step can be captured once prepared, not before",
          "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  const CacheView view = world.device_view();
  EngineLists lists(world);
  DeviceBuffer<Status> statuses(3, "statuses");
  cuda::DeviceExtend what;
  what.statuses = statuses.data();
  cuda::DeviceStepOptions options;
  options.written = true;
  const auto check = [&](const auto& policy) {
    DeviceSide side(world, policy);
    const auto run = [&] {
      cudaError_t e = cuda::extend(view, lists.tables, what, nullptr);
      if (e == cudaSuccess) { e = cuda::written(view, LayerId{-1}, nullptr, nullptr); }
      if (e != cudaSuccess) { return e; }
      return one_step(policy, view, side, lists.tables, options);
    };
    emulator::unload_kernels();
    for (auto& known : cuda::detail::raised_limits) { known = 0; }
    emulator::Graph graph;
    emulator::capture = &graph;
    CHECK(run() == cudaErrorStreamCaptureUnsupported);
    emulator::capture = nullptr;
    ok(cuda::prepare(policy, view, {}, side.workspace.shape));
    emulator::capture = &graph;
    ok(run());
    emulator::capture = nullptr;
    CHECK(world.difference() == "");  // nothing ran yet
  };
  check(HeavyHitter({.heavy = 4, .recent = 2}));
  check(StreamingSink({.sinks = 1, .recent = 4}));
}
#endif
