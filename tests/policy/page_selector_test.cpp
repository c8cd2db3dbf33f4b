// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/page_selector.hpp>

#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/page_accumulate.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/page_worlds.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::ForeignWorld;
using test::Ints;
using test::PagedWorld;
using test::WorldReader;
using test::WorldSetup;

#define KVTRIM_WORLDS PagedWorld, ForeignWorld

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

using ByScores = PageSelector<ExternalParams>;

// Scores of the caller by (sequence, layer, head, token), for rows as they are before any eviction.
class Given {
 public:
  template <class F>
  Given(const WorldSetup& w, F&& f) {
    const std::int32_t most = *std::max_element(w.lengths.begin(), w.lengths.end()) + 8;
    const auto n = static_cast<std::int32_t>(w.lengths.size());
    data_.assign(at(n) * at(w.layers) * at(w.kv_heads) * at(most), 0.0F);
    obs.scores = SequencePlane::dense(data_.data(), w.layers, w.kv_heads, most);
    for (std::int32_t s = 0; s < n; ++s) {
      for (std::int32_t l = 0; l < w.layers; ++l) {
        for (std::int32_t h = 0; h < w.kv_heads; ++h) {
          for (std::int32_t r = 0; r < w.lengths[at(s)]; ++r) {
            obs.scores.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) = f(s, l, h, r);
          }
        }
      }
    }
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;
  Observation obs;

 private:
  std::vector<float> data_;
};

float noise(std::int32_t s, std::int32_t l, std::int32_t h, std::int32_t r) {
  test::Random random(static_cast<std::uint64_t>((s * 16 + l) * 16 + h) * 7919 +
                      static_cast<std::uint64_t>(r));
  return std::abs(random.uniform());
}

// Queries [sequences, layers, heads, window, dim] of the last tokens.
struct Queries {
  Queries(const WorldSetup& w, std::int32_t group, std::int32_t window) {
    const auto n = static_cast<std::int32_t>(w.lengths.size());
    const std::int64_t heads = static_cast<std::int64_t>(w.kv_heads) * group;
    obs.queries.query_heads = w.kv_heads * group;
    obs.queries.rows = window;
    obs.queries.row_stride = w.dim;
    obs.queries.head_stride = window * static_cast<std::int64_t>(w.dim);
    obs.queries.layer_stride = heads * obs.queries.head_stride;
    obs.queries.sequence_stride = w.layers * obs.queries.layer_stride;
    for (std::int32_t s = 0; s < n; ++s) {
      test::Random random(w.seed * 31 + static_cast<std::uint64_t>(s + w.first_name));
      for (std::int64_t i = 0; i < obs.queries.sequence_stride; ++i) {
        data.push_back(3 * random.uniform());
      }
    }
    obs.queries.data = data.data();
  }
  Queries(const Queries&) = delete;
  Queries& operator=(const Queries&) = delete;
  std::vector<float> data;
  Observation obs;
};

// The default rule of one KV head, in double: one number per page.
std::vector<double> page_scores_of(
    const WorldSetup& w, const Observation& obs, std::int32_t s, std::int32_t l, std::int32_t h) {
  const std::int32_t n = w.lengths[at(s)];
  const std::int32_t window = obs.queries.rows;
  const std::int32_t group = obs.queries.query_heads / w.kv_heads;
  std::vector<std::vector<float>> keys;
  for (std::int32_t t = 0; t < n; ++t) { keys.push_back(test::world_key(w, s, l, h, t)); }
  std::vector<double> mean(at(n), 0.0);
  for (std::int32_t g = 0; g < group; ++g) {
    std::vector<double> most(at(n), 0.0);
    for (std::int32_t i = 0; i < window; ++i) {
      const float* const q = obs.queries.row(SequenceId{s}, LayerId{l}, h * group + g, i);
      std::vector<double> weights;
      double total = 0;
      for (std::int32_t t = 0; t <= n - window + i; ++t) {
        double dot = 0;
        for (std::int32_t d = 0; d < w.dim; ++d) {
          dot += static_cast<double>(q[d]) * static_cast<double>(keys[at(t)][at(d)]);
        }
        weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(w.dim))));
        total += weights.back();
      }
      for (std::size_t t = 0; t < weights.size(); ++t) {
        most[t] = std::max(most[t], weights[t] / total);
      }
    }
    for (std::int32_t t = 0; t < n; ++t) { mean[at(t)] += most[at(t)] / group; }
  }
  std::vector<double> pooled(at(n), 0.0);
  double sum = 0;
  for (std::int32_t t = 0; t < n - window; ++t) {
    for (std::int32_t j = std::max(0, t - 2); j <= std::min(n - 1, t + 2); ++j) {
      pooled[at(t)] += mean[at(j)] / 5;
    }
    sum += pooled[at(t)];
  }
  std::vector<double> pages(at(pages_for(n, w.page_size)), 0.0);
  for (std::int32_t t = 0; t < n - window; ++t) {
    double& page = pages[at(t / w.page_size)];
    page = std::max(page, pooled[at(t)] / sum);
  }
  return pages;
}

// Tokens that stay: the first page, pages of the window, a partly filled last one, and the best while whole ones fit.
Ints kept_of(const WorldSetup& w,
             std::int32_t s,
             const std::vector<double>& pages,
             std::int32_t budget,
             std::int32_t window) {
  const std::int32_t n = w.lengths[at(s)];
  std::vector<std::pair<double, std::size_t>> order;
  std::vector<bool> stays(pages.size());
  std::int32_t rows = 0;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const std::int32_t end = (static_cast<std::int32_t>(p) + 1) * w.page_size;
    stays[p] = p == 0 || end > n - window;
    if (stays[p]) {
      rows += std::min(end, n) - static_cast<std::int32_t>(p) * w.page_size;
    } else {
      order.emplace_back(-pages[p], p);
    }
  }
  std::sort(order.begin(), order.end());
  const std::size_t fits = std::min(order.size(), at(std::max(0, budget - rows) / w.page_size));
  if (fits > 0 && fits < order.size()) {  // otherwise float rounding may decide
    REQUIRE(order[fits].first - order[fits - 1].first > -1e-5 * order[fits - 1].first);
  }
  for (std::size_t i = 0; i < fits; ++i) { stays[order[i].second] = true; }
  Ints kept;
  for (std::int32_t t = 0; t < n; ++t) {
    if (stays[at(t / w.page_size)]) { kept.push_back(t); }
  }
  return kept;
}

// Which set of pages a head belongs to.
std::int32_t set_of(const WorldSetup& w, PageUnit unit, std::int32_t l, std::int32_t h) {
  if (unit == PageUnit::per_group || w.scope == TableScope::group) { return 0; }
  if (unit == PageUnit::per_layer || w.scope == TableScope::layer) { return l; }
  return l * w.kv_heads + h;
}

template <class World>
std::vector<Ints> all_tokens(World& world, std::int32_t s) {
  std::vector<Ints> out;
  for (std::int32_t l = 0; l < world.setup.layers; ++l) {
    for (std::int32_t h = 0; h < world.setup.kv_heads; ++h) {
      out.push_back(WorldReader::tokens(world.view(), s, l, h));
    }
  }
  return out;
}

template <class World>
std::vector<Ints> all_pages(World& world) {
  std::vector<Ints> out;
  const CacheView v = world.view();
  for (std::int32_t s = 0; s < v.sequences; ++s) {
    for (std::int32_t t = 0; t < v.tables_per_sequence(); ++t) {
      out.push_back(WorldReader::pages(v, s, t));
    }
  }
  return out;
}

// Whether pages are counted by exactly the tables that name them.
template <class World>
void check_counts(World& world) {
  const auto tables = all_pages(world);
  std::vector<std::int32_t> named(at(world.view().pages), 0);
  for (const Ints& t : tables) {
    for (const std::int32_t p : t) {
      if (p >= 0) { ++named[at(p)]; }
    }
  }
  std::int32_t used = 0;
  for (std::size_t p = 0; p < named.size(); ++p) {
    if (named[p] != world.ref_count(static_cast<std::int32_t>(p))) {
      FAIL_CHECK("page " << p << " is in " << named[p] << " tables, its count is "
                         << world.ref_count(static_cast<std::int32_t>(p)));
      return;
    }
    used += named[p] > 0 ? 1 : 0;
  }
  CHECK(world.in_use() == used);
}

Ints range(std::int32_t first, std::int32_t last) {
  Ints out(at(last - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}
Ints operator+(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

// --- the value ---------------------------------------------------------------------------

TEST_CASE("page_selector: the defaults are the measured ones", "[page]") {
  constexpr PageSelector<> policy;
  const auto& p = policy.params();
  CHECK(p.scores.window == 16);
  CHECK(p.scores.kernel == 9);
  CHECK(p.scores.rows == Reduction::max);
  CHECK(p.scores.group == Reduction::mean);
  CHECK(p.scores.pooling == Pooling::average);
  CHECK(p.scores.columns == PoolColumns::all_columns);
  CHECK(p.pages.norm == HeadNorm::sum);
  CHECK(p.pages.reduction == PageReduction::max);
  CHECK(p.pages.heads == Reduction::max);
  CHECK(p.unit == PageUnit::per_table);
  CHECK(p.budget == 1024);
  CHECK(p.budget_pages == 0);
  CHECK(p.sinks == 1);
  CHECK(p.window == 16);
  CHECK(policy.removal() == Removal::drop_pages);
  CHECK(policy.unit() == PageUnit::per_table);
  CHECK(policy.scorer().window == 16);
  STATIC_REQUIRE(PagePolicy<PageSelector<>>);
  STATIC_REQUIRE(PagePolicy<PageSelector<KeyDiffParams>>);
  STATIC_REQUIRE(PagePolicy<PageSelector<AccumulateParams>>);
  STATIC_REQUIRE(PagePolicy<ByScores>);
}

TEST_CASE("page_selector: agnostic_pages is a configuration of 4 sinks, 16 rows and bare scores",
          "[page]") {
  constexpr auto p = agnostic_pages(300);
  STATIC_REQUIRE(p.budget == 300);
  STATIC_REQUIRE(p.sinks == 4);
  STATIC_REQUIRE(p.window == 16);
  STATIC_REQUIRE(p.pages.norm == HeadNorm::none);
  STATIC_REQUIRE(p.pages.reduction == PageReduction::max);
  CHECK_NOTHROW(ByScores(p));
}

TEST_CASE("page_selector: the constructor refuses what cannot work, with the numbers",
          "[page][edge]") {
  using S = PageSelector<>;
  const auto refused = [](auto&& change) {
    S::Params p;
    change(p);
    return [p] { static_cast<void>(S(p)); };
  };
  CHECK_THROWS_WITH(refused([](auto& p) { p.sinks = -1; })(), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.window = -2; })(), ContainsSubstring("window -2"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget_pages = -3; })(),
                    ContainsSubstring("budget_pages -3"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget = std::int64_t{1} << 31; })(),
                    ContainsSubstring("2147483648"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget_pages = std::int64_t{1} << 31; })(),
                    ContainsSubstring("2147483648"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.sinks = std::int64_t{1} << 40; })(),
                    ContainsSubstring("1099511627776"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget = 16; })(),
                    ContainsSubstring("budget 16") && ContainsSubstring("sinks 1") &&
                        ContainsSubstring("window 16"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget = 0, p.sinks = 0, p.window = 0; })(),
                    ContainsSubstring("budget 0"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.budget = -7; })(), ContainsSubstring("budget -7"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.pages.top_m = 0; })(), ContainsSubstring("top_m 0"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.scores.kernel = 4; })(), ContainsSubstring("kernel 4"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.scores.kernel = -1; })(),
                    ContainsSubstring("kernel -1"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.scores.window = 0; })(),
                    ContainsSubstring("scores.window 0"));
  CHECK_THROWS_WITH(refused([](auto& p) { p.pages.sums = Sums::exact; })(),
                    ContainsSubstring("sums of pages are exact, but those of the scores window"));
  const auto above_one = [](auto& p) {
    p.scores.sums = Sums::exact;
    p.scores.rows = Reduction::sum;
    p.pages = {.norm = HeadNorm::none, .heads = Reduction::sum};
  };
  CHECK_THROWS_WITH(refused(above_one)(), ContainsSubstring("window may be above 1"));
  CHECK_NOTHROW(refused([&](auto& p) { above_one(p), p.pages.norm = HeadNorm::sum; })());
  CHECK_NOTHROW(refused([&](auto& p) { above_one(p), p.pages.heads = Reduction::max; })());
  CHECK_NOTHROW(refused([](auto& p) { p.budget = 17; })());
  CHECK_NOTHROW(refused([](auto& p) { p.budget = 1, p.sinks = 0, p.window = 0; })());
  CHECK_NOTHROW(refused([](auto& p) { p.budget = 0, p.budget_pages = 1; })());
}

// --- what stays --------------------------------------------------------------------------

TEMPLATE_TEST_CASE("page_selector: keeps the pages that a plain transcription of the rule keeps",
                   "[page][property]",
                   KVTRIM_WORLDS) {
  std::uint64_t seed = 0;
  for (const std::int32_t group : {1, 3, 8}) {
    for (const std::int32_t page_size : {4, 16}) {
      for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
        if (!TestType::supports(scope)) { continue; }
        for (const PageUnit unit :
             {PageUnit::per_table, PageUnit::per_layer, PageUnit::per_group}) {
          if (scope == TableScope::group && unit == PageUnit::per_layer) { continue; }
          constexpr std::int32_t window = 6;
          ++seed;
          WorldSetup w{.scope = scope, .page_size = page_size, .layers = 3, .seed = seed};
          w.lengths = {93, 128, 8, 60};  // partly filled, full, short, fitting
          const Queries q(w, group, window);
          PageSelector<>::Params p;
          p.scores.window = window;
          p.scores.kernel = 5;
          p.scores.sums = group == 3 ? Sums::exact : Sums::floating;
          p.pages.heads = Reduction::sum;
          p.unit = unit;
          p.budget = 60;
          p.window = window;
          TestType world(w);
          const auto before = world.memory();
          const auto tables = all_pages(world);
          const Report report = world.evict(PageSelector<>(p), q.obs);
          INFO("group " << group << ", page size " << page_size << ", scope "
                        << static_cast<int>(scope) << ", unit " << static_cast<int>(unit));
          REQUIRE(report.status == Status::ok);
          CHECK(report.bytes_moved == 0);
          CHECK(world.memory_again() == before);

          std::int64_t kept_rows = 0;
          for (std::int32_t s = 0; s < 4; ++s) {
            std::vector<std::vector<double>> sums(at(w.layers * w.kv_heads));
            for (std::int32_t l = 0; l < w.layers; ++l) {
              for (std::int32_t h = 0; h < w.kv_heads; ++h) {
                const auto pages = page_scores_of(w, q.obs, s, l, h);
                auto& sum = sums[at(set_of(w, unit, l, h))];
                sum.resize(pages.size(), 0.0);
                for (std::size_t i = 0; i < pages.size(); ++i) { sum[i] += pages[i]; }
              }
            }
            for (std::int32_t l = 0; l < w.layers; ++l) {
              for (std::int32_t h = 0; h < w.kv_heads; ++h) {
                const Ints expected =
                    w.lengths[at(s)] <= 60
                        ? range(0, w.lengths[at(s)])
                        : kept_of(w, s, sums[at(set_of(w, unit, l, h))], 60, window);
                kept_rows += static_cast<std::int64_t>(expected.size());
                INFO("sequence " << s << ", layer " << l << ", head " << h);
                CHECK(WorldReader::tokens(world.view(), s, l, h) == expected);
              }
            }
          }
          CHECK(report.kept_rows == kept_rows);
          CHECK(report.evicted_rows == (93 + 128 + 8 + 60) * w.layers * w.kv_heads - kept_rows);
          // Tables closed up: what is left is in the old order.
          const auto after = all_pages(world);
          std::int32_t gone = 0;
          for (std::size_t t = 0; t < tables.size(); ++t) {
            gone += static_cast<std::int32_t>(tables[t].size() - after[t].size());
            auto next = tables[t].begin();
            for (const std::int32_t page : after[t]) {
              next = std::find(next, tables[t].end(), page);
              REQUIRE(next != tables[t].end());
            }
          }
          CHECK(report.dropped_pages == gone);
          CHECK(report.released_pages == gone);
          check_counts(world);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("page_selector: any token scorer ranks pages, negative scores too",
                   "[page]",
                   KVTRIM_WORLDS) {
  // KeyDiff's scores are cosines: a page of outlying keys stays among pages of alike ones.
  WorldSetup w{.layers = 1, .kv_heads = 1, .lengths = {64}};
  TestType world(w);
  const CacheView view = world.view();
  for (std::int32_t t = 0; t < 64; ++t) {
    std::vector<float> key(8, 0.05F * noise(0, 0, 0, t));
    key[t == 37 ? 1 : 0] = 2;
    std::memcpy(view.key(SequenceId{0}, LayerId{0}, HeadId{0}, t), key.data(), 32);
  }
  PageSelector<KeyDiffParams>::Params p;
  p.budget = 12;
  p.window = 4;
  const Report report = world.evict(PageSelector<KeyDiffParams>(p));
  CHECK(report.status == Status::ok);
  CHECK(WorldReader::tokens(world.view(), 0, 0, 0) == range(0, 4) + range(36, 40) + range(60, 64));
}

TEST_CASE("page_selector: accumulated attention ranks pages", "[page]") {
  PagedCache cache({.pages = 16, .page_size = 4, .kv_heads = 2, .key_dim = 2, .scores = true});
  const SequenceId s = *cache.try_create();
  REQUIRE(cache.try_extend(s, 40) == Status::ok);
  REQUIRE(cache.written(s, {}) == Status::ok);
  for (std::int32_t h = 0; h < 2; ++h) {
    std::vector<float> probabilities(40, 0.01F);
    probabilities[at(h == 0 ? 22 : 13)] = 0.5F;
    accumulate_probabilities({}, {cache.view(), s, {}, HeadId{h}}, {probabilities.data(), 1, 0});
  }
  PageSelector<AccumulateParams>::Params p;
  p.budget = 16;
  p.window = 4;
  const PageSelector<AccumulateParams> policy(p);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.view())));
  REQUIRE(evict(policy, cache, cache.view(), {}, workspace).status == Status::ok);
  Ints kept;
  for (std::int32_t r = 0; r < 16; ++r) {
    kept.push_back(raw(cache.view().position(s, {}, {}, r)));
  }
  CHECK(kept == range(0, 4) + range(12, 16) + range(20, 24) + range(36, 40));
}

TEMPLATE_TEST_CASE("page_selector: equal pages keep the lower one, all NaN keep the lowest",
                   "[page][ties][nan]",
                   KVTRIM_WORLDS) {
  WorldSetup w{.lengths = {40}};
  for (const float score : {1.0F, 0.0F, -3.0F, nan_f, -inf_f, inf_f}) {
    const Given given(w, [&](auto...) { return score; });
    TestType world(w);
    ByScores::Params p;
    p.budget = 20;
    p.window = 4;
    const Report report = world.evict(ByScores(p), given.obs);
    REQUIRE(report.status == Status::ok);
    INFO("score " << score);
    for (const Ints& tokens : all_tokens(world, 0)) {
      CHECK(tokens == range(0, 16) + range(36, 40));
    }
    CHECK(report.nan_count == (std::isnan(score) ? 4 * (40 - 1 - 4) : 0));
  }
}

TEMPLATE_TEST_CASE("page_selector: NaN are counted among the candidates and rank lowest",
                   "[page][nan]",
                   KVTRIM_WORLDS) {
  for (const float sign : {1.0F, -1.0F}) {
    for (const float bad : {nan_f, -inf_f}) {
      WorldSetup w{.scope = TableScope::layer, .lengths = {48, 48}};
      // Page 3 has nothing but NaN; page 5 one NaN and the best score; page 0 and the window have NaN too.
      const Given given(w, [&](auto s, auto l, auto h, std::int32_t r) {
        if (s == 1) { return sign * noise(0, l, h, r); }
        if (r / 4 == 3 || r == 21 || r == 0 || r == 47) { return bad; }
        return sign * (r == 20 ? (sign > 0 ? 5.0F : 0.0F) : 0.25F + noise(s, l, h, r));
      });
      TestType world(w);
      TestType alone(w);
      ByScores::Params p;
      p.budget = 44;
      p.window = 4;
      const Report report = world.evict(ByScores(p), given.obs);
      INFO("sign " << sign << ", bad " << bad);
      CHECK(report.status == Status::ok);
      CHECK(report.nan_count == (std::isnan(bad) ? 4 * 5 : 0));
      for (const Ints& tokens : all_tokens(world, 0)) {
        CHECK(tokens == range(0, 12) + range(16, 48));
      }
      p.budget = 12;
      CHECK(alone.evict(ByScores(p), given.obs).status == Status::ok);
      for (const Ints& tokens : all_tokens(alone, 0)) {
        CHECK(tokens == range(0, 4) + range(20, 24) + range(44, 48));
      }
    }
  }
}

TEMPLATE_TEST_CASE("page_selector: a head without a vote leaves the choice to the others",
                   "[page][nan]",
                   KVTRIM_WORLDS) {
  WorldSetup w{.lengths = {64}};
  ByScores::Params p;
  p.budget = 24;
  p.window = 4;
  const auto score = [](std::int32_t, std::int32_t l, std::int32_t h, std::int32_t r) {
    return l == 1 && h == 0 ? 0.0F : noise(0, l, h, r);
  };
  const Given silent(w, score);
  const Given spoilt(w, [&](auto s, auto l, auto h, auto r) {
    return l == 1 && h == 0 ? nan_f : score(s, l, h, r);
  });
  TestType a(w);
  TestType b(w);
  CHECK(a.evict(ByScores(p), silent.obs).status == Status::ok);
  CHECK(b.evict(ByScores(p), spoilt.obs).status == Status::ok);
  CHECK(all_tokens(a, 0) == all_tokens(b, 0));
}

// --- how much stays ----------------------------------------------------------------------

TEMPLATE_TEST_CASE(
    "page_selector: a budget in rows is never exceeded, and missed by less than a page",
    "[page][property][edge]",
    KVTRIM_WORLDS) {
  for (const std::int32_t page_size : {1, 3, 4, 16}) {
    for (std::int32_t n = 0; n <= 48; n += page_size == 16 ? 1 : 3) {
      for (const std::int32_t budget : {6, 7, 8, 13, 16, 20, 32, 40}) {
        WorldSetup w{.page_size = page_size, .layers = 1, .kv_heads = 1, .lengths = {n}};
        const Given given(w, noise);
        TestType world(w);
        ByScores::Params p;
        p.budget = budget;
        p.window = 5;
        const Report report = world.evict(ByScores(p), given.obs);
        const Ints kept = WorldReader::tokens(world.view(), 0, 0, 0);
        const auto rows = static_cast<std::int32_t>(kept.size());
        // Pages that may not go, by counting.
        std::int32_t fixed = 0;
        for (std::int32_t first = 0; first < n; first += page_size) {
          const std::int32_t end = std::min(n, first + page_size);
          if (first == 0 || end > n - 5 || end - first < page_size) { fixed += end - first; }
        }
        INFO("page size " << page_size << ", tokens " << n << ", budget " << budget);
        if (n <= budget) {
          CHECK(report.status == Status::ok);
          CHECK(rows == n);
        } else if (fixed > budget) {
          CHECK(report.status == Status::over_budget);
          CHECK(rows == fixed);
        } else {
          CHECK(report.status == Status::ok);
          CHECK(rows == std::min(fixed + (budget - fixed) / page_size * page_size, n));
          CHECK(rows <= budget);
          CHECK(rows > budget - page_size);
        }
        CHECK(report.kept_rows == rows);
        CHECK(report.evicted_rows == n - rows);
        CHECK(report.bytes_moved == 0);
      }
    }
  }
}

TEMPLATE_TEST_CASE("page_selector: a budget in pages is met exactly",
                   "[page][property][edge]",
                   KVTRIM_WORLDS) {
  for (const std::int32_t page_size : {1, 3, 4, 16}) {
    for (std::int32_t n = 1; n <= 60; n += 2) {
      for (const std::int32_t budget : {1, 2, 3, 5}) {
        WorldSetup w{.page_size = page_size, .layers = 1, .kv_heads = 1, .lengths = {n}};
        const Given given(w, noise);
        TestType world(w);
        ByScores::Params p;
        p.budget = 0;
        p.budget_pages = budget;
        p.sinks = 0;
        p.window = 1;
        const Report report = world.evict(ByScores(p), given.obs);
        INFO("page size " << page_size << ", tokens " << n << ", budget " << budget);
        CHECK(report.status == Status::ok);
        CHECK(WorldReader::pages(world.view(), 0, 0).size() ==
              at(std::min(budget, pages_for(n, page_size))));
      }
    }
  }
}

TEST_CASE("page_selector: left padding counts neither as rows nor as pages that may go",
          "[page][edge][property]") {
  for (const std::int32_t padding : {0, 1, 2, 3, 4, 5, 7, 8, 13}) {
    for (std::int32_t n = 1; n <= 40; ++n) {
      const WorldSetup w{.page_size = 4, .layers = 1, .kv_heads = 1, .lengths = {n}};
      const Given given(w, noise);
      ByScores::Params p;
      p.budget = 0;
      p.budget_pages = 3;
      p.sinks = 0;
      p.window = 0;
      ForeignWorld world(w, {padding});
      INFO("padding " << padding << ", tokens " << n);
      const Report report = world.evict(ByScores(p), given.obs);
      CHECK(report.status == Status::ok);
      const Ints pages = WorldReader::pages(world.view(), 0, 0);
      // Pages of padding alone are up to the engine: null entries in front.
      const auto data =
          std::count_if(pages.begin(), pages.end(), [](std::int32_t p1) { return p1 >= 0; });
      CHECK(data <= 3);
      const std::int32_t had = pages_for(n + padding, 4) - padding / 4;
      if (had <= 3) { CHECK(data == had); }
      CHECK(report.kept_rows ==
            static_cast<std::int64_t>(WorldReader::tokens(world.view(), 0, 0, 0).size()));
      for (const std::int32_t t : WorldReader::tokens(world.view(), 0, 0, 0)) { CHECK(t >= 0); }
      check_counts(world);
    }
  }
}

TEMPLATE_TEST_CASE(
    "page_selector: budgets given at run time, one for each sequence, replace its own",
    "[page]",
    KVTRIM_WORLDS) {
  WorldSetup w{.scope = TableScope::layer, .lengths = {60, 60, 60, 60}};
  const Given given(w, noise);
  const Ints budgets{100, 24, 9, 0};
  Observation obs = given.obs;
  obs.budgets = budgets.data();
  ByScores::Params p;
  p.window = 5;
  TestType world(w);
  const Report report = world.evict(ByScores(p), obs);
  CHECK(report.status == Status::over_budget);  // sequences 2 and 3 keep what is protected
  const Ints rows{60, 24, 12, 12};
  for (std::int32_t s = 0; s < 4; ++s) {
    for (const Ints& tokens : all_tokens(world, s)) {
      CHECK(static_cast<std::int32_t>(tokens.size()) == rows[at(s)]);
      CHECK(tokens.back() == 59);
      CHECK(tokens.front() == 0);
    }
  }
  check_counts(world);
}

TEMPLATE_TEST_CASE("page_selector: one page, two pages, and protected pages over budget",
                   "[page][edge]",
                   KVTRIM_WORLDS) {
  ByScores::Params p;
  p.budget = 4;
  p.sinks = 1;
  p.window = 3;
  for (const std::int32_t n : {1, 3, 4}) {  // one page: within the budget
    WorldSetup w{.lengths = {n}};
    const Given given(w, noise);
    TestType world(w);
    const Report report = world.evict(ByScores(p), given.obs);
    CHECK(report.status == Status::ok);
    CHECK(report.evicted_rows == 0);
  }
  for (const std::int32_t n : {5, 7, 8}) {  // two pages, both protected
    WorldSetup w{.lengths = {n}};
    const Given given(w, noise);
    TestType world(w);
    const auto tables = all_pages(world);
    const Report report = world.evict(ByScores(p), given.obs);
    CHECK(report.status == Status::over_budget);
    CHECK(report.evicted_rows == 0);
    CHECK(all_pages(world) == tables);
  }
  WorldSetup w{.lengths = {8}};  // two pages, no protection: the better one
  const Given given(w, [](auto, auto, auto, std::int32_t r) { return r == 6 ? 1.0F : 0.5F; });
  p.sinks = p.window = 0;
  TestType world(w);
  CHECK(world.evict(ByScores(p), given.obs).status == Status::ok);
  CHECK(WorldReader::tokens(world.view(), 0, 1, 1) == range(4, 8));
}

TEMPLATE_TEST_CASE("page_selector: a window that ends on a page border protects no further page",
                   "[page][edge]",
                   KVTRIM_WORLDS) {
  for (const std::int32_t window : {7, 8, 9}) {
    WorldSetup w{.lengths = {40}};
    const Given given(w,
                      [](auto, auto, auto, std::int32_t r) {  // falls: the window's pages are worst
                        return static_cast<float>(40 - r);
                      });
    ByScores::Params p;
    p.budget = 16;
    p.sinks = 0;
    p.window = window;
    TestType world(w);
    REQUIRE(world.evict(ByScores(p), given.obs).status == Status::ok);
    INFO("window " << window);
    CHECK(WorldReader::tokens(world.view(), 0, 0, 0) ==
          (window <= 8 ? range(0, 8) + range(32, 40) : range(0, 4) + range(28, 40)));
  }
}

// --- who shares a set --------------------------------------------------------------------

TEMPLATE_TEST_CASE("page_selector: tables of all layers of a group drop the same pages",
                   "[page][property]",
                   KVTRIM_WORLDS) {
  for (const TableScope scope : {TableScope::layer, TableScope::head}) {
    if (!TestType::supports(scope)) { continue; }
    for (const bool ready : {false, true}) {
      WorldSetup w{.scope = scope, .layers = 4, .lengths = {70, 33, 0, 64}};
      const Given given(w, noise);
      ByScores::Params p;
      p.unit = PageUnit::per_group;
      p.budget = 28;
      p.window = 5;
      const ByScores policy(p);
      TestType world(w);
      const auto before = all_pages(world);
      Observation obs = given.obs;
      std::vector<float> sums(4 * 32);
      if (ready) {
        obs = {};
        obs.page_scores = {sums.data(), 32, 32};
        for (std::int32_t l = 0; l < 4; ++l) {
          std::vector<std::byte> scratch(
              page_accumulate_bytes(policy, plan_shape(world.view(), given.obs)));
          REQUIRE(accumulate_page_scores(
                      policy, world.view(), LayerId{l}, given.obs, obs.page_scores, scratch) ==
                  Status::ok);
        }
      }
      REQUIRE(world.evict(policy, obs).status == Status::ok);
      const auto after = all_pages(world);
      const std::size_t tables = after.size() / 4;
      for (std::size_t s = 0; s < 4; ++s) {
        Ints entries;  // of the first table that are left
        for (std::size_t t = 0; t < tables; ++t) {
          const Ints& old = before[s * tables + t];
          Ints left;
          for (const std::int32_t page : after[s * tables + t]) {
            left.push_back(
                static_cast<std::int32_t>(std::find(old.begin(), old.end(), page) - old.begin()));
          }
          if (t == 0) { entries = left; }
          CHECK(left == entries);
        }
      }
      for (std::int32_t s = 0; s < 4; ++s) {
        const auto tokens = all_tokens(world, s);
        for (const Ints& head : tokens) { CHECK(head == tokens.front()); }
        CHECK(tokens.front().size() <= 28);
      }
      // Not because all layers score alike.
      p.unit = PageUnit::per_table;
      TestType apart(w);
      REQUIRE(apart.evict(ByScores(p), given.obs).status == Status::ok);
      CHECK(all_tokens(apart, 0).front() != all_tokens(apart, 0).back());
      check_counts(world);
    }
  }
}

TEMPLATE_TEST_CASE("page_selector: a unit finer than the tables is refused, and nothing changes",
                   "[page][edge]",
                   KVTRIM_WORLDS) {
  WorldSetup w{.scope = TableScope::group, .lengths = {40}};
  const Given given(w, noise);
  ByScores::Params p;
  p.unit = PageUnit::per_layer;
  p.budget = 20;
  p.window = 5;
  TestType world(w);
  const auto tables = all_pages(world);
  CHECK(world.evict(ByScores(p), given.obs).status == Status::unequal_budget);
  CHECK(all_pages(world) == tables);
  CHECK(all_tokens(world, 0).front() == range(0, 40));
  // One layer alone is its own group.
  w.layers = 1;
  const Given one(w, noise);
  TestType single(w);
  CHECK(single.evict(ByScores(p), one.obs).status == Status::ok);
}

TEMPLATE_TEST_CASE("page_selector: tables of one set that would keep different counts are refused",
                   "[page][edge]",
                   KVTRIM_WORLDS) {
  WorldSetup w{.scope = TableScope::layer, .lengths = {40}};
  const Given given(w, noise);
  const Ints budgets{24, 16};
  Observation obs = given.obs;
  obs.budgets = budgets.data();
  obs.budget_rows = {0, 1, 0};
  ByScores::Params p;
  p.unit = PageUnit::per_group;
  p.window = 5;
  TestType world(w);
  const auto tables = all_pages(world);
  CHECK(world.evict(ByScores(p), obs).status == Status::unequal_budget);
  CHECK(all_pages(world) == tables);
  p.unit = PageUnit::per_layer;  // by themselves they may
  CHECK(world.evict(ByScores(p), obs).status == Status::ok);
  CHECK(WorldReader::tokens(world.view(), 0, 0, 0).size() == 24);
  CHECK(WorldReader::tokens(world.view(), 0, 1, 0).size() == 16);
}

TEMPLATE_TEST_CASE("page_selector: ways of removal other than by pages are refused",
                   "[page][edge]",
                   KVTRIM_WORLDS) {
  WorldSetup w{.lengths = {40}};
  const Given given(w, noise);
  ByScores::Params p;
  p.budget = 20;
  p.window = 5;
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot}) {
    TestType world(w);
    PlanOptions options;
    options.removal = way;
    CHECK(world.evict(ByScores(p), given.obs, options).status == Status::bad_options);
    options.removal = Removal::drop_pages;
    CHECK(world.evict(ByScores(p), given.obs, options).status == Status::ok);
  }
  TestType world(w);
  PageSelector<>::Params queries;
  queries.budget = 40 - 1;
  queries.window = 5;
  CHECK(world.evict(PageSelector<>(queries)).status == Status::bad_observation);  // none given
}

TEST_CASE("page_selector: rows out of order are refused", "[page][edge]") {
  WorldSetup w{.lengths = {40}};
  const Given given(w, noise);
  ByScores::Params p;
  p.budget = 20;
  p.window = 5;
  for (const bool hole : {false, true}) {
    PagedWorld world(w);
    SequenceState& state = world.view().states[0];
    if (hole) {
      state.append_row = 7;
      state.live_rows = 39;
    } else {
      state.ordered = false;
    }
    CHECK(world.evict(ByScores(p), given.obs).status == Status::rows_unordered);
  }
}

// --- shared pages, positions -------------------------------------------------------------

TEMPLATE_TEST_CASE(
    "page_selector: a shared page leaves this table alone, and is free when the last "
    "owner drops it",
    "[page][shared]",
    KVTRIM_WORLDS) {
  for (const TableScope scope : {TableScope::group, TableScope::layer}) {
    for (const SharedPages shared : {SharedPages::leave, SharedPages::copy}) {
      WorldSetup w{.scope = scope, .lengths = {44, 40}, .prefix = 32};
      // Pages 2 and 3, shared, and page 9, not shared, are the worst.
      const Given given(w, [](std::int32_t, auto, auto, std::int32_t r) {
        return r / 4 == 2 || r / 4 == 3 || r / 4 == 9 ? 0.0F : 1.0F + static_cast<float>(r % 4);
      });
      TestType world(w);
      const auto before = world.memory();
      const auto tables = all_pages(world);
      const Ints others = tables[tables.size() / 2];
      const std::int32_t in_use = world.in_use();
      const auto n = static_cast<std::int32_t>(tables.size() / 2);
      const std::int32_t two = tables[0][2];
      const std::int32_t nine = tables[0][9];
      REQUIRE(world.ref_count(two) == 2);
      REQUIRE(world.ref_count(nine) == 1);

      Observation obs = given.obs;
      Ints budgets{32, 100};
      obs.budgets = budgets.data();
      ByScores::Params p;
      p.window = 4;
      PlanOptions options;
      options.shared = shared;
      const Report report = world.evict(ByScores(p), obs, options);
      CHECK(report.status == Status::ok);
      CHECK(report.dropped_pages == 3 * n);
      CHECK(report.released_pages == n);
      CHECK(world.ref_count(two) == 1);
      CHECK(world.ref_count(nine) == 0);
      CHECK(world.in_use() == in_use - n);
      for (const Ints& tokens : all_tokens(world, 0)) {
        CHECK(tokens == range(0, 8) + range(16, 36) + range(40, 44));
      }
      for (const Ints& tokens : all_tokens(world, 1)) { CHECK(tokens == range(0, 40)); }
      CHECK(all_pages(world)[tables.size() / 2] == others);
      CHECK(world.memory_again() == before);
      check_counts(world);

      // The other sequence drops them too: now they are free. Its scores are those of its own rows.
      budgets = {100, 32};
      const Report again = world.evict(ByScores(p), obs, options);
      CHECK(again.status == Status::ok);
      CHECK(again.dropped_pages == 2 * n);
      CHECK(again.released_pages == 2 * n);
      CHECK(world.ref_count(two) == 0);
      for (const Ints& tokens : all_tokens(world, 1)) {
        CHECK(tokens == range(0, 8) + range(16, 40));
      }
      CHECK(world.memory_again() == before);
      check_counts(world);
    }
  }
}

TEST_CASE("page_selector: positions are kept, and the next token goes on counting", "[page]") {
  WorldSetup w{.lengths = {41}};
  const Given given(w, noise);
  PagedWorld world(w);
  ByScores::Params p;
  p.budget = 20;
  p.window = 4;
  REQUIRE(world.evict(ByScores(p), given.obs).status == Status::ok);
  CHECK(raw(world.cache.next_position(SequenceId{0})) == 41);
  CHECK(world.cache.next_rope_position(SequenceId{0}) == 41);
  const CacheView v = world.view();
  const Ints tokens = WorldReader::tokens(v, 0, 1, 1);
  CHECK(tokens.size() == 17);
  for (std::int32_t r = 0; r < 17; ++r) {
    CHECK(v.rope_position(SequenceId{0}, LayerId{1}, HeadId{1}, r) == tokens[at(r)]);
  }
  // The partly filled page takes the next rows.
  world.append(0, 5);
  CHECK(WorldReader::tokens(world.view(), 0, 0, 1) == tokens + range(41, 46));
  check_counts(world);
}

TEST_CASE(
    "page_selector: in_cache renumbers own pages, and is refused where a shared one would turn",
    "[page][shared]") {
  const auto frequencies = rope_frequencies(10'000.0, 8);
  for (const bool shared : {false, true}) {
    WorldSetup w{.lengths = {44, 40}, .prefix = shared ? 32 : 0};
    const Given given(w, [](auto, auto, auto, std::int32_t r) {
      return r / 4 == 2 || r / 4 == 3 || r / 4 == 9 ? 0.0F : 1.0F;
    });
    PagedWorld world(w);
    const auto before = world.memory();
    const auto tables = all_pages(world);
    const Ints budgets{32, 100};
    Observation obs = given.obs;
    obs.budgets = budgets.data();
    ByScores::Params p;
    p.window = 4;
    const Rerotator rerotator(
        world.view(),
        Rope{.inverse_frequencies = frequencies, .dim = 8, .same_for_all_layers = true},
        PositionMode::in_cache);
    PlanOptions options;
    options.rerotator = &rerotator;
    const Report report = world.evict(ByScores(p), obs, options);
    if (shared) {  // rows 16..31 would be turned, in pages that are not ours
      CHECK(report.status == Status::shared_page);
      CHECK(world.memory_again() == before);
      CHECK(all_pages(world) == tables);
      continue;
    }
    CHECK(report.status == Status::ok);
    CHECK(report.bytes_moved == 0);
    const CacheView v = world.view();
    const Ints tokens = WorldReader::tokens(v, 0, 1, 0);
    REQUIRE(tokens == range(0, 8) + range(16, 36) + range(40, 44));
    CHECK(world.cache.next_rope_position(SequenceId{0}) == 32);
    double worst = 0;
    for (std::int32_t r = 0; r < 32; ++r) {
      CHECK(v.rope_position(SequenceId{0}, LayerId{1}, HeadId{0}, r) == r);
      const auto key = test::world_key(w, 0, 1, 0, tokens[at(r)]);
      float got[8];
      std::memcpy(got, v.key(SequenceId{0}, LayerId{1}, HeadId{0}, r), sizeof got);
      for (std::size_t j = 0; j < 4; ++j) {
        const double angle = (r - tokens[at(r)]) * std::pow(10'000.0, -static_cast<double>(j) / 4);
        const auto x = static_cast<double>(key[j]);
        const auto y = static_cast<double>(key[j + 4]);
        worst = std::max(
            worst,
            std::abs(static_cast<double>(got[j]) - (x * std::cos(angle) - y * std::sin(angle))));
        worst = std::max(worst,
                         std::abs(static_cast<double>(got[j + 4]) -
                                  (x * std::sin(angle) + y * std::cos(angle))));
      }
    }
    CHECK(worst < 1e-6);
    for (const Ints& other : all_tokens(world, 1)) { CHECK(other == range(0, 40)); }
  }
}

// --- batches -----------------------------------------------------------------------------

TEMPLATE_TEST_CASE("page_selector: sequences of a batch do not mix",
                   "[page][property]",
                   KVTRIM_WORLDS) {
  constexpr std::int32_t window = 4;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    if (!TestType::supports(scope)) { continue; }
    WorldSetup w{.scope = scope, .lengths = {51, 0, 80, 3, 64}};
    PageSelector<>::Params p;
    p.scores.window = window;
    p.unit = scope == TableScope::group ? PageUnit::per_table : PageUnit::per_group;
    p.budget = 28;
    p.window = window;
    const Queries q(w, 2, window);
    TestType batch(w);
    REQUIRE(batch.evict(PageSelector<>(p), q.obs).status == Status::ok);
    for (std::int32_t s = 0; s < 5; ++s) {
      WorldSetup one = w;
      one.lengths = {w.lengths[at(s)]};
      one.first_name = s;
      const Queries own(one, 2, window);
      TestType alone(one);
      REQUIRE(alone.evict(PageSelector<>(p), own.obs).status == Status::ok);
      INFO("sequence " << s);
      CHECK(all_tokens(batch, s) == all_tokens(alone, 0));
    }
    check_counts(batch);
  }
}

// --- decode ------------------------------------------------------------------------------

namespace {

// Keys of noise except for one token, which every query looks for.
struct Stream {
  static constexpr std::int32_t dim = 8;
  explicit Stream(std::int32_t n) : needle(n) {}
  void token(std::int32_t t, std::vector<float>& keys, std::vector<float>& query) {
    keys.clear();
    query.clear();
    for (std::int32_t i = 0; i < 2 * dim; ++i) {
      keys.push_back(t == needle ? (i % dim == 0 ? 6.0F : 0.0F) : random.uniform());
    }
    for (std::int32_t i = 0; i < 4 * dim; ++i) {
      query.push_back(i % dim == 0 ? 4.0F : random.uniform());
    }
  }
  std::int32_t needle;
  test::Random random{5};
};

bool has_position(PagedCache& cache, std::int32_t position) {
  for (std::int32_t r = 0; r < cache.live_rows(SequenceId{0}); ++r) {
    if (raw(cache.view().position(SequenceId{0}, {}, HeadId{1}, r)) == position) { return true; }
  }
  return false;
}

}  // namespace

TEST_CASE("page_selector: 20,000 generated tokens stay within the pages of the budget",
          "[page][decode]") {
  constexpr std::int32_t budget = 256, page_size = 16, steps = 20'000, needle = 700;
  constexpr std::int32_t most = pages_for(budget, page_size) + 1;
  // The pool has not one page more.
  PagedCache cache({.pages = most,
                    .page_size = page_size,
                    .kv_heads = 2,
                    .key_dim = Stream::dim,
                    .max_rows = budget + 1});
  const SequenceId s = *cache.try_create();
  QueryRing ring({.query_heads = 4, .head_dim = Stream::dim, .window = 32});
  PageSelector<>::Params p;
  p.budget = budget;
  const PageSelector<> policy(p);
  PlanShape shape = plan_shape(cache.view(), {.queries = ring.queries()});
  shape.max_rows = budget + 1;
  shape.query_rows = 32;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, shape));
  Stream stream(needle);
  std::vector<float> keys, query;
  std::int64_t moved = 0;
  std::int32_t wrong = 0;
  std::int32_t evictions = 0;
  for (std::int32_t t = 0; t < steps; ++t) {
    REQUIRE(cache.try_extend(s, 1) == Status::ok);
    stream.token(t, keys, query);
    REQUIRE(cache.write(s, LayerId{0}, {keys.data()}, {keys.data()}) == kvtrim::Status::ok);
    const Position position{t};
    ring.push(s, LayerId{0}, 1, query.data(), &position);
    wrong += cache.pool().in_use() > most ? 1 : 0;
    const Report report =
        evict(policy, cache, cache.view(), {.queries = ring.queries()}, workspace);
    REQUIRE(report.status == Status::ok);
    moved += report.bytes_moved;
    const bool evicted = report.evicted_rows > 0;
    evictions += evicted ? 1 : 0;
    // One page at a time: the rows of a page, for each KV head.
    wrong +=
        evicted && (report.released_pages != 1 || report.evicted_rows != 2 * page_size) ? 1 : 0;
    wrong += cache.live_rows(s) > budget ? 1 : 0;
    wrong += cache.live_rows(s) <= budget - page_size && t >= budget ? 1 : 0;
    wrong += t >= budget && cache.pool().in_use() != most - 1 ? 1 : 0;
    wrong += t < budget && cache.pool().in_use() != pages_for(t + 1, page_size) ? 1 : 0;
  }
  CHECK(wrong == 0);
  CHECK(moved == 0);
  CHECK(evictions == (steps - budget + page_size - 1) / page_size);
  CHECK(raw(cache.next_position(s)) == steps);
  CHECK(has_position(cache, 0));
  CHECK(has_position(cache, needle));  // 19,300 tokens later
  CHECK(has_position(cache, steps - 32));
  cache.destroy(s);
  CHECK(cache.pool().in_use() == 0);
  CHECK(cache.pool().available() == most);
}

TEST_CASE("page_selector: accumulated scores hold a budget over 2,000 generated tokens",
          "[page][decode]") {
  constexpr std::int32_t budget = 64, page_size = 4, steps = 2'000, needle = 150;
  constexpr std::int32_t most = pages_for(budget, page_size) + 1;
  PagedCache cache({.pages = most,
                    .page_size = page_size,
                    .kv_heads = 2,
                    .key_dim = 2,
                    .max_rows = budget + 1,
                    .scores = true});
  const SequenceId s = *cache.try_create();
  PageSelector<AccumulateParams>::Params p;
  p.budget = budget;
  p.window = 8;
  const PageSelector<AccumulateParams> policy(p);
  PlanShape shape = plan_shape(cache.view());
  shape.max_rows = budget + 1;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, shape));
  const std::vector<float> zeros(4, 0.0F);
  std::int32_t wrong = 0;
  for (std::int32_t t = 0; t < steps; ++t) {
    REQUIRE(cache.try_extend(s, 1) == Status::ok);
    REQUIRE(cache.write(s, LayerId{0}, {zeros.data()}, {zeros.data()}) == kvtrim::Status::ok);
    const std::int32_t live = cache.live_rows(s);
    for (std::int32_t h = 0; h < 2; ++h) {
      std::vector<float> probabilities(at(live), 0.5F / static_cast<float>(live));
      for (std::int32_t r = 0; r < live; ++r) {
        if (raw(cache.view().position(s, {}, HeadId{h}, r)) == needle) {
          probabilities[at(r)] += 0.5F;
        }
      }
      accumulate_probabilities({}, {cache.view(), s, {}, HeadId{h}}, {probabilities.data(), 1, 0});
    }
    const Report report = evict(policy, cache, cache.view(), {}, workspace);
    REQUIRE(report.status == Status::ok);
    wrong += report.bytes_moved != 0 || cache.live_rows(s) > budget ? 1 : 0;
    wrong += t >= budget && cache.pool().in_use() != most - 1 ? 1 : 0;
    wrong += t >= needle && !has_position(cache, needle) ? 1 : 0;
  }
  CHECK(wrong == 0);
  CHECK(raw(cache.next_position(s)) == steps);
  // The score moved with its row: it was seen by every query since.
  const CacheView v = cache.view();
  for (std::int32_t r = 0; r < cache.live_rows(s); ++r) {
    if (raw(v.position(s, {}, {}, r)) == needle) {
      CHECK(v.score_sums.at<float>(s, {}, {}, r) > 0.5F * (steps - needle));
    }
  }
  cache.destroy(s);
  CHECK(cache.pool().in_use() == 0);
}
