// SPDX-License-Identifier: Apache-2.0
// A step that is open, states that contradict themselves, and truncation after mixed position modes.
#include <kvtrim/cache/paged_cache.hpp>

#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/random.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

PagedCache::Params three_layers(TableScope scope) {
  return {.pages = 300,
          .page_size = 4,
          .layers = 3,
          .kv_heads = 2,
          .key_dim = 2,
          .scope = scope,
          .max_sequences = 3,
          .max_rows = 64};
}
const StreamingSink<SinkForm::exact> window({.sinks = 2, .recent = 6});

}  // namespace

TEST_CASE("C05 nothing goes from a table whose reserved rows are not written", "[fault][step]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    TestCache t(three_layers(scope));
    const SequenceId s = t.filled(20);
    const SequenceId other = t.filled(20);
    REQUIRE(t.cache.try_extend(s, 4) == Status::ok);

    CHECK(t.cache.try_extend(s, 1) == Status::step_open);
    CHECK(t.cache.try_truncate(s, Position{3}) == Status::step_open);
    Status why = Status::ok;
    CHECK_FALSE(t.cache.try_fork(s, &why).has_value());
    CHECK(why == Status::step_open);
    CHECK(evict(window, t, s).report.status == Status::step_open);
    CHECK(evict(StreamingSink({.sinks = 2, .recent = 60}), t, s).report.status ==
          Status::ok);  // nothing goes
    CHECK(evict(window, t, other).report.status == Status::ok);

    const std::vector<float> rows(4 * 2 * 2, 7.0F);
    CHECK(t.cache.write(s, LayerId{1}, {rows.data()}, {rows.data()}) == Status::ok);
    CHECK(t.cache.write(s, LayerId{1}, {rows.data()}, {rows.data()}) == Status::no_open_step);
    CHECK(evict(window, t, s).report.status == Status::step_open);
    CHECK(t.cache.state(s, LayerId{1}).open == (scope == TableScope::group));
    CHECK(t.cache.written(s, LayerId{0}) == Status::ok);  // written through the view
    CHECK(t.cache.written(s, LayerId{0}) == Status::no_open_step);
    CHECK(t.cache.state(s, LayerId{2}, HeadId{1}).open);
    CHECK(t.cache.write(s, LayerId{2}, {rows.data()}, {rows.data()}) == Status::ok);
    CHECK(evict(window, t, s).report.status == Status::ok);
    CHECK(t.cache.live_rows(s, LayerId{2}, HeadId{1}) == 8);
    CHECK(t.append(s, 1) == Status::ok);
  }
}

TEST_CASE("C29 a prompt is cut layer by layer, each as soon as it is written", "[fault][step]") {
  for (const TableScope scope : {TableScope::layer, TableScope::head}) {
    TestCache at_once(three_layers(scope));
    TestCache by_layer(three_layers(scope));
    const Random policy({.budget = 9, .scores = {.seed = 5}});  // which differs by layer
    const SequenceId other = by_layer.filled(7);
    static_cast<void>(at_once.filled(7));
    const SequenceId s = at_once.filled(30);
    REQUIRE(evict(policy, at_once, s).report.status == Status::ok);

    REQUIRE(by_layer.create() == s);
    REQUIRE(by_layer.cache.try_extend(s, 30) == Status::ok);
    const std::vector<float> rows(30 * 2 * 2, 1.0F);
    std::int32_t most = by_layer.cache.pool().in_use();
    for (std::int32_t l = 0; l < 3; ++l) {
      const CacheView view = by_layer.cache.view(s, LayerId{l}, 1);
      REQUIRE_NOTHROW(check_layout(view));
      auto sink = by_layer.cache.sink_for(view);
      CHECK(evict_into(policy, view, sink).report.status == Status::step_open);
      REQUIRE(by_layer.cache.write(s, LayerId{l}, {rows.data()}, {rows.data()}) == Status::ok);
      REQUIRE(evict_into(policy, view, sink).report.status == Status::ok);
      CHECK(by_layer.cache.pool().in_use() < most);  // pages come back at once
      most = by_layer.cache.pool().in_use();
    }
    for (std::int32_t l = 0; l < 3; ++l) {
      for (std::int32_t h = 0; h < 2; ++h) {
        CHECK(by_layer.slots(s, l, h) == at_once.slots(s, l, h));
      }
    }
    CHECK(by_layer.slots(s, 0) != by_layer.slots(s, 1));
    CHECK(by_layer.slots(other, 2, 1) == range(0, 7));
    CHECK(by_layer.cache.pool().in_use() == at_once.cache.pool().in_use());
    CHECK(by_layer.append(s, 1) == Status::ok);
    const CacheView two = by_layer.cache.view(s, LayerId{1}, 2);
    CHECK(two.position({}, LayerId{1}, HeadId{1}, 9) == Position{30});
  }
}

TEST_CASE("C05 a step that failed is taken back", "[fault][step]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    TestCache t(three_layers(scope));
    const SequenceId s = t.filled(6);
    CHECK(t.cache.try_cancel_step(s) == Status::no_open_step);
    const std::int32_t used = t.cache.pool().in_use();
    REQUIRE(t.cache.try_extend(s, 5) == Status::ok);
    REQUIRE(t.cache.written(s, LayerId{1}) == Status::ok);
    CHECK(t.cache.try_cancel_step(s) == Status::ok);
    CHECK(t.cache.pool().in_use() == used);
    CHECK(t.positions(s, 2, 1) == range(0, 6));
    CHECK(t.append(s, 2) == Status::ok);
    REQUIRE(t.cache.try_extend(s, 3) == Status::ok);
    t.cache.reset(s);  // ends the step too
    CHECK(t.cache.written(s, LayerId{1}) == Status::no_open_step);
    CHECK(t.append(s, 2) == Status::ok);
    t.cache.destroy(s);
    CHECK(t.cache.written(s, LayerId{1}) == Status::no_such_sequence);
    CHECK(t.cache.try_cancel_step(s) == Status::no_such_sequence);
    CHECK(t.cache.pool().in_use() == 0);
  }
}

TEST_CASE("C05 a step is taken back also where a written layer was evicted from in it",
          "[fault][step]") {
  for (const TableScope scope : {TableScope::layer, TableScope::head}) {
    TestCache t(three_layers(scope));
    const SequenceId s = t.filled(20);
    REQUIRE(t.cache.try_extend(s, 4) == Status::ok);
    const std::vector<float> rows(4 * 2 * 2, 7.0F);
    REQUIRE(t.cache.write(s, LayerId{0}, {rows.data()}, {rows.data()}) == Status::ok);
    Input in;
    in.budgets = {8, 60, 60};
    in.budget_rows = {0, 1, 0};
    REQUIRE(evict(window, t, s, in).report.status == Status::ok);
    CHECK(t.cache.try_cancel_step(s) == Status::ok);
    CHECK(t.positions(s, 0) == Rows{0, 1, 18, 19});
    CHECK(t.positions(s, 1) == range(0, 20));
    CHECK(raw(t.cache.next_position(s)) == 20);
  }
}

TEST_CASE("C05 layers of one table may be written by several threads", "[fault][step]") {
  TestCache t(three_layers(TableScope::group));
  const SequenceId s = t.create();
  const std::vector<float> rows(2 * 2, 1.0F);
  for (int step = 0; step < 30; ++step) {
    REQUIRE(t.cache.try_extend(s, 1) == Status::ok);
    std::array<Status, 3> status{};
    std::vector<std::thread> threads;
    for (std::int32_t l = 0; l < 3; ++l) {
      threads.emplace_back([&, l] {
        status[index(l)] = t.cache.write(s, LayerId{l}, {rows.data()}, {rows.data()});
      });
    }
    for (std::thread& thread : threads) { thread.join(); }
    for (const Status x : status) { REQUIRE(x == Status::ok); }
    REQUIRE_FALSE(t.cache.state(s).open);
  }
}

TEST_CASE("C11 lengths and states that disagree are refused with both numbers", "[fault][states]") {
  EnginePages engine(8, 4, 1, 2, {{3, 1, 6, 2, 5, 7}});
  engine.fill(0, 20);
  SequenceState state;
  Rows positions = range(0, 24);
  CacheView view = engine.view();
  view.states = &state;
  view.positions = SequencePlane::dense(positions.data(), 1, 1, 24);
  const auto fault = [&](SequenceState now) {
    state = now;
    std::vector<std::uint64_t> scratch(index(check_tables_words(view.pages)));
    const ViewFault found = check_tables(view, scratch);
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(window, view);
    CHECK(plan.status() == found.status);
    if (found.status != Status::ok) {
      CHECK(apply(plan, view) == found.status);
      CHECK(engine.tags(0) == range(0, 20));
    }
    return found;
  };
  const SequenceState right{.live_rows = 20, .next_position = 20, .next_rope_position = 20};
  CHECK(fault(right).status == Status::ok);
  SequenceState wrong = right;
  wrong.live_rows = wrong.next_position = 8;  // the batch was condensed
  CHECK(fault(wrong).status == Status::states_disagree);
  CHECK(fault(wrong).value == 20);
  CHECK(fault(wrong).expected == 8);
  wrong = right;
  wrong.next_position = 19;
  CHECK(fault(wrong).status == Status::states_disagree);
  CHECK(fault(wrong).value == 19);
  CHECK(fault(wrong).expected == 20);
  for (const std::int32_t hole : {21, 2'147'483'647, -2}) {
    wrong = right;
    wrong.append_row = hole;
    CHECK(fault(wrong).status == Status::states_disagree);
    CHECK(fault(wrong).value == hole);
    CHECK(fault(wrong).expected == 20);
  }
}

TEST_CASE("C16 after mixed position modes a truncation gives the next token its old rope position",
          "[fault][truncate]") {
  const Rotation rotation = plain_rotation(4);
  const Rope rope = rotation.rope();
  for (const TableScope scope : {TableScope::group, TableScope::head}) {
    TestCache t({.pages = 200,
                 .page_size = 4,
                 .kv_heads = 2,
                 .key_dim = 4,
                 .scope = scope,
                 .max_rows = 64});
    t.rotation = rotation;
    const SequenceId s = t.filled(20);
    const CacheView view = t.cache.view(s);
    const Rerotator in_cache(view, rope, PositionMode::in_cache);
    Input in;
    in.options.rerotator = &in_cache;
    REQUIRE(evict(window, t, s, in).report.status == Status::ok);  // ropes 0..7, next 8
    REQUIRE(t.append(s, 12) == Status::ok);                        // ropes 8..19
    const Rows before = t.ropes(s);
    REQUIRE(evict(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 10}), t, s).report.status ==
            Status::ok);  // positions 0, 1, 22..31, ropes as they were
    CHECK(t.ropes(s) == Rows{0, 1} + range(10, 20));
    REQUIRE(t.cache.try_remove_last(s, 6) == Status::ok);
    CHECK(raw(t.cache.next_position(s)) == 26);
    CHECK(t.cache.next_rope_position(s) == 14);  // where that token stood
    REQUIRE(t.append(s, 1) == Status::ok);
    CHECK(t.ropes(s).back() == 14);
    // Tokens of before the cut: they are counted back from the first row that is left.
    REQUIRE(t.cache.try_truncate(s, Position{21}) == Status::ok);
    CHECK(t.cache.next_rope_position(s) == 9);
    REQUIRE(t.cache.try_truncate(s, Position{5}) == Status::ok);
    CHECK(t.cache.next_rope_position(s) == 2);  // never below the rows that stay
  }
}
