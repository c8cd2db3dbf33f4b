// SPDX-License-Identifier: Apache-2.0
// The references are the published algorithms, written down step by step over plain lists. Probabilities are multiples
// of 2^-12, so every sum is exact and the kept sets must be equal, ties included.
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::TaggedCache;

namespace {

constexpr std::int32_t layers = 2;
constexpr std::int32_t kv_heads = 3;
constexpr std::int32_t group = 2;

struct Token {
  std::int32_t position;
  double score;
};
using Tokens = std::vector<Token>;  // ascending by position

// Index of the lowest score in [begin, end); of equal ones the last, as the lower position is kept.
std::size_t lowest(const Tokens& tokens, std::size_t begin, std::size_t end) {
  std::size_t victim = begin;
  for (std::size_t i = begin; i < end; ++i) {
    if (tokens[i].score <= tokens[victim].score) { victim = i; }
  }
  return victim;
}

void drop_lowest(Tokens& tokens, std::size_t sinks, std::size_t recent, std::size_t budget) {
  while (tokens.size() > budget) {
    tokens.erase(tokens.begin() +
                 static_cast<std::ptrdiff_t>(lowest(tokens, sinks, tokens.size() - recent)));
  }
}

// FMInference: the last `recent` stay, of all others the `heavy` with the most attention.
struct RealDrop {
  std::size_t heavy, recent, sinks = 0;
  void operator()(Tokens& tokens) const {
    drop_lowest(tokens, sinks, recent, heavy + recent + sinks);
  }
};
// Algorithm 1 of the paper: while there are too many, the lowest goes.
struct Greedy {
  std::size_t budget;
  void operator()(Tokens& tokens) const { drop_lowest(tokens, 0, 0, budget); }
};
// FlexGen: a heavy part and a window; each new token pushes the window's oldest into the heavy part, whose lowest dies.
struct Promote {
  std::size_t heavy, recent;
  std::set<std::int32_t> heavy_part = {};
  std::deque<std::int32_t> window = {};
  bool split = false;

  void operator()(Tokens& tokens) {
    if (!split) {
      if (tokens.size() <= heavy + recent) { return; }
      drop_lowest(tokens, 0, recent, heavy + recent);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (i < heavy) {
          heavy_part.insert(tokens[i].position);
        } else {
          window.push_back(tokens[i].position);
        }
      }
      split = true;
      return;
    }
    window.push_back(tokens.back().position);
    std::int32_t victim = -1;
    double least = 1e300;
    for (const Token& t : tokens) {
      if (heavy_part.contains(t.position) && t.score <= least) {
        least = t.score;
        victim = t.position;
      }
    }
    heavy_part.erase(victim);
    heavy_part.insert(window.front());
    window.pop_front();
    std::erase_if(tokens, [&](const Token& t) { return t.position == victim; });
  }
};

template <class P>
struct Decode {
  P policy;
  std::int32_t prompt = 0;
  std::int32_t steps = 2000;
  std::int32_t levels = 4;  // few: many equal scores
  bool squared = false;
  std::uint64_t seed = 1;
  TableScope scope = TableScope::group;
};

// Decodes with random attention; after each step the cache must hold exactly what `Algorithm` holds.
template <class P, class Algorithm>
void compare(const Decode<P>& run, const Algorithm& algorithm) {
  test::Random random(run.seed);
  TaggedCache c({.page_size = 4,
                 .pages = 400,
                 .layers = layers,
                 .kv_heads = kv_heads,
                 .scope = run.scope,
                 .max_rows = 128,
                 .scores = true});
  std::vector<Algorithm> algorithms(layers * kv_heads, algorithm);
  std::vector<Tokens> tokens(layers * kv_heads);
  std::vector<std::byte> workspace;
  std::int32_t next = 0;
  for (std::int32_t step = 0; step <= run.steps; ++step) {
    const std::int32_t n = step == 0 ? run.prompt : 1;
    if (n == 0) { continue; }
    REQUIRE(c.append(0, n) == Status::ok);
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < kv_heads; ++h) {
        Tokens& list = tokens[static_cast<std::size_t>(l * kv_heads + h)];
        for (std::int32_t i = 0; i < n; ++i) { list.push_back({next + i, 0.0}); }
        // Attention of each of the n queries to the rows not in its future.
        for (std::int32_t query = next; query < next + n; ++query) {
          std::vector<float> probabilities(group * list.size(), 0.0F);
          std::vector<std::size_t> row_of;  // token -> row of the table
          row_of.resize(list.size());
          c.for_each_row(0, l, h, [&](std::int32_t r, std::int32_t position) {
            const auto it = std::find_if(
                list.begin(), list.end(), [&](const Token& t) { return t.position == position; });
            REQUIRE(it != list.end());
            row_of[static_cast<std::size_t>(it - list.begin())] = static_cast<std::size_t>(r);
          });
          for (std::size_t i = 0; i < list.size(); ++i) {
            if (list[i].position > query) { continue; }
            double sum = 0;
            for (std::size_t g = 0; g < group; ++g) {
              const double p = random.below(run.levels) / 4096.0;
              probabilities[g * list.size() + row_of[i]] = static_cast<float>(p);
              sum += run.squared ? p * p : p;
            }
            list[i].score += sum / group;
          }
          accumulate_probabilities(
              run.policy.scorer(),
              {c.cache.view(), SequenceId{0}, LayerId{l}, HeadId{h}},
              {probabilities.data(), group, static_cast<std::int64_t>(list.size())});
        }
        algorithms[static_cast<std::size_t>(l * kv_heads + h)](list);
      }
    }
    next += n;
    workspace.resize(plan_workspace_bytes(run.policy, plan_shape(c.view())));
    const Report report = evict(run.policy, c.cache, c.view(), {}, workspace);
    REQUIRE(report.status == Status::ok);
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < kv_heads; ++h) {
        const Tokens& list = tokens[static_cast<std::size_t>(l * kv_heads + h)];
        std::vector<std::int32_t> expected;
        for (const Token& t : list) { expected.push_back(t.position); }
        INFO("step " << step << " layer " << l << " head " << h);
        REQUIRE(c.kept(0, l, h) == expected);
      }
    }
    if (step % 50 == 0) { REQUIRE(c.fault() == ""); }
  }
  REQUIRE(c.fault() == "");
}

}  // namespace

TEST_CASE("h2o: real_drop equals FMInference's algorithm for 2,000 steps", "[h2o][paper][ties]") {
  for (const std::int32_t prompt : {1, 30}) {
    compare(Decode{.policy = HeavyHitter({.heavy = 7, .recent = 5}), .prompt = prompt},
            RealDrop{.heavy = 7, .recent = 5});
  }
  compare(Decode{.policy = HeavyHitter({.heavy = 7, .recent = 5}),
                 .prompt = 12,
                 .levels = 64,
                 .scope = TableScope::head},
          RealDrop{.heavy = 7, .recent = 5});
}

TEST_CASE("h2o: greedy equals Algorithm 1 for 2,000 steps", "[h2o][paper][ties]") {
  for (const std::int32_t levels : {4, 64}) {
    compare(Decode{.policy =
                       HeavyHitter<AccumulateParams, HeavyMode::greedy>({.heavy = 11, .recent = 0}),
                   .prompt = 20,
                   .levels = levels},
            Greedy{.budget = 11});
  }
}

TEST_CASE("h2o: promote equals FlexGen's algorithm for 2,000 steps", "[h2o][paper][ties]") {
  for (const std::int32_t prompt : {1, 11, 12, 30}) {
    compare(Decode{.policy =
                       HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 7, .recent = 4}),
                   .prompt = prompt,
                   .steps = prompt == 30 ? 2000 : 300},
            Promote{.heavy = 7, .recent = 4});
  }
  compare(
      Decode{.policy = HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 1, .recent = 6}),
             .prompt = 20,
             .steps = 300,
             .scope = TableScope::layer},
      Promote{.heavy = 1, .recent = 6});
}

TEST_CASE("h2o: the ways of removal keep the same rows", "[h2o][property]") {
  for (const Removal removal :
       {Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    compare(Decode{.policy = HeavyHitter({.heavy = 6, .recent = 3, .removal = removal}),
                   .prompt = 15,
                   .steps = 400},
            RealDrop{.heavy = 6, .recent = 3});
  }
}

TEST_CASE("h2o: sinks and squared probabilities follow their plain transcription",
          "[h2o][property]") {
  compare(
      Decode{
          .policy = HeavyHitter({.heavy = 5, .recent = 4, .sinks = 3}), .prompt = 20, .steps = 500},
      RealDrop{.heavy = 5, .recent = 4, .sinks = 3});
  compare(Decode{.policy = HeavyHitter({.heavy = 5, .recent = 4, .squared = true}),
                 .prompt = 20,
                 .steps = 500,
                 .levels = 64,
                 .squared = true},
          RealDrop{.heavy = 5, .recent = 4});
}

TEST_CASE("h2o: grace protects rows younger than its steps", "[h2o][property]") {
  // With grace 4 and recent 2 the last four rows stay, within the same budget.
  compare(
      Decode{
          .policy = HeavyHitter({.heavy = 8, .recent = 2, .grace = 4}), .prompt = 15, .steps = 500},
      RealDrop{.heavy = 6, .recent = 4});
  compare(
      Decode{
          .policy = HeavyHitter({.heavy = 8, .recent = 0, .grace = 3}), .prompt = 15, .steps = 500},
      RealDrop{.heavy = 5, .recent = 3});
}

TEST_CASE("h2o: an interval lets rows exceed the budget by interval - 1, then cuts to it",
          "[h2o][property]") {
  struct Interval {
    std::size_t interval;
    RealDrop cut;
    void operator()(Tokens& tokens) const {
      if (tokens.size() >= cut.heavy + cut.recent + interval) { cut(tokens); }
    }
  };
  compare(Decode{.policy = HeavyHitter({.heavy = 6, .recent = 4, .interval = 5}),
                 .prompt = 12,
                 .steps = 600},
          Interval{.interval = 5, .cut = {.heavy = 6, .recent = 4}});
  const HeavyHitter policy({.heavy = 6, .recent = 4, .interval = 5});
  DemandInput in;
  for (in.live = 0; in.live < 40; ++in.live) {
    const Demand d = policy.demand(in);
    CHECK(d.keep == (in.live > 14 ? 10 : in.live));
  }
}

TEST_CASE("h2o: promote in intervals promotes every row that left the window", "[h2o][property]") {
  // Two rows leave between cuts: both are safe, two of the heavy part go.
  const HeavyHitter<AccumulateParams, HeavyMode::promote> policy(
      {.heavy = 6, .recent = 3, .interval = 2});
  DemandInput in;
  in.live = 20;
  CHECK(policy.demand(in).protection.recent == 3);  // the prompt's cut
  in.state.rows_at_eviction = 9;
  in.live = 10;
  CHECK(policy.demand(in).keep == 10);
  in.live = 11;
  CHECK(policy.demand(in).keep == 9);
  CHECK(policy.demand(in).protection.recent == 5);
  in.live = 30;  // a chunk longer than the heavy part: no more than the budget is protected
  CHECK(policy.demand(in).protection.recent == 9);
  const HeavyHitter<AccumulateParams, HeavyMode::promote> with_sinks(
      {.heavy = 6, .recent = 3, .sinks = 2});
  CHECK(with_sinks.demand(in).keep == 11);
  CHECK(with_sinks.demand(in).protection.recent == 9);  // sinks are protected apart
}

TEST_CASE("h2o: decay and age normalisation rank as sums in double do", "[h2o][property]") {
  // Not exact in fp32: nothing that goes may score above what stays by more than rounding.
  for (const bool age : {false, true}) {
    const float decay = age ? 1.0F : 0.97F;
    const HeavyHitter policy({.heavy = 8, .recent = 4, .decay = decay, .age_normalised = age});
    test::Random random(5);
    TaggedCache c({.max_rows = 64, .scores = true});
    std::vector<Token> tokens;
    for (std::int32_t step = 0; step < 500; ++step) {
      REQUIRE(c.append(0, 1) == Status::ok);
      tokens.push_back({step, 0.0});
      std::vector<float> p(tokens.size());
      c.for_each_row(0, 0, 0, [&](std::int32_t r, std::int32_t position) {
        const auto t = std::find_if(
            tokens.begin(), tokens.end(), [&](const Token& x) { return x.position == position; });
        const auto x = std::abs(random.uniform());
        p[static_cast<std::size_t>(r)] = x;
        t->score = t->score * static_cast<double>(decay) + static_cast<double>(x);
      });
      accumulate_probabilities(policy.scorer(),
                               {c.cache.view(), SequenceId{0}, LayerId{0}, HeadId{0}},
                               {p.data(), 1, 0});
      REQUIRE(c.evict(policy).status == Status::ok);
      const auto kept = c.kept(0);
      const auto rank = [&](const Token& t) {
        return age ? t.score / (step + 1 - t.position) : t.score;
      };
      double least_kept = 1e300;
      double most_gone = -1;
      std::vector<Token> left;
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const bool stays = std::binary_search(kept.begin(), kept.end(), tokens[i].position);
        if (i + 4 >= tokens.size()) { REQUIRE(stays); }
        if (!stays) { most_gone = std::max(most_gone, rank(tokens[i])); }
        if (stays && i + 4 < tokens.size()) { least_kept = std::min(least_kept, rank(tokens[i])); }
        if (stays) { left.push_back(tokens[i]); }
      }
      INFO("step " << step << (age ? " age" : " decay"));
      REQUIRE(kept.size() == std::min<std::size_t>(12, static_cast<std::size_t>(step + 1)));
      REQUIRE(most_gone <= least_kept * (1 + 1e-6));
      tokens = left;
    }
  }
}

TEST_CASE("h2o: without score planes a plan is refused", "[h2o][edge]") {
  TaggedCache c({.max_rows = 20});
  REQUIRE(c.append(0, 20) == Status::ok);
  const auto before = c.bytes();
  CHECK(c.evict(HeavyHitter({.heavy = 4, .recent = 4})).status == Status::bad_observation);
  CHECK(c.bytes() == before);
}

TEST_CASE("h2o: the constructor refuses what cannot work, with the numbers", "[h2o][edge]") {
  using H = HeavyHitter<>;
  using Greedy = HeavyHitter<AccumulateParams, HeavyMode::greedy>;
  using Promote = HeavyHitter<AccumulateParams, HeavyMode::promote>;
  CHECK_THROWS_WITH(Greedy({.heavy = 0}),
                    ContainsSubstring("heavy + recent + sinks 0 must be at least 1"));
  CHECK_THROWS_WITH(H({.heavy = 8, .recent = 0}), ContainsSubstring("recent 0 and grace 0"));
  CHECK_THROWS_WITH(Promote({.heavy = 8, .recent = 0}), ContainsSubstring("grace 0"));
  CHECK_NOTHROW(Greedy({.heavy = 8}));
  CHECK_NOTHROW(H({.heavy = 8, .recent = 0, .grace = 1}));
  CHECK_THROWS_WITH(Greedy({.heavy = 8, .recent = 3}), ContainsSubstring("recent is 3"));
  CHECK_THROWS_WITH(H({.heavy = -1}), ContainsSubstring("heavy -1"));
  CHECK_THROWS_WITH(H({.sinks = -2}), ContainsSubstring("sinks -2"));
  CHECK_THROWS_WITH(
      H({.heavy = (std::int64_t{1} << 31) - 1, .recent = 1}),
      ContainsSubstring("heavy + recent + sinks 2147483648 must be at most 2147483647"));
  CHECK_THROWS_WITH(H({.heavy = 4, .recent = 2, .sinks = 1, .grace = 7}),
                    ContainsSubstring("budget 7") && ContainsSubstring("grace 7"));
  CHECK_NOTHROW(H({.heavy = 4, .recent = 2, .sinks = 1, .grace = 6}));
  CHECK_THROWS_WITH(H({.interval = 0}), ContainsSubstring("interval 0"));
  CHECK_THROWS_WITH(H({.decay = 0.0F}), ContainsSubstring("decay 0"));
  CHECK_THROWS_WITH(H({.decay = 1.5F}), ContainsSubstring("decay 1.5"));
  CHECK_THROWS_AS(H({.decay = std::numeric_limits<float>::quiet_NaN()}), std::invalid_argument);
}

TEST_CASE("h2o: by other scores, the modes are the same and rows without a score are protected",
          "[h2o][edge]") {
  using ByKeys = HeavyHitter<KeyDiffParams, HeavyMode::promote>;
  STATIC_REQUIRE(ByKeys::name == "h2o<keydiff>");
  STATIC_REQUIRE(std::is_same_v<decltype(ByKeys().scorer()), KeyDiffParams>);
  DemandInput in;
  in.live = 12;
  in.state.rows_at_eviction = 10;
  const ByKeys promote({.heavy = 6, .recent = 4});
  CHECK(promote.demand(in).keep == 10);
  CHECK(promote.demand(in).protection.recent == 6);  // two rows left the window: promoted
  CHECK(HeavyHitter<KeyDiffParams>({.heavy = 6, .recent = 4}).demand(in).protection.recent == 4);

  using ByWindow = HeavyHitter<WindowParams>;
  CHECK_THROWS_WITH(ByWindow({.recent = 31}), ContainsSubstring("recent 31 must be at least 32"));
  CHECK_NOTHROW(ByWindow({.recent = 31, .grace = 32}));
  using GreedyByWindow = HeavyHitter<WindowParams, HeavyMode::greedy>;
  CHECK_THROWS_WITH(GreedyByWindow(), ContainsSubstring("grace 0 must be at least 32"));
  CHECK_THROWS_WITH(ByWindow({.scores = {.kernel = 4}}),
                    ContainsSubstring("kvtrim::HeavyHitter: scores.kernel 4 must be odd"));
}

TEST_CASE("h2o: a budget given at run time below the protected rows keeps them", "[h2o][edge]") {
  const HeavyHitter policy({.heavy = 4, .recent = 3, .sinks = 2});
  for (const std::int32_t budget : {0, 4, 5, 6, 30}) {
    TaggedCache c({.max_rows = 20, .scores = true});
    REQUIRE(c.append(0, 20) == Status::ok);
    Observation obs;
    obs.budgets = &budget;
    obs.budget_rows = {0, 0, 0};
    const Report report = c.evict(policy, obs);
    INFO("budget " << budget);
    CHECK(report.status == (budget < 5 ? Status::over_budget : Status::ok));
    // Equal scores: the lower positions stay.
    std::vector<std::int32_t> expected{0, 1};
    for (std::int32_t i = 2; i < 17; ++i) {
      if (i < budget - 3) { expected.push_back(i); }
    }
    for (std::int32_t i = 17; i < 20; ++i) { expected.push_back(i); }
    CHECK(c.kept(0) == expected);
    REQUIRE(c.fault() == "");
  }
}
