// SPDX-License-Identifier: Apache-2.0
// Pages with more than one owner, and plans that the cache has outrun.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <map>
#include <random>

using namespace kvtrim;
using namespace kvtrim::fault;
using test::ByScore;

namespace {

PagedCache::Params shared_params(TableScope scope = TableScope::group, std::int32_t layers = 1) {
  return {.pages = 20,
          .page_size = 4,
          .layers = layers,
          .kv_heads = 2,
          .key_dim = 4,
          .value_dim = 2,
          .scope = scope,
          .max_sequences = 2,
          .max_rows = 24};
}

// What a reader sees of a sequence, bit for bit.
std::vector<float> seen(TestCache& t, SequenceId s) {
  std::vector<float> all;
  for (std::int32_t h = 0; h < t.cache.params().kv_heads; ++h) {
    for (const Row& r : t.rows(s, 0, h)) {
      for (const std::int32_t x : {r.row, r.position, r.rope, r.tag}) {
        all.push_back(static_cast<float>(x));
      }
      all.insert(all.end(), r.key.begin(), r.key.end());
    }
  }
  return all;
}

// A prefix cache, as engines have one: a full page is found by its contents, until it is free or no longer full.
struct PrefixIndex {
  std::map<Rows, std::int32_t> pages;  // tags of its rows, and the page
  std::vector<std::uint64_t> writable = std::vector<std::uint64_t>(1, ~std::uint64_t{0});

  void enter(const Rows& content, std::int32_t page) {
    if (pages.emplace(content, page).second) { writable[0] &= ~(std::uint64_t{1} << page); }
  }
  void forget(std::int32_t page) {
    std::erase_if(pages, [&](const auto& entry) { return entry.second == page; });
    writable[0] |= std::uint64_t{1} << page;
  }
};

// The cache's sink, and the event by which the index learns of a page before anyone can get it.
struct IndexedSink {
  PagedCache::Sink sink;
  PrefixIndex& index;
  Rows order;
  void update(const TableUpdate& u) noexcept { sink.update(u); }
  bool release(PageId p) noexcept {
    order.push_back(raw(p));
    const bool free = sink.release(p);
    if (free) { index.forget(raw(p)); }
    return free;
  }
};

}  // namespace

TEST_CASE("B072 one layer drops a shared page, another frees a private one, in one plan",
          "[sharing][fault]") {
  SECTION("layers take pages from one pool") {
    TestCache t(shared_params(TableScope::layer, 2));
    const SequenceId a = t.filled(8);
    const SequenceId b = t.cache.try_fork(a).value();
    REQUIRE(t.append(a, 4) == Status::ok);
    const Rows layer0 = t.pages(a, 0), layer1 = t.pages(a, 1);
    Input in;
    in.score = [](std::int32_t, std::int32_t p, std::int32_t l, std::int32_t) {
      return p / 4 == (l == 0 ? 1 : 2) ? 0.0F : 1.0F;
    };
    const Outcome out = evict(ByScore{.keep = 8}, t, a, in);
    REQUIRE(out.report.status == Status::ok);
    CHECK(out.report.dropped_pages == 2);
    CHECK(out.report.released_pages == 1);
    CHECK(out.released == std::vector<Rows>{{layer0[1]}, {layer1[2]}});
    CHECK(t.cache.pool().ref_count(PageId{layer0[1]}) == 1);  // B's
    CHECK(t.cache.pool().ref_count(PageId{layer1[1]}) == 2);
    CHECK(t.cache.pool().ref_count(PageId{layer1[2]}) == 0);
    CHECK(t.positions(a, 0, 1) == range(0, 4) + range(8, 12));
    CHECK(t.positions(a, 1, 1) == range(0, 8));
    CHECK(t.positions(b, 0, 1) == range(0, 8));
    CHECK(t.positions(b, 1, 1) == range(0, 8));
  }
  SECTION("layers have pools of their own, so the pages have the case's numbers in both") {
    std::vector<float> k(2 * 4 * 4 * 2), v(k.size());
    Rows ids{0, 1, 2, -1, 0, 1, 2, -1}, lengths{12, 12};
    Rows counts{2, 2, 1, 0, 2, 2, 1, 0};
    CacheView view;
    view.k = Plane::nhd(k.data(), {4, 1, 2, DType::f32});
    view.v = Plane::nhd(v.data(), {4, 1, 2, DType::f32});
    view.k.layer_stride = view.v.layer_stride = 4 * view.k.page_stride;
    view.page_size = view.pages = 4;
    view.kv_heads = view.sequences = 1;
    view.layers = 2;
    view.scope = TableScope::layer;
    view.table = {.ids = ids.data(), .rows = {2, 1, 0}, .row_stride = 4, .max_pages = 4};
    view.lengths = lengths.data();
    view.length_rows = {2, 1, 0};
    view.writable = {.ref_counts = counts.data(), .layer_stride = 4};
    Input in;
    in.score = [](std::int32_t, std::int32_t p, std::int32_t l, std::int32_t) {
      return p / 4 == (l == 0 ? 1 : 2) ? 0.0F : 1.0F;
    };
    std::vector<PageId> freed(8);
    std::vector<std::int64_t> freed_tables(8);
    DenseTables sink(view, ids.data(), lengths.data(), counts.data(), freed, freed_tables);
    const Outcome out = evict_into(ByScore{.keep = 8}, view, sink, in);
    REQUIRE(out.report.status == Status::ok);
    CHECK(counts == Rows{2, 1, 1, 0, 2, 2, 0, 0});
    REQUIRE(sink.freed().size() == 1);
    CHECK(sink.freed()[0] == PageId{2});
    CHECK(sink.freed_tables()[0] == 1);
    CHECK(ids == Rows{0, 2, -1, -1, 0, 1, -1, -1});
    CHECK(lengths == Rows{8, 8});
  }
}

TEST_CASE("B073 a page leaves the prefix cache before anyone can get it, and none is rewritten",
          "[sharing][fault][property]") {
  PagedCache::Params params = shared_params();
  params.scope = TableScope::group;
  TestCache t(params);
  PrefixIndex prefix;
  std::mt19937 rng(73);
  const auto below = [&](std::uint32_t n) { return static_cast<std::int32_t>(rng() % n); };
  const auto content = [&](const Rows& tags, std::int32_t e) {
    return Rows(tags.begin() + e * 4, tags.begin() + e * 4 + 4);
  };
  std::int32_t misses = 0, hits = 0, refused = 0;
  std::int32_t tag = 0;
  const SequenceId a = t.create(), b = t.create();
  for (std::int32_t step = 0; step < 600; ++step) {
    const SequenceId s = below(2) == 0 ? a : b;
    if (below(2) == 0) {
      const std::int32_t n = 1 + below(6);
      if (t.append(s, n, tag) == Status::ok) { tag += n; }
    } else if (t.cache.live_rows(s) > 2) {
      CacheView view = t.cache.view(s);
      view.writable.bits = prefix.writable.data();
      Input in;
      in.options.removal = static_cast<Removal>(below(5));
      in.score = [step](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
        return noise(p, step);
      };
      in.budgets = {1 + below(static_cast<std::uint32_t>(t.cache.live_rows(s)))};
      IndexedSink sink{t.cache.sink_for(view), prefix, {}};
      const Status status = evict_into(ByScore{.keep = 4}, view, sink, in).report.status;
      refused += usable(status) ? 0 : 1;
      REQUIRE(
          (usable(status) || status == Status::rows_unordered || status == Status::shared_page));
    }
    // Whatever the index names holds what it is named for: in this sequence, in the other one, or in none.
    const CacheView all = t.cache.view();
    for (const auto& [tags, page] : prefix.pages) {
      REQUIRE(t.cache.pool().ref_count(PageId{page}) > 0);
      for (std::int32_t i = 0; i < 4; ++i) {
        float value[2];
        load_row(all.v, all.v.row({}, PageId{page}, {}, Slot{i}), value);
        REQUIRE(static_cast<std::int32_t>(value[0]) == tags[index(i)]);
      }
    }
    Rows tags;
    for (const Row& r : t.rows(s)) { tags.push_back(r.tag); }
    if (t.cache.state(s).append_row >= 0) { continue; }  // rows are not yet where entries say
    const Rows pages = t.pages(s);
    for (std::int32_t e = 0; (e + 1) * 4 <= static_cast<std::int32_t>(tags.size()); ++e) {
      const bool known = prefix.pages.contains(content(tags, e));
      ++(known ? hits : misses);
      if (known) { REQUIRE(prefix.pages.at(content(tags, e)) == pages[index(e)]); }
      prefix.enter(content(tags, e), pages[index(e)]);
    }
  }
  CHECK(hits > 100);
  CHECK(misses > 50);
  CHECK(refused < 300);
}

TEST_CASE("B074 a page that is renumbered gets a copy first, its other owner keeps its keys",
          "[sharing][fault]") {
  TestCache t(shared_params());
  t.rotation = plain_rotation(4);
  const SequenceId a = t.filled(8);  // pages 0 and 1
  const SequenceId b = t.cache.try_fork(a).value();
  REQUIRE(t.append(a, 4) == Status::ok);
  const Rows before = t.pages(a);
  const std::vector<float> of_b = seen(t, b);
  const Rerotator rerotator(t.cache.view(a), t.rotation->rope(), PositionMode::in_cache);
  const StreamingSink<SinkForm::exact> policy({.sinks = 5, .recent = 3});  // row 4 is in page 1
  Input in;
  in.options.removal = Removal::stable_pack;
  in.options.rerotator = &rerotator;
  const std::vector<float> of_a = seen(t, a);

  in.options.shared = SharedPages::copy;
  Prepared without(t.cache.view(a), in);
  const PlanRef refused = without.plan(policy, t.cache.view(a), in.options);
  CHECK(refused.status() == Status::out_of_pages);
  CHECK(refused.spares_needed() == 1);
  CHECK(seen(t, a) == of_a);

  const PageId spare = t.cache.pool().try_acquire().value();
  in.options.spare_pages = {&spare, 1};
  REQUIRE(evict(policy, t, a, in).report.status == Status::ok);
  CHECK(t.pages(a) == Rows{before[0], raw(spare)});
  CHECK(t.cache.pool().ref_count(PageId{before[0]}) == 2);
  CHECK(t.cache.pool().ref_count(PageId{before[1]}) == 1);
  CHECK(t.cache.pool().ref_count(PageId{before[2]}) == 0);
  CHECK(seen(t, b) == of_b);
  CHECK(t.positions(a) == range(0, 5) + range(9, 12));
  CHECK(t.ropes(a) == range(0, 8));
  CHECK(t.raw_key_error(a) < 1e-5);
  CHECK(t.raw_key_error(b) < 1e-5);
}

TEST_CASE("B078 a plan from before an append or a release is stale, the next one works",
          "[sharing][fault]") {
  TestCache t(shared_params());
  const SequenceId a = t.filled(8);
  const SequenceId b = t.cache.try_fork(a).value();
  REQUIRE(t.append(a, 4) == Status::ok);
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 4});
  const auto outcome_after = [&](const auto& change) {
    const CacheView view = t.cache.view(a);
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(policy, view, {.removal = Removal::stable_pack});
    REQUIRE(usable(plan.status()));
    change();
    const std::vector<float> before = seen(t, a);
    const Status status = apply(plan, view);
    CHECK(seen(t, a) == before);  // rows of shared pages stay, the others have nowhere to go
    if (status == Status::ok) {
      auto sink = t.cache.sink_for(view);
      REQUIRE(usable(commit(plan, view, sink).status));
    } else {
      auto sink = t.cache.sink_for(view);
      CHECK(commit(plan, view, sink).status == Status::not_applied);
      CHECK(seen(t, a) == before);
    }
    return status;
  };
  CHECK(outcome_after([&] { REQUIRE(t.append(a, 1) == Status::ok); }) == Status::stale_plan);
  // A schedule that failed changed nothing, so the plan still holds; the other sequence's steps are its own.
  const auto failed_schedule = [&] { CHECK(t.cache.try_extend(a, 100) == Status::too_many_rows); };
  const auto step_of_b = [&] { REQUIRE(t.append(b, 1) == Status::ok); };
  {
    const CacheView view = t.cache.view(a);
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(policy, view, {.removal = Removal::stable_pack});
    failed_schedule();
    step_of_b();
    CHECK(detail::fresh(plan, view));
  }
  // A page that was shared is A's own from now on: the plan left its rows alone for no reason.
  CHECK(outcome_after([&] { t.cache.destroy(b); }) == Status::stale_plan);
  REQUIRE(evict(policy, t, a).report.status == Status::ok);
  CHECK(t.positions(a) == Rows{0, 1, 9, 10, 11, 12});
}

TEST_CASE("B079 pages are offered for reuse tail first, so that no descendant outlives its root",
          "[sharing][fault]") {
  TestCache t(shared_params());
  const SequenceId s = t.filled(14);
  const Rows chain = t.pages(s);  // A, B, C and a tail
  CacheView view = t.cache.view(s);
  PrefixIndex index;
  IndexedSink sink{t.cache.sink_for(view), index, {}};
  Input in;
  in.options.removal = Removal::drop_pages;
  const Outcome out = evict_into(StreamingSink({.sinks = 0, .recent = 2}), view, sink, in);
  REQUIRE(out.report.status == Status::ok);
  // The queue of an engine, oldest first: C is taken before B, B before A. The library's own pool has no index of
  // contents, and hands out what came last.
  CHECK(sink.order == Rows{chain[2], chain[1], chain[0]});
  CHECK(out.released[0] == sink.order);
  CHECK(t.cache.pool().try_acquire() == PageId{chain[0]});
}
