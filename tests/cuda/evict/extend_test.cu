// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/extend.cuh>

#include <kvtrim/cuda/evict/step.cuh>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::ok;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

/// A list of free pages on both sides.
struct FreeList {
  FreeList(World& world, std::vector<std::int32_t> pages)
      : host(std::move(pages)),
        ids(static_cast<std::size_t>(world.pages()), "free pages"),
        count(std::vector<std::int32_t>{static_cast<std::int32_t>(host.size()), 0}, "free count"),
        statuses(static_cast<std::size_t>(world.host_view().sequences), "statuses"),
        counts(std::vector<std::int32_t>(static_cast<std::size_t>(world.pages()), 1),
               "ref counts") {
    ids.upload(host);
    tables.ids = world.device().ids.data();
    tables.free = {ids.data(), count.data(), world.pages()};
    what.statuses = statuses.data();
  }
  [[nodiscard]] std::vector<std::int32_t> on_device() const {
    auto list = ids.download();
    list.resize(static_cast<std::size_t>(count.download()[0]));
    return list;
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const Status s : statuses.download()) { all.emplace_back(to_string(s)); }
    return all;
  }
  std::vector<std::int32_t> host;
  DeviceBuffer<std::int32_t> ids, count;
  DeviceBuffer<Status> statuses;
  DeviceBuffer<std::int32_t> counts;
  cuda::DeviceTables tables;
  cuda::DeviceExtend what;
};

/// `PagedCache::try_extend` over a world's host side, row by row: as simple as it can be said.
std::vector<std::string> host_extend(World& world,
                                     const CacheView& view,
                                     const std::vector<std::int32_t>& rows,
                                     std::vector<std::int32_t>& free) {
  std::vector<std::string> statuses;
  const std::int32_t tables = view.tables_per_sequence();
  const std::int32_t each = view.table.v_offset != 0 ? 2 : 1;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    const SequenceId q{s};
    const std::int32_t n = rows[static_cast<std::size_t>(s)];
    const auto state_of = [&](std::int32_t t) -> SequenceState& {
      return world.host().states[static_cast<std::size_t>(s * tables + t)];
    };
    const auto pages_of = [&](std::int64_t extent) {
      return static_cast<std::size_t>((extent + view.first_row(q) + view.page_size - 1) /
                                      view.page_size);
    };
    Status status = Status::ok;
    std::size_t needed = 0;
    for (std::int32_t t = 0; t < tables; ++t) {
      const SequenceState& state = state_of(t);
      if (state.open && status != Status::eviction_open) { status = Status::step_open; }
      if (state.applied) { status = Status::eviction_open; }
    }
    for (std::int32_t t = 0; t < tables && status == Status::ok && n > 0; ++t) {
      const SequenceState& state = state_of(t);
      if (pages_of(state.live_rows + n) > static_cast<std::size_t>(view.table.max_pages)) {
        status = Status::too_many_rows;
      }
      needed += (pages_of(state.live_rows + n) - pages_of(state.extent())) *
                static_cast<std::size_t>(each);
    }
    if (status == Status::ok && needed > free.size()) { status = Status::out_of_pages; }
    statuses.emplace_back(to_string(status));
    if (status != Status::ok || n == 0) { continue; }
    for (std::int32_t t = 0; t < tables; ++t) {
      SequenceState& state = state_of(t);
      std::int32_t* const entries =
          world.host().ids.data() +
          view.table.rows(q, view.first_layer(t), view.first_head(t)) * view.table.row_stride;
      for (std::size_t e = pages_of(state.extent()); e < pages_of(state.live_rows + n); ++e) {
        entries[e] = free.back(), free.pop_back();
        if (each == 2) {
          entries[e + static_cast<std::size_t>(view.table.v_offset)] = free.back();
          free.pop_back();
        }
      }
      for (std::int32_t i = 0; i < n; ++i) {
        const std::int32_t row = state.append_row >= 0 ? state.append_row : state.live_rows;
        for (std::int32_t l = 0; l < view.layers_per_table(); ++l) {
          for (std::int32_t h = 0; h < view.heads_per_table(); ++h) {
            const LayerId layer{raw(view.first_layer(t)) + l};
            const HeadId head{raw(view.first_head(t)) + h};
            view.positions.at<std::int32_t>(q, layer, head, row) = state.next_position;
            view.score_sums.at<float>(q, layer, head, row) = 0;
            view.score_compensations.at<float>(q, layer, head, row) = 0;
          }
        }
        state.ordered = state.ordered && row == state.live_rows;
        state.append_row = -1;
        ++state.live_rows;
        ++state.next_position;
        ++state.next_rope_position;
      }
      ++state.steps;
      ++state.generation;
      state.open = true;
    }
  }
  return statuses;
}

}  // namespace

TEST_CASE("cuda::extend: holes, tails and pages, as the host, all or nothing per sequence",
          "[cuda][parity][fault]") {
  WorldShape shape;
  shape.sequences = 5;
  shape.max_pages = 9;
  shape.reserved = 0;
  shape.spare_pages = 30;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.holes = GENERATE(false, true);
  shape.padding = GENERATE(false, true);
  shape.separate_values = shape.padding;
  shape.seed = GENERATE(1U, 2U);
  World world(shape);
  auto free = world.spares();
  const std::size_t pages = GENERATE(0U, 3U, 30U);
  free.resize(pages);
  const int rows = GENERATE(0, 1, 2);
  const std::vector<std::int32_t> numbers = rows == 0   ? std::vector<std::int32_t>{1, 1, 1, 1, 1}
                                            : rows == 1 ? std::vector<std::int32_t>{0, 1, 5, 2, 1}
                                                        : std::vector<std::int32_t>{9, 4, 3, 7, 1};
  CAPTURE(static_cast<int>(shape.scope), shape.holes, shape.padding, shape.seed, pages, rows);
  auto& states = world.host().states;
  for (std::size_t i = 1; i < states.size(); ++i) {  // room for more
    states[i].live_rows = std::min(states[i].live_rows, 20);
    states[i].append_row = std::min(states[i].append_row, states[i].live_rows - 1);
  }
  // Entries that are not in use any more are null.
  const CacheView host = world.host_view();
  for (std::int32_t s = 0; s < host.sequences; ++s) {
    for (std::int32_t t = 0; t < host.tables_per_sequence(); ++t) {
      const LayerId l = host.first_layer(t);
      const HeadId h = host.first_head(t);
      const std::int32_t used = pages_for(
          host.state(SequenceId{s}, l, h).extent() + host.first_row(SequenceId{s}), host.page_size);
      std::int32_t* const row =
          world.host().ids.data() + host.table.rows(SequenceId{s}, l, h) * host.table.row_stride;
      for (std::int32_t e = used; e < shape.max_pages; ++e) {
        row[e] = row[e + host.table.v_offset] = -1;
      }
    }
  }
  world.device().states.upload(states);
  world.device().ids.upload(world.host().ids);
  FreeList list(world, free);
  const DeviceBuffer<std::int32_t> device_rows(numbers, "rows");
  list.what.rows = device_rows.data();
  ok(cuda::extend(world.device_view(), list.tables, list.what, nullptr));
  ok(kvtrim::test::finish());
  const auto want = host_extend(world, host, numbers, list.host);
  CHECK(list.names() == want);
  CHECK(list.on_device() == list.host);
  CHECK(world.difference() == "");
  // Again: a step is open wherever rows were given.
  ok(cuda::extend(world.device_view(), list.tables, list.what, nullptr));
  const auto again = host_extend(world, host, numbers, list.host);
  CHECK(list.names() == again);
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::extend: an empty list, a shared page, a bad state or list: nothing is changed",
          "[cuda][fault]") {
  WorldShape shape;
  shape.max_pages = 10;
  shape.spare_pages = 8;
  World world(shape);
  auto& states = world.host().states;
  auto& ids = world.host().ids;
  for (std::size_t s = 0; s < 3; ++s) {  // 8 rows in two pages; sequence 2 has 7
    states[s].live_rows = s == 2 ? 7 : 8;
    states[s].next_position = states[s].next_rope_position = 30;
    for (std::size_t e = 2; e < 10; ++e) { ids[s * 10 + e] = -1; }
  }
  std::vector<std::int32_t> counts(static_cast<std::size_t>(world.pages()), 1);
  auto free = world.spares();
  const int what = GENERATE(0, 1, 2, 3, 4, 5, 6, 7);
  std::vector<std::string> want{"ok", "ok", "ok"};
  std::size_t taken = 2;
  if (what == 0) { free.clear(), want = {"out_of_pages", "out_of_pages", "ok"}, taken = 0; }
  if (what == 1) { free.resize(1), want = {"ok", "out_of_pages", "ok"}, taken = 1; }
  if (what == 2) { counts[static_cast<std::size_t>(ids[21])] = 2, want[2] = "shared_page"; }
  if (what == 3) { states[1].next_position = 2, want[1] = "states_disagree", taken = 1; }
  if (what == 4) { states[1].applied = true, want[1] = "eviction_open", taken = 1; }
  if (what == 5) { free.back() = world.pages(), want[0] = "page_out_of_range"; }
  if (what == 6) { ids[21] = -1, want[2] = "page_out_of_range"; }
  if (what == 7) { want = {"too_many_rows", "too_many_rows", "ok"}, taken = 0; }
  world.device().states.upload(states);
  world.device().ids.upload(ids);
  FreeList list(world, free);
  list.counts.upload(counts);
  if (what == 7) { list.what.max_rows = 8; }
  CacheView view = world.device_view();
  view.writable.ref_counts = list.counts.data();
  ok(cuda::extend(view, list.tables, list.what, nullptr));
  CHECK(list.names() == want);
  const auto after = world.device().states.download();
  for (std::size_t s = 0; s < 3; ++s) {
    const bool extended = want[s] == "ok";
    CHECK(after[s].live_rows == states[s].live_rows + (extended ? 1 : 0));
    CHECK(after[s].generation == states[s].generation + (extended ? 1 : 0));
    CHECK(after[s].open == extended);
    const std::int32_t third = world.device().ids.download()[s * 10 + 2];
    CHECK((third >= 0) == (extended && s < 2));
  }
  CHECK(list.on_device() ==
        std::vector<std::int32_t>(free.begin(), free.end() - static_cast<std::ptrdiff_t>(taken)));
  if (std::find(want.begin(), want.end(), "ok") == want.end()) { CHECK(world.difference() == ""); }
}

TEST_CASE("cuda::extend, written: what the host can see is refused before any launch",
          "[cuda][fault]") {
  WorldShape shape;
  World world(shape);
  FreeList list(world, {});
  const CacheView sound = world.device_view();
  const auto refused = [&](auto&& change) {
    CacheView view = sound;
    cuda::DeviceTables tables = list.tables;
    cuda::DeviceExtend what = list.what;
    change(view, tables, what);
    return cuda::extend(view, tables, what, nullptr) == cudaErrorInvalidValue;
  };
  using View = CacheView;
  using Tables = cuda::DeviceTables;
  using What = cuda::DeviceExtend;
  CHECK(refused([](View& v, Tables&, What&) { v.states = nullptr; }));
  CHECK(refused([](View& v, Tables&, What&) { v.table.indptr = v.table.ids; }));
  CHECK(refused([](View& v, Tables&, What&) { v.reserved_pages = v.table.ids; }));
  CHECK(refused([](View& v, Tables&, What&) { v.lengths = v.table.ids; }));
  CHECK(refused([](View& v, Tables&, What&) { v.positions.element_bytes = 8; }));
  CHECK(refused([](View&, Tables& t, What&) { t.ids = nullptr; }));
  CHECK(refused([](View&, Tables& t, What&) { t.free = {}; }));
  CHECK(refused([](View&, Tables&, What& w) { w.statuses = nullptr; }));
  CHECK(refused([](View&, Tables&, What& w) { w.each = -1; }));
  CHECK(cuda::written(sound, LayerId{0}, nullptr, nullptr) == cudaErrorInvalidValue);
  CHECK(cuda::written(sound, LayerId{2}, nullptr, nullptr) == cudaErrorInvalidValue);
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::written: a table is closed once all layers that it serves are written", "[cuda]") {
  WorldShape shape;
  shape.layers = 3;
  shape.spare_pages = 40;
  shape.max_pages = 9;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  World world(shape);
  for (SequenceState& state : world.host().states) {
    state.live_rows = std::min(state.live_rows, 20);
  }
  world.device().states.upload(world.host().states);
  FreeList list(world, world.spares());
  const CacheView view = world.device_view();
  DeviceBuffer<std::uint8_t> unwritten(std::vector<std::uint8_t>(9, 0), "unwritten");
  list.what.unwritten = unwritten.data();
  ok(cuda::extend(view, list.tables, list.what, nullptr));
  CHECK(list.names() == std::vector<std::string>{"ok", "ok", "ok"});
  const auto open_tables = [&] {
    const auto states = world.device().states.download();
    return std::count_if(states.begin(), states.end(), [](const auto& s) { return s.open; });
  };
  const auto all = static_cast<std::ptrdiff_t>(world.host().states.size());
  const auto each = shape.scope == TableScope::group ? 0 : all / 3;
  CHECK(open_tables() == all);
  ok(cuda::written(view, LayerId{1}, unwritten.data(), nullptr));
  ok(cuda::written(view, LayerId{1}, unwritten.data(), nullptr));  // counts once
  CHECK(open_tables() == all - each);
  if (GENERATE(false, true)) {
    ok(cuda::written(view, LayerId{-1}, unwritten.data(), nullptr));
  } else {
    ok(cuda::written(view, LayerId{2}, unwritten.data(), nullptr));
    CHECK(open_tables() == all - 2 * each);
    ok(cuda::written(view, LayerId{0}, unwritten.data(), nullptr));
  }
  CHECK(open_tables() == 0);
}

namespace {

/// Decode steps on both sides: extend, more attention, evict; pages go round, whether or not their owners are counted.
template <class P>
void decode(const P& policy, const WorldShape& shape, int steps) {
  World world(shape);
  FreeList list(world, world.spares());
  list.what.each = 1;
  const CacheView host = world.host_view();
  CacheView view = world.device_view();
  // An owner for every page, except for those in the list.
  const auto owners = [&] {
    std::vector<std::int32_t> counts(static_cast<std::size_t>(world.pages()), 1);
    for (const std::int32_t page : list.host) { counts[static_cast<std::size_t>(page)] = 0; }
    return counts;
  };
  if (GENERATE(false, true)) {
    list.counts.upload(owners());
    list.tables.ref_counts = list.counts.data();
    view.writable.ref_counts = list.counts.data();
  }
  const bool counted = view.writable.ref_counts != nullptr;
  PlanShape bounds = plan_shape(host);
  bounds.max_rows = world.capacity();
  const std::size_t bytes = cuda::plan_workspace_bytes(policy, bounds);
  DeviceBuffer<std::byte> memory(bytes, "workspace");
  const cuda::PlanWorkspace workspace{bounds, memory.data(), bytes};
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(shape.sequences), 1);
  cuda::DeviceStepOptions options;
  options.written = true;
  for (int i = 0; i < steps; ++i) {
    CAPTURE(i);
    const auto want = host_extend(world, host, ones, list.host);
    ok(cuda::extend(view, list.tables, list.what, nullptr));
    REQUIRE(list.names() == want);
    REQUIRE(world.difference() == "");
    if (counted) { REQUIRE(list.counts.download() == owners()); }
    // What attention would have added.
    auto& sums = world.host().sums;
    for (std::size_t r = static_cast<std::size_t>(i) % 3; r < sums.size(); r += 3) {
      sums[r] += static_cast<float>((r * 7 + static_cast<std::size_t>(i) * 13) % 11);
    }
    world.device().sums.upload(sums);
    for (SequenceState& state : world.host().states) { state.open = false; }
    Plan wanted = kvtrim::test::host_plan(policy, host, {}, Removal::automatic);
    REQUIRE(wanted.view().status() == Status::ok);
    REQUIRE(apply(wanted.ref(), host) == Status::ok);
    std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
    DenseTables sink(host, world.host().ids.data(), nullptr, nullptr, freed);
    REQUIRE(commit(wanted.ref(), host, sink).status == Status::ok);
    for (const PageId p : sink.freed()) { list.host.push_back(raw(p)); }
    ok(cuda::step(policy, view, {}, workspace, list.tables, nullptr, options));
    REQUIRE(world.difference() == "");
    REQUIRE(list.on_device() == list.host);
    if (counted) { REQUIRE(list.counts.download() == owners()); }
  }
}

}  // namespace

TEST_CASE("cuda::extend, step: decode steps leave what the host's leave, pages go round",
          "[cuda][parity]") {
  WorldShape shape;
  shape.max_pages = 10;
  shape.spare_pages = 6;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  if (shape.scope == TableScope::head) { shape.spare_pages = 24; }
  switch (GENERATE(0, 1, 2, 3)) {
    case 0:
      return decode(HeavyHitter({.heavy = 6, .recent = 4}), shape, 12);
    case 1:
      return decode(
          HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 6, .recent = 4}), shape, 12);
    case 2:
      return decode(StreamingSink({.sinks = 2, .recent = 9}), shape, 12);
    default:
      return decode(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 9}), shape, 12);
  }
}

#if defined(KVTRIM_EMULATED)
TEST_CASE("cuda::extend, step: from the first to the last launch eight, or five by position",
          "[cuda]") {
  WorldShape shape;
  shape.max_pages = 10;
  shape.spare_pages = 6;
  World world(shape);
  const bool heavy = GENERATE(false, true);
  const HeavyHitter by_score({.heavy = 6, .recent = 4});
  const StreamingSink by_position({.sinks = 2, .recent = 9});
  PlanShape bounds = plan_shape(world.host_view());
  bounds.max_rows = world.capacity();
  const std::size_t bytes = heavy ? cuda::plan_workspace_bytes(by_score, bounds)
                                  : cuda::plan_workspace_bytes(by_position, bounds);
  DeviceBuffer<std::byte> memory(bytes, "workspace");
  const cuda::PlanWorkspace workspace{bounds, memory.data(), bytes};
  FreeList list(world, world.spares());
  const auto stream = reinterpret_cast<cudaStream_t>(&world);
  kvtrim::emulator::launches().clear();
  ok(cuda::extend(world.device_view(), list.tables, list.what, stream));
  cuda::DeviceStepOptions options;
  options.written = true;
  if (heavy) {
    ok(cuda::step(by_score, world.device_view(), {}, workspace, list.tables, stream, options));
  } else {
    ok(cuda::step(by_position, world.device_view(), {}, workspace, list.tables, stream, options));
  }
  CHECK(kvtrim::emulator::launches().size() <= (heavy ? 8U : 5U));
  for (const auto& l : kvtrim::emulator::launches()) { CHECK(l.stream == stream); }
}
#endif
