// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::TaggedCache;

TEST_CASE("snapkv: the defaults are the paper's window and kernel", "[snapkv][paper]") {
  constexpr SnapKVSelector policy;
  CHECK(policy.params().window == 32);
  CHECK(policy.params().kernel == 5);
  CHECK(policy.params().budget == 1024);
  CHECK(policy.params().rows == Reduction::mean);
  CHECK(policy.params().group == Reduction::mean);
  CHECK(policy.params().pooling == Pooling::average);
  CHECK(policy.params().columns == PoolColumns::candidates);
  CHECK(policy.params().sinks == 0);
  CHECK(policy.removal() == Removal::stable_pack);
}

TEST_CASE("snapkv: the scorer gets every parameter", "[snapkv]") {
  const WindowParams p = SnapKVSelector({.window = 7,
                                         .budget = 90,
                                         .kernel = 3,
                                         .rows = Reduction::sum,
                                         .group = Reduction::max,
                                         .pooling = Pooling::max,
                                         .columns = PoolColumns::all_columns})
                             .scorer();
  CHECK(p.window == 7);
  CHECK(p.kernel == 3);
  CHECK(p.rows == Reduction::sum);
  CHECK(p.group == Reduction::max);
  CHECK(p.pooling == Pooling::max);
  CHECK(p.columns == PoolColumns::all_columns);
}

TEST_CASE("snapkv: the constructor refuses what cannot work, with the numbers", "[snapkv][edge]") {
  using S = SnapKVSelector<>;
  CHECK_THROWS_WITH(S({.kernel = 4}), ContainsSubstring("kernel 4 must be odd"));
  CHECK_THROWS_WITH(S({.kernel = 0}), ContainsSubstring("kernel 0 must be at least 1"));
  CHECK_THROWS_WITH(S({.kernel = -3}), ContainsSubstring("kernel -3 must be at least 1"));
  CHECK_THROWS_WITH(S({.window = 0}), ContainsSubstring("window 0"));
  CHECK_THROWS_WITH(S({.window = 8, .budget = 7}),
                    ContainsSubstring("budget 7") && ContainsSubstring("window 8"));
  CHECK_THROWS_WITH(S({.window = 8, .budget = 9, .sinks = 2}), ContainsSubstring("sinks 2"));
  CHECK_THROWS_WITH(S({.window = 8, .budget = 0}), ContainsSubstring("budget 0"));
  CHECK_THROWS_WITH(S({.sinks = -1}), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(S({.budget = std::int64_t{1} << 31}), ContainsSubstring("2147483648"));
  CHECK_NOTHROW(S({.window = 8, .budget = 10, .sinks = 2}));
  CHECK_NOTHROW(S({.window = 1, .budget = 1, .kernel = 1}));
}

TEST_CASE(
    "snapkv: by other scores, their sinks and recent rows stay; nothing goes within the budget",
    "[snapkv]") {
  using ByNorm = SnapKVSelector<ValueNorm<WindowParams>>;
  STATIC_REQUIRE(ByNorm::name == "snapkv<value_norm<window>>");
  STATIC_REQUIRE(ByNorm().params().recent == 32);
  const ByNorm policy({.budget = 20,
                       .sinks = 2,
                       .recent = 8,
                       .scores = {.scores = {.window = 8}, .epsilon = 0.5F}});
  CHECK(policy.scorer().scores.window == 8);
  CHECK(policy.scorer().epsilon == 0.5F);
  DemandInput in;
  for (const std::int32_t live : {0, 8, 20, 21, 100}) {
    in.live = live;
    const Demand demand = policy.demand(in);
    CHECK(demand.keep == std::min(live, 20));
    CHECK(demand.protection.sinks == 2);
    CHECK(demand.protection.recent == 8);
  }
}

TEST_CASE("snapkv: by other scores, what cannot work is refused, with the numbers",
          "[snapkv][edge]") {
  using ByNorm = SnapKVSelector<ValueNorm<WindowParams>>;
  CHECK_THROWS_WITH(ByNorm({.recent = 31}),
                    ContainsSubstring("kvtrim::SnapKVSelector: recent 31 must be at least 32"));
  CHECK_THROWS_WITH(ByNorm({.budget = 33, .sinks = 2}),
                    ContainsSubstring("budget 33 must be at least sinks 2 + recent 32"));
  CHECK_THROWS_WITH(ByNorm({.sinks = -1}), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(ByNorm({.scores = {.epsilon = -1}}),
                    ContainsSubstring("kvtrim::SnapKVSelector: epsilon -1"));
}

TEST_CASE("snapkv: a budget given at run time below the protected rows keeps exactly those",
          "[snapkv][edge]") {
  const SnapKVSelector policy({.window = 4, .budget = 100, .sinks = 2});
  for (const std::int32_t budget : {0, 1, 5, 6, 7, 12, 40}) {
    for (const std::int32_t tokens : {3, 6, 20}) {
      TaggedCache c({.max_rows = 40});
      REQUIRE(c.append(0, tokens) == Status::ok);
      std::vector<float> scores(40, 1.0F);
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 1, 1, 40);
      obs.budgets = &budget;
      obs.budget_rows = {0, 0, 0};
      const Report report = c.evict(policy, obs);
      INFO("budget " << budget << " tokens " << tokens);
      const std::int32_t guarded = std::min(tokens, 6);
      CHECK(report.status == (budget < guarded ? Status::over_budget : Status::ok));
      CHECK(c.cache.live_rows(SequenceId{0}) == std::min(tokens, std::max(budget, guarded)));
      // Equal scores: the lower positions.
      std::vector<std::int32_t> expected;
      for (std::int32_t p = 0; p < tokens; ++p) {
        if (p < std::max(2, budget - 4) || p >= tokens - 4) { expected.push_back(p); }
      }
      CHECK(c.kept(0) == expected);
      REQUIRE(c.fault() == "");
    }
  }
}

TEST_CASE("snapkv: without queries or scores a plan is refused", "[snapkv][edge]") {
  TaggedCache c({.max_rows = 40});
  REQUIRE(c.append(0, 40) == Status::ok);
  const auto before = c.bytes();
  CHECK(c.evict(SnapKVSelector({.window = 4, .budget = 8})).status == Status::bad_observation);
  CHECK(c.bytes() == before);
}

TEST_CASE("snapkv: keeps the columns that the last queries attend to most, pooled, and the window",
          "[snapkv][paper]") {
  constexpr std::int32_t tokens = 60, heads = 2, group = 3, dim = 4, window = 5, kernel = 3;
  test::Random random(11);
  PagedCache cache({.pages = 40, .page_size = 4, .kv_heads = heads, .key_dim = dim});
  const SequenceId s = *cache.try_create();
  REQUIRE(cache.try_extend(s, tokens) == Status::ok);
  std::vector<float> keys, queries;
  for (std::int32_t i = 0; i < tokens * heads * dim; ++i) { keys.push_back(random.uniform()); }
  for (std::int32_t i = 0; i < heads * group * window * dim; ++i) {
    queries.push_back(4 * random.uniform());
  }
  REQUIRE(cache.write(s, LayerId{0}, {keys.data()}, {keys.data()}) == kvtrim::Status::ok);
  Observation obs;
  obs.queries.data = queries.data();
  obs.queries.query_heads = heads * group;
  obs.queries.rows = window;
  obs.queries.head_stride = window * dim;
  obs.queries.row_stride = dim;

  std::vector<std::vector<std::int32_t>> expected(heads);
  for (std::size_t h = 0; h < heads; ++h) {
    constexpr std::size_t columns = tokens - window;
    std::vector<double> mean(columns, 0.0);
    for (std::size_t g = 0; g < group; ++g) {
      for (std::size_t i = 0; i < window; ++i) {
        std::vector<double> weights;
        double total = 0;
        for (std::size_t t = 0; t < tokens - window + i + 1; ++t) {
          double dot = 0;
          for (std::size_t d = 0; d < dim; ++d) {
            dot += static_cast<double>(queries[((h * group + g) * window + i) * dim + d]) *
                   static_cast<double>(keys[(t * heads + h) * dim + d]);
          }
          weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(dim))));
          total += weights.back();
        }
        for (std::size_t t = 0; t < columns; ++t) { mean[t] += weights[t] / total; }
      }
    }
    std::vector<std::pair<double, std::int32_t>> pooled;
    for (std::size_t t = 0; t < columns; ++t) {
      double sum = mean[t];
      if (t > 0) { sum += mean[t - 1]; }
      if (t + 1 < columns) { sum += mean[t + 1]; }
      pooled.emplace_back(-sum, static_cast<std::int32_t>(t));
    }
    std::sort(pooled.begin(), pooled.end());
    for (std::size_t i = 0; i < 15; ++i) { expected[h].push_back(pooled[i].second); }
    for (std::int32_t t = tokens - window; t < tokens; ++t) { expected[h].push_back(t); }
    std::sort(expected[h].begin(), expected[h].end());
  }

  const SnapKVSelector policy({.window = window, .budget = 20, .kernel = kernel});
  const CacheView view = cache.view();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  REQUIRE(evict(policy, cache, view, obs, workspace).status == Status::ok);
  for (std::int32_t h = 0; h < heads; ++h) {
    std::vector<std::int32_t> kept;
    for (std::int32_t r = 0; r < 20; ++r) {
      kept.push_back(raw(cache.view().position(s, LayerId{0}, HeadId{h}, r)));
    }
    CHECK(kept == expected[static_cast<std::size_t>(h)]);
  }
}
