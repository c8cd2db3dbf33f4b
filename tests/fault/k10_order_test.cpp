// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <random>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("B068 equal scores give one plan, whatever the order of sequences, pages and slots",
          "[order][fault]") {
  const Rows expected = range(0, 8) + range(60, 64);
  std::mt19937 rng(68);
  std::int32_t wrong = 0, shuffled_tables = 0;
  for (std::int32_t run = 0; run < 1000; ++run) {
    TestCache t({.pages = 34,
                 .page_size = 4,
                 .kv_heads = 1,
                 .key_dim = 1,
                 .value_dim = 1,
                 .max_sequences = 2});
    // Pages come in random order, the sequence next to another one, its slots in or out of order.
    std::vector<PageId> taken;
    while (const auto p = t.cache.pool().try_acquire()) { taken.push_back(*p); }
    std::shuffle(taken.begin(), taken.end(), rng);
    for (const PageId p : taken) { t.cache.pool().release(p); }
    const bool second = rng() % 2 == 0;
    if (second) { t.filled(5); }
    const SequenceId s = t.create();
    for (std::int32_t n = 0; n < 64;) {
      const auto chunk = std::min(64 - n, static_cast<std::int32_t>(1 + rng() % 64));
      REQUIRE(t.append(s, chunk) == Status::ok);
      n += chunk;
    }
    const Rows pages = t.pages(s);
    shuffled_tables += std::is_sorted(pages.begin(), pages.end()) ? 0 : 1;
    Input in;
    in.score = [](std::int32_t, std::int32_t, std::int32_t, std::int32_t) { return 0.25F; };
    in.options.removal = run % 2 == 0 ? Removal::stable_pack : Removal::fill_holes;
    const Outcome out = evict(HeavyHitter({.heavy = 8, .recent = 4}), t, s, in);
    wrong += out.report.status == Status::ok && t.positions(s) == expected &&
                     out.evicted.at(0) == range(8, 60)
                 ? 0
                 : 1;
    // Once more, where fill_holes left the slots out of order.
    const Outcome again = evict(HeavyHitter({.heavy = 3, .recent = 2}), t, s, in);
    wrong += again.report.status == Status::ok && t.positions(s) == Rows{0, 1, 2, 62, 63} ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(shuffled_tables > 900);
}

TEST_CASE("B070 kept rows lie in position order, not in score order", "[order][fault]") {
  TestCache t({.pages = 4, .page_size = 3, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.filled(8);
  const SnapKVSelector policy({.window = 2, .budget = 5, .kernel = 1});
  Input in;
  in.score = scores_of({1, 9, 3, 7, 5, 2});
  const CacheView view = t.cache.view(s);
  Prepared prepared(view, in);
  const PlanRef plan = prepared.plan(policy, view);
  const auto kept = plan.kept_list({}, {}, HeadId{1});
  CHECK(Rows(kept.begin(), kept.end()) == Rows{1, 3, 4, 6, 7});
  REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
  for (const std::int32_t h : {0, 1}) { CHECK(t.slots(s, 0, h) == Rows{1, 3, 4, 6, 7}); }
  CHECK(t.cache.state(s).ordered);

  // The list is ascending by position where slots are not: fill_holes leaves row 7 in slot 1.
  TestCache u({.pages = 4, .page_size = 3, .kv_heads = 1, .key_dim = 2, .value_dim = 2});
  const SequenceId q = u.filled(8);
  in.options.removal = Removal::fill_holes;
  const Outcome out = evict(policy, u, q, in);
  CHECK(out.evicted.at(0) == Rows{0, 2, 5});
  CHECK(u.slots(q) != u.positions(q));
  CHECK_FALSE(u.cache.state(q).ordered);
  in.budgets = {4};
  in.options.removal = Removal::stable_pack;
  CHECK(evict(policy, u, q, in).evicted.at(0) == Rows{4});
  CHECK(u.positions(q) == Rows{1, 3, 6, 7});
}

TEST_CASE("B071 pages are freed tail first, now or later", "[order][fault]") {
  struct Sink {  // keeps the order in which pages come back
    Rows freed;
    void update(const TableUpdate&) noexcept {}
    bool release(PageId p) noexcept {
      freed.push_back(raw(p));
      return true;
    }
  };
  static_assert(TableSink<Sink>);
  const Rows table{7, 3, 5, 1, 0, 2, 6, 4};
  EnginePages engine(8, 4, 1, 2, {table});
  engine.fill(0, 32);
  const CacheView view = engine.view();
  const StreamingSink policy({.sinks = 4, .recent = 8});  // entries 1..5 go
  Prepared prepared(view, {});
  const PlanRef now = prepared.plan(policy, view);
  REQUIRE(now.status() == Status::ok);
  Plan later(now);
  const std::vector<std::byte> sent(now.bytes().begin(), now.bytes().end());
  Plan received = Plan::from_bytes(sent, view);
  const Rows tail_first{2, 0, 1, 5, 3};
  for (const PlanRef& plan : {now, later.ref(), received.ref()}) {
    // All over the same unchanged view: a page-dropping plan writes no byte of it.
    REQUIRE(apply(plan, view) == Status::ok);
    Sink sink;
    CHECK(commit(plan, view, sink).released_pages == 5);
    CHECK(sink.freed == tail_first);
    Rows listed;
    for (const PageId p : plan.released({}, 0)) { listed.push_back(raw(p)); }
    CHECK(listed == tail_first);
  }

  // The way rows are packed does not change the order either.
  TestCache t({.pages = 8, .page_size = 4, .kv_heads = 1, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.filled(32);
  const Rows pages = t.pages(s);
  const Outcome out = evict(StreamingSink<SinkForm::exact>({.sinks = 4, .recent = 8}), t, s);
  CHECK(out.released.at(0) == Rows{pages[7], pages[6], pages[5], pages[4], pages[3]});
}
