// SPDX-License-Identifier: Apache-2.0
// Tables in compressed rows, written on the device as `CsrTables` writes them.

#include <kvtrim/evict/csr_tables.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::ByScore;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::ok;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

using Ints = std::vector<std::int32_t>;

/// A world whose tables are compressed rows, in the order of sequences or of layers and heads.
struct CsrWorld {
  CsrWorld(const WorldShape& shape, bool sequences_first, bool by_states)
      : world(shape),
        host(world.host_view()),
        device(world.device_view()),
        tables(host.tables_per_sequence()) {
    const std::int32_t n = host.sequences;
    const bool heads = shape.scope == TableScope::head;
    const std::int64_t inner = sequences_first ? 1 : n;
    RowMap rows{sequences_first ? tables : 1, 0, 0};
    if (shape.scope == TableScope::layer) { rows.layer = inner; }
    if (heads) { rows.head = inner, rows.layer = inner * shape.kv_heads; }
    std::vector<Ints> lists(static_cast<std::size_t>(n * tables));
    last.resize(lists.size());
    for (std::int32_t s = 0; s < n; ++s) {
      for (std::int32_t t = 0; t < tables; ++t) {
        const SequenceId q{s};
        const LayerId l = host.first_layer(t);
        const HeadId h = host.first_head(t);
        const auto r = static_cast<std::size_t>(rows(q, l, h));
        const SequenceState& state = world.host().states[static_cast<std::size_t>(s * tables + t)];
        const std::int32_t* const row = host.table.row(q, l, h);
        lists[r].assign(row, row + pages_for(state.extent(), host.page_size) + shape.reserved);
        last[r] = (state.live_rows - 1) % host.page_size + 1;
      }
    }
    indptr.push_back(3);  // what lies before the first row is not the batch's
    indices.assign(3, -9);
    for (const Ints& list : lists) {
      indices.insert(indices.end(), list.begin(), list.end());
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
    }
    indices.insert(indices.end(), 4, -9);  // nor is what lies behind the last one
    device_indices.emplace(indices, "indices");
    device_indptr.emplace(indptr, "indptr");
    device_last.emplace(last, "last_page_len");
    for (CacheView* const view : {&host, &device}) {
      view->table.rows = rows;
      view->table.row_stride = view->table.max_pages = 0;
      view->first_rows = nullptr;
      if (!by_states) { view->states = nullptr; }
    }
    host.table.ids = indices.data();
    host.table.indptr = indptr.data();
    device.table.ids = device_indices->data();
    device.table.indptr = device_indptr->data();
    if (!by_states) {
      host.last_page_len = last.data(), device.last_page_len = device_last->data();
    }
  }
  [[nodiscard]] cuda::DeviceTables device_tables() {
    cuda::DeviceTables out;
    out.ids = device_indices->data();
    out.indptr = device_indptr->data();
    out.last_page_len = device_last->data();
    return out;
  }
  /// What the device has that the host has not.
  [[nodiscard]] std::string difference() {
    if (device_indptr->download() != indptr) { return "indptr"; }
    const Ints got = device_indices->download();
    const auto end = static_cast<std::ptrdiff_t>(indptr.back());
    if (!std::equal(indices.begin(), indices.begin() + end, got.begin())) { return "indices"; }
    if (device_last->download() != last) { return "last_page_len"; }
    return world.difference();
  }

  World world;
  CacheView host;
  CacheView device;
  std::int32_t tables;
  Ints indices, indptr, last;
  std::optional<DeviceBuffer<std::int32_t>> device_indices, device_indptr, device_last;
};

}  // namespace

TEST_CASE("cuda::commit: compressed rows close up as on the host", "[cuda][parity]") {
  WorldShape shape;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  const bool sequences_first = GENERATE(true, false);
  const bool by_states = GENERATE(true, false);
  const Removal removal = GENERATE(Removal::drop_pages, Removal::stable_pack);
  shape.sequences = 5;
  shape.reserved = by_states ? 1 : 0;
  shape.flags = sequences_first;
  CAPTURE(static_cast<int>(shape.scope), sequences_first, by_states, static_cast<int>(removal));
  CsrWorld c(shape, sequences_first, by_states);
  const ByScore policy{removal == Removal::drop_pages ? 5 : 13, {2, 2}, Removal::stable_pack};
  Observation obs;
  obs.scores = c.host.score_sums;
  Plan wanted = kvtrim::test::host_plan(policy, c.host, obs, removal);
  DeviceSide side(policy, cuda::PlanBounds(plan_shape(c.host)));
  cuda::DevicePlanOptions options;
  options.removal = removal;
  const cuda::GivenScores given(c.device.score_sums);
  ok(cuda::plan(policy, c.device, given, side.workspace, nullptr, options));
  ok(cuda::apply(side.workspace, c.device, nullptr));
  CHECK(to_string(side.report().status) == to_string(wanted.view().status()));
  CHECK(apply(wanted.ref(), c.host) == Status::ok);
  CHECK(c.difference() == "");

  DeviceBuffer<std::int32_t> freed(static_cast<std::size_t>(c.world.pages()), "freed pages");
  DeviceBuffer<std::int32_t> count(1, "freed count");
  cuda::DeviceTables tables = c.device_tables();
  tables.freed = freed.data();
  tables.freed_count = count.data();
  ok(cuda::commit(side.workspace, c.device, tables, nullptr));
  Ints counts(c.last.size());
  std::vector<PageId> host_freed(static_cast<std::size_t>(c.world.pages()));
  CsrTables sink(c.host,
                 c.indptr.data(),
                 c.indices.data(),
                 c.last.data(),
                 nullptr,
                 std::span<std::int32_t>(counts),
                 std::span<PageId>(host_freed));
  CHECK(usable(commit(wanted.ref(), c.host, sink).status));
  CHECK(c.difference() == "");
  const Ints list = freed.download();
  REQUIRE(count.download()[0] == static_cast<std::int32_t>(sink.freed().size()));
  CHECK(!sink.freed().empty());
  for (std::size_t i = 0; i < sink.freed().size(); ++i) { CHECK(list[i] == raw(sink.freed()[i])); }
}

TEST_CASE("cuda::plan: row starts that descend are found, and nothing is moved",
          "[cuda][parity][fault]") {
  WorldShape shape;
  const bool by_states = GENERATE(true, false);
  CsrWorld c(shape, true, by_states);
  const ByScore policy{6, {2, 2}, Removal::stable_pack};
  PlanShape bounds = plan_shape(c.host);
  bounds.max_rows *= 3;  // the row before it is longer now
  DeviceSide side(policy, cuda::PlanBounds(bounds));
  const std::size_t row = GENERATE(1U, 2U);
  const std::int32_t was = c.indptr[row];
  c.indptr[row] = c.indptr[row + 1] + 1;
  c.device_indptr->upload(c.indptr);
  Observation obs;
  obs.scores = c.host.score_sums;
  const Plan wanted = kvtrim::test::host_plan(policy, c.host, obs, Removal::automatic);
  CHECK_FALSE(usable(wanted.view().status()));
  const cuda::GivenScores given(c.device.score_sums);
  ok(cuda::plan(policy, c.device, given, side.workspace, nullptr));
  CHECK(to_string(side.report().status) == to_string(wanted.view().status()));
  ok(cuda::apply(side.workspace, c.device, nullptr));
  ok(cuda::commit(side.workspace, c.device, c.device_tables(), nullptr));
  CHECK(side.report().evicted == 0);
  CHECK(c.difference() == "");
  CHECK(was < c.indptr[row]);
}

TEST_CASE("cuda::commit: row starts that descend after the rows were moved are torn",
          "[cuda][fault]") {
  WorldShape shape;
  CsrWorld c(shape, true, true);
  // Of a table from which nothing goes: those of the others are compared with the plan.
  c.world.host().states[2].live_rows = 3;
  c.world.host().states[2].next_position = 13;
  c.world.device().states.upload(c.world.host().states);
  const ByScore policy{6, {2, 2}, Removal::stable_pack};
  DeviceSide side(policy, cuda::PlanBounds(plan_shape(c.host)));
  const cuda::GivenScores given(c.device.score_sums);
  ok(cuda::plan(policy, c.device, given, side.workspace, nullptr));
  ok(cuda::apply(side.workspace, c.device, nullptr));
  CHECK(to_string(side.report().status) == "ok");
  CHECK(side.report().evicted > 0);
  const Ints sound = c.indptr;
  c.indptr[3] = c.indptr[2] - 1;
  c.device_indptr->upload(c.indptr);
  const auto states = c.world.device().states.download();
  ok(cuda::commit(side.workspace, c.device, c.device_tables(), nullptr));
  CHECK(to_string(side.report().status) == "torn");
  CHECK(side.report().released == 0);
  CHECK(c.device_indptr->download() == c.indptr);
  CHECK(c.device_indices->download() == c.indices);
  CHECK(c.world.device().states.download()[0].live_rows == states[0].live_rows);
}

TEST_CASE("cuda::commit: compressed rows that are not the view's tables are refused at once",
          "[cuda][fault]") {
  WorldShape shape;
  shape.scope = TableScope::layer;
  CsrWorld c(shape, true, true);
  const ByScore policy{6, {2, 2}, Removal::stable_pack};
  DeviceSide side(policy, cuda::PlanBounds(plan_shape(c.host)));
  const cuda::GivenScores given(c.device.score_sums);
  ok(cuda::plan(policy, c.device, given, side.workspace, nullptr));
  const auto refused = [&](auto&& change) {
    CacheView view = c.device;
    cuda::DeviceTables tables = c.device_tables();
    change(view, tables);
    return cuda::commit(side.workspace, view, tables, nullptr) == cudaErrorInvalidValue;
  };
  using Tables = cuda::DeviceTables;
  CHECK_FALSE(refused([](CacheView&, Tables&) {}));
  CHECK(refused([](CacheView&, Tables& t) { t.indptr = nullptr; }));
  CHECK(refused([](CacheView& v, Tables&) { v.table.indptr = nullptr; }));
  CHECK(refused([](CacheView& v, Tables&) { v.table.rows.layer = 2; }));
  CHECK(refused([](CacheView& v, Tables&) { v.table.rows.sequence = 3; }));
  CHECK(refused([](CacheView& v, Tables&) { v.table.rows.sequence = 1; }));
  CHECK(refused([](CacheView& v, Tables&) { v.table.v_offset = 8; }));
  CHECK(refused([&](CacheView& v, Tables&) { v.first_rows = c.device_last->data(); }));
  CHECK(refused([&](CacheView& v, Tables& t) {
    v.last_page_len = c.device_last->data();
    t.last_page_len = nullptr;
  }));
}
