// SPDX-License-Identifier: Apache-2.0
// Rows that must stay, and orders that nothing records.
#include <kvtrim/evict/planner.hpp>

#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/row_local.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"
#include "support/by_score.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

// One sequence of an engine with states, with or without a plane of positions, that appends at the end of its table.
struct StateEngine {
  explicit StateEngine(bool keeps_positions, std::int32_t n)
      : pages(16, 4, 1, 2, {{9, 2, 5, 0, 7, 3, 11, 1}}), positions(32) {
    pages.fill(0, n);
    state.live_rows = state.next_position = state.next_rope_position = n;
    for (std::int32_t r = 0; r < 32; ++r) { positions[index(r)] = r; }
    view = pages.view();
    view.states = &state;
    if (keeps_positions) { view.positions = SequencePlane::dense(positions.data(), 1, 1, 32); }
  }
  void append() {
    const std::int32_t r = state.append_row >= 0 ? state.append_row : state.live_rows;
    if (state.append_row >= 0) { state.ordered = false; }
    state.append_row = -1;
    if (view.positions) { positions[index(r)] = state.next_position; }
    std::array<float, 2> value{static_cast<float>(state.next_position), 0};
    if (pages.ids[index(r / 4)] < 0) {
      pages.ids[index(r / 4)] = free.back();
      free.pop_back();
    }
    store_row(view.v, view.value({}, {}, {}, r), value.data());
    ++state.live_rows, ++state.next_position, ++state.next_rope_position, ++state.generation;
    pages.lengths[0] = state.live_rows;
  }
  // Tags of the live rows, ascending.
  [[nodiscard]] Rows tags() {
    Rows out;
    for_each_run({view, {}, {}, {}}, [&](const Run& run) {
      for (std::int32_t r = run.row; r < run.row + run.count; ++r) {
        std::array<float, 2> value{};
        load_row(view.v, view.value({}, {}, {}, r), value.data());
        out.push_back(static_cast<std::int32_t>(value[0]));
      }
    });
    return out;
  }
  template <Policy P>
  Outcome evict(const P& policy, const Input& in) {
    std::array<PageId, 8> freed{};
    DenseTables sink(view, pages.ids.data(), pages.lengths.data(), nullptr, freed);
    return evict_into(policy, view, sink, in);
  }

  EnginePages pages;
  Rows positions;
  SequenceState state;
  CacheView view;
  Rows free{12, 13, 14, 15};
};

}  // namespace

TEST_CASE("C02 a shared page that is partly padding keeps its rows, and they count",
          "[fault][shared]") {
  // Page size 4: row 0 lies in the last slot of page 5, which another sequence holds too.
  const auto run = [](std::vector<float> scores, std::int32_t budget, Removal way) {
    EnginePages engine(6, 4, 1, 2, {{5, 1, 2}});
    engine.padding[0] = 3;
    engine.fill(0, 9);
    std::array<std::int32_t, 6> counts{0, 1, 1, 0, 0, 2};
    CacheView view = engine.view();
    view.writable.ref_counts = counts.data();
    const auto shared = std::vector<float>(engine.v.begin() + 5 * 8, engine.v.begin() + 6 * 8);
    std::array<PageId, 4> freed{};
    DenseTables sink(view, engine.ids.data(), engine.lengths.data(), counts.data(), freed);
    Input in;
    in.score = scores_of(std::move(scores));
    SequenceState state;
    Rows positions = range(0, 12);
    if (way == Removal::fill_holes) {
      state.live_rows = state.next_position = state.next_rope_position = 9;
      view.states = &state;
      view.positions = SequencePlane::dense(positions.data(), 1, 1, 12);
    }
    in.options.removal = way;
    const Outcome out = evict_into(External({.budget = budget}), view, sink, in);
    CHECK(usable(out.report.status));
    CHECK(engine.lengths[0] == out.report.kept_rows);
    const auto now = std::vector<float>(engine.v.begin() + 5 * 8, engine.v.begin() + 6 * 8);
    CHECK(std::equal(shared.begin() + 6, shared.end(), now.begin() + 6));  // its one live slot
    CHECK(counts[5] == 2);
    Rows tags = engine.tags(0);
    std::sort(tags.begin(), tags.end());
    return tags;
  };
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    CHECK(run({0, 9, 9, 9, 9, 9, 0, 0, 0}, 5, way) == Rows{0, 1, 2, 3, 4});
    CHECK(run({9, 9, 9, 9, 9, 0, 0, 0, 0}, 5, way) == Rows{0, 1, 2, 3, 4});  // it is wanted
    CHECK(run({0, 0, 0, 0, 0, 0, 7, 8, 9}, 3, way) == Rows{0, 7, 8});
    CHECK(run({0, 1, 2, 3, 4, 5, 6, 7, 8}, 1, way) == Rows{0});
  }
}

TEST_CASE("C03 without positions the newest rows stay protected at every cut", "[fault][order]") {
  for (const bool keeps_positions : {true, false}) {
    StateEngine e(keeps_positions, 8);
    const HeavyHitter policy({.heavy = 4, .recent = 4});
    Input in;
    in.budgets = {8};
    for (std::int32_t step = 0; step < 12; ++step) {
      e.append();
      // Given by row: what an engine without positions can give. Old rows score high, new ones low.
      std::vector<float> scores(32);
      for (std::int32_t r = 0; r < 32; ++r) { scores[index(r)] = static_cast<float>(40 - r); }
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 1, 1, 32);
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
      const PlanRef plan = kvtrim::plan(policy, e.view, obs, workspace);
      REQUIRE(plan.status() == Status::ok);
      CHECK(plan.positions_known() == (keeps_positions || step == 0));
      REQUIRE(apply(plan, e.view) == Status::ok);
      std::array<PageId, 8> freed{};
      DenseTables sink(e.view, e.pages.ids.data(), e.pages.lengths.data(), nullptr, freed);
      const Report report = commit(plan, e.view, sink);
      REQUIRE(report.status == Status::ok);
      CHECK(report.replaced == (keeps_positions ? 0 : 1));
      for (const PageId p : sink.freed()) { e.free.push_back(raw(p)); }
      const Rows tags = e.tags();
      for (std::int32_t recent = 0; recent < 4; ++recent) {
        CHECK(std::count(tags.begin(), tags.end(), 8 + step - recent) == 1);
      }
    }
  }
}

TEST_CASE("C03 scores that depend on positions are refused where they are unknown",
          "[fault][order]") {
  for (const bool gone : {false, true}) {
    for (const bool keeps_positions : {true, false}) {
      StateEngine e(keeps_positions, 12);
      if (gone) { e.state.next_position = 20; }
      std::vector<float> sums(32), compensations(32), scores(32);
      e.view.score_sums = SequencePlane::dense(sums.data(), 1, 1, 32);
      e.view.score_compensations = SequencePlane::dense(compensations.data(), 1, 1, 32);
      const Queries q = make_queries(16, 4, 1, 2);
      Observation obs;
      obs.queries.data = q.data.data();
      obs.queries.query_heads = 1;
      obs.queries.rows = 4;
      obs.queries.row_stride = 2;
      const auto status = [&](const auto& policy) {
        std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(e.view, obs)));
        return kvtrim::plan(policy, e.view, obs, workspace).status();
      };
      const Status wanted = gone && !keeps_positions ? Status::bad_observation : Status::ok;
      CHECK(status(SnapKVSelector({.window = 4, .budget = 8})) == wanted);
      CHECK(status(ChunkKV<KeyNormParams>({.budget = 8, .chunk = 2})) == wanted);
      CHECK(status(HeavyHitter({.heavy = 4, .recent = 4, .age_normalised = true})) == wanted);
      CHECK(status(HeavyHitter({.heavy = 4, .recent = 4})) == Status::ok);
      CHECK(status(KeyNorm({.budget = 8})) == Status::ok);
      obs.queries.rows = 1;  // the newest query sees every row
      CHECK(status(Tova({.budget = 8})) == Status::ok);
      obs.queries.positions = q.positions.data();  // that of a ring may be older
      CHECK(status(Tova({.budget = 8})) == wanted);
    }
  }
}

TEST_CASE("C03 without positions new rows are the last, and sums of several queries are refused",
          "[fault][order]") {
  StateEngine e(false, 10);
  e.state.next_position = 14;  // four rows have gone before
  std::vector<float> plane(32, -777.0F), compensations(32);
  const SequencePlane scores = SequencePlane::dense(plane.data(), 1, 1, 32);
  for (const std::int32_t rows : {1, 2, 3}) {
    std::fill(plane.begin(), plane.end(), -777.0F);
    std::vector<std::byte> scratch(score_new_rows_bytes(KeyNormParams{}, plan_shape(e.view), rows));
    REQUIRE(score_new_rows(KeyNormParams{}, e.view, {}, rows, {}, scores, scratch) == Status::ok);
    for (std::int32_t r = 0; r < 10; ++r) {
      CHECK((plane[index(r)] != -777.0F) == (r >= 10 - rows));
    }
  }
  e.view.score_sums = scores;
  e.view.score_compensations = SequencePlane::dense(compensations.data(), 1, 1, 32);
  const HeavyHitter policy({.heavy = 4, .recent = 4});
  Recorder recorder(needs(policy), {.query_heads = 1, .kv_heads = 1, .head_dim = 2, .lse = true});
  const Queries q = make_queries(12, 2, 1, 2);
  const std::array<float, 2> lse{3, 3};
  LayerStep step;
  step.queries.data = q.data.data();
  step.queries.query_heads = 1;
  step.queries.row_stride = 2;
  step.queries.lse = lse.data();
  step.queries.rows = 2;
  CHECK(recorder.record(e.view, step) == Status::bad_observation);
  CHECK(recorder.fault().what == "row positions");
  step.queries.rows = 1;  // the newest query sees every row
  CHECK(recorder.record(e.view, step) == Status::ok);
}

TEST_CASE("C04 rows lose their order only where it is recorded", "[fault][order]") {
  const auto scores = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
    return noise(p, 5);
  };
  enum class Records { nothing, states, both };
  for (const Records records : {Records::nothing, Records::states, Records::both}) {
    for (const Removal way : {Removal::fill_holes, Removal::overwrite_slot}) {
      for (const bool named : {false, true}) {
        StateEngine e(records == Records::both, 16);
        if (records == Records::nothing) { e.view.states = nullptr; }
        Input in;
        in.score = scores;
        if (named) { in.options.removal = way; }
        const test::ByScore policy{
            .keep = 15, .recent = 4, .way = named ? Removal::automatic : way};
        const Outcome out = e.evict(policy, in);
        if (named && records != Records::both) {
          CHECK(out.report.status == Status::bad_options);
          CHECK(e.tags() == range(0, 16));
          continue;
        }
        REQUIRE(out.report.status == Status::ok);
        CHECK(out.report.replaced == (records == Records::both ? 0 : 1));
        Rows tags = e.tags();
        if (records == Records::both) { std::sort(tags.begin(), tags.end()); }
        CHECK(std::is_sorted(tags.begin(), tags.end()));
        CHECK(Rows(tags.end() - 4, tags.end()) == range(12, 16));
      }
    }
  }
  // 16 rows cut to 8, then to 6: the last four are still there, and in order.
  StateEngine e(false, 16);
  Input in;
  in.score = scores;
  REQUIRE(e.evict(test::ByScore{.keep = 8, .recent = 4, .way = Removal::fill_holes}, in)
              .report.status == Status::ok);
  REQUIRE(e.evict(test::ByScore{.keep = 6, .recent = 4, .way = Removal::fill_holes}, in)
              .report.status == Status::ok);
  CHECK(e.state.ordered);
  const Rows tags = e.tags();
  CHECK(Rows(tags.end() - 4, tags.end()) == range(12, 16));
}

TEST_CASE("C04 a state that says rows are out of order needs positions", "[fault][order]") {
  StateEngine e(false, 16);
  Input in;
  in.score = scores_of({});
  for (const bool hole : {false, true}) {
    e.state.ordered = hole;
    e.state.append_row = hole ? 3 : -1;
    e.pages.lengths[0] = e.state.live_rows = 15;
    CHECK(e.evict(test::ByScore{.keep = 8}, in).report.status == Status::states_disagree);
  }
}
