// SPDX-License-Identifier: Apache-2.0
// What a build without assertions says where others stop: this folder is compiled with NDEBUG.
#include <kvtrim/evict/commit.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"
#include "support/by_score.hpp"

#include <array>
#include <cstdint>
#include <limits>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE(
    "C01 a table that the engine changes between apply and commit is torn, the others are not",
    "[fault][commit]") {
  for (const bool keeps_states : {false, true}) {
    EnginePages engine(16, 4, 1, 2, {{3, 1, 6, 9}, {2, 5, 7, 8}});
    engine.fill(0, 12);
    engine.fill(1, 12);
    std::array<SequenceState, 2> states{};
    for (SequenceState& state : states) { state.live_rows = state.next_position = 12; }
    CacheView view = engine.view();
    if (keeps_states) { view.states = states.data(); }
    Input in;
    in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
      return static_cast<float>(p);
    };
    Prepared prepared(view, in);
    const PlanRef plan = prepared.plan(test::ByScore{.keep = 7}, view);
    REQUIRE(apply(plan, view) == Status::ok);
    engine.lengths[0] = states[0].live_rows = states[0].next_position =
        13;  // an append, written nowhere
    std::array<PageId, 8> freed{};
    DenseTables sink(view, engine.ids.data(), engine.lengths.data(), nullptr, freed);
    const Report report = commit(plan, view, sink);
    CHECK(report.status == Status::torn);
    CHECK(plan.table(SequenceId{0}, 0).status == Status::torn);
    CHECK(engine.lengths == Rows{13, 7});
    CHECK(engine.tags(1) == range(5, 12));
    CHECK(report.evicted_rows == 5);
    CHECK(report.kept_rows == 7);
    CHECK(report.released_pages == 1);
    CHECK(commit(plan, view, sink).status == Status::stale_plan);
  }
}

TEST_CASE("C21 a negative number of tokens takes none back", "[fault][truncate]") {
  TestCache t({.pages = 8, .page_size = 4, .key_dim = 2});
  const SequenceId s = t.filled(10);
  for (const std::int32_t n : {-1, -2, std::numeric_limits<std::int32_t>::min()}) {
    CHECK(t.cache.try_remove_last(s, n) == Status::ok);
    CHECK(t.positions(s) == range(0, 10));
  }
  CHECK(t.cache.try_remove_last(s, std::numeric_limits<std::int32_t>::max()) == Status::ok);
  CHECK(t.positions(s).empty());
}
