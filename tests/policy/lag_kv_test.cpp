// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/lag_kv.hpp>

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/score/lag_kv.hpp>

#include "catch.hpp"
#include "score/kv_fixture.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace score_test;

namespace {

template <class P>
Status evict_once(const P& policy, PagedCache& cache, const Observation& obs = {}) {
  const CacheView view = cache.view();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  return kvtrim::evict(policy, cache, view, obs, workspace).status;
}

void append(PagedCache& cache, const KvData& d, std::int32_t first, std::int32_t n) {
  REQUIRE(cache.try_extend(SequenceId{0}, n) == Status::ok);
  REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {d.key(first, 0)}, {d.value(first, 0)}) ==
          kvtrim::Status::ok);
}

PagedCache cache_of(const KvData& d) {
  PagedCache::Params p;
  p.pages = d.tokens + 1;
  p.page_size = 4;
  p.kv_heads = d.kv_heads;
  p.key_dim = d.dim;
  p.value_dim = d.value_dim;
  PagedCache cache(p);
  REQUIRE(cache.try_create());
  return cache;
}

std::vector<std::int32_t> positions_of(PagedCache& cache, std::int32_t h) {
  const CacheView view = cache.view();
  std::vector<std::int32_t> out;
  for (std::int32_t r = 0; r < view.live_rows(SequenceId{0}, LayerId{0}, HeadId{h}); ++r) {
    out.push_back(raw(view.position(SequenceId{0}, LayerId{0}, HeadId{h}, r)));
  }
  return out;
}

// Scores of the prompt as a whole, by position.
std::vector<float> scores_of(const KvData& d, std::int32_t h, const LagKVParams& p) {
  KvCache c(d);
  return score_test::scores_of(LagKVScorer(p), c.view(), c.sequence(), HeadId{h}, {});
}

}  // namespace

TEST_CASE("lag_kv: the last partition, the remainder and the sinks always stay", "[lag_kv]") {
  const LagKV policy({.budget = 60, .sinks = 4, .lag = 16});
  DemandInput in;
  for (in.live = 61; in.live < 200; ++in.live) {
    in.state.next_position = in.live;
    const Demand demand = policy.demand(in);
    CHECK(demand.keep == 60);
    CHECK(demand.protection.sinks == 4);
    CHECK(demand.protection.recent == 16 + (in.live - 4) % 16);
  }
}

TEST_CASE("lag_kv: short prompts and small budgets are a sliding window", "[lag_kv][edge]") {
  const KvData d = make_kv(2, 4, 4, 90, 1);
  // 90 = 4 + 2 * 40 + 6 rows make no two partitions of 43; and 46 rows of a last partition of 40 exceed a budget of 30.
  for (const std::int64_t lag : {44, 40}) {
    PagedCache cache = cache_of(d);
    append(cache, d, 0, 90);
    REQUIRE(evict_once(LagKV({.budget = 30, .sinks = 4, .lag = lag}), cache) == Status::ok);
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto kept = positions_of(cache, h);
      REQUIRE(kept.size() == 30);
      CHECK(kept[3] == 3);
      CHECK(kept[4] == 64);
      CHECK(kept[29] == 89);
    }
  }
}

TEST_CASE("lag_kv: keeps the best ranks of all partitions, the lower position among equals",
          "[lag_kv]") {
  const KvData d = make_kv(2, 6, 6, 75, 2);
  PagedCache cache = cache_of(d);
  append(cache, d, 0, 75);
  REQUIRE(evict_once(LagKV({.budget = 41, .sinks = 3, .lag = 10}), cache) == Status::ok);
  for (std::int32_t h = 0; h < 2; ++h) {
    auto scores = scores_of(d, h, {3, 10, false, false});
    // 3 sinks, 6 partitions to score, then 10 + 2 rows: 26 of 60 stay.
    std::vector<std::pair<float, std::int32_t>> order;
    for (std::int32_t t = 3; t < 63; ++t) { order.emplace_back(-scores[at(t)], t); }
    std::sort(order.begin(), order.end());
    std::vector<std::int32_t> expected{0, 1, 2};
    for (std::int32_t i = 0; i < 26; ++i) { expected.push_back(order[at(i)].second); }
    for (std::int32_t t = 63; t < 75; ++t) { expected.push_back(t); }
    std::sort(expected.begin(), expected.end());
    CHECK(positions_of(cache, h) == expected);
  }
}

TEST_CASE("lag_kv: the recursive form judges each row once, however the sequence is cut",
          "[lag_kv][property]") {
  const std::int32_t tokens = 143;
  const KvData d = make_kv(2, 6, 6, tokens, 3);
  const RecursiveLagKV policy({.sinks = 3, .lag = 10, .keep = 4});
  const LagKVParams whole{3, 10, false, false};
  for (const auto& cut : {std::vector<std::int32_t>{tokens},
                          std::vector<std::int32_t>(at(tokens), 1),
                          std::vector<std::int32_t>{1, 40, 1, 1, 25, 75},
                          std::vector<std::int32_t>{23, 120},
                          std::vector<std::int32_t>{22, 1, 9, 1, 110}}) {
    PagedCache cache = cache_of(d);
    std::int32_t first = 0;
    for (const std::int32_t n : cut) {
      append(cache, d, first, n);
      first += n;
      REQUIRE(evict_once(policy, cache) == Status::ok);
      // 3 + 4 * (partitions - 1) + 10 + remainder.
      const std::int32_t partitions = (first - 3) / 10;
      CHECK(static_cast<std::int32_t>(positions_of(cache, 0).size()) ==
            (first < 23 ? first : 3 + 4 * (partitions - 1) + 10 + (first - 3) % 10));
    }
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto scores = scores_of(d, h, whole);
      std::vector<std::int32_t> expected;
      for (std::int32_t t = 0; t < tokens; ++t) {
        if (t < 3 || t >= 3 + 13 * 10 || scores[at(t)] > 0.55F) { expected.push_back(t); }
      }
      CHECK(positions_of(cache, h) == expected);
    }
  }
}

TEST_CASE("lag_kv: a budget at run time replaces the fraction of the recursive form",
          "[lag_kv][edge]") {
  const KvData d = make_kv(1, 6, 6, 60, 4);
  PagedCache cache = cache_of(d);
  append(cache, d, 0, 60);
  const std::int32_t budget = 33;
  Observation obs;
  obs.budgets = &budget;
  REQUIRE(evict_once(RecursiveLagKV({.sinks = 3, .lag = 10, .keep = 4}), cache, obs) == Status::ok);
  CHECK(positions_of(cache, 0).size() == 33);
  const std::int32_t too_few = 5;  // all that is left was judged, or is too young
  obs.budgets = &too_few;
  CHECK(evict_once(RecursiveLagKV({.sinks = 3, .lag = 10, .keep = 4}), cache, obs) ==
        Status::over_budget);
}

TEST_CASE("lag_kv: parameters out of range are refused by name and value", "[lag_kv][edge]") {
  CHECK_THROWS_WITH(LagKV({.lag = 0}), "kvtrim::LagKV: lag 0 must be at least 1 (sinks 4, lag 0)");
  CHECK_THROWS_WITH(LagKV({.budget = 3}), "kvtrim::LagKV: budget 3 must be at least sinks 4");
  CHECK_THROWS_AS(LagKV({.sinks = -1}), std::invalid_argument);
  CHECK_THROWS_AS(LagKV({.budget = 0, .sinks = 0}), std::invalid_argument);
  CHECK_THROWS_AS(LagKV({.budget = std::int64_t{1} << 40}), std::invalid_argument);
  CHECK_THROWS_WITH(RecursiveLagKV({.lag = 8, .keep = 9}),
                    "kvtrim::RecursiveLagKV: keep 9 must be at most 8 (sinks 16, lag 8, keep 9)");
  CHECK_THROWS_AS(RecursiveLagKV({.keep = -1}), std::invalid_argument);
  CHECK_THROWS_AS(RecursiveLagKV({.sinks = -2}), std::invalid_argument);
  CHECK(LagKV(LagKV::authors(4096)).params().lag == 1024);
  CHECK(LagKV::authors(4096).sinks == 16);
}

namespace {
constexpr LagKVParams once{.sinks = 4, .lag = 10, .judged_once = true};

SequenceState state_of(std::int32_t next, std::int32_t rows_at_eviction) {
  SequenceState s;
  s.next_position = next;
  s.rows_at_eviction = rows_at_eviction;
  return s;
}
}  // namespace

TEST_CASE("lag_kv_params: the defaults are kvpress's", "[lag_kv]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<LagKVParams>);
  constexpr LagKVParams p;
  STATIC_REQUIRE(p.sinks == 4);
  STATIC_REQUIRE(p.lag == 128);
  STATIC_REQUIRE_FALSE(p.cross_scoring);
}

TEST_CASE("lag_layout: all full partitions but the last are scored", "[lag_kv]") {
  constexpr LagKVParams p{.sinks = 4, .lag = 10};
  for (const auto& [live, partitions, scored] : {std::tuple{0, 0, 0},
                                                 {3, 0, 0},
                                                 {13, 0, 0},
                                                 {23, 1, 0},
                                                 {24, 2, 10},
                                                 {33, 2, 10},
                                                 {34, 3, 20}}) {
    const LagLayout layout = lag_layout(p, state_of(live, 0), live);
    INFO(live << " rows");
    CHECK(layout.begin == std::min(4, live));
    CHECK(layout.partitions == partitions);
    CHECK(layout.scored(10) == scored);
  }
}

TEST_CASE("lag_layout: with judged_once what was scored is known from rows and positions alone",
          "[lag_kv]") {
  // 37 tokens: 4 sinks, partitions [4, 14) and [14, 24) cut to 5 each, [24, 34) and a remainder of 3.
  const std::int32_t rows = 4 + 5 + 5 + 10 + 3;
  for (std::int32_t more = 0; more < 20; ++more) {
    const LagLayout layout = lag_layout(once, state_of(37 + more, rows), rows + more);
    INFO(more << " tokens later");
    CHECK(layout.begin == 14);
    CHECK(layout.partitions == (13 + more) / 10);
  }
  // An eviction before there was anything to judge, and none at all.
  CHECK(lag_layout(once, state_of(20, 12), 12).begin == 4);
  CHECK(lag_layout(once, state_of(37, 0), 37).begin == 4);
  // Of another policy, which kept less than the last partition: nothing is counted twice or below the sinks.
  CHECK(lag_layout(once, state_of(400, 6), 6).begin == 4);
}
