// SPDX-License-Identifier: Apache-2.0
// What may happen between plan, apply and commit, and inside commit.
#include <kvtrim/evict/commit.hpp>

#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

const StreamingSink<SinkForm::exact> window({.sinks = 4, .recent = 28});

PagedCache::Params two_sequences(TableScope scope = TableScope::group) {
  return {.pages = 400,
          .page_size = 4,
          .layers = 2,
          .kv_heads = 2,
          .key_dim = 2,
          .scope = scope,
          .max_sequences = 3,
          .max_rows = 64};
}

bool sound(PagedCache& cache) {
  std::vector<std::uint64_t> scratch(index(check_tables_words(cache.params().pages)));
  return check_tables(cache.view(), scratch).status == Status::ok;
}

}  // namespace

TEST_CASE("C01 other sequences go on between plan, apply and commit", "[fault][commit]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    TestCache t(two_sequences(scope));
    const SequenceId a = t.create();
    const SequenceId b = t.create();
    REQUIRE(t.append(a, 40) == Status::ok);
    REQUIRE(t.append(b, 5) == Status::ok);
    const CacheView view = t.cache.view();
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(window, view);
    REQUIRE(t.append(b, 1) == Status::ok);
    REQUIRE(apply(plan, view) == Status::ok);
    REQUIRE(t.append(b, 1) == Status::ok);
    const SequenceId c = t.create();
    REQUIRE(t.append(c, 3) == Status::ok);
    auto sink = t.cache.sink_for(view);
    CHECK(commit(plan, view, sink).status == Status::ok);
    CHECK(t.positions(a, 1, 1) == range(0, 4) + range(12, 40));
    CHECK(t.positions(b) == range(0, 7));
    CHECK(t.positions(c) == range(0, 3));
    CHECK(t.append(a, 1) == Status::ok);
    CHECK(t.positions(a) == range(0, 4) + range(12, 41));
    CHECK(sound(t.cache));
  }
}

TEST_CASE("C01 a change of a table that is evicted from makes the plan stale before a byte moves",
          "[fault][commit]") {
  TestCache t(two_sequences());
  const SequenceId a = t.create();
  REQUIRE(t.append(a, 40) == Status::ok);
  const CacheView view = t.cache.view(a);
  Prepared prepared(view, {});
  const PlanRef plan = prepared.plan(window, view);
  REQUIRE(t.append(a, 1) == Status::ok);
  CHECK(apply(plan, view) == Status::stale_plan);
  CHECK(t.positions(a) == range(0, 41));
}

TEST_CASE("C01 between apply and commit a sequence may only end", "[fault][commit]") {
  TestCache t(two_sequences());
  const SequenceId a = t.create();
  const SequenceId b = t.create();
  REQUIRE(t.append(a, 40) == Status::ok);
  REQUIRE(t.append(b, 36) == Status::ok);
  const CacheView view = t.cache.view();
  Prepared prepared(view, {});
  const PlanRef plan = prepared.plan(window, view);
  REQUIRE(apply(plan, view) == Status::ok);

  CHECK(t.cache.try_extend(a, 1) == Status::eviction_open);
  CHECK(t.cache.try_extend(a, 0) == Status::eviction_open);
  CHECK(t.cache.try_truncate(a, Position{3}) == Status::eviction_open);
  CHECK(t.cache.try_remove_last(a, 1) == Status::eviction_open);
  CHECK(t.cache.try_make_private(a) == Status::eviction_open);
  CHECK(t.cache.try_cancel_step(a) == Status::eviction_open);
  const std::vector<float> rows(4);
  CHECK(t.cache.write(a, LayerId{1}, {rows.data()}, {rows.data()}) == Status::eviction_open);
  CHECK(t.cache.written(a, LayerId{1}) == Status::eviction_open);
  Status why = Status::ok;
  CHECK_FALSE(t.cache.try_fork(a, &why).has_value());
  CHECK(why == Status::eviction_open);
  {
    Prepared second(view, {});
    CHECK(second.plan(window, view).status() == Status::eviction_open);
  }
  auto sink = t.cache.sink_for(view);
  SECTION("nothing ended") {
    CHECK(commit(plan, view, sink).status == Status::ok);
    CHECK(t.positions(a) == range(0, 4) + range(12, 40));
    CHECK(t.positions(b) == range(0, 4) + range(8, 36));
  }
  SECTION("one ended, the other is committed") {
    t.cache.reset(a);
    const Report report = commit(plan, view, sink);
    CHECK(report.status == Status::ok);
    CHECK(report.evicted_rows == 4 * 4);
    CHECK(report.kept_rows == 4 * 32);
    CHECK(t.positions(a).empty());
    CHECK(t.positions(b) == range(0, 4) + range(8, 36));
  }
  SECTION("one ended, and its slot has new rows") {
    t.cache.destroy(a);
    REQUIRE(t.create() == a);
    REQUIRE(t.append(a, 7) == Status::ok);
    CHECK(commit(plan, view, sink).status == Status::ok);
    CHECK(t.positions(a) == range(0, 7));
    CHECK(t.positions(b) == range(0, 4) + range(8, 36));
  }
  SECTION("both ended") {
    t.cache.reset(a);
    t.cache.destroy(b);
    const std::int32_t free = t.cache.pool().available();
    CHECK(commit(plan, view, sink).status == Status::stale_plan);
    CHECK(t.cache.pool().available() == free);
  }
  CHECK(t.append(a, 1) == Status::ok);
  CHECK(sound(t.cache));
}

TEST_CASE("C01 a sequence that shares pages may end between apply and commit", "[fault][commit]") {
  TestCache t(two_sequences());
  const SequenceId a = t.create();
  REQUIRE(t.append(a, 42) == Status::ok);
  const SequenceId b = *t.cache.try_fork(a);
  const CacheView view = t.cache.view(a);
  Prepared prepared(view, {});
  const PlanRef plan = prepared.plan(StreamingSink({.sinks = 4, .recent = 8}), view);
  REQUIRE(apply(plan, view) == Status::ok);
  SECTION("it ends") {
    t.cache.destroy(b);
  }
  SECTION("it is cut") {
    REQUIRE(t.cache.try_truncate(b, Position{2}) == Status::ok);
  }
  auto sink = t.cache.sink_for(view);
  CHECK(commit(plan, view, sink).status == Status::ok);
  CHECK(t.positions(a) == range(0, 4) + range(32, 42));
  CHECK(sound(t.cache));
}

TEST_CASE("C01 a plan that changes nothing is never stale", "[fault][commit]") {
  TestCache t(two_sequences());
  const SequenceId a = t.create();
  REQUIRE(t.append(a, 20) == Status::ok);
  const CacheView view = t.cache.view();
  Prepared prepared(view, {});
  const PlanRef plan = prepared.plan(window, view);
  REQUIRE(plan.empty());
  REQUIRE(t.append(a, 1) == Status::ok);
  CHECK(apply(plan, view) == Status::ok);
  REQUIRE(t.append(a, 1) == Status::ok);
  CHECK(apply(plan, view) == Status::ok);
  auto sink = t.cache.sink_for(view);
  const Report report = commit(plan, view, sink);
  CHECK(report.status == Status::ok);
  CHECK(report.dropped_pages == 0);
  CHECK(commit(plan, view, sink).status == Status::ok);
  CHECK(t.positions(a) == range(0, 22));
}

TEST_CASE("C01 spare pages are the caller's own, or the options are refused", "[fault][plan]") {
  TestCache t(two_sequences());
  const SequenceId a = t.create();
  REQUIRE(t.append(a, 40) == Status::ok);
  const SequenceId b = *t.cache.try_fork(a);
  REQUIRE(t.append(b, 2) == Status::ok);
  std::vector<PageId> own;
  for (int i = 0; i < 12; ++i) { own.push_back(*t.cache.pool().try_acquire()); }
  const CacheView view = t.cache.view(b);
  const auto status = [&](const std::vector<PageId>& spares) {
    Prepared prepared(view, {});
    return prepared.plan(window, view, {.shared = SharedPages::copy, .spare_pages = spares})
        .status();
  };
  CHECK(status(own) == Status::ok);
  const auto with = [&](PageId p) {
    std::vector<PageId> spares = own;
    spares.back() = p;
    return status(spares);
  };
  CHECK(with(own.front()) == Status::bad_options);                // twice
  CHECK(with(PageId{t.pages(b).back()}) == Status::bad_options);  // in its own table
  CHECK(with(PageId{-1}) == Status::bad_options);
  CHECK(with(PageId{t.cache.params().pages}) == Status::bad_options);
  t.cache.pool().retain(own.back());
  CHECK(status(own) == Status::bad_options);  // somebody else's as well
}

namespace {
// Writes tables through a cache, and calls back when a page comes back.
struct CallsBack {
  PagedCache::Sink sink;
  std::function<void()> on_release;
  void update(const TableUpdate& u) noexcept { sink.update(u); }
  bool release(PageId p) noexcept {
    const bool free = sink.release(p);
    on_release();
    return free;
  }
};
}  // namespace

TEST_CASE("C06 a sink may append, plan and end sequences while pages come back",
          "[fault][commit]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const int what : {0, 1, 2}) {
      TestCache t(two_sequences(scope));
      const SequenceId a = t.create();
      const SequenceId b = t.create();
      REQUIRE(t.append(a, 60) == Status::ok);
      REQUIRE(t.append(b, 50) == Status::ok);
      const CacheView view = t.cache.view();
      Prepared prepared(view, {});
      const PlanRef plan = prepared.plan(window, view);
      REQUIRE(apply(plan, view) == Status::ok);
      int calls = 0;
      CallsBack sink{t.cache.sink_for(view), [&] {
                       if (++calls > 1) { return; }
                       if (what == 0) { CHECK(t.append(a, 9) == Status::ok); }
                       if (what == 1) {
                         Prepared again(view, {});
                         CHECK(again.plan(window, view).status() == Status::ok);
                       }
                       if (what == 2) { t.cache.destroy(b); }
                     }};
      const Report report = commit(plan, view, sink);
      CHECK(report.status == Status::ok);
      CHECK(report.dropped_pages == calls);
      CHECK(t.positions(a, 1, 1) == range(0, 4) + range(32, what == 0 ? 69 : 60));
      if (what != 2) { CHECK(t.positions(b) == range(0, 4) + range(22, 50)); }
      CHECK(sound(t.cache));
      t.cache.destroy(a);
      if (what != 2) { t.cache.destroy(b); }
      CHECK(t.cache.pool().in_use() == 0);  // none leaked, none returned twice
    }
  }
}

TEST_CASE("C06 a page that nobody holds is not returned again", "[fault][pool]") {
  PagePool pool(3);
  const PageId p = *pool.try_acquire();
  CHECK(pool.release(p));
  for (const PageId bad : {p, PageId{2}, PageId{-1}, PageId{3}}) { CHECK_FALSE(pool.release(bad)); }
  CHECK(pool.available() == 3);
  std::vector<PageId> all;
  while (const auto page = pool.try_acquire()) { all.push_back(*page); }
  CHECK(all.size() == 3);
  std::array<std::int32_t, 3> counts{1, 0, 2};
  EnginePages engine(3, 4, 1, 2, {{0, 2}});
  std::array<PageId, 3> freed{};
  DenseTables tables(engine.view(), engine.ids.data(), nullptr, counts.data(), freed);
  CHECK(tables.release(ReleasedPage{PageId{0}, {}, 0, {}, {}}));
  CHECK_FALSE(tables.release(ReleasedPage{PageId{0}, {}, 0, {}, {}}));
  CHECK_FALSE(tables.release(ReleasedPage{PageId{1}, {}, 0, {}, {}}));
  CHECK_FALSE(tables.release(ReleasedPage{PageId{2}, {}, 0, {}, {}}));
  CHECK(counts == std::array<std::int32_t, 3>{0, 0, 1});
  CHECK(tables.freed().size() == 1);
}

TEST_CASE("C13 a second apply is refused where a generation is kept", "[fault][commit]") {
  for (const bool keeps : {false, true}) {
    EnginePages engine(8, 4, 1, 2, {{3, 1, 6}});
    engine.fill(0, 12);
    std::array<std::uint64_t, 1> generations{41};
    CacheView view = engine.view();
    if (keeps) { view.generations = generations.data(); }
    Prepared first(view, {});
    Prepared second(view, {});
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 8});
    const PlanRef a = first.plan(policy, view);
    const PlanRef b = second.plan(policy, view);
    Plan sent(b);
    REQUIRE(apply(a, view) == Status::ok);
    if (!keeps) { continue; }  // one plan at a time is then the caller's duty
    CHECK(generations[0] == 42);
    CHECK(apply(b, view) == Status::stale_plan);
    CHECK(apply(sent.ref(), view) == Status::stale_plan);
    std::array<PageId, 4> freed{};
    DenseTables sink(view, engine.ids.data(), engine.lengths.data(), nullptr, freed);
    REQUIRE(commit(a, view, sink).status == Status::ok);
    CHECK(generations[0] == 43);
    CHECK(engine.tags(0) == range(4, 12));
    CHECK(apply(b, view) == Status::stale_plan);
    // The freed page comes back for appends: the table looks as it did.
    engine.ids[2] = 6;
    engine.lengths[0] = 12;
    ++generations[0];
    CHECK(apply(b, view) == Status::stale_plan);
    const Rows tags = engine.tags(0);
    CHECK(Rows(tags.begin(), tags.begin() + 8) == range(4, 12));
  }
}
