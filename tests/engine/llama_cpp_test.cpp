// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/engine/llama_cpp.hpp>
#include <kvtrim/engine/row_table.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/window.hpp>

#include "../support/random.hpp"
#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using llama_cpp::CellMap;
using llama_cpp::PositionRange;

namespace {

constexpr float hidden = -std::numeric_limits<float>::infinity();

std::vector<Position> positions(const std::vector<std::int32_t>& numbers) {
  std::vector<Position> out;
  for (const std::int32_t n : numbers) { out.push_back(Position{n}); }
  return out;
}
std::vector<PositionRange> ranges_of(const std::vector<std::int32_t>& numbers) {
  std::vector<PositionRange> out;
  llama_cpp::for_each_range(positions(numbers), [&](PositionRange r) { out.push_back(r); });
  return out;
}
void write(CellMap& map, std::int32_t cell, std::int32_t s, std::int32_t position) {
  REQUIRE(map.write(cell, s, Position{position}) == Status::ok);
}
std::vector<std::int32_t> rows(const CellMap& map, std::int32_t s) {
  return {map.rows(s).begin(), map.rows(s).end()};
}

}  // namespace

TEST_CASE("llama_cpp: positions fall into as few ranges as there are gaps", "[llama_cpp]") {
  CHECK(ranges_of({}).empty());
  CHECK(ranges_of({0}) == std::vector<PositionRange>{{0, 1}});
  CHECK(ranges_of({3, 4, 5, 9, 11, 12}) == std::vector<PositionRange>{{3, 6}, {9, 10}, {11, 13}});
}

TEST_CASE("llama_cpp: shifts make positions 0, 1, 2, and no range meets one moved before it",
          "[llama_cpp][property]") {
  test::Random random(3);
  for (std::int32_t round = 0; round < 200; ++round) {
    std::map<std::int32_t, std::int32_t> token_at;  // position -> token, as llama.cpp holds them
    std::vector<std::int32_t> kept;
    for (std::int32_t p = random.below(3); kept.size() < 20; p += 1 + random.below(3)) {
      token_at[p] = static_cast<std::int32_t>(kept.size());
      kept.push_back(p);
    }
    std::int32_t calls = 0;
    llama_cpp::for_each_shift(positions(kept), [&](PositionRange range, std::int32_t delta) {
      ++calls;
      CHECK(delta < 0);
      std::map<std::int32_t, std::int32_t> moved;
      for (const auto& [p, token] : token_at) {
        const bool inside = p >= range.begin && p < range.end;
        CHECK(moved.emplace(inside ? p + delta : p, token).second);
      }
      token_at = moved;
    });
    CHECK(calls <= static_cast<std::int32_t>(ranges_of(kept).size()));
    for (std::int32_t i = 0; i < 20; ++i) { CHECK(token_at.at(i) == i); }
  }
}

TEST_CASE("llama_cpp: what a plan evicts, range by range", "[llama_cpp]") {
  RowTable table({.layers = 2, .kv_heads = 2, .page_size = 4, .max_rows = 32});
  REQUIRE(table.append(30) == Status::ok);
  std::vector<PositionRange> gone;
  const auto keep = [&](PositionRange r) { gone.push_back(r); };
  const StreamingSink policy({.sinks = 4, .recent = 10});
  CHECK(llama_cpp::for_each_evicted_range(table.plan(policy), SequenceId{0}, keep) == Status::ok);
  CHECK(gone == std::vector<PositionRange>{{4, 20}});
  gone.clear();
  const StreamingSink all({.sinks = 4, .recent = 30});
  CHECK(llama_cpp::for_each_evicted_range(table.plan(all), SequenceId{0}, keep) == Status::ok);
  CHECK(gone.empty());
  const PlanView refused(Status::out_of_pages);
  CHECK(llama_cpp::for_each_evicted_range(refused, SequenceId{0}, keep) == Status::out_of_pages);
  CHECK(gone.empty());
}

TEST_CASE("llama_cpp: heads that keep different rows are refused", "[llama_cpp]") {
  // Two tables would serve them; a cell holds both.
  std::vector<std::int32_t> ids(16), lengths{8, 8};
  std::iota(ids.begin(), ids.end(), 0);
  std::vector<float> scores{9, 9, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9, 9};
  CacheView view;
  view.page_size = 1, view.pages = 16, view.kv_heads = 2, view.sequences = 1;
  view.scope = TableScope::head;
  view.table = {.ids = ids.data(), .rows = {2, 0, 1}, .row_stride = 8, .max_pages = 8};
  view.lengths = lengths.data(), view.length_rows = {2, 0, 1};
  Observation seen;
  seen.scores = SequencePlane::dense(scores.data(), 1, 2, 8);
  const PageSelector<> policy({.budget = 3, .sinks = 1, .window = 1});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view, seen)));
  const PlanRef plan = kvtrim::plan(policy, view, seen, memory);
  REQUIRE(plan.status() == Status::ok);
  bool called = false;
  CHECK(llama_cpp::for_each_evicted_range(
            plan, SequenceId{0}, [&](PositionRange) { called = true; }) == Status::unequal_budget);
  CHECK_FALSE(called);
}

TEST_CASE("llama_cpp: a layer is read out of a tensor's name, and of no other", "[llama_cpp]") {
  using llama_cpp::layer_of;
  CHECK(layer_of("kq_soft_max-0", "kq_soft_max-") == 0);
  CHECK(layer_of("kq_soft_max-17", "kq_soft_max-") == 17);
  CHECK(layer_of("cache_k_l5", "cache_k_l") == 5);
  CHECK(layer_of("cache_k_l12 (view)", "cache_k_l") == 12);
  for (const char* other : {"",
                            "kq_soft_max-",
                            "kq_soft_max-x",
                            "kq_soft_max-1x",
                            "kq_soft_max",
                            "kq-3",
                            "kq_soft_max--1",
                            "kq_soft_max-99999999999999999999"}) {
    CHECK(layer_of(other, "kq_soft_max-") == -1);
  }
}

TEST_CASE("llama_cpp: the cell map refuses what llama.cpp cannot have done", "[llama_cpp]") {
  CHECK_THROWS_WITH(CellMap(0, 1), ContainsSubstring("cells 0"));
  CHECK_THROWS_WITH(CellMap(1, 0), ContainsSubstring("sequences 0"));
  CellMap map(4, 2);
  write(map, 2, 0, 7);
  CHECK(map.write(-1, 0, Position{8}) == Status::page_out_of_range);
  CHECK(map.write(4, 0, Position{8}) == Status::page_out_of_range);
  CHECK(map.write(1, 2, Position{8}) == Status::no_such_sequence);
  CHECK(map.write(1, -1, Position{8}) == Status::no_such_sequence);
  CHECK(map.write(2, 1, Position{0}) == Status::page_twice);
  CHECK(map.write(1, 0, Position{7}) == Status::states_disagree);
  CHECK(map.write(1, 1, Position{-1}) == Status::states_disagree);
  CHECK(map.used() == 1);
  CHECK(rows(map, 0) == std::vector<std::int32_t>{2});
}

TEST_CASE("llama_cpp: holes are refilled by other sequences, and every row keeps its cell",
          "[llama_cpp]") {
  CellMap map(6, 2);
  for (std::int32_t p = 0; p < 4; ++p) { write(map, p, 0, p); }
  map.remove(0, {1, 3});
  CHECK(rows(map, 0) == std::vector<std::int32_t>{0, 3});
  write(map, 2, 1, 0);
  write(map, 1, 1, 1);
  write(map, 4, 0, 4);
  CHECK(rows(map, 0) == std::vector<std::int32_t>{0, 3, 4});
  CHECK(rows(map, 1) == std::vector<std::int32_t>{2, 1});
  CHECK(map.position(3) == Position{3});
  CHECK(map.used() == 5);
  map.shift(0, {3, 5}, -2);
  CHECK(map.position(3) == Position{1});
  CHECK(map.position(4) == Position{2});
  CHECK(map.position(1) == Position{1});  // of the other sequence
  map.shift(0, {0, 3}, -1);               // below 0: free
  CHECK(rows(map, 0) == std::vector<std::int32_t>{3, 4});
  map.clear(1);
  CHECK(rows(map, 1).empty());
  CHECK(map.used() == 2);
  CHECK(map.peak() == 5);
}

TEST_CASE("llama_cpp: a cell that sequences share is free when the last of them lets go",
          "[llama_cpp]") {
  CellMap map(4, 2);
  write(map, 0, 0, 0);
  write(map, 1, 0, 1);
  map.copy(0, 1);
  CHECK(map.used() == 2);
  map.remove(1, {0, 1});
  CHECK(map.used() == 2);
  CHECK(map.write(0, 1, Position{2}) == Status::page_twice);
  map.clear(0);
  CHECK(map.used() == 1);
  CHECK(rows(map, 1) == std::vector<std::int32_t>{1});
}

TEST_CASE("llama_cpp: a mask agrees with the map, or the first column that does not is named",
          "[llama_cpp]") {
  CellMap map(6, 2);
  write(map, 5, 0, 0);
  write(map, 0, 0, 1);
  write(map, 3, 1, 0);
  write(map, 2, 0, 4);
  // Sequence 0 at position 1 sees cells 5 and 0; the mask is wider than the cache.
  std::vector<float> mask{0, hidden, hidden, hidden, hidden, 0, hidden, hidden};
  CHECK(map.first_wrong_column(0, Position{1}, mask) == -1);
  CHECK(CellMap::visible(mask) == 2);
  CHECK(map.first_wrong_column(0, Position{4}, mask) == 2);  // one too few
  mask[3] = -0.5F;                                           // a bias shows, too
  CHECK(map.first_wrong_column(0, Position{1}, mask) == 3);  // another sequence's
  mask[3] = hidden, mask[7] = 0;
  CHECK(map.first_wrong_column(0, Position{1}, mask) == 7);                      // beyond the cache
  CHECK(map.first_wrong_column(0, Position{1}, std::span(mask).first(5)) == 5);  // too narrow
}

TEST_CASE("llama_cpp: random writes, evictions and shifts against a plain model",
          "[llama_cpp][property]") {
  constexpr std::int32_t cells = 24, sequences = 3;
  test::Random random(5);
  CellMap map(cells, sequences);
  std::vector<std::pair<std::int32_t, std::int32_t>> model(cells, {-1, -1});  // sequence, position
  const auto next = [&](std::int32_t s) {
    std::int32_t p = 0;
    for (const auto& [owner, position] : model) {
      if (owner == s) { p = std::max(p, position + 1); }
    }
    return p;
  };
  for (std::int32_t step = 0; step < 3000; ++step) {
    const std::int32_t s = random.below(sequences), kind = random.below(4);
    if (kind < 2) {
      const std::int32_t cell = random.below(cells);
      const bool free = model[static_cast<std::size_t>(cell)].first < 0;
      const std::int32_t p = next(s);
      CHECK((map.write(cell, s, Position{p}) == Status::ok) == free);
      if (free) { model[static_cast<std::size_t>(cell)] = {s, p}; }
    } else if (kind == 2) {
      const std::int32_t begin = random.below(12);
      const PositionRange range{begin, begin + 1 + random.below(4)};
      map.remove(s, range);
      for (auto& [owner, position] : model) {
        if (owner == s && position >= range.begin && position < range.end) { owner = -1; }
      }
    } else {
      std::vector<Position> live;
      for (const std::int32_t cell : map.rows(s)) { live.push_back(map.position(cell)); }
      llama_cpp::for_each_shift(live, [&](PositionRange range, std::int32_t delta) {
        map.shift(s, range, delta);
        for (auto& [owner, position] : model) {
          if (owner == s && position >= range.begin && position < range.end) { position += delta; }
        }
      });
    }
    std::vector<float> mask(cells, hidden);
    std::int32_t used = 0, seen = 0;
    for (std::size_t c = 0; c < model.size(); ++c) {
      used += model[c].first >= 0 ? 1 : 0;
      if (model[c].first == s) { mask[c] = 0, ++seen; }
    }
    REQUIRE(map.used() == used);
    REQUIRE(static_cast<std::int32_t>(map.rows(s).size()) == seen);
    REQUIRE(map.first_wrong_column(s, Position{1000}, mask) == -1);
    for (std::size_t r = 0; r < map.rows(s).size(); ++r) {
      const std::int32_t cell = map.rows(s)[r];
      REQUIRE(raw(map.position(cell)) == model[static_cast<std::size_t>(cell)].second);
      if (r > 0) { REQUIRE(map.position(map.rows(s)[r - 1]) < map.position(cell)); }
    }
  }
}

TEST_CASE("llama_cpp: columns are gathered by row", "[llama_cpp]") {
  const std::vector<float> columns{10, 11, 12, 13};
  const std::vector<std::int32_t> cells{2, 0, 3};
  std::vector<float> by_row(3);
  llama_cpp::gather_rows(columns, cells, by_row.data());
  CHECK(by_row == std::vector<float>{12, 10, 13});
}
