// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plain model of the random-operation test: rows in lists, what a policy demands said once more, and what a plan that is
// under way was made from.

#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include "random/choice.hpp"
#include "random/setup.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvtrim::random_test {

struct Row {
  std::int32_t position, rope, tag;
  Key key;           // as it must stand in the cache
  double score = 0;  // accumulated
};
using Rows = std::vector<Row>;  // ascending by position

struct Sequence {
  bool alive = false, ended = false;  // ended: at least once
  std::int32_t next = 0;
  std::vector<Rows> heads;             // [layers, heads]
  Ints next_rope;                      // [tables]
  Ints rows_at_eviction;               // [tables]
  std::int32_t step = 0;               // rows of the open step
  std::vector<bool> unwritten;         // [layers]
  std::vector<std::uint64_t> version;  // [tables]
  std::vector<bool> applied;           // [tables]
};

// What a policy demands, said once more.
struct Rule {
  enum Kind {
    by_score,
    heavy,
    greedy,
    promote,
    key_norm,
    key_diff,
    q_filter,
    tova,
    window,
    by_chance,
    cur_kv,
    rkv,
    lag_kv,
    recursive_lag_kv,
    chunk_kv,
    pyramid_kv,
    ada_kv,
    critical_kv,
    critical_ada_kv,
    page_set,
    page_window,
    exact,
    pages,
    full,
    kinds
  } kind = by_score;
  std::int32_t keep = 0, sinks = 0, recent = 0, interval = 1, grace = 0;
  std::int32_t chunk = 1;  // tokens of a chunk, or rows of a partition
  Removal own = Removal::stable_pack;
  WindowParams votes{};      // of window scores
  AdaptiveParams sharing{};  // of heads that share a budget
  double first_stage = 0.5;
  float epsilon = 0;
  PageScoreParams page{};
  PageUnit unit = PageUnit::per_table;

  bool by_position() const { return kind == exact || kind == pages || kind == full; }
  bool has_interval() const { return kind == heavy || kind == greedy || kind == promote; }
  bool by_window() const {
    return kind == window || kind == rkv || kind == pyramid_kv || kind == page_window || shares();
  }
  // The cut is the policy's own answer: its budget is a formula that has tests of its own.
  bool asks() const {
    return kind == lag_kv || kind == recursive_lag_kv || kind == chunk_kv || kind == pyramid_kv;
  }
  bool shares() const { return kind == ada_kv || kind == critical_ada_kv; }
  bool two_stages() const { return kind == critical_kv || kind == critical_ada_kv; }
  bool by_page() const { return kind == page_set || kind == page_window; }
  SnapKVSelector<>::Params prompt() const {
    return {.window = recent,
            .budget = keep,
            .kernel = votes.kernel,
            .rows = votes.rows,
            .group = votes.group,
            .pooling = votes.pooling,
            .columns = votes.columns,
            .sinks = sinks};
  }
  AdaKV<SnapKVSelector<>>::Params shared() const {
    return {.inner = prompt(),
            .safeguard = sharing.safeguard,
            .form = sharing.form,
            .over = sharing.over};
  }
  // Calls f(policy).
  template <class F>
  auto with_policy(F&& f) const {
    const auto hitter = [&](auto policy) {
      using P = decltype(policy);
      return f(P({.heavy = keep - sinks - recent,
                  .recent = recent,
                  .sinks = sinks,
                  .interval = interval,
                  .grace = grace,
                  .removal = own}));
    };
    const auto top = [&](auto policy) {
      using P = decltype(policy);
      return f(P({.budget = keep, .sinks = sinks, .recent = recent}));
    };
    switch (kind) {
      case heavy:
        return hitter(HeavyHitter<>());
      case greedy:
        return hitter(HeavyHitter<AccumulateParams, HeavyMode::greedy>());
      case promote:
        return hitter(HeavyHitter<AccumulateParams, HeavyMode::promote>());
      case key_norm:
        return top(KeyNorm());
      case key_diff:
        return top(KeyDiff());
      case q_filter:
        return top(QFilter());
      case tova:
        return top(Tova());
      case by_chance:
        return top(kvtrim::Random());
      case cur_kv:
        return top(CurKV());
      case rkv:
        return f(RKV({.budget = keep,
                      .sinks = sinks,
                      .recent = recent,
                      .scores = {.window = recent, .kernel = votes.kernel}}));
      case lag_kv:
        return f(
            LagKV({.budget = keep, .sinks = sinks, .lag = chunk, .cross_scoring = keep % 2 == 0}));
      case recursive_lag_kv:
        return f(RecursiveLagKV({.sinks = sinks, .lag = chunk + 1, .keep = chunk / 2}));
      case chunk_kv:
        return f(ChunkKV<KeyNormParams>(
            {.budget = keep + 2 * chunk, .chunk = chunk, .sinks = sinks, .recent = recent}));
      case window:
        return f(SnapKVSelector<>(prompt()));
      case pyramid_kv:
        return f(PyramidKV({.snapkv = prompt(), .beta = chunk}));
      case ada_kv:
        return f(AdaKV<SnapKVSelector<>>(shared()));
      case critical_kv:
        return f(CriticalKV<KeyNorm>({.inner = {.budget = keep, .sinks = sinks, .recent = recent},
                                      .first_stage = first_stage,
                                      .epsilon = epsilon}));
      case critical_ada_kv:
        return f(CriticalKV<AdaKV<SnapKVSelector<>>>(
            {.inner = shared(), .first_stage = first_stage, .epsilon = epsilon}));
      case page_set:
        return f(PageSelector<KeyDiffParams>(
            {.pages = page, .unit = unit, .budget = keep, .sinks = sinks, .window = recent}));
      case page_window:
        return f(PageSelector<>({.scores = votes,
                                 .pages = page,
                                 .unit = unit,
                                 .budget = keep,
                                 .sinks = sinks,
                                 .window = recent}));
      case exact:
        return f(StreamingSink<SinkForm::exact>({.sinks = sinks, .recent = recent}));
      case pages:
        return f(StreamingSink<>({.sinks = sinks, .recent = recent}));
      case full:
        return f(Full());
      default:
        return f(test::ByScore{keep, sinks, recent, own});
    }
  }
  std::string_view name() const {
    return with_policy([](const auto& policy) { return std::string_view(policy.name); });
  }
  std::string words() const {
    return std::string(name()) + " keep " + std::to_string(keep) + " sinks " +
           std::to_string(sinks) + " recent " + std::to_string(recent) + " grace " +
           std::to_string(grace) + " every " + std::to_string(interval) + " chunk " +
           std::to_string(chunk);
  }
};
// `following`: sinks that follow the window, which a rule must protect.
inline Rule random_rule(Random& random, std::int32_t following) {
  Rule rule;
  rule.kind = static_cast<Rule::Kind>(random.below(Rule::kinds));
  rule.sinks = std::max(random.below(4), random.below(4) > 0 ? following : 0);
  const bool must = rule.kind == Rule::heavy || rule.kind == Rule::promote || rule.by_window();
  rule.recent = rule.kind == Rule::greedy ? 0 : (must ? 1 : 0) + random.below(6);
  rule.chunk = 1 + random.below(4);
  if (rule.by_page()) {  // room for pages that compete
    rule.sinks = std::min(rule.sinks, std::max(1, following)),
    rule.recent = std::min(rule.recent, 2);
  }
  rule.keep = rule.sinks + rule.recent + random.below(rule.by_page() ? 12 : 8);
  if (rule.kind == Rule::by_score) {
    rule.keep = random.below(16), rule.own = static_cast<Removal>(random.below(5));
  } else if (rule.has_interval()) {
    rule.interval = 1 + random.below(3), rule.grace = random.below(rule.keep - rule.sinks + 1);
    rule.own = static_cast<Removal>(random.below(5));
  } else if (rule.kind == Rule::exact || rule.kind == Rule::pages) {
    rule.recent += 1, rule.keep = rule.sinks + rule.recent;
    rule.own = rule.kind == Rule::exact ? Removal::overwrite_slot : Removal::drop_pages;
  }
  if (rule.by_page()) { rule.own = Removal::drop_pages; }
  rule.keep = std::max(rule.keep, rule.kind == Rule::by_score ? 0 : 1);
  const auto any = [&](auto last) {
    return static_cast<decltype(last)>(random.below(static_cast<std::int32_t>(last) + 1));
  };
  rule.votes = {.window = rule.recent,
                .kernel = 1 + 2 * random.below(3),
                .rows = any(Reduction::max),
                .group = any(Reduction::max),
                .pooling = any(Pooling::max),
                .columns = any(PoolColumns::all_columns)};
  if (rule.shares()) {  // shares that are exact, but for the paper's
    rule.sharing = {std::array{0.0, 0.25, 0.5, 0.75, 1.0}[at(random.below(5))],
                    any(AdaptiveForm::floor_rounded),
                    any(AdaptiveOver::all_heads)};
    if (rule.sharing.form == AdaptiveForm::safeguard && random.below(2) == 0) {
      rule.sharing.safeguard = 0.2;
    }
  }
  if (rule.two_stages()) {
    rule.first_stage = std::array{0.0, 0.3, 0.5, 1.0}[at(random.below(4))];
    rule.epsilon = random.below(2) == 0 ? 1e-4F : 1.0F;
  }
  if (rule.by_page()) {
    rule.page = {any(HeadNorm::sum),
                 any(PageReduction::top_m),
                 1 + random.below(3),
                 any(Reduction::max),
                 rule.kind == Rule::page_window ? any(Sums::exact) : Sums::floating};
    rule.unit = any(PageUnit::per_group);
    rule.votes.sums = rule.page.sums;
    if (!rule.votes.at_most_one()) { rule.page.norm = HeadNorm::sum; }
  }
  return rule;
}

// `left`: rows at the last eviction.
inline Cut cut_of(const Rule& rule, std::int32_t live, std::int32_t budget, std::int32_t left) {
  if (rule.kind == Rule::full) { return {}; }
  std::int32_t recent = std::max(rule.recent, rule.grace);
  std::int32_t keep = budget >= 0 ? budget : rule.keep;
  if (rule.by_position()) {
    if (budget >= 0) { recent = std::max(0, budget - rule.sinks); }
    keep = budget >= 0 && budget < rule.sinks ? budget : rule.sinks + recent;
  }
  if (live - keep < rule.interval) { return {}; }
  if (rule.kind == Rule::promote && left > 0) {
    recent = std::max(recent, std::min(rule.recent + live - left, keep - rule.sinks));
  }
  return cut_to(keep, rule.sinks, recent, live);
}

// A plan that is under way.
struct Pending {
  struct Part {  // of a table
    bool evicts = false, ended = false;
    std::int32_t live = 0;
    std::vector<std::uint64_t> signature;
    std::vector<Ints> gone;    // ranks, of each head that it serves
    std::vector<Ints> places;  // of the others, before apply
  };
  std::int32_t first = -1;  // sequence; -1: all
  CacheView view;
  std::vector<std::byte> workspace;
  PlanRef plan;
  std::optional<Plan> copy;
  const Rerotator* rerotator = nullptr;
  Rule::Kind kind = Rule::by_score;
  Removal way = Removal::automatic;
  std::vector<PageId> spares;
  std::vector<Part> parts;
  bool applied = false;
};

// An operation, for those who must find out what went wrong.
struct Done {
  std::string what;
  std::int32_t s, a;
  Status status;
  std::string words() const {
    return what + " sequence " + std::to_string(s) + " (" + std::to_string(a) +
           "): " + std::string(to_string(status));
  }
};

}  // namespace kvtrim::random_test
