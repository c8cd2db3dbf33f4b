// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/engine/row_table.hpp>
#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/window.hpp>

#include "../support/random.hpp"
#include "catch.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

using Rows = std::vector<std::int32_t>;

Rows positions(const RowTable& table) {
  Rows out;
  for (const Position p : table.positions()) { out.push_back(raw(p)); }
  return out;
}
template <class P>
Report evict(RowTable& table, const P& policy, const Observation& seen = {}) {
  return table.commit(table.plan(policy, seen));
}

}  // namespace

TEST_CASE("row_table: sizes below 1 are refused with the numbers", "[row_table]") {
  CHECK_THROWS_WITH(RowTable({.max_rows = 0}), ContainsSubstring("max_rows 0"));
  CHECK_THROWS_WITH(RowTable({.page_size = 0, .max_rows = 4}), ContainsSubstring("page_size 0"));
  RowTable table({.max_rows = 4});
  CHECK(table.append(5) == Status::too_many_rows);
  CHECK(table.append(-1) == Status::too_many_rows);
  CHECK(table.append(4) == Status::ok);
  CHECK(table.append(1) == Status::too_many_rows);
  CHECK(table.live_rows() == 4);
}

TEST_CASE("row_table: sinks and a window, twice, with positions kept and renumbered",
          "[row_table]") {
  for (const bool renumbers : {false, true}) {
    RowTable table({.layers = 3, .kv_heads = 2, .max_rows = 12});
    const StreamingSink policy({.sinks = 2, .recent = 3});
    REQUIRE(table.append(9) == Status::ok);
    CHECK(evict(table, policy).status == Status::ok);
    CHECK(positions(table) == Rows{0, 1, 6, 7, 8});
    if (renumbers) { table.renumber(); }
    REQUIRE(table.append(7) == Status::ok);
    CHECK(evict(table, policy).evicted_rows == 7 * 6);
    CHECK(positions(table) == (renumbers ? Rows{0, 1, 9, 10, 11} : Rows{0, 1, 13, 14, 15}));
    CHECK(table.next_position() == (renumbers ? 12 : 16));
    table.clear();
    CHECK(table.live_rows() == 0);
    CHECK(table.next_position() == 0);
  }
}

TEST_CASE(
    "row_table: one set for all layers and heads by ready-made scores, row by row and by pages",
    "[row_table]") {
  constexpr std::int32_t n = 16;
  std::vector<float> scores(2 * 2 * n, 0.0F);
  scores[0 * n + 4] = 1, scores[3 * n + 9] = 1;  // layer 0 head 0; layer 1 head 1
  Observation seen;
  seen.scores = SequencePlane::dense(scores.data(), 2, 2, n);
  {
    RowTable table({.layers = 2, .kv_heads = 2, .max_rows = n});
    REQUIRE(table.append(n) == Status::ok);
    const PageSelector<> policy(
        {.unit = PageUnit::per_group, .budget = 4, .sinks = 1, .window = 1});
    CHECK(evict(table, policy, seen).status == Status::ok);
    CHECK(positions(table) == Rows{0, 4, 9, 15});
  }
  {
    RowTable table({.layers = 2, .kv_heads = 2, .page_size = 4, .max_rows = n});
    REQUIRE(table.append(n) == Status::ok);
    const PageSelector<> policy(
        {.unit = PageUnit::per_group, .budget = 12, .sinks = 1, .window = 1});
    CHECK(evict(table, policy, seen).status == Status::ok);
    CHECK(positions(table) == Rows{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15});
  }
}

TEST_CASE("row_table: sums follow their rows through evictions, and a copy has its own",
          "[row_table]") {
  constexpr std::int32_t layers = 2, heads = 2;
  const RowTable::Params params{.layers = layers, .kv_heads = heads, .max_rows = 32, .sums = true};
  RowTable table(params), copy(params);
  const PageSelector<AccumulateParams> policy(
      {.unit = PageUnit::per_group, .budget = 8, .sinks = 1, .window = 2});
  Recorder recorder(needs(policy),
                    {.layers = layers,
                     .query_heads = 2 * heads,
                     .kv_heads = heads,
                     .head_dim = 1,
                     .probabilities = true});
  test::Random random(1);
  std::vector<double> by_position(64, 0.0);  // the sums, in layer 0 and KV head 0
  for (std::int32_t step = 0; step < 6; ++step) {
    REQUIRE(table.append(5) == Status::ok);
    const auto rows = static_cast<std::size_t>(table.live_rows());
    for (std::int32_t l = 0; l < layers; ++l) {
      std::vector<float> p(2 * heads * rows);
      for (float& x : p) { x = random.uniform() + 1; }
      LayerStep now{.layer = LayerId{l}};
      now.queries = {.query_heads = 2 * heads, .rows = 1};
      now.probabilities = {.data = p.data(), .head_stride = table.live_rows(), .row_stride = 0};
      REQUIRE(recorder.record(table.view(), now) == Status::ok);
      for (std::size_t r = 0; l == 0 && r < rows; ++r) {
        by_position[static_cast<std::size_t>(raw(table.positions()[r]))] +=
            (static_cast<double>(p[r]) + static_cast<double>(p[rows + r])) / 2;
      }
    }
    if (step == 4) { copy.assign(table); }
    REQUIRE(evict(table, policy).status == Status::ok);
    const CacheView view = table.view();
    for (std::int32_t r = 0; r < table.live_rows(); ++r) {
      const auto p = static_cast<std::size_t>(raw(table.positions()[static_cast<std::size_t>(r)]));
      CHECK(static_cast<double>(view.score_sums.at<float>(
                SequenceId{0}, LayerId{0}, HeadId{0}, r)) == Catch::Approx(by_position[p]));
    }
    CHECK(table.live_rows() == std::min(8, 5 * (step + 1)));
  }
  const Rows before = positions(copy);
  CHECK(before.size() == 13);
  CHECK(evict(copy, policy).status == Status::ok);
  CHECK(positions(copy).size() == 8);
  CHECK(positions(copy) != positions(table));
}

TEST_CASE("row_table: a new row's sum begins at 0, whatever row was there before", "[row_table]") {
  RowTable table({.max_rows = 8, .sums = true});
  REQUIRE(table.append(8) == Status::ok);
  CacheView view = table.view();
  for (std::int32_t r = 0; r < 8; ++r) {
    view.score_sums.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = 5;
    view.score_compensations.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = 5;
  }
  REQUIRE(evict(table, StreamingSink({.sinks = 1, .recent = 2})).status == Status::ok);
  REQUIRE(table.append(3) == Status::ok);
  view = table.view();
  for (std::int32_t r = 0; r < 6; ++r) {
    CHECK(view.score_sums.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, r) == (r < 3 ? 5 : 0));
    CHECK(view.score_compensations.at<float>(SequenceId{0}, LayerId{0}, HeadId{0}, r) ==
          (r < 3 ? 5 : 0));
  }
}

TEST_CASE("row_table: policies that one table cannot serve are refused, and nothing is changed",
          "[row_table]") {
  RowTable table({.layers = 2, .kv_heads = 2, .max_rows = 16});
  REQUIRE(table.append(16) == Status::ok);
  std::vector<float> scores(2 * 2 * 16);
  for (std::size_t i = 0; i < scores.size(); ++i) { scores[i] = static_cast<float>(i * 7 % 64); }
  Observation seen;
  seen.scores = SequencePlane::dense(scores.data(), 2, 2, 16);
  // Rows of their own in each KV head.
  const Report own = evict(table, SnapKVSelector({.window = 2, .budget = 6}), seen);
  CHECK(own.status == Status::planes_disagree);
  const Report layers =
      evict(table,
            PageSelector<>({.unit = PageUnit::per_layer, .budget = 6, .sinks = 1, .window = 1}),
            seen);
  CHECK(layers.status == Status::unequal_budget);
  // A policy that overwrites rows.
  CHECK_FALSE(
      usable(evict(table, StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 3})).status));
  // No scores.
  const Report none = evict(
      table, PageSelector<>({.unit = PageUnit::per_group, .budget = 6, .sinks = 1, .window = 1}));
  CHECK(none.status == Status::bad_observation);
  CHECK(table.live_rows() == 16);
}

TEST_CASE("row_table: protected rows beyond the budget stay, and the report says so",
          "[row_table]") {
  RowTable table({.max_rows = 16});
  REQUIRE(table.append(16) == Status::ok);
  std::vector<float> scores(16, 1.0F);
  Observation seen;
  seen.scores = SequencePlane::dense(scores.data(), 1, 1, 16);
  const PageSelector<> policy({.unit = PageUnit::per_group, .budget = 8, .sinks = 2, .window = 4});
  const Report report = table.commit(table.plan(policy, seen, 3));
  CHECK(report.status == Status::over_budget);
  CHECK(positions(table) == Rows{0, 1, 12, 13, 14, 15});
}
