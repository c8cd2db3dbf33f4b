// SPDX-License-Identifier: Apache-2.0
// What every policy must obey with the scores that it makes itself. A new policy adds one word to `KVTRIM_POLICIES`; one
// that is not a `TopRows` says in an `Entry` how it is made. (policy_test.cpp: the same of selection, with given scores.)
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/peak_pages.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"
#include "support/quantised.hpp"
#include "support/step_world.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::Keys;
using test::Layout;
using test::MethodSetup;
using test::MethodWorld;

// clang-format off
#define KVTRIM_POLICIES                                                                           \
  Full, StreamingSink<SinkForm::exact>, HeavyHitter<>, Promote, PromoteKeyDiff, SnapKVSelector<>, \
  SnapKVSelector<KeyDiffParams>, SnapKVSelector<ValueNorm<WindowParams>>, PageSelector<>,         \
  External, KeyDiff, KeyNorm, QFilter, Random, Tova, RKV, ExpectedAttention, CurKV, LagKV,        \
  ChunkKV<>, ChunkKV<KeyDiffParams>, PyramidKV, AdaKV<SnapKVSelector<>>, AdaKV<KeyNorm>,          \
  CriticalKV<SnapKVSelector<>>, CriticalKV<AdaKV<KeyNorm>>, TopRows<PerLayer<KeyDiffParams>>,     \
  TopRows<ValueNorm<KeyDiffParams>>, TopRows<OutputNorm<RandomParams>>,                           \
  TopRows<ValueNorm<WindowParams>>, PageSelector<ValueNorm<KeyDiffParams>>,                       \
  PageSelector<TovaParams>
// clang-format on

namespace {

using Promote = HeavyHitter<AccumulateParams, HeavyMode::promote>;
using PromoteKeyDiff = HeavyHitter<KeyDiffParams, HeavyMode::promote>;

// How a policy is made: `budget` rows stay (of a head, on average), of which some at either end are protected.
template <class P>
struct Entry;

// What a policy is like unless its entry says otherwise.
struct Usual {
  static constexpr TableScope scope = TableScope::group;  // tables that it needs
  static constexpr bool given_scores = false;             // needs Observation::scores
  static constexpr bool whole_pages = false;              // what stays depends on the page size
  static constexpr bool by_row =
      true;  // a row whose key and value are NaN goes first, and it alone
};

template <class Scores>
struct Entry<TopRows<Scores>> : Usual {
  static constexpr bool by_row = !std::is_same_v<Scores, RandomParams>;
  static TopRows<Scores> make(std::int32_t budget) {
    typename TopRows<Scores>::Params p;
    p.budget = budget;
    p.sinks = 2;
    p.recent = 3;
    return TopRows<Scores>(p);
  }
};
template <>
struct Entry<TopRows<ValueNorm<WindowParams>>> : Usual {
  static TopRows<ValueNorm<WindowParams>> make(std::int32_t budget) {
    return TopRows<ValueNorm<WindowParams>>(
        {.budget = budget, .recent = 4, .scores = {.scores = {.window = 4, .kernel = 1}}});
  }
};
template <>
struct Entry<ExpectedAttention> : Usual {
  static ExpectedAttention make(std::int32_t budget) {
    static constexpr std::array<double, 4> frequencies{1, 0.25, 0.0625, 0.015625};
    ExpectedAttention::Params p;
    p.budget = budget;
    p.scores.future = 20;
    p.scores.rope = {.inverse_frequencies = frequencies, .dim = 8, .same_for_all_layers = true};
    return ExpectedAttention(p);
  }
};
template <>
struct Entry<RKV> : Usual {
  static RKV make(std::int32_t budget) {
    RKV::Params p;
    p.budget = budget;
    p.recent = 3;
    p.scores.window = 3;
    return RKV(p);
  }
};
template <>
struct Entry<LagKV> : Usual {
  static constexpr bool by_row = false;  // the rows behind it are scored by it
  static LagKV make(std::int32_t budget) { return LagKV({.budget = budget, .sinks = 2, .lag = 4}); }
};
template <class Scores>
struct Entry<ChunkKV<Scores>> : Usual {
  static constexpr bool by_row = false;  // its chunk goes with it
  static ChunkKV<Scores> make(std::int32_t budget) {
    typename ChunkKV<Scores>::Params p;
    p.budget = budget;
    p.chunk = 3;
    p.sinks = 2;
    p.recent = 2;
    if constexpr (std::is_same_v<Scores, WindowParams>) { p.scores = {.window = 2, .kernel = 1}; }
    return ChunkKV<Scores>(p);
  }
};
template <>
struct Entry<PyramidKV> : Usual {
  static constexpr TableScope scope = TableScope::layer;
  static PyramidKV make(std::int32_t budget) {
    return PyramidKV({.snapkv = {.window = 4, .budget = budget, .kernel = 1}});
  }
};
template <class Inner>
struct Entry<AdaKV<Inner>> : Usual {
  static constexpr TableScope scope = TableScope::head;
  static AdaKV<Inner> make(std::int32_t budget) {
    return AdaKV<Inner>({.inner = Entry<Inner>::make(budget).params()});
  }
};
template <class Inner>
struct Entry<CriticalKV<Inner>> : Entry<Inner> {
  static CriticalKV<Inner> make(std::int32_t budget) {
    return CriticalKV<Inner>({.inner = Entry<Inner>::make(budget).params()});
  }
};
template <>
struct Entry<External> : Usual {
  static constexpr bool given_scores = true;
  static External make(std::int32_t budget) { return External({.budget = budget, .sinks = 1}); }
};
template <>
struct Entry<Full> : Usual {
  static constexpr bool by_row = false;
  static Full make(std::int32_t) { return {}; }
};
template <>
struct Entry<StreamingSink<SinkForm::exact>> : Usual {
  static constexpr bool by_row = false;
  static StreamingSink<SinkForm::exact> make(std::int32_t budget) {
    return StreamingSink<SinkForm::exact>({.sinks = 2, .recent = budget - 2});
  }
};
template <class Scores, HeavyMode Mode>
struct Entry<HeavyHitter<Scores, Mode>> : Usual {
  static HeavyHitter<Scores, Mode> make(std::int32_t budget) {
    return HeavyHitter<Scores, Mode>({.heavy = budget - 5, .recent = 3, .sinks = 2});
  }
};
template <class Scores>
struct Entry<SnapKVSelector<Scores>> : Usual {
  static SnapKVSelector<Scores> make(std::int32_t budget) {
    const auto p = Entry<TopRows<Scores>>::make(budget).params();
    return SnapKVSelector<Scores>({p.budget, p.sinks, p.recent, p.scores});
  }
};
template <>
struct Entry<SnapKVSelector<>> : Usual {
  static SnapKVSelector<> make(std::int32_t budget) {
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

// Rows that a plan keeps, all heads of all sequences.
std::vector<std::vector<std::int32_t>> kept_rows(const PlanView& made, const CacheView& view) {
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

// A policy as the laws see it: the laws are compiled once, not once per policy.
struct Law {
  Report (*evict)(MethodWorld&);
  Report (*evict_shown)(MethodWorld&, const Observation&);
  Needs needs;
  std::vector<std::vector<std::int32_t>> (*planned)(MethodWorld&, const CacheView&);
  Status (*status)(MethodWorld&, const CacheView&, const CacheView& sized_by);
  std::vector<float> (*scores)(MethodWorld&, const CacheView&);  // of layer 1, head 1
  Demand (*demand)(std::int32_t tokens, std::int32_t layer);
  PeakPages (*peak)(std::int32_t prompt, std::int32_t new_tokens, std::int32_t chunk, CutTimes);
  TableScope scope;
  bool shares;  // heads of a layer share a budget
  bool whole_pages;
  bool by_row;

  // A world with the tables that the policy needs.
  MethodSetup setup(MethodSetup from = {}) const {
    from.scope = scope;
    return from;
  }
};

template <class P>
Law law_of() {
  using E = Entry<P>;
  Law law{};
  law.scope = E::scope;
  law.shares = AdaptivePolicy<P>;
  law.whole_pages = E::whole_pages;
  law.by_row = E::by_row;
  law.evict = [](MethodWorld& world) {
    return world.evict(E::make(budget), world.observation(E::given_scores));
  };
  law.evict_shown = [](MethodWorld& world, const Observation& obs) {
    return world.evict(E::make(budget), obs);
  };
  law.needs = kvtrim::needs(E::make(budget));
  law.planned = [](MethodWorld& world, const CacheView& view) {
    const P policy = E::make(budget);
    const Observation obs = world.observation(E::given_scores);
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    const PlanRef made = plan(policy, view, obs, workspace);
    REQUIRE(made.status() == Status::ok);
    return kept_rows(made, view);
  };
  law.status = [](MethodWorld& world, const CacheView& view, const CacheView& sized_by) {
    const P policy = E::make(budget);
    const Observation obs = world.observation(E::given_scores);
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(sized_by, obs)));
    return plan(policy, view, obs, workspace).status();
  };
  law.scores = [](MethodWorld& world, const CacheView& view) {
    using Scores = std::remove_cvref_t<decltype(std::declval<const P&>().scorer())>;
    const typename ScorerOf<Scores>::type scorer(E::make(budget).scorer());
    const Observation obs = world.observation(E::given_scores);
    REQUIRE(scorer.check(view, obs) == Status::ok);
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
    std::vector<float> out(
        static_cast<std::size_t>(view.live_rows(SequenceId{0}, LayerId{1}, HeadId{1})),
        std::nanf(""));
    scorer.score({view, SequenceId{0}, LayerId{1}, HeadId{1}}, obs, scratch, out);
    return out;
  };
  law.demand = [](std::int32_t tokens, std::int32_t layer) {
    DemandInput in;
    in.live = tokens;
    in.page_size = 4;
    in.state.live_rows = in.state.next_position = tokens;
    in.layer = LayerId{layer};
    in.layers = 2;
    return E::make(budget).demand(in);
  };
  law.peak = [](std::int32_t prompt, std::int32_t new_tokens, std::int32_t chunk, CutTimes cuts) {
    return peak_pages(E::make(budget), prompt, new_tokens, 4, chunk, {.cuts = cuts, .layers = 2});
  };
  return law;
}

// Whether each head has the rows demanded of it; of heads that share a budget, each layer.
bool as_many_as_demanded(const Law& law,
                         std::int32_t tokens,
                         const std::vector<std::vector<std::int32_t>>& kept) {
  bool right = true;
  for (std::int32_t l = 0; l < 2; ++l) {
    const std::int32_t keep = std::min(tokens, law.demand(tokens, l).keep);
    const auto first = static_cast<std::int32_t>(kept[static_cast<std::size_t>(2 * l)].size());
    const auto second = static_cast<std::int32_t>(kept[static_cast<std::size_t>(2 * l + 1)].size());
    if (law.shares) {
      right = right && first + second == 2 * keep;
    } else if (law.whole_pages) {
      right = right && first == second && first <= keep && first > keep - 4;
    } else {
      right = right && first == keep && second == keep;
    }
  }
  return right;
}

// Scores of quantised rows, and what stays, against the same rows widened beforehand: bit for bit.
void quantised_rows_score_as_widened(const Law& law) {
  MethodWorld world(law.setup({.dim = 32, .value_dim = 32, .max_rows = 44, .shuffled = true}));
  REQUIRE(world.append(0, 37) == Status::ok);
  for (const test::Quantisation& q : test::quantisations()) {
    INFO(to_string(q.dtype) << " " << to_string(q.format) << ", scales "
                            << static_cast<int>(q.scales));
    const test::QuantisedCache cache(world.view(), q);
    check_layout(cache.quantised);
    check_layout(cache.widened);
    const auto bits = [&](const CacheView& view) {
      std::vector<std::uint32_t> out;
      for (const float x : law.scores(world, view)) {
        out.push_back(std::bit_cast<std::uint32_t>(x));
      }
      return out;
    };
    CHECK(bits(cache.quantised) == bits(cache.widened));
    CHECK(law.planned(world, cache.quantised) == law.planned(world, cache.widened));
  }
}

void keeps_all_within_the_budget(const Law& law) {
  for (const std::int32_t tokens : {0, 1, 2, 5, budget - 1, budget}) {
    MethodWorld world(law.setup());
    REQUIRE(world.append(0, tokens) == Status::ok);
    const Report report = law.evict(world);
    INFO("tokens " << tokens);
    REQUIRE(report.status == Status::ok);
    REQUIRE(report.evicted_rows == 0);
    REQUIRE(report.bytes_moved == 0);
    REQUIRE(static_cast<std::int32_t>(world.kept(0)[3].size()) == tokens);
  }
}

// Whatever a length says, nothing is sized or read by it before the tables are checked.
void refuses_lengths_beyond_the_table(const Law& law) {
  MethodWorld world(law.setup());
  REQUIRE(world.append(0, 25) == Status::ok);  // with 3 rows of padding, still in 7 pages
  const CacheView good = world.view();
  const std::int32_t room = good.table.capacity(SequenceId{0}, LayerId{0}, HeadId{0}) * 4;
  const std::vector<SequenceState> states(good.states, good.states + good.tables_per_sequence());
  for (const std::int32_t length :
       {room + 1, 1 << 20, std::numeric_limits<std::int32_t>::max(), -1}) {
    for (const std::int32_t padding : {0, 3}) {
      for (std::size_t t = 0; t <= states.size(); ++t) {  // one table, or all of them
        std::vector<SequenceState> wrong = states;
        for (std::size_t i = 0; i < states.size(); ++i) {
          if (i == t || t == states.size()) { wrong[i].live_rows = length; }
        }
        CacheView bad = good;
        bad.states = wrong.data();
        bad.first_rows = &padding;
        INFO("length " << length << ", padding " << padding << ", table " << t);
        CHECK(plan_shape(bad).max_rows <= room);
        CHECK(law.status(world, bad, good) == Status::length_beyond_table);
        CHECK(law.status(world, bad, bad) == Status::length_beyond_table);
      }
    }
  }
}

void keeps_as_many_as_demanded(const Law& law) {
  for (const std::int32_t tokens : {budget + 1, 30, 61}) {
    MethodWorld world(law.setup());
    REQUIRE(world.append(0, tokens) == Status::ok);
    const auto kept = law.planned(world, world.view());
    INFO("tokens " << tokens << ", kept " << kept[0].size() << ' ' << kept[1].size() << ' '
                   << kept[2].size() << ' ' << kept[3].size());
    CHECK(as_many_as_demanded(law, tokens, kept));
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const auto& rows = kept[i];
      REQUIRE(std::is_sorted(rows.begin(), rows.end()));
      REQUIRE(std::set<std::int32_t>(rows.begin(), rows.end()).size() == rows.size());
      const Demand demand = law.demand(tokens, static_cast<std::int32_t>(i / 2));
      for (std::int32_t p = 0; p < tokens; ++p) {
        if (p < demand.protection.sinks || p >= tokens - demand.protection.recent) {
          REQUIRE(std::binary_search(rows.begin(), rows.end(), p));
        }
      }
    }
  }
}

void second_cut_does_nothing(const Law& law) {
  MethodWorld world(law.setup());
  REQUIRE(world.append(0, 45) == Status::ok);
  REQUIRE(law.evict(world).status == Status::ok);
  const auto before = world.kept(0);
  const Report again = law.evict(world);
  CHECK(again.status == Status::ok);
  CHECK(again.evicted_rows == 0);
  CHECK(again.bytes_moved == 0);
  CHECK(world.kept(0) == before);
}

void rows_move_as_a_whole(const Law& law) {
  MethodWorld world(law.setup());
  REQUIRE(world.append(0, 33) == Status::ok);
  for (std::int32_t step = 0; step < 10; ++step) {
    REQUIRE(law.evict(world).status == Status::ok);
    REQUIRE(world.rows_belong_to_their_positions());
    for (const auto& set : world.kept(0)) {
      REQUIRE(std::set<std::int32_t>(set.begin(), set.end()).size() == set.size());
    }
    REQUIRE(world.append(0, 1 + step % 3) == Status::ok);
  }
  REQUIRE(raw(world.cache().next_position(SequenceId{0})) == 33 + 19);
}

void ignores_pages(const Law& law) {
  std::vector<std::vector<std::vector<std::int32_t>>> first;
  for (const std::int32_t page_size : {4, 4, 1, 3, 16}) {
    if (law.whole_pages && page_size != 4) { continue; }
    MethodWorld world(law.setup({.page_size = page_size, .shuffled = !first.empty()}));
    REQUIRE(world.append(0, 37) == Status::ok);
    std::vector<std::vector<std::vector<std::int32_t>>> sets;
    for (std::int32_t step = 0; step < 5; ++step) {
      REQUIRE(law.evict(world).status == Status::ok);
      sets.push_back(world.kept(0));
      REQUIRE(world.append(0, 1) == Status::ok);
    }
    if (first.empty()) { first = sets; }
    INFO("page size " << page_size);
    REQUIRE(sets == first);
  }
}

void ignores_layout(const Law& law) {
  MethodWorld world(law.setup({.sequences = 2, .shuffled = true}));
  REQUIRE(world.append(0, 37) == Status::ok);
  REQUIRE(world.append(1, 22) == Status::ok);
  const auto expected = law.planned(world, world.view());
  for (const Layout layout : {Layout::nhd, Layout::hnd, Layout::packed, Layout::transposed}) {
    INFO("layout " << static_cast<int>(layout));
    CHECK(law.planned(world, world.relaid(layout)) == expected);
  }
}

void ignores_the_batch(const Law& law) {
  const std::array<std::int32_t, 4> tokens{17, 1, 31, 9};
  MethodWorld batch(law.setup({.sequences = 4, .shuffled = true}));
  std::vector<MethodWorld> alone;
  alone.reserve(4);
  for (std::int32_t s = 0; s < 4; ++s) {
    alone.emplace_back(law.setup({.first_name = s}));
    REQUIRE(batch.append(s, tokens[static_cast<std::size_t>(s)]) == Status::ok);
    REQUIRE(alone.back().append(0, tokens[static_cast<std::size_t>(s)]) == Status::ok);
  }
  for (std::int32_t step = 0; step < 4; ++step) {
    REQUIRE(law.evict(batch).status == Status::ok);
    for (std::int32_t s = 0; s < 4; ++s) {
      MethodWorld& one = alone[static_cast<std::size_t>(s)];
      REQUIRE(law.evict(one).status == Status::ok);
      INFO("step " << step << ", sequence " << s);
      REQUIRE(one.kept(0) == batch.kept(s));
      REQUIRE(batch.append(s, 1 + (s + step) % 3) == Status::ok);
      REQUIRE(one.append(0, 1 + (s + step) % 3) == Status::ok);
    }
  }
}

// A prompt in chunks, a cut, decode steps with a cut after each; one sequence has nothing at first, one is done early.
void recorder_shows_what_calls_by_hand_show(const Law& law) {
  REQUIRE(law.needs.scope >= law.scope);
  for (const bool from_probabilities : {false, true}) {
    if (from_probabilities && !law.needs.accumulate) { continue; }
    const MethodSetup setup = law.setup({.sequences = 3});
    MethodWorld recorded(setup), by_hand(setup);
    const Observation offered = recorded.observation();
    Recorder recorder(law.needs,
                      {.sequences = 3,
                       .layers = 2,
                       .query_heads = setup.kv_heads * setup.group,
                       .kv_heads = setup.kv_heads,
                       .head_dim = setup.dim,
                       .lse = true,
                       .probabilities = from_probabilities,
                       .filters = offered.filters,
                       .output = offered.output});
    test::ByHand hand(law.needs, setup, true);
    const std::vector<test::Batch> steps{{{0, 9}, {1, 0}, {2, 17}},
                                         {{0, 8}, {1, 3}, {2, 0}},
                                         {{0, 5}, {1, 21}, {2, 1}},
                                         {{0, 1}, {1, 1}, {2, 1}},
                                         {{0, 1}, {1, 1}, {2, 0}},
                                         {{0, 2}, {1, 1}, {2, 0}}};
    for (std::size_t step = 0; step < steps.size(); ++step) {
      append_rows(recorded, steps[step]);
      append_rows(by_hand, steps[step]);
      for (std::int32_t l = 0; l < setup.layers; ++l) {
        const test::StepData data(recorded, steps[step], l);
        LayerStep given = data.step(l, true);
        if (from_probabilities) {
          // Attention of one sequence at a time: probabilities of sequences lie one after the other.
          for (std::size_t i = 0; i < data.size(); ++i) {
            LayerStep one = given;
            const std::int32_t slot = data.slot(i);
            one.sequences = {&slot, 1};
            one.queries = data.block_of(i, true);
            one.unrotated = data.block_of(i, false);
            one.probabilities = {
                data.probabilities_of(i), 0, data.head_stride(), data.row_stride()};
            const CacheView view = recorded.cache().view(SequenceId{slot});
            REQUIRE(recorder.record(view, one) == Status::ok);
          }
        } else {
          REQUIRE(recorder.record(recorded.view(), given) == Status::ok);
        }
        hand.record(by_hand, data, l, from_probabilities);
      }
      INFO("step " << step);
      REQUIRE(sum_bits(recorded) == sum_bits(by_hand));
      if (step < 2) { continue; }
      Observation shown = recorder.observation();
      Observation expected = hand.observation(by_hand);
      if (law.needs.token_scores) {
        shown.scores = recorded.observation(true).scores;
        expected.scores = by_hand.observation(true).scores;
      } else {
        for (const std::int32_t slot : {0, 1, 2}) {
          CHECK(recorder.missing(law.needs, {&slot, 1}).empty());
        }
      }
      const Report got = law.evict_shown(recorded, shown);
      REQUIRE(got.status == Status::ok);
      REQUIRE(law.evict_shown(by_hand, expected).status == Status::ok);
      for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(recorded.kept(s) == by_hand.kept(s)); }
      REQUIRE(sum_bits(recorded) == sum_bits(by_hand));
    }
  }
}

void drops_bad_rows_first(const Law& law) {
  if (law.by_row && !law.whole_pages) {
    // More of them than go, so that some must stay: the lower ones.
    const std::set<std::int32_t> bad{5, 7, 8, 11, 12, 13, 14, 17, 19, 20, 21, 23};
    for (const std::int32_t tokens : {20, 26, 60}) {
      MethodWorld world(law.setup({.bad = bad}));
      REQUIRE(world.append(0, tokens) == Status::ok);
      const Report report = law.evict(world);
      REQUIRE(report.status == Status::ok);
      INFO("tokens " << tokens);
      CHECK(report.nan_count > 0);
      const auto sets = world.kept(0);
      for (std::size_t i = 0; i < sets.size(); ++i) {
        const auto& kept = sets[i];
        const Demand demand = law.demand(tokens, static_cast<std::int32_t>(i / 2));
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
    // By position or at random, keys are not looked at; pages: a NaN counts as the lowest of its page (page_selector_test);
    // otherwise the entry says what it does to its neighbours.
    MethodWorld world(law.setup({.bad = {3, 9}}));
    REQUIRE(world.append(0, 30) == Status::ok);
    CHECK(law.evict(world).status == Status::ok);
  }
}

void survives_equal_and_zero_keys(const Law& law) {
  for (const Keys keys : {Keys::constant, Keys::zero}) {
    MethodWorld world(law.setup({.keys = keys}));
    REQUIRE(world.append(0, 40) == Status::ok);
    const Report report = law.evict(world);
    CHECK(report.status == Status::ok);
    CHECK(report.nan_count == 0);
    CHECK(as_many_as_demanded(law, 40, world.kept(0)));
    CHECK(world.rows_belong_to_their_positions());
  }
}

// Pages in use are counted after every append, before the policy acts.
void never_has_more_pages_than_its_peak(const Law& law) {
  for (const CutTimes cuts : {CutTimes::after_prompt, CutTimes::each_step, CutTimes::each_chunk}) {
    for (const std::int32_t prompt : {0, 3, budget, budget + 1, 16, 17, 43}) {
      MethodWorld world(law.setup());
      const std::int32_t tables = tables_of(law.scope, 2, 2);
      const std::int32_t chunk = 6;
      const std::int32_t steps = 23;
      PeakPages seen;
      const auto append = [&](std::int32_t n, std::int64_t& most) {
        REQUIRE(world.append(0, n) == Status::ok);
        most = std::max<std::int64_t>(most, world.cache().pool().in_use());
      };
      for (std::int32_t row = 0; row < prompt; row += chunk) {
        if (row > 0 && cuts == CutTimes::each_chunk) { REQUIRE(usable(law.evict(world).status)); }
        append(std::min(chunk, prompt - row), seen.prompt);
      }
      REQUIRE(usable(law.evict(world).status));
      seen.running = world.cache().pool().in_use();
      for (std::int32_t step = 0; step < steps; ++step) {
        append(1, seen.running);
        if (cuts != CutTimes::after_prompt) { REQUIRE(usable(law.evict(world).status)); }
      }
      PeakPages most = law.peak(prompt, steps, chunk, cuts);
      most.prompt *= tables;
      most.running *= tables;
      INFO("cuts " << static_cast<int>(cuts) << ", prompt " << prompt);
      CHECK(seen.prompt <= most.prompt);
      CHECK(seen.running <= most.running);
      const bool equal_rows = law.scope == TableScope::group;
      if (equal_rows) { CHECK(seen == most); }
      if (!equal_rows) { CHECK(most.running < seen.running + 2 * tables); }
    }
  }
}

void scores_none_and_one(const Law& law) {
  for (const std::int32_t tokens : {0, 1}) {
    for (const Keys keys : {Keys::random, Keys::zero}) {
      MethodWorld world(law.setup({.keys = keys}));
      REQUIRE(world.append(0, tokens) == Status::ok);
      const auto scores = law.scores(world, world.view());
      CHECK(static_cast<std::int32_t>(scores.size()) == tokens);
      for (const float x : scores) { CHECK(!std::isnan(x)); }
    }
  }
}

}  // namespace

TEST_CASE("laws: names are unique", "[laws]") {
  const auto names =
      []<class... P>(std::type_identity<P>...) {
        return std::multiset<std::string_view>{P::name...};
      }(std::type_identity<External>{},
        std::type_identity<Full>{},
        std::type_identity<AdaKV<KeyNorm>>{},
        std::type_identity<ChunkKV<>>{},
        std::type_identity<CriticalKV<KeyNorm>>{},
        std::type_identity<CurKV>{},
        std::type_identity<ExpectedAttention>{},
        std::type_identity<LagKV>{},
        std::type_identity<PyramidKV>{},
        std::type_identity<RecursiveLagKV>{},
        std::type_identity<HeavyHitter<>>{},
        std::type_identity<HeavyHitter<KeyDiffParams>>{},
        std::type_identity<AdaKV<SnapKVSelector<>>>{},
        std::type_identity<SnapKVSelector<ValueNorm<WindowParams>>>{},
        std::type_identity<KeyDiff>{},
        std::type_identity<KeyNorm>{},
        std::type_identity<PageSelector<>>{},
        std::type_identity<QFilter>{},
        std::type_identity<Random>{},
        std::type_identity<RKV>{},
        std::type_identity<SnapKVSelector<>>{},
        std::type_identity<StreamingSink<>>{},
        std::type_identity<Tova>{},
        std::type_identity<TopRows<PerLayer<KeyDiffParams>>>{},
        std::type_identity<TopRows<ValueNorm<KeyDiffParams>>>{},
        std::type_identity<TopRows<ValueNorm<WindowParams>>>{},
        std::type_identity<TopRows<OutputNorm<KeyDiffParams>>>{});
  for (const auto name : names) {
    INFO(name);
    CHECK(names.count(name) == 1);
  }
}

TEMPLATE_TEST_CASE("laws: quantised rows are scored as if they had been widened beforehand",
                   "[laws][quantised][property]",
                   KVTRIM_POLICIES) {
  quantised_rows_score_as_widened(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: nothing goes while rows are within the budget",
                   "[laws][edge]",
                   KVTRIM_POLICIES) {
  keeps_all_within_the_budget(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: as many rows stay as demanded, protected ones among them, ascending",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  keeps_as_many_as_demanded(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: a second cut at once finds nothing to do",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  second_cut_does_nothing(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: keys, values, scores and positions move together, over many steps",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  rows_move_as_a_whole(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: kept rows depend neither on page size nor on page placement",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  ignores_pages(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: kept rows do not depend on the layout of the keys",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  ignores_layout(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: a sequence alone keeps what it keeps in a batch",
                   "[laws][property]",
                   KVTRIM_POLICIES) {
  ignores_the_batch(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: what a Recorder made for a policy shows it is what calls by hand show",
                   "[laws][recorder]",
                   KVTRIM_POLICIES) {
  recorder_shows_what_calls_by_hand_show(law_of<TestType>());
}

TEMPLATE_TEST_CASE(
    "laws: rows that are not finite go before all others, the higher positions first",
    "[laws][nan]",
    KVTRIM_POLICIES) {
  drops_bad_rows_first(law_of<TestType>());
}

TEMPLATE_TEST_CASE(
    "laws: no run has more pages than peak_pages, and those of fixed budgets as many",
    "[laws][property]",
    KVTRIM_POLICIES) {
  never_has_more_pages_than_its_peak(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: equal keys and keys of norm 0 do no harm",
                   "[laws][edge]",
                   KVTRIM_POLICIES) {
  survives_equal_and_zero_keys(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: without rows there are no scores, and a single row gets one",
                   "[laws][edge]",
                   KVTRIM_POLICIES) {
  scores_none_and_one(law_of<TestType>());
}

TEMPLATE_TEST_CASE("laws: a length beyond its table is the table's fault",
                   "[laws][fault]",
                   KVTRIM_POLICIES) {
  refuses_lengths_beyond_the_table(law_of<TestType>());
}
