// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <map>
#include <set>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("B147 over a run, what the reports say went is what was appended less what is live",
          "[report][fault]") {
  const auto run = [](const auto& policy, TableScope scope, Rows budgets) {
    PagedCache::Params p{.pages = 120,
                         .page_size = 4,
                         .layers = 3,
                         .kv_heads = 2,
                         .key_dim = 2,
                         .value_dim = 2,
                         .scope = scope,
                         .max_sequences = 2};
    TestCache t(p);
    const SequenceId s = t.create();
    const SequenceId shared = t.create();
    REQUIRE(t.append(shared, 3) == Status::ok);
    std::int64_t evicted = 0;
    std::int32_t appended = 0, released = 0, acquired = 0;
    std::vector<std::set<std::int32_t>> gone(6);
    for (std::int32_t step = 0; step < 100; ++step) {
      const std::int32_t n = 1 + step % 5;
      const std::int32_t before = t.cache.pool().in_use();
      REQUIRE(t.append(s, n) == Status::ok);
      acquired += t.cache.pool().in_use() - before;
      appended += n;
      Input in;
      in.score = [step](std::int32_t, std::int32_t pos, std::int32_t l, std::int32_t h) {
        return noise(pos, l, h, step);
      };
      in.budgets = budgets;
      in.budget_rows = {0, budgets.size() == 3 ? 1 : 0, 0};
      const Outcome out = evict(policy, t, s, in);
      REQUIRE(usable(out.report.status));
      evicted += out.report.evicted_rows;
      released += out.report.released_pages;
      CHECK(out.report.dropped_pages == out.report.released_pages);  // no other owner holds them
      std::int32_t listed_pages = 0;
      for (const Rows& pages : out.released) {
        listed_pages += static_cast<std::int32_t>(pages.size());
      }
      CHECK(listed_pages == out.report.released_pages);  // the pages of each table, by the plan
      std::int64_t live = 0, listed = 0;
      for (std::int32_t i = 0; i < 6; ++i) {
        live += t.cache.live_rows(s, LayerId{i / 2}, HeadId{i % 2});
        const Rows& list = out.evicted[index(i)];
        CHECK(std::is_sorted(list.begin(), list.end()));
        for (const std::int32_t position : list) { gone[index(i)].insert(position); }
        listed += static_cast<std::int64_t>(list.size());
      }
      CHECK(listed == out.report.evicted_rows);
      CHECK(out.report.kept_rows == live);
      CHECK(evicted == 6 * appended - live);
    }
    CHECK(evicted > 500);
    CHECK(acquired - released == t.cache.pool().in_use() - (scope == TableScope::group   ? 1
                                                            : scope == TableScope::layer ? 3
                                                                                         : 6));
    for (std::int32_t i = 0; i < 6; ++i) {  // each token is reported once, or live
      Rows all = t.positions(s, i / 2, i % 2);
      all.insert(all.end(), gone[index(i)].begin(), gone[index(i)].end());
      std::sort(all.begin(), all.end());
      CHECK(all == range(0, appended));
    }
  };
  const StreamingSink<SinkForm::exact> exact({.sinks = 2, .recent = 10});
  const StreamingSink pages({.sinks = 2, .recent = 10});
  const HeavyHitter heavy({.heavy = 5, .recent = 6, .sinks = 1});
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    run(exact, scope, {});
    run(pages, scope, {});
    run(heavy, scope, {});
  }
  run(exact, TableScope::layer, {8, 20, 11});  // layers that free different numbers of pages
  run(pages, TableScope::layer, {8, 20, 11});
  run(heavy, TableScope::head, {8, 20, 11});
}

TEST_CASE("B147 an eviction of nothing reports nothing, a refused one its reason",
          "[report][fault]") {
  TestCache t({.pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.filled(9);
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 10});
  const Report none = evict(policy, t, s).report;
  CHECK(none.status == Status::ok);
  CHECK(none.evicted_rows == 0);
  CHECK(none.kept_rows == 18);
  CHECK(none.released_pages == 0);
  CHECK(none.bytes_moved == 0);
  const Report refused = evict(policy.make_room(11), t, s).report;
  CHECK(refused.status == Status::chunk_too_long);
  CHECK(refused.evicted_rows == 0);
  CHECK(t.positions(s, 0, 1) == range(0, 9));
}

TEST_CASE("B146 a removal event counts the copies of the same content that remain",
          "[report][fault]") {
  // Copies of the same content are known to an engine's prefix cache alone; it is told of each page, before anyone gets it.
  struct Events {
    PagedCache::Sink sink;
    std::map<std::int32_t, std::int32_t>& content;               // of each page that holds any
    std::vector<std::pair<std::int32_t, std::int32_t>> removed;  // page, copies that remain
    void update(const TableUpdate& u) noexcept { sink.update(u); }
    bool release(PageId p) noexcept {
      const bool free = sink.release(p);
      const auto it = content.find(raw(p));
      if (free && it != content.end()) {
        const std::int32_t id = it->second;
        content.erase(it);
        removed.emplace_back(raw(p), std::count_if(content.begin(), content.end(), [&](auto& x) {
                               return x.second == id;
                             }));
      }
      return free;
    }
  };
  TestCache t({.pages = 8,
               .page_size = 4,
               .kv_heads = 2,
               .key_dim = 2,
               .value_dim = 2,
               .max_sequences = 3});
  const StreamingSink policy({.sinks = 0, .recent = 2});
  const SequenceId a = t.create(), b = t.create();
  REQUIRE(t.append(a, 6, 0) == Status::ok);  // the same prompt, computed twice
  REQUIRE(t.append(b, 6, 0) == Status::ok);
  const std::int32_t first = t.pages(a)[0], second = t.pages(b)[0];
  std::map<std::int32_t, std::int32_t> content{{first, 7}, {second, 7}};
  const auto cut = [&](SequenceId s) {
    const CacheView view = t.cache.view(s);
    Events events{t.cache.sink_for(view), content, {}};
    REQUIRE(evict_into(policy, view, events).report.status == Status::ok);
    return events.removed;
  };
  using Removed = std::vector<std::pair<std::int32_t, std::int32_t>>;
  // One page that two sequences share is one copy: it is removed with its last owner.
  const SequenceId c = t.cache.try_fork(a).value();
  CHECK(cut(a).empty());
  CHECK(cut(c) == Removed{{first, 1}});
  CHECK(cut(b) == Removed{{second, 0}});
}
