// SPDX-License-Identifier: Apache-2.0
// What every policy must obey with the scores that it makes itself. A new policy adds one word to `KVTRIM_POLICIES`; one
// that is no `TopRows` says in an `Entry` how it is made. (policy_test.cpp: the same of selection, with given scores.)
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/accumulate.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using test::Keys;
using test::Layout;
using test::MethodSetup;
using test::MethodWorld;

// clang-format off
#define KVTRIM_POLICIES                                                                          \
  Full, StreamingSink, HeavyHitter, SnapKVSelector, PageSelector<>, External, KeyDiff, KeyNorm,  \
  QFilter, Random, Tova, TopRows<PerLayer<KeyDiffParams>>, TopRows<ValueNorm<KeyDiffParams>>,    \
  TopRows<OutputNorm<RandomParams>>, PageSelector<ValueNorm<KeyDiffParams>>,                     \
  PageSelector<TovaParams>
// clang-format on

namespace {

// How a policy is made: `budget` rows stay, of which some at either end are protected.
template <class P>
struct Entry;

// What a policy does unless its entry says otherwise.
struct Usual {
  static constexpr bool given_scores = false;  // needs Observation::scores
  static constexpr bool whole_pages = false;   // what stays depends on the page size
  static constexpr bool reads_keys = true;     // a row with a NaN key goes first
};

template <class Scores>
struct Entry<TopRows<Scores>> : Usual {
  static constexpr bool reads_keys = !std::is_same_v<Scores, RandomParams>;
  static TopRows<Scores> make(std::int32_t budget) {
    typename TopRows<Scores>::Params p;
    p.budget = budget;
    p.sinks = 2;
    p.recent = 3;
    return TopRows<Scores>(p);
  }
};
template <>
struct Entry<External> : Usual {
  static constexpr bool given_scores = true;
  static External make(std::int32_t budget) { return External({.budget = budget, .sinks = 1}); }
};
template <>
struct Entry<Full> : Usual {
  static constexpr bool reads_keys = false;
  static Full make(std::int32_t) { return {}; }
};
template <>
struct Entry<StreamingSink> : Usual {
  static constexpr bool reads_keys = false;
  static StreamingSink make(std::int32_t budget) {
    return StreamingSink({.sinks = 2, .recent = budget - 2, .form = SinkForm::exact});
  }
};
template <>
struct Entry<HeavyHitter> : Usual {
  static HeavyHitter make(std::int32_t budget) {
    return HeavyHitter({.heavy = budget - 5, .recent = 3, .sinks = 2});
  }
};
template <>
struct Entry<SnapKVSelector> : Usual {
  static SnapKVSelector make(std::int32_t budget) {
    return SnapKVSelector({.window = 4, .budget = budget, .kernel = 1, .sinks = 2});
  }
};
template <class Scores>
struct Entry<PageSelector<Scores>> : Usual {
  static constexpr bool whole_pages = true;
  static PageSelector<Scores> make(std::int32_t budget) {
    typename PageSelector<Scores>::Params p;
    p.budget = budget;
    p.window = 3;
    return PageSelector<Scores>(p);
  }
};

constexpr std::int32_t budget = 14;

template <class P>
Report evict(MethodWorld& world, const P& policy) {
  return world.evict(policy, world.observation(Entry<P>::given_scores));
}

template <class P>
Demand demand_of(const P& policy, std::int32_t live) {
  DemandInput in;
  in.live = live;
  in.page_size = 4;
  in.state.live_rows = in.state.next_position = live;
  return policy.demand(in);
}

// Kept rows of a plan that is not carried out, all heads of all sequences.
template <class P>
std::vector<std::vector<std::int32_t>> planned(MethodWorld& world, const CacheView& view) {
  const P policy = Entry<P>::make(budget);
  const Observation obs = world.observation(Entry<P>::given_scores);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const PlanView made = plan(policy, view, obs, workspace);
  REQUIRE(made.status() == Status::ok);
  std::vector<std::vector<std::int32_t>> out;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        auto& rows = out.emplace_back();
        made.for_each_kept(
            SequenceId{s}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { rows.push_back(r); });
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("laws: names are unique", "[laws]") {
  const auto names =
      []<class... P>(std::type_identity<P>...) {
        return std::multiset<std::string_view>{P::name...};
      }(std::type_identity<External>{},
        std::type_identity<Full>{},
        std::type_identity<HeavyHitter>{},
        std::type_identity<KeyDiff>{},
        std::type_identity<KeyNorm>{},
        std::type_identity<PageSelector<>>{},
        std::type_identity<QFilter>{},
        std::type_identity<Random>{},
        std::type_identity<SnapKVSelector>{},
        std::type_identity<StreamingSink>{},
        std::type_identity<Tova>{},
        std::type_identity<TopRows<PerLayer<KeyDiffParams>>>{},
        std::type_identity<TopRows<ValueNorm<KeyDiffParams>>>{},
        std::type_identity<TopRows<OutputNorm<KeyDiffParams>>>{});
  for (const auto name : names) {
    INFO(name);
    CHECK(names.count(name) == 1);
  }
}

TEMPLATE_TEST_CASE("laws: nothing goes while rows are within the budget",
                   "[laws][edge]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  for (const std::int32_t tokens : {0, 1, 2, 5, budget - 1, budget}) {
    MethodWorld world({});
    REQUIRE(world.append(0, tokens) == Status::ok);
    const Report report = evict(world, policy);
    INFO("tokens " << tokens);
    REQUIRE(report.status == Status::ok);
    REQUIRE(report.evicted_rows == 0);
    REQUIRE(report.bytes_moved == 0);
    REQUIRE(static_cast<std::int32_t>(world.kept(0)[3].size()) == tokens);
  }
}

TEMPLATE_TEST_CASE("laws: as many rows stay as demanded, protected ones among them, ascending",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  for (const std::int32_t tokens : {budget + 1, 30, 61}) {
    MethodWorld world({});
    REQUIRE(world.append(0, tokens) == Status::ok);
    const Demand demand = demand_of(policy, tokens);
    for (const auto& rows : planned<TestType>(world, world.view())) {
      REQUIRE(std::is_sorted(rows.begin(), rows.end()));
      REQUIRE(std::set<std::int32_t>(rows.begin(), rows.end()).size() == rows.size());
      const auto kept = static_cast<std::int32_t>(rows.size());
      INFO("tokens " << tokens << ", kept " << kept);
      REQUIRE(kept <= demand.keep);
      REQUIRE(kept > demand.keep - (Entry<TestType>::whole_pages ? 4 : 1));
      for (std::int32_t p = 0; p < tokens; ++p) {
        if (p < demand.protection.sinks || p >= tokens - demand.protection.recent) {
          REQUIRE(std::binary_search(rows.begin(), rows.end(), p));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("laws: a second cut at once finds nothing to do",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  MethodWorld world({});
  REQUIRE(world.append(0, 45) == Status::ok);
  REQUIRE(evict(world, policy).status == Status::ok);
  const auto before = world.kept(0);
  const Report again = evict(world, policy);
  CHECK(again.status == Status::ok);
  CHECK(again.evicted_rows == 0);
  CHECK(again.bytes_moved == 0);
  CHECK(world.kept(0) == before);
}

TEMPLATE_TEST_CASE("laws: keys, values, scores and positions move together, over many steps",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  MethodWorld world({});
  REQUIRE(world.append(0, 33) == Status::ok);
  for (std::int32_t step = 0; step < 10; ++step) {
    REQUIRE(evict(world, policy).status == Status::ok);
    REQUIRE(world.rows_belong_to_their_positions());
    for (const auto& set : world.kept(0)) {
      REQUIRE(std::set<std::int32_t>(set.begin(), set.end()).size() == set.size());
    }
    REQUIRE(world.append(0, 1 + step % 3) == Status::ok);
  }
  REQUIRE(raw(world.cache().next_position(SequenceId{0})) == 33 + 19);
}

TEMPLATE_TEST_CASE("laws: kept rows depend neither on page size nor on page placement",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  std::vector<std::vector<std::vector<std::int32_t>>> first;
  for (const std::int32_t page_size : {4, 4, 1, 3, 16}) {
    if (Entry<TestType>::whole_pages && page_size != 4) { continue; }
    MethodWorld world({.page_size = page_size, .shuffled = !first.empty()});
    REQUIRE(world.append(0, 37) == Status::ok);
    std::vector<std::vector<std::vector<std::int32_t>>> sets;
    for (std::int32_t step = 0; step < 5; ++step) {
      REQUIRE(evict(world, Entry<TestType>::make(budget)).status == Status::ok);
      sets.push_back(world.kept(0));
      REQUIRE(world.append(0, 1) == Status::ok);
    }
    if (first.empty()) { first = sets; }
    INFO("page size " << page_size);
    REQUIRE(sets == first);
  }
}

TEMPLATE_TEST_CASE("laws: kept rows do not depend on the layout of the keys",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  MethodWorld world({.sequences = 2, .shuffled = true});
  REQUIRE(world.append(0, 37) == Status::ok);
  REQUIRE(world.append(1, 22) == Status::ok);
  const auto expected = planned<TestType>(world, world.view());
  for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::packed, Layout::transposed}) {
    INFO("layout " << static_cast<int>(layout));
    CHECK(planned<TestType>(world, world.relaid(layout)) == expected);
  }
}

TEMPLATE_TEST_CASE("laws: a sequence alone keeps what it keeps in a batch",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  const std::array<std::int32_t, 4> tokens{17, 1, 31, 9};
  MethodWorld batch({.sequences = 4, .shuffled = true});
  std::vector<MethodWorld> alone;
  alone.reserve(4);
  for (std::int32_t s = 0; s < 4; ++s) {
    alone.emplace_back(MethodSetup{.first_name = s});
    REQUIRE(batch.append(s, tokens[static_cast<std::size_t>(s)]) == Status::ok);
    REQUIRE(alone.back().append(0, tokens[static_cast<std::size_t>(s)]) == Status::ok);
  }
  for (std::int32_t step = 0; step < 4; ++step) {
    REQUIRE(evict(batch, policy).status == Status::ok);
    for (std::int32_t s = 0; s < 4; ++s) {
      MethodWorld& one = alone[static_cast<std::size_t>(s)];
      REQUIRE(evict(one, policy).status == Status::ok);
      INFO("step " << step << ", sequence " << s);
      REQUIRE(one.kept(0) == batch.kept(s));
      REQUIRE(batch.append(s, 1 + (s + step) % 3) == Status::ok);
      REQUIRE(one.append(0, 1 + (s + step) % 3) == Status::ok);
    }
  }
}

TEMPLATE_TEST_CASE(
    "laws: rows that are not finite go before all others, the higher positions first",
    "[laws][nan]",
    KVTRIM_POLICIES) {
  using E = Entry<TestType>;
  if constexpr (E::reads_keys && !E::whole_pages) {
    const TestType policy = E::make(budget);
    // More of them than go, so that some must stay: the lower ones.
    const std::set<std::int32_t> bad{5, 7, 8, 11, 12, 13, 14, 17, 19, 20, 21, 23};
    for (const std::int32_t tokens : {20, 26, 60}) {
      MethodWorld world({.bad = bad});
      REQUIRE(world.append(0, tokens) == Status::ok);
      const Demand demand = demand_of(policy, tokens);
      const Report report = evict(world, policy);
      REQUIRE(report.status == Status::ok);
      INFO("tokens " << tokens);
      CHECK(report.nan_count > 0);
      for (const auto& kept : world.kept(0)) {
        std::int32_t last_bad = -1;
        std::int32_t first_gone_bad = tokens;
        bool good_gone = false;
        for (std::int32_t p = demand.protection.sinks; p < tokens - demand.protection.recent; ++p) {
          const bool stays = std::binary_search(kept.begin(), kept.end(), p);
          const bool is_bad = bad.contains(p);
          if (is_bad && stays) { last_bad = p; }
          if (is_bad && !stays) { first_gone_bad = std::min(first_gone_bad, p); }
          good_gone = good_gone || (!is_bad && !stays);
        }
        CHECK(last_bad < first_gone_bad);
        CHECK((last_bad == -1 || !good_gone));
      }
    }
  } else {
    // By position or by lot, keys are not looked at; pages: a NaN counts as the lowest of its page (page_selector_test).
    MethodWorld world({.bad = {3, 9}});
    REQUIRE(world.append(0, 30) == Status::ok);
    CHECK(evict(world, E::make(budget)).status == Status::ok);
  }
}

TEMPLATE_TEST_CASE("laws: equal keys and keys of norm 0 do no harm",
                   "[laws][edge]",
                   KVTRIM_POLICIES) {
  const TestType policy = Entry<TestType>::make(budget);
  for (const Keys keys : {Keys::constant, Keys::zero}) {
    MethodWorld world({.keys = keys});
    REQUIRE(world.append(0, 40) == Status::ok);
    const Report report = evict(world, policy);
    CHECK(report.status == Status::ok);
    CHECK(report.nan_count == 0);
    const auto left = static_cast<std::int32_t>(world.kept(0)[0].size());
    CHECK(left <= demand_of(policy, 40).keep);
    CHECK(left > demand_of(policy, 40).keep - (Entry<TestType>::whole_pages ? 4 : 1));
    CHECK(world.rows_belong_to_their_positions());
  }
}
