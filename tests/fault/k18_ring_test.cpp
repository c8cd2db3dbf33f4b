// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <set>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

// A window over 20 tokens, appended one by one: its rows lie in a ring.
struct Ring : TestCache {
  Ring(std::int32_t sinks, std::int32_t window, std::int32_t page_size = 4)
      : TestCache({.pages = 16,
                   .page_size = page_size,
                   .kv_heads = 2,
                   .key_dim = 2,
                   .value_dim = 2,
                   .scores = true}) {
    const SequenceId s = create();
    const StreamingSink<SinkForm::exact> policy({.sinks = sinks, .recent = window});
    for (std::int32_t token = 0; token < 20; ++token) {
      REQUIRE(append(s, 1) == Status::ok);
      REQUIRE(evict(policy, *this, s).report.status == Status::ok);
    }
  }
};

}  // namespace

TEST_CASE("B119 of a wrapped ring the last tokens go, wherever they lie, and nothing stale stays",
          "[ring][fault]") {
  for (const std::int32_t page_size : {1, 4}) {
    Ring t(0, 8, page_size);
    const SequenceId s{0};
    REQUIRE_FALSE(t.cache.state(s).ordered);
    CHECK(t.cache.try_remove_last(s, 3) == Status::ok);
    CHECK(t.positions(s, 0, 1) == range(12, 17));
    CHECK(raw(t.cache.next_position(s)) == 17);
    REQUIRE(t.append(s, 1) == Status::ok);
    CHECK(t.positions(s, 0, 1) == range(12, 18));
    CHECK(t.raw_key_error(s, 0, 1) == 0);
  }
  // More than the window has: no row is left, and the next token is the one that was asked for.
  Ring all(0, 8);
  CHECK(all.cache.try_remove_last({}, 9) == Status::ok);
  CHECK(all.positions({}).empty());
  CHECK(raw(all.cache.next_position({})) == 11);
  CHECK(all.cache.pool().in_use() == 0);
  // Sinks stay, however many of the last tokens go, until they are among them.
  Ring sinks(2, 6);
  CHECK(sinks.cache.try_remove_last({}, 9) == Status::ok);
  CHECK(sinks.positions({}, 0, 1) == Rows{0, 1});
  CHECK(sinks.cache.try_truncate({}, Position{1}) == Status::ok);
  CHECK(sinks.positions({}, 0, 1) == Rows{0});
}

TEST_CASE("B121 tokens 12 to 15 of a ring are read in time order, whatever the physical one",
          "[ring][fault]") {
  for (const std::int32_t page_size : {1, 2, 4}) {
    Ring t(0, 8, page_size);
    REQUIRE(t.slots({}) != range(12, 20));
    const CacheView view = t.cache.view(SequenceId{0});
    const std::vector<Row> rows = t.rows({}, 0, 1);
    const LiveRows live({view, {}, {}, HeadId{1}});
    REQUIRE(live.count() == 8);
    std::vector<std::int32_t> order(8);
    live.order(order);
    for (std::int32_t p = 12; p < 20; ++p) {
      const std::int32_t by_position = live.row_at(Position{p});
      CHECK(by_position == live.row(order[index(p - 12)]));
      const auto it = std::find_if(
          rows.begin(), rows.end(), [&](const Row& r) { return r.row == by_position; });
      REQUIRE(it != rows.end());
      CHECK(it->tag == p);
    }
    CHECK(live.row_at(Position{11}) == -1);
    CHECK(live.row_at(Position{20}) == -1);
  }
}

TEST_CASE("B122 a prompt longer than the window is refused or cut, and no query sees the future",
          "[ring][fault]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 4});
  TestCache t(
      {.pages = 8, .page_size = 2, .kv_heads = 1, .key_dim = 2, .value_dim = 2, .scores = true});
  t.raw_key = [](std::int32_t, std::int32_t, std::int32_t) { return std::vector<float>(2, 0.0F); };
  const SequenceId s = t.create();
  CHECK(evict(policy.make_room(7), t, s).report.status == Status::chunk_too_long);
  CHECK(policy.max_chunk() == 4);
  // Which rows one query at position `p` pays attention to.
  const auto seen_by = [&](std::int32_t p) {
    const CacheView view = t.cache.view(s);
    for (const Row& r : t.rows(s)) {
      view.score_sums.at<float>({}, {}, {}, r.row) = 0;
      view.score_compensations.at<float>({}, {}, {}, r.row) = 0;
    }
    const std::array<float, 2> query{1, 1};
    const float lse = 0;
    const Position position{p};
    QueryBlock block{.data = query.data(), .query_heads = 1, .rows = 1};
    block.row_stride = 2;
    block.positions = &position;
    block.lse = &lse;
    std::vector<std::byte> scratch(column_sums_scratch_bytes(2));
    accumulate_column_sums({}, {view, {}, {}, {}}, block, {}, scratch);
    Rows seen;
    for (const Row& r : t.rows(s)) {
      if (view.score_sums.at<float>({}, {}, {}, r.row) != 0) { seen.push_back(r.position); }
    }
    std::sort(seen.begin(), seen.end());
    return seen;
  };
  // In one piece: attended in full, cut afterwards.
  REQUIRE(t.append(s, 7) == Status::ok);
  for (std::int32_t p = 0; p < 7; ++p) { CHECK(seen_by(p) == range(0, p + 1)); }
  REQUIRE(evict(policy, t, s).report.status == Status::ok);
  CHECK(t.positions(s) == range(3, 7));
  // In pieces, within the ring: from the second on, slots are out of order.
  t.cache.reset(s);
  for (const std::int32_t chunk : {4, 2, 1, 1, 3}) {
    REQUIRE(evict(policy.make_room(chunk), t, s).report.status == Status::ok);
    REQUIRE(t.append(s, chunk) == Status::ok);
    const Rows live = t.positions(s);
    CHECK(live.size() <= 4);
    for (const std::int32_t p : live) { CHECK(seen_by(p) == range(live.front(), p + 1)); }
  }
  CHECK(t.positions(s) == range(7, 11));
}

TEST_CASE("B127 after 20 tokens through a window of 4, removing 3 leaves the one row there is",
          "[ring][fault]") {
  Ring t(0, 4);
  REQUIRE(t.positions({}) == range(16, 20));
  CHECK(t.cache.try_remove_last({}, 3) == Status::ok);
  CHECK(t.positions({}, 0, 1) == Rows{16});
  CHECK(t.cache.live_rows({}) == 1);
  CHECK(raw(t.cache.next_position({})) == 17);
  CHECK(t.cache.pool().in_use() == 1);
}

TEST_CASE("B123 a first append longer than the window leaves the window", "[ring][fault]") {
  for (const std::int32_t page_size : {1, 2, 4}) {
    TestCache t({.pages = 12, .page_size = page_size, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.create();
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 4});
    REQUIRE(t.append(s, 2) == Status::ok);
    t.cache.reset(s);
    REQUIRE(t.append(s, 7) == Status::ok);  // attended in full
    CHECK(t.positions(s, 0, 1) == range(0, 7));
    REQUIRE(evict(policy, t, s).report.status == Status::ok);
    CHECK(t.positions(s, 0, 1) == Rows{3, 4, 5, 6});
    CHECK(t.cache.pool().in_use() == 4 / page_size);
  }
}

TEST_CASE("B125 a chunk longer than the window writes no place twice", "[ring][fault]") {
  for (const Removal way : {Removal::automatic, Removal::stable_pack, Removal::fill_holes}) {
    TestCache t({.pages = 8, .page_size = 2, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.filled(4);
    REQUIRE(t.append(s, 6) == Status::ok);  // a chunk of 10 in all, on a window of 4
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 4});
    Input in;
    in.options.removal = way;
    const CacheView view = t.cache.view(s);
    Prepared prepared(view, in);
    const PlanRef plan = prepared.plan(policy, view, in.options);
    REQUIRE(plan.status() == Status::ok);
    CHECK(plan.head({}, {}, HeadId{1}).moved == 4);
    std::set<std::int32_t> targets;
    detail::for_each_target(
        plan.kept_list({}, {}, HeadId{1}),
        plan.table({}, 0).removal,
        [&](std::int32_t, std::int32_t to, std::int32_t) { CHECK(targets.insert(to).second); });
    CHECK(targets == std::set<std::int32_t>{0, 1, 2, 3});
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.positions(s, 0, 1) == Rows{6, 7, 8, 9});
    CHECK(t.raw_key_error(s, 0, 1) == 0);
  }
}
