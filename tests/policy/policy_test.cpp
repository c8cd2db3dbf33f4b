// SPDX-License-Identifier: Apache-2.0
// What every policy must obey. A new policy adds a `Laws` specialisation and one word to `KVTRIM_POLICIES`.
#include <kvtrim/policy/policy.hpp>

#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::TaggedCache;

#define KVTRIM_POLICIES                                                                  \
  Full, StreamingSink<>, StreamingSink<SinkForm::exact>, HeavyHitter<>, Greedy, Promote, \
      SnapKVSelector<>, SnapKVSelector<AccumulateParams>, PageSelector<>

namespace {

using Greedy = HeavyHitter<AccumulateParams, HeavyMode::greedy>;
using Promote = HeavyHitter<AccumulateParams, HeavyMode::promote>;

template <class P>
struct Case {
  P policy;
  std::int32_t budget;  // nothing goes while there are at most this many rows
  std::int32_t sinks;   // first rows that always stay
  std::int32_t recent;  // last rows that always stay
  bool by_score = true;
  bool whole_pages = false;  // what stays depends on the page size
};

template <class P>
struct Laws;
template <>
struct Laws<Full> {
  static std::vector<Case<Full>> cases() { return {{{}, 1000, 1000, 0, false}}; }
};
template <>
struct Laws<StreamingSink<>> {
  static std::vector<Case<StreamingSink<>>> cases() {
    return {{StreamingSink({.sinks = 3, .recent = 6}), 9, 3, 6, false, true},
            {StreamingSink({.sinks = 3, .recent = 9, .hard_budget = 20}), 12, 3, 1, false, true}};
  }
};
template <>
struct Laws<StreamingSink<SinkForm::exact>> {
  static std::vector<Case<StreamingSink<SinkForm::exact>>> cases() {
    return {{StreamingSink<SinkForm::exact>({.sinks = 3, .recent = 6}), 9, 3, 6, false}};
  }
};
template <>
struct Laws<HeavyHitter<>> {
  static std::vector<Case<HeavyHitter<>>> cases() {
    return {{HeavyHitter({.heavy = 6, .recent = 4}), 10, 0, 4},
            {HeavyHitter({.heavy = 6, .recent = 4, .sinks = 2, .interval = 3}), 12, 2, 4},
            {HeavyHitter({.heavy = 6, .recent = 3, .removal = Removal::fill_holes}), 9, 0, 3}};
  }
};
template <>
struct Laws<Greedy> {
  static std::vector<Case<Greedy>> cases() { return {{Greedy({.heavy = 9}), 9, 0, 0}}; }
};
template <>
struct Laws<Promote> {
  static std::vector<Case<Promote>> cases() {
    return {{Promote({.heavy = 6, .recent = 3}), 9, 0, 3}};
  }
};
template <>
struct Laws<SnapKVSelector<AccumulateParams>> {
  static std::vector<Case<SnapKVSelector<AccumulateParams>>> cases() {
    return {{SnapKVSelector<AccumulateParams>({.budget = 11, .sinks = 3, .recent = 4}), 11, 3, 4}};
  }
};
template <>
struct Laws<SnapKVSelector<>> {
  static std::vector<Case<SnapKVSelector<>>> cases() {
    return {{SnapKVSelector({.window = 4, .budget = 11}), 11, 0, 4},
            {SnapKVSelector({.window = 4, .budget = 11, .sinks = 3}), 11, 3, 4},
            {SnapKVSelector({.window = 5, .budget = 5}), 5, 0, 5}};
  }
};
template <>
struct Laws<PageSelector<>> {
  static Case<PageSelector<>> of(PageUnit unit,
                                 std::int32_t budget,
                                 std::int32_t sinks,
                                 std::int32_t recent,
                                 const PageScoreParams& pages = {}) {
    PageSelector<>::Params p;
    p.unit = unit;
    p.budget = budget;
    p.sinks = sinks;
    p.window = recent;
    p.pages = pages;
    return {PageSelector<>(p), budget, sinks, recent, true, true};
  }
  static std::vector<Case<PageSelector<>>> cases() {
    // The largest protected part is a page of sinks and recent + page_size - 1 rows.
    return {of(PageUnit::per_table, 12, 1, 4),
            of(PageUnit::per_group, 19, 3, 5),
            of(PageUnit::per_table, 14, 0, 0, {.reduction = PageReduction::mean}),
            of(PageUnit::per_group, 17, 5, 1, {.heads = Reduction::max})};
  }
};

// The score of a token, whatever its row: few values, so that many are equal.
float score_of(std::int32_t sequence, std::int32_t l, std::int32_t h, std::int32_t position) {
  test::Random random(static_cast<std::uint64_t>(position * 64 + l * 8 + h) * 31 +
                      static_cast<std::uint64_t>(sequence));
  return static_cast<float>(random.below(9));
}

class Scored {
 public:
  explicit Scored(const TaggedCache::Setup& setup, std::int32_t first_name = 0)
      : cache(setup), first_name_(first_name) {
    const auto& p = cache.cache.params();
    scores_.assign(static_cast<std::size_t>(p.max_sequences * p.layers * p.kv_heads * p.max_rows),
                   -3.0F);
  }
  // `edit` may change the score of a position.
  template <class Edit>
  Observation observation(Edit&& edit) {
    const auto& p = cache.cache.params();
    Observation obs;
    obs.scores = SequencePlane::dense(scores_.data(), p.layers, p.kv_heads, p.max_rows);
    for (std::int32_t s = 0; s < p.max_sequences; ++s) {
      for (std::int32_t l = 0; l < p.layers; ++l) {
        for (std::int32_t h = 0; h < p.kv_heads; ++h) {
          cache.for_each_row(s, l, h, [&](std::int32_t r, std::int32_t position) {
            obs.scores.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) =
                edit(position, score_of(first_name_ + s, l, h, position));
          });
        }
      }
    }
    return obs;
  }
  Observation observation() {
    return observation([](std::int32_t, float score) { return score; });
  }
  TaggedCache cache;

 private:
  std::int32_t first_name_;
  std::vector<float> scores_;
};

TaggedCache::Setup setup(std::int32_t page_size = 4, std::int32_t sequences = 1) {
  return {.page_size = page_size,
          .pages = 200,
          .layers = 2,
          .kv_heads = 2,
          .sequences = sequences,
          .max_rows = 64};
}

std::vector<std::vector<std::int32_t>> kept_sets(TaggedCache& c, std::int32_t s) {
  std::vector<std::vector<std::int32_t>> sets;
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) { sets.push_back(c.kept(s, l, h)); }
  }
  return sets;
}

struct NotTrivial {
  [[maybe_unused]] static constexpr std::string_view name = "x";
  std::string text;
  Demand demand(const DemandInput&) const noexcept { return {}; }
  Removal removal() const noexcept { return {}; }
  NoScores scorer() const noexcept { return {}; }
};
struct MayThrow {
  [[maybe_unused]] static constexpr std::string_view name = "x";
  Demand demand(const DemandInput&) const { return {}; }
  Removal removal() const noexcept { return {}; }
  NoScores scorer() const noexcept { return {}; }
};
struct Mutable {
  [[maybe_unused]] static constexpr std::string_view name = "x";
  Demand demand(const DemandInput&) noexcept { return {}; }
  Removal removal() const noexcept { return {}; }
  NoScores scorer() const noexcept { return {}; }
};
struct Nameless {
  Demand demand(const DemandInput&) const noexcept { return {}; }
  Removal removal() const noexcept { return {}; }
  NoScores scorer() const noexcept { return {}; }
};
static_assert(Policy<detail::PolicyArchetype>);
static_assert(!Policy<NotTrivial>);
static_assert(!Policy<MayThrow>);
static_assert(!Policy<Mutable>);
static_assert(!Policy<Nameless>);
static_assert(!Policy<int>);

}  // namespace

TEMPLATE_TEST_CASE("policy: is a value", "[policy]", KVTRIM_POLICIES) {
  STATIC_REQUIRE(Policy<TestType>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<TestType>);
  STATIC_REQUIRE(std::is_default_constructible_v<TestType>);
}

TEST_CASE("policy: names are unique", "[policy]") {
  const std::set<std::string_view> names{Full::name,
                                         StreamingSink<>::name,
                                         HeavyHitter<>::name,
                                         SnapKVSelector<>::name,
                                         PageSelector<>::name};
  CHECK(names.size() == 5);
}

TEMPLATE_TEST_CASE("policy: nothing changes while rows are within the budget",
                   "[policy][edge]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    for (std::int32_t tokens = 0; tokens <= std::min(40, law.budget); ++tokens) {
      Scored c(setup());
      REQUIRE(c.cache.append(0, tokens) == Status::ok);
      const auto before = c.cache.bytes();
      const Report report = c.cache.evict(law.policy, c.observation());
      INFO("tokens " << tokens);
      REQUIRE(report.status == Status::ok);
      REQUIRE(report.evicted_rows == 0);
      REQUIRE(report.kept_rows == 4 * tokens);
      REQUIRE(c.cache.bytes() == before);
    }
  }
}

TEMPLATE_TEST_CASE("policy: a second cut at once finds nothing to do",
                   "[policy][property]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    for (std::int32_t tokens = 0; tokens <= 50; ++tokens) {
      Scored c(setup());
      REQUIRE(c.cache.append(0, tokens) == Status::ok);
      REQUIRE(c.cache.evict(law.policy, c.observation()).status == Status::ok);
      const auto before = c.cache.bytes();
      const Report again = c.cache.evict(law.policy, c.observation());
      INFO("tokens " << tokens);
      REQUIRE(again.status == Status::ok);
      REQUIRE(again.evicted_rows == 0);
      REQUIRE(c.cache.bytes() == before);
      REQUIRE(c.cache.fault() == "");
    }
  }
}

TEMPLATE_TEST_CASE("policy: protected rows stay, whatever their scores",
                   "[policy][property]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    for (const std::int32_t tokens : {16, 30, 50}) {
      Scored c(setup());
      REQUIRE(c.cache.append(0, tokens) == Status::ok);
      const auto is_protected = [&](std::int32_t position) {
        return position < law.sinks || position >= tokens - law.recent;
      };
      // The protected ones score lowest of all.
      const Observation obs = c.observation([&](std::int32_t position, float score) {
        return is_protected(position) ? -std::numeric_limits<float>::infinity() : score;
      });
      REQUIRE(c.cache.evict(law.policy, obs).status == Status::ok);
      for (const auto& kept : kept_sets(c.cache, 0)) {
        for (std::int32_t p = 0; p < tokens; ++p) {
          if (is_protected(p)) { REQUIRE(std::binary_search(kept.begin(), kept.end(), p)); }
        }
        if (!law.whole_pages) {
          REQUIRE(static_cast<std::int32_t>(kept.size()) == std::min(tokens, law.budget));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("policy: kept rows and evicted positions are listed ascending and disjoint",
                   "[policy][property]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    Scored c(setup());
    REQUIRE(c.cache.append(0, 30) == Status::ok);
    for (std::int32_t step = 0; step < 12; ++step) {
      const Observation obs = c.observation();
      const CacheView view = c.cache.view();
      std::vector<std::byte> workspace(plan_workspace_bytes(law.policy, plan_shape(view, obs)));
      const PlanRef made = plan(law.policy, view, obs, workspace);
      REQUIRE(made.status() == Status::ok);
      for (std::int32_t l = 0; l < 2; ++l) {
        for (std::int32_t h = 0; h < 2; ++h) {
          std::vector<std::int32_t> rows;
          std::set<std::int32_t> positions;
          made.for_each_kept(SequenceId{0}, LayerId{l}, HeadId{h}, [&](std::int32_t r) {
            rows.push_back(r);
            positions.insert(raw(view.position(SequenceId{0}, LayerId{l}, HeadId{h}, r)));
          });
          REQUIRE(std::is_sorted(rows.begin(), rows.end()));
          const auto gone = made.evicted(SequenceId{0}, LayerId{l}, HeadId{h});
          REQUIRE(std::is_sorted(gone.begin(), gone.end()));
          for (const Position p : gone) { REQUIRE(positions.insert(raw(p)).second); }
          REQUIRE(static_cast<std::int32_t>(positions.size()) ==
                  c.cache.cache.live_rows(SequenceId{0}));
        }
      }
      REQUIRE(c.cache.evict(law.policy, c.observation()).status == Status::ok);
      REQUIRE(c.cache.append(0, 1 + step % 3) == Status::ok);
    }
  }
}

TEMPLATE_TEST_CASE("policy: a sequence alone keeps what it keeps in a batch",
                   "[policy][property]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    const std::array<std::int32_t, 5> tokens{17, 0, 31, 1, 9};
    Scored batch(setup(4, 5));
    std::vector<Scored> alone;
    for (std::int32_t s = 0; s < 5; ++s) { alone.emplace_back(setup(), s); }
    for (std::int32_t step = 0; step < 6; ++step) {
      for (std::int32_t s = 0; s < 5; ++s) {
        const std::int32_t n = step == 0 ? tokens[static_cast<std::size_t>(s)] : (s + step) % 3;
        REQUIRE(batch.cache.append(s, n) == Status::ok);
        REQUIRE(alone[static_cast<std::size_t>(s)].cache.append(0, n) == Status::ok);
      }
      REQUIRE(batch.cache.evict(law.policy, batch.observation()).status == Status::ok);
      REQUIRE(batch.cache.fault() == "");
      for (std::int32_t s = 0; s < 5; ++s) {
        Scored& one = alone[static_cast<std::size_t>(s)];
        REQUIRE(one.cache.evict(law.policy, one.observation()).status == Status::ok);
        INFO("step " << step << " sequence " << s);
        REQUIRE(kept_sets(one.cache, 0) == kept_sets(batch.cache, s));
      }
    }
  }
}

TEMPLATE_TEST_CASE("policy: NaN and -inf are one lowest class and go first, counted",
                   "[policy][nan]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    if (!law.by_score || law.whole_pages) { continue; }  // pages: page_selector_test
    const std::int32_t tokens = law.budget + 8;
    // Ten candidates are lowest, in two dresses; one of their class too many for the two or so that may stay.
    const auto lowest = [&](std::int32_t p) { return p >= law.sinks && p < law.sinks + 10; };
    std::vector<std::vector<std::int32_t>> first;
    for (const bool swapped : {false, true}) {
      Scored c(setup());
      REQUIRE(c.cache.append(0, tokens) == Status::ok);
      std::int32_t nan = 0;
      const Observation obs = c.observation([&](std::int32_t p, float score) {
        if (!lowest(p)) { return score; }
        const bool is_nan = (p % 2 == 0) != swapped;
        if (is_nan && p < tokens - law.recent) { ++nan; }
        return is_nan ? (p % 3 == 0 ? -1.0F : 1.0F) * std::numeric_limits<float>::quiet_NaN()
                      : -std::numeric_limits<float>::infinity();
      });
      const Report report = c.cache.evict(law.policy, obs);
      REQUIRE(report.status == Status::ok);
      if (law.budget > law.sinks + law.recent) { CHECK(report.nan_count == nan); }
      const auto sets = kept_sets(c.cache, 0);
      for (const auto& kept : sets) {
        // No row of the class stays while one that scores more goes; among themselves the lower positions stay.
        std::int32_t last_kept = -1;
        std::int32_t first_gone = 1000;
        for (std::int32_t p = law.sinks; p < tokens - law.recent; ++p) {
          const bool stays = std::binary_search(kept.begin(), kept.end(), p);
          if (lowest(p) && stays) { last_kept = p; }
          if (lowest(p) && !stays) { first_gone = std::min(first_gone, p); }
          if (!lowest(p) && !stays) { CHECK(last_kept == -1); }
        }
        CHECK(last_kept < first_gone);
      }
      if (swapped) { CHECK(sets == first); }
      first = sets;
    }
  }
}

TEMPLATE_TEST_CASE("policy: kept rows depend neither on the page size nor on page placement",
                   "[policy][property]",
                   KVTRIM_POLICIES) {
  for (const auto& law : Laws<TestType>::cases()) {
    std::vector<std::vector<std::vector<std::int32_t>>> results;
    for (const std::int32_t page_size : {4, 4, 1, 3, 16}) {
      if (law.whole_pages && page_size != 4) { continue; }
      Scored c(setup(page_size));
      // The second time, pages are handed out in another order.
      if (!results.empty()) {
        std::vector<PageId> taken;
        while (const auto p = c.cache.cache.pool().try_acquire()) { taken.push_back(*p); }
        test::Random random(9);
        for (std::size_t i = taken.size(); i > 1; --i) {
          std::swap(taken[i - 1],
                    taken[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(i)))]);
        }
        for (const PageId p : taken) { c.cache.cache.pool().release(p); }
      }
      std::vector<std::vector<std::int32_t>> sets;
      REQUIRE(c.cache.append(0, 37) == Status::ok);
      for (std::int32_t step = 0; step < 8; ++step) {
        REQUIRE(c.cache.evict(law.policy, c.observation()).status == Status::ok);
        for (auto& set : kept_sets(c.cache, 0)) { sets.push_back(set); }
        REQUIRE(c.cache.append(0, 1) == Status::ok);
      }
      REQUIRE(c.cache.fault() == "");
      results.push_back(sets);
      REQUIRE(results.back() == results.front());
    }
  }
}

TEST_CASE("no_scores: is empty, and what policies by position alone return", "[no_scores]") {
  STATIC_REQUIRE(std::is_empty_v<NoScores>);
  STATIC_REQUIRE(std::is_same_v<decltype(StreamingSink().scorer()), NoScores>);
  STATIC_REQUIRE(std::is_same_v<ScorerOf<NoScores>::type, NoScorer>);
  STATIC_REQUIRE(!Scorer<NoScores>);
}
