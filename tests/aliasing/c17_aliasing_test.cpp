// SPDX-License-Identifier: Apache-2.0
// Compiled with -O3: positions are written as one type and read as another, in one function, as an optimiser sees it when
// a library is all headers.
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/select/victim.hpp>

#include "../catch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::int32_t rows = 150;  // more than are compared at once, and some left

// A view of positions alone, kept as `T`s.
template <class T>
struct Positions {
  std::vector<T> memory = std::vector<T>(rows);
  std::vector<SequenceState> states = std::vector<SequenceState>(1);
  std::vector<std::int32_t> ids;
  CacheView view;

  Positions() {
    for (std::int32_t i = 0; i < rows; ++i) {
      memory[static_cast<std::size_t>(i)] = T{i};
      ids.push_back(i);
    }
    view.page_size = 1;
    view.pages = rows;
    view.kv_heads = view.sequences = 1;
    view.table.ids = ids.data();
    view.table.max_pages = rows;
    view.table.row_stride = rows;
    states[0].live_rows = states[0].next_position = rows;
    view.states = states.data();
    view.positions = SequencePlane::dense(memory.data(), 1, 1, rows);
  }
  [[nodiscard]] HeadRef head() const { return {view, SequenceId{0}, LayerId{0}, HeadId{0}}; }
  void set(std::int32_t r, std::int32_t p) {
    view.positions.at<T>(SequenceId{0}, LayerId{0}, HeadId{0}, r) = T{p};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("C17 a position is read as it was written, as an integer or as a Position",
                   "[position][fault]",
                   Position,
                   std::int32_t) {
  Positions<TestType> p;
  std::int32_t wrong = 0;
  for (std::int32_t i = 0; i < rows; ++i) {
    const auto list = p.head().positions();
    const std::int32_t before = list[i];
    p.set(i, before + 100);
    wrong += list[i] == before + 100 ? 0 : 1;
    wrong += p.head().position(i) == Position{before + 100} ? 0 : 1;
    p.view.positions.template at<std::int32_t>(SequenceId{0}, LayerId{0}, HeadId{0}, i) =
        before + 200;
    wrong += list[i] == before + 200 ? 0 : 1;
    wrong += p.head().position(i) == Position{before + 200} ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("C17 rows are found by positions that were just written",
                   "[position][fault]",
                   Position,
                   std::int32_t) {
  Positions<TestType> p;
  p.states[0].ordered = false;
  std::int32_t wrong = 0;
  for (std::int32_t i = 0; i < rows; ++i) {
    const LiveRows live(p.head());
    wrong += live.row_at(Position{i}) == i ? 0 : 1;
    p.set(i, 1000 + i);
    wrong += live.row_at(Position{i}) == -1 ? 0 : 1;
    wrong += live.row_at(Position{1000 + i}) == i ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("C17 the victim is found by positions that were just written",
                   "[position][fault]",
                   Position,
                   std::int32_t) {
  Positions<TestType> p;
  const std::vector<float> scores(rows, 1.0F);
  std::vector<std::int32_t> scratch(rows);
  std::int32_t wrong = 0;
  for (std::int32_t i = 0; i < rows; ++i) {
    const auto victim = [&] {  // the highest position goes
      return lowest_row(scores, p.head().positions(), {0, rows}, 3000, scratch).row;
    };
    const std::int32_t before = victim();
    wrong += before == (i == 0 ? rows - 1 : i - 1) ? 0 : 1;
    p.set(i, 2000 + i);
    wrong += victim() == i ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("C17 the positions that a plan lists are read as they were written",
          "[position][fault]") {
  Positions<std::int32_t> p;
  std::vector<float> scores(rows, 1.0F);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, rows);
  const External policy({.budget = rows / 2});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(p.view, obs)));
  PlanOptions options;
  options.removal = Removal::drop_pages;
  std::int32_t wrong = 0;
  for (std::int32_t round = 0; round < 8;
       ++round) {  // into the same workspace, kept rows first, then positions
    for (std::int32_t i = 0; i < rows; ++i) {
      p.set(i, 100 * round + i);
      scores[static_cast<std::size_t>(i)] = (i + round) % 2 == 0 ? 1.0F : 0.0F;
    }
    p.states[0].next_position = 100 * round + rows;
    const PlanRef plan = kvtrim::plan(policy, p.view, obs, workspace, options);
    REQUIRE(plan.status() == Status::ok);
    std::int32_t i = 0;
    for (const Position gone : plan.evicted(SequenceId{0}, LayerId{0}, HeadId{0})) {
      const std::int32_t row = 2 * i++ + (round % 2 == 0 ? 1 : 0);
      wrong += raw(gone) == 100 * round + row ? 0 : 1;
    }
    wrong += i == rows / 2 ? 0 : 1;
  }
  CHECK(wrong == 0);
}
