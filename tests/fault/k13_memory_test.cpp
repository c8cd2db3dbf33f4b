// SPDX-License-Identifier: Apache-2.0
// B089, B090 and B094 without a policy are tests of the cache; here real plans free the pages.
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

#include <array>
#include <map>
#include <random>
#include <type_traits>

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::for_each_value;

namespace {

// Free + in use = all, and each page has as many owners as tables name it.
bool pool_adds_up(TestCache& t) {
  const auto& p = t.cache.params();
  const PagePool& pool = t.cache.pool();
  Rows owners(index(pool.capacity()), 0);
  for (std::int32_t s = 0; s < p.max_sequences; ++s) {
    const std::int32_t layers = p.scope == TableScope::group ? 1 : p.layers;
    const std::int32_t heads = p.scope == TableScope::head ? p.kv_heads : 1;
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < heads; ++h) {
        const Rows pages = t.pages(SequenceId{s}, l, h);
        const auto& state = t.cache.state(SequenceId{s}, LayerId{l}, HeadId{h});
        if (static_cast<std::int32_t>(pages.size()) != pages_for(state.extent(), p.page_size)) {
          return false;
        }
        for (const std::int32_t id : pages) { ++owners[index(id)]; }
      }
    }
  }
  std::int32_t used = 0;
  for (std::int32_t id = 0; id < pool.capacity(); ++id) {
    if (pool.ref_count(PageId{id}) != owners[index(id)]) { return false; }
    used += owners[index(id)] > 0 ? 1 : 0;
  }
  return pool.in_use() == used && pool.available() + used == pool.capacity();
}

}  // namespace

TEST_CASE("B089 6 of 8 pages are free at once, while a view, a plan and its copy exist",
          "[memory][fault]") {
  for_each_value<SinkForm::pages, SinkForm::exact>([&](auto form) {
    TestCache t({.pages = 8,
                 .page_size = 4,
                 .kv_heads = 2,
                 .key_dim = 2,
                 .value_dim = 2,
                 .max_sequences = 2});
    const SequenceId s = t.filled(32);
    const CacheView view = t.cache.view(s);
    const StreamingSink<form> policy({.sinks = 4, .recent = 4});
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(policy, view);
    Plan snapshot(plan);
    CHECK(t.cache.pool().available() == 0);
    REQUIRE(apply(plan, view) == Status::ok);
    auto sink = t.cache.sink_for(view);
    const Report report = commit(plan, view, sink);
    CHECK(report.dropped_pages == 6);
    CHECK(report.released_pages == 6);
    CHECK(t.cache.pool().available() == 6);
    const SequenceId other = t.create();
    CHECK(t.append(other, 24) == Status::ok);  // all six
    CHECK(t.positions(s) == Rows{0, 1, 2, 3, 28, 29, 30, 31});
    CHECK(t.positions(other, 0, 1) == range(0, 24));
    // What is left of the past cannot be applied.
    CHECK(apply(snapshot.ref(), view) == Status::stale_plan);
    CHECK(apply(plan, view) == Status::stale_plan);
    CHECK(t.positions(other, 0, 1) == range(0, 24));
  });
}

TEST_CASE("B090 10,000 random steps with real evictions lose no page and no row",
          "[memory][fault][property]") {
  struct Token {
    std::int32_t position, tag;
    bool operator==(const Token&) const = default;
  };
  using Tokens = std::vector<Token>;
  std::int32_t evicted_by[5] = {}, over = 0, refused = 0, copied = 0;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache::Params p{.page_size = page_size,
                           .layers = 2,
                           .kv_heads = 2,
                           .key_dim = 1,
                           .value_dim = 2,
                           .scope = scope,
                           .max_sequences = 4,
                           .max_rows = 40};
      const std::int32_t tables = scope == TableScope::group   ? 1
                                  : scope == TableScope::layer ? 2
                                                               : 4;
      p.pages = tables * (page_size == 16 ? 7 : 90 / page_size);
      TestCache t(p);
      std::mt19937 rng(90U + static_cast<std::uint32_t>(page_size) +
                       100U * static_cast<std::uint32_t>(scope));
      const auto below = [&](std::int32_t n) {
        return static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(n));
      };
      // Tokens of each head of each layer, ascending: what the cache must hold.
      std::map<std::int32_t, std::array<Tokens, 4>> model;
      const auto agrees = [&](std::int32_t s) {
        for (std::int32_t i = 0; i < 4; ++i) {
          Tokens seen;
          for (const Row& r : t.ordered_rows(SequenceId{s}, i / 2, i % 2)) {
            if (!r.own) { return false; }
            seen.push_back({r.position, r.tag});
          }
          if (seen != model[s][index(i)]) { return false; }
          const auto& state = t.cache.state(SequenceId{s}, LayerId{i / 2}, HeadId{i % 2});
          const Rows slots = t.slots(SequenceId{s}, i / 2, i % 2);
          if (state.ordered && !std::is_sorted(slots.begin(), slots.end())) { return false; }
          if (state.live_rows != static_cast<std::int32_t>(seen.size())) { return false; }
        }
        return true;
      };
      for (std::int32_t step = 0; step < 1112; ++step) {  // nine walks
        const SequenceId s{below(4)};
        if (!t.cache.alive(s)) {
          model[raw(t.create())] = {};
          continue;
        }
        auto& mine = model[raw(s)];
        const std::int32_t kind = below(16);
        std::string what = "extend";
        if (kind < 6) {
          const std::int32_t n = 1 + below(7);
          const std::int32_t next = raw(t.cache.next_position(s));
          const std::int32_t tag = 1000 * step % 8'000'000 + next % 1000;
          if (t.append(s, n, tag) == Status::ok) {
            for (Tokens& tokens : mine) {
              for (std::int32_t i = 0; i < n; ++i) { tokens.push_back({next + i, tag + i}); }
            }
          }
        } else if (kind < 12) {
          const std::int32_t live = t.cache.live_rows(s);
          if (live < 2) { continue; }
          Input in;
          in.score = [step](std::int32_t, std::int32_t pos, std::int32_t l, std::int32_t h) {
            return noise(pos, l, h, step);
          };
          in.budgets = {below(2) == 0 ? live - 1 : 1 + below(live)};
          in.options.removal = static_cast<Removal>(below(5));
          in.options.shared = below(3) == 0 ? SharedPages::copy : SharedPages::leave;
          std::vector<PageId> spares;
          if (in.options.shared == SharedPages::copy) {
            while (spares.size() < 8) {
              const auto page = t.cache.pool().try_acquire();
              if (!page) { break; }
              spares.push_back(*page);
            }
            in.options.spare_pages = spares;
          }
          const CacheView view = t.cache.view(s);
          auto sink = t.cache.sink_for(view);
          Prepared prepared(view, in);
          const HeavyHitter heavy({.heavy = 1, .recent = 1, .sinks = 1});
          const StreamingSink window({.sinks = 2, .recent = 3});
          const bool by_position = below(3) == 0;
          const PlanRef plan = by_position ? prepared.plan(window, view, in.options)
                                           : prepared.plan(heavy, view, in.options);
          what = std::string("evict by ") + std::string(to_string(in.options.removal)) + ": " +
                 to_string(plan);
          std::size_t used = 0;
          if (usable(plan.status())) {
            used = index(plan.spares_needed());
            copied += static_cast<std::int32_t>(used);
            over += plan.status() == Status::over_budget ? 1 : 0;
            std::array<Tokens, 4> after;
            for (std::int32_t i = 0; i < 4; ++i) {
              const auto gone = plan.evicted({}, LayerId{i / 2}, HeadId{i % 2});
              for (const Token& token : mine[index(i)]) {
                if (std::find(gone.begin(), gone.end(), Position{token.position}) == gone.end()) {
                  after[index(i)].push_back(token);
                }
              }
            }
            REQUIRE(apply(plan, view) == Status::ok);
            ++evicted_by[static_cast<int>(plan.table({}, 0).removal)];
            REQUIRE(usable(commit(plan, view, sink).status));
            mine = after;
          } else {
            ++refused;
            const Status status = plan.status();
            REQUIRE((status == Status::rows_unordered || status == Status::shared_page ||
                     status == Status::out_of_pages));
          }
          while (spares.size() > used) {
            t.cache.pool().release(spares.back());
            spares.pop_back();
          }
        } else if (kind < 13) {
          what = "truncate";
          const std::int32_t next = below(raw(t.cache.next_position(s)) + 1);
          if (t.cache.try_truncate(s, Position{next}) == Status::ok) {
            for (Tokens& tokens : mine) {
              std::erase_if(tokens, [&](const Token& x) { return x.position >= next; });
            }
          }
        } else if (kind < 15) {
          what = "fork";
          if (const auto made = t.cache.try_fork(s)) { model[raw(*made)] = model[raw(s)]; }
        } else {
          what = "destroy";
          t.cache.destroy(s);
          model.erase(raw(s));
        }
        bool right = pool_adds_up(t);
        for (const auto& [q, tokens] : model) { right = right && agrees(q); }
        if (!right) {
          INFO("scope " << static_cast<int>(scope) << ", page size " << page_size << ", step "
                        << step << ", sequence " << raw(s) << ": " << what);
          REQUIRE(right);
        }
      }
      for (std::int32_t s = 0; s < 4; ++s) {
        if (t.cache.alive(SequenceId{s})) { t.cache.destroy(SequenceId{s}); }
      }
      CHECK(t.cache.pool().available() == p.pages);
    }
  }
  INFO(evicted_by[1] << ' ' << evicted_by[2] << ' ' << evicted_by[3] << ' ' << evicted_by[4] << ' '
                     << over << ' ' << refused << ' ' << copied);
  for (int way = 1; way < 5; ++way) { CHECK(evicted_by[way] > 50); }
  CHECK(over > 50);
  CHECK(refused > 50);
  CHECK(copied > 50);
}

TEST_CASE("B093 the only sequence is cut to its budget of 8 pages like any other",
          "[memory][fault]") {
  const auto pages_after = [](const auto& policy, std::int32_t n) {
    TestCache t({.pages = 102, .page_size = 4, .kv_heads = 2, .key_dim = 4, .value_dim = 2});
    const SequenceId s = t.filled(n);
    const Queries q = make_queries(n - 4, 4, 2, 4);
    Input in;
    if constexpr (std::is_same_v<std::decay_t<decltype(policy)>, HeavyHitter<>>) {
      in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t h) {
        return noise(p, h);
      };
    }
    in.queries.data = q.data.data();
    in.queries.query_heads = 2;
    in.queries.rows = 4;
    in.queries.row_stride = 8;
    in.queries.head_stride = 4;
    CHECK(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) <= 32);
    return t.cache.pool().in_use();
  };
  for (const std::int32_t n : {400, 401, 402, 403}) {  // 100 pages and more
    INFO(n << " tokens");
    CHECK(pages_after(StreamingSink({.sinks = 4, .recent = 1000, .hard_budget = 32}), n) <= 8);
    CHECK(pages_after(StreamingSink<SinkForm::exact>({.sinks = 4, .recent = 28}), n) == 8);
    CHECK(pages_after(HeavyHitter({.heavy = 16, .recent = 16}), n) == 8);
    CHECK(pages_after(SnapKVSelector({.window = 4, .budget = 32}), n) == 8);
  }
}

TEST_CASE("B094 policies hold nothing of a sequence: 10,000 of them leave no byte behind",
          "[memory][fault]") {
  static_assert(std::is_trivially_copyable_v<StreamingSink<>> &&
                std::is_trivially_copyable_v<Full>);
  static_assert(std::is_trivially_copyable_v<HeavyHitter<>>);
  static_assert(std::is_trivially_copyable_v<SnapKVSelector<>>);
  TestCache t({.pages = 8,
               .page_size = 4,
               .kv_heads = 1,
               .key_dim = 1,
               .value_dim = 1,
               .max_sequences = 2,
               .scores = true});
  const HeavyHitter policy({.heavy = 2, .recent = 2});
  const SequencePlane before = t.cache.view().score_sums;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(t.cache.view())) +
                                   65'536);
  std::int32_t wrong = 0;
  for (std::int32_t i = 0; i < 10'000; ++i) {
    const SequenceId s = t.filled(5 + i % 9);
    const CacheView view = t.cache.view(s);
    const PlanRef plan = kvtrim::plan(policy, view, {}, workspace);  // the same memory each time
    wrong += apply(plan, view) == Status::ok ? 0 : 1;
    auto sink = t.cache.sink_for(view);
    wrong += commit(plan, view, sink).status == Status::ok && t.cache.live_rows(s) == 4 ? 0 : 1;
    t.cache.destroy(s);
    wrong += t.cache.pool().available() == 8 ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(t.cache.view().score_sums.base == before.base);
}

TEST_CASE("B096 after 1,000 tokens a window of 8 has 8 rows, for its length and for a reader",
          "[memory][fault]") {
  for_each_value<SinkForm::exact, SinkForm::pages>([&](auto form) {
    TestCache t({.pages = 5, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.create();
    const StreamingSink<form> policy({.sinks = 0, .recent = 8});
    for (std::int32_t token = 0; token < 1000; ++token) {
      REQUIRE(t.append(s, 1) == Status::ok);
      REQUIRE(evict(policy, t, s).report.status == Status::ok);
      REQUIRE(t.cache.pool().in_use() <= 3);
      REQUIRE(t.cache.live_rows(s) == static_cast<std::int32_t>(t.rows(s, 0, 1).size()));
    }
    CHECK(t.cache.live_rows(s) == 8);  // the length at 1,000 is a border of pages
    CHECK(t.rows(s).size() == 8);
    CHECK(t.positions(s) == range(992, 1000));
  });
}
