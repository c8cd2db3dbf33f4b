// SPDX-License-Identifier: Apache-2.0
// Layers that keep different numbers of rows, and what an engine reads of the tables afterwards.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

#include <random>
#include <set>

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::ByScore;
using kvtrim::test::for_each_value;

namespace {

PagedCache::Params layered(std::int32_t layers, TableScope scope = TableScope::layer) {
  return {.pages = 40,
          .page_size = 4,
          .layers = layers,
          .kv_heads = 2,
          .key_dim = 2,
          .value_dim = 2,
          .scope = scope};
}

}  // namespace

TEST_CASE("B102 layers of 4 and 8 rows have lengths and positions of their own",
          "[layers][fault]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 12});
  Input in;
  in.budgets = {4, 8};
  in.budget_rows = {0, 1, 0};
  TestCache t(layered(2));
  const SequenceId s = t.filled(12);
  REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
  for (const std::int32_t l : {0, 1}) {
    const std::int32_t kept = l == 0 ? 4 : 8;
    CHECK(t.positions(s, l, 1) == range(12 - kept, 12));
    CHECK(t.cache.live_rows(s, LayerId{l}) == kept);
    const CacheView view = t.cache.view(s, LayerId{l}, 1);  // this layer alone, as its layer 0
    CHECK(view.live_rows({}, {}, {}) == kept);
    CHECK(raw(view.position({}, {}, HeadId{1}, 0)) == 12 - kept);
    CHECK(view.model_layer({}) == LayerId{l});
    CHECK(raw(t.cache.next_position(s)) == 12);
  }
  // There is no helper that takes one length for all layers: where one table serves them all, the plan is refused.
  TestCache uniform(layered(2, TableScope::group));
  const SequenceId u = uniform.filled(12);
  CHECK(evict(policy, uniform, u, in).report.status == Status::unequal_budget);
  CHECK(uniform.positions(u, 1, 1) == range(0, 12));
}

TEST_CASE("B104 a table names live pages first, then none, and no page that was freed",
          "[layers][fault][property]") {
  // The library writes tables in commit, not in apply: an engine's kernels read the same array.
  EnginePages engine(40, 4, 2, 2, {Rows(9, -1), Rows(9, -1), Rows(9, -1)});
  Rows counts(40, 0);
  std::mt19937 rng(104);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(n));
  };
  std::vector<std::int32_t> pool = range(0, 40);
  std::int32_t evicted = 0;
  for (std::int32_t plan = 0; plan < 1000; ++plan) {
    const std::int32_t s = below(3);
    const std::int32_t live = engine.lengths[index(s)];
    const std::int32_t rows = std::min(36, live + 1 + below(12));
    for (std::int32_t e = pages_for(live, 4); e < pages_for(rows, 4); ++e) {
      engine.ids[index(s * 9 + e)] = pool.back();
      counts[index(pool.back())] = 1;
      pool.pop_back();
    }
    engine.lengths[index(s)] = rows;
    CacheView view = engine.view();
    view.writable.ref_counts = counts.data();
    Input in;
    in.options.removal = below(2) == 0 ? Removal::drop_pages : Removal::stable_pack;
    in.budgets = {36, 36, 36};
    in.budgets[index(s)] = 1 + below(rows);
    in.score = [plan](std::int32_t, std::int32_t p, std::int32_t, std::int32_t h) {
      return noise(p, h, plan);
    };
    std::vector<PageId> freed(40);
    DenseTables sink(view, engine.ids.data(), engine.lengths.data(), counts.data(), freed);
    const bool drops = in.options.removal == Removal::drop_pages;
    const Outcome out = drops
                            ? evict_into(StreamingSink({.sinks = 2, .recent = 20}), view, sink, in)
                            : evict_into(ByScore{.keep = 8}, view, sink, in);
    REQUIRE(usable(out.report.status));
    evicted += out.report.evicted_rows > 0 ? 1 : 0;
    std::set<std::int32_t> named;
    for (std::int32_t q = 0; q < 3; ++q) {
      const std::int32_t used = pages_for(engine.lengths[index(q)], 4);
      for (std::int32_t e = 0; e < 9; ++e) {
        const std::int32_t id = engine.ids[index(q * 9 + e)];
        REQUIRE((e < used ? id >= 0 && id < 40 : id == -1));
        if (id >= 0) { REQUIRE(named.insert(id).second); }
      }
    }
    for (const PageId p : sink.freed()) {
      REQUIRE(named.count(raw(p)) == 0);
      REQUIRE(counts[index(raw(p))] == 0);
      pool.push_back(raw(p));
    }
    REQUIRE(named.size() + pool.size() == 40);
  }
  CHECK(evicted > 500);
}

TEST_CASE("B106 layers free 1, 0 and 3 pages in one plan, each listed with its layer",
          "[layers][fault]") {
  TestCache t(layered(3));
  const SequenceId s = t.filled(16);
  std::vector<Rows> before;
  for (std::int32_t l = 0; l < 3; ++l) { before.push_back(t.pages(s, l)); }
  Input in;
  in.budgets = {12, 16, 4};
  in.budget_rows = {0, 1, 0};
  const Outcome out = evict(StreamingSink<SinkForm::exact>({.sinks = 0, .recent = 16}), t, s, in);
  REQUIRE(out.report.status == Status::ok);
  REQUIRE(out.released.size() == 3);
  CHECK(out.released[0].size() == 1);
  CHECK(out.released[1].empty());
  CHECK(out.released[2].size() == 3);
  CHECK(out.report.released_pages == 4);
  CHECK(out.report.evicted_rows == 2 * (4 + 0 + 12));
  CHECK(t.cache.pool().in_use() == 3 + 4 + 1);
  for (std::int32_t l = 0; l < 3; ++l) {
    Rows pages = t.pages(s, l) + out.released[index(l)];
    std::sort(pages.begin(), pages.end());
    std::sort(before[index(l)].begin(), before[index(l)].end());
    CHECK(pages == before[index(l)]);  // of this layer's pages, and of no other's
  }
}

TEST_CASE("B107 chunks of 2 against a window of 6: nothing inside the window ever goes",
          "[layers][fault]") {
  for_each_value<SinkForm::exact, SinkForm::pages>([](auto form) {
    for (const std::int32_t chunk : {1, 2, 3, 5}) {
      TestCache t(layered(1));
      const SequenceId s = t.create();
      const StreamingSink<form> policy({.sinks = 0, .recent = 6});
      for (std::int32_t n = chunk; n <= 40; n += chunk) {
        REQUIRE(t.append(s, chunk) == Status::ok);
        const Outcome out = evict(policy, t, s);
        REQUIRE(out.report.status == Status::ok);
        for (const Rows& gone : out.evicted) { CHECK((gone.empty() || gone.back() < n - 6)); }
        const Rows live = t.positions(s, 0, 1);
        const Rows window = range(std::max(0, n - 6), n);
        CHECK(std::includes(live.begin(), live.end(), window.begin(), window.end()));
        if (n == 10 && form == SinkForm::exact) { CHECK(live == range(4, 10)); }
      }
    }
  });
}
