// SPDX-License-Identifier: Apache-2.0
// B013, B015 and B016 in their plain form are tests of the cache; here they follow evictions.
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

#include <array>

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::for_each_value;

namespace {

PagedCache::Params scored(std::int32_t kv_heads = 2) {
  return {.pages = 40,
          .page_size = 4,
          .layers = 1,
          .kv_heads = kv_heads,
          .key_dim = 4,
          .value_dim = 2,
          .max_sequences = 3,
          .scores = true};
}

// One query's probabilities over the live rows, a function of the positions alone.
void attend(TestCache& t, SequenceId s, const AccumulateParams& params, std::int32_t step) {
  const CacheView view = t.cache.view(s);
  for (std::int32_t h = 0; h < view.kv_heads; ++h) {
    std::vector<float> p;
    for (const Row& r : t.rows(s, 0, h)) { p.push_back(0.5F + 0.5F * noise(r.position, h, step)); }
    accumulate_probabilities(params, {view, {}, {}, HeadId{h}}, {p.data(), 1, 0});
  }
}

}  // namespace

TEST_CASE("B013 a sliding layer next to a full one does not shorten the sequence",
          "[length][fault]") {
  PagedCache::Params p = scored();
  p.layers = 2;
  p.scope = TableScope::layer;
  TestCache t(p);
  const SequenceId s = t.create();
  const StreamingSink<SinkForm::exact> sliding({.sinks = 0, .recent = 1000});
  Input in;
  in.budgets = {4, 1000};  // layer 0: W = 4, layer 1: full
  in.budget_rows = {2, 1, 0};
  for (std::int32_t token = 0; token < 10; ++token) {
    REQUIRE(t.append(s, 1) == Status::ok);
    REQUIRE(evict(sliding, t, s, in).report.status == Status::ok);
  }
  CHECK(raw(t.cache.next_position(s)) == 10);
  for (const std::int32_t l : {0, 1}) {
    CHECK(t.cache.state(s, LayerId{l}).next_position == 10);
    CHECK(t.cache.next_rope_position(s, LayerId{l}) == 10);
  }
  CHECK(t.cache.live_rows(s, LayerId{0}) == 4);
  CHECK(t.cache.live_rows(s, LayerId{1}) == 10);
  CHECK(t.positions(s, 0, 1) == Rows{6, 7, 8, 9});
  CHECK(t.positions(s, 1, 1) == range(0, 10));
}

TEST_CASE("B015 a reset after evictions leaves neither their holes nor their numbers",
          "[length][fault]") {
  TestCache t(scored());
  t.rotation = plain_rotation(4);
  const SequenceId s = t.create();
  const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  for (std::int32_t token = 0; token < 13; ++token) {
    REQUIRE(t.append(s, 1) == Status::ok);
    REQUIRE(
        evict(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 4}), t, s, in).report.status ==
        Status::ok);
  }
  REQUIRE(t.cache.state(s).append_row >= 0);
  t.cache.reset(s);
  REQUIRE(t.append(s, 3) == Status::ok);
  CHECK(t.cache.live_rows(s) == 3);
  CHECK(t.slots(s) == Rows{0, 1, 2});
  CHECK(t.ropes(s) == Rows{0, 1, 2});
  CHECK(t.cache.next_rope_position(s) == 3);
  CHECK(raw(t.cache.next_position(s)) == 3);
  CHECK(t.cache.state(s).rows_at_eviction == 0);
  CHECK(t.cache.state(s).steps == 1);
  CHECK(t.cache.pool().in_use() == pages_for(3, 4));
  const CacheView view = t.cache.view(s);
  for (std::int32_t r = 0; r < 3; ++r) {
    CHECK(view.score_sums.at<float>({}, {}, HeadId{1}, r) == 0.0F);
    CHECK(view.score_compensations.at<float>({}, {}, HeadId{1}, r) == 0.0F);
  }
}

TEST_CASE("B016 removing the last tokens after an eviction counts tokens, not slots",
          "[length][fault]") {
  TestCache t(scored());
  const SequenceId s = t.create();
  for (std::int32_t token = 0; token < 12; ++token) {
    REQUIRE(t.append(s, 1) == Status::ok);
    REQUIRE(evict(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 4}), t, s).report.status ==
            Status::ok);
  }
  REQUIRE(t.positions(s) == Rows{0, 1, 8, 9, 10, 11});
  CHECK(t.cache.try_remove_last(s, 0) == Status::ok);
  CHECK(t.positions(s) == Rows{0, 1, 8, 9, 10, 11});
  CHECK(t.cache.try_remove_last(s, 3) == Status::ok);
  CHECK(t.positions(s) == Rows{0, 1, 8});
  CHECK(t.cache.try_remove_last(s, 5) == Status::ok);  // tokens 4..8: of them only 8 is live
  CHECK(t.positions(s) == Rows{0, 1});
  CHECK(raw(t.cache.next_position(s)) == 4);
  CHECK(t.cache.try_remove_last(s, 5) == Status::ok);
  CHECK(t.positions(s).empty());
  CHECK(t.cache.pool().in_use() == 0);
}

TEST_CASE("B017 one policy object plans for the second sequence as a fresh one does",
          "[length][fault]") {
  for_each_value<HeavyMode::real_drop, HeavyMode::promote>([&](auto mode) {
    using H = HeavyHitter<AccumulateParams, mode>;
    const H policy({.heavy = 6, .recent = 10});
    TestCache used(scored());
    const SequenceId a = used.filled(30);
    attend(used, a, policy.scorer(), 1);
    REQUIRE(evict(policy, used, a).report.status == Status::ok);
    for (std::int32_t step = 0; step < 5; ++step) {
      REQUIRE(used.append(a, 1) == Status::ok);
      attend(used, a, policy.scorer(), step);
      REQUIRE(evict(policy, used, a).report.status == Status::ok);
    }
    used.cache.destroy(a);
    const SequenceId b = used.filled(30);
    attend(used, b, policy.scorer(), 2);

    TestCache fresh(scored());
    const SequenceId c = fresh.filled(30);
    attend(fresh, c, policy.scorer(), 2);
    const CacheView view_b = used.cache.view(b);
    const CacheView view_c = fresh.cache.view(c);
    Prepared for_b(view_b, {});
    Prepared for_c(view_c, {});
    const PlanRef plan_b = for_b.plan(policy, view_b);
    const PlanRef plan_c = for_c.plan(H(policy.params()), view_c);
    REQUIRE(plan_b.status() == Status::ok);
    CHECK(plan_b.evicted_rows() == 2 * 14);
    for (const std::int32_t h : {0, 1}) {
      CHECK(std::ranges::equal(plan_b.kept_list({}, {}, HeadId{h}),
                               plan_c.kept_list({}, {}, HeadId{h})));
    }
  });
}

TEST_CASE("B017 with a budget of 16, at most 16 rows are live after each of 100 decode steps",
          "[length][fault]") {
  const auto decode = [](const auto& policy, std::int32_t exactly) {
    TestCache t(scored());
    const SequenceId s = t.filled(30);
    const HeavyHitter any;
    for (std::int32_t step = 0; step < 100; ++step) {
      attend(t, s, any.scorer(), step);
      REQUIRE(evict(policy, t, s).report.status == Status::ok);
      CHECK(t.cache.live_rows(s) <= 16);
      CHECK((exactly < 0 || t.cache.live_rows(s) == exactly));
      REQUIRE(t.append(s, 1) == Status::ok);
    }
  };
  decode(StreamingSink<SinkForm::exact>({.sinks = 4, .recent = 12}), 16);
  decode(StreamingSink({.sinks = 4, .recent = 12, .hard_budget = 16}), -1);
  decode(HeavyHitter({.heavy = 8, .recent = 8}), 16);
  decode(HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 6, .recent = 8, .sinks = 2}),
         16);
  decode(HeavyHitter<AccumulateParams, HeavyMode::greedy>({.heavy = 16, .recent = 0}), 16);
  decode(HeavyHitter({.heavy = 8, .recent = 8, .removal = Removal::fill_holes}), 16);
}

TEST_CASE("B018 a token keeps its position through a shift, and a plan from before it is stale",
          "[length][fault]") {
  // The design has no row handles: a token is named by its position, which never changes (its row and rope position
  // do), and a plan by the generation it was made in.
  TestCache t(scored(1));
  t.rotation = plain_rotation(4);
  const SequenceId s = t.filled(10);  // a..j
  const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
  const auto all_but = [](Rows gone) {
    return [gone](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
      return std::find(gone.begin(), gone.end(), p) == gone.end() ? 1.0F : 0.0F;
    };
  };
  const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy({.heavy = 8, .recent = 0});
  const CacheView view = t.cache.view(s);
  PlanOptions renumber;
  renumber.rerotator = &rerotator;
  Input remove_g;
  remove_g.score = all_but({6, 7});
  Prepared early(view, remove_g);
  const PlanRef old_plan = early.plan(policy, view, renumber);  // names g by its old row, 6
  REQUIRE(old_plan.status() == Status::ok);

  Input in;
  in.score = all_but({2, 3});
  in.options = renumber;
  REQUIRE(evict(policy, t, s, in).report.status ==
          Status::ok);  // [2, 4) goes, the rest moves by -2
  CHECK(t.positions(s) == Rows{0, 1, 4, 5, 6, 7, 8, 9});
  const Row g = t.rows(s)[4];
  CHECK(g.tag == 6);
  CHECK(g.position == 6);
  CHECK(g.row == 4);
  CHECK(g.rope == 4);

  CHECK(apply(old_plan, t.cache.view(s), rerotator) == Status::stale_plan);
  CHECK(t.positions(s) == Rows{0, 1, 4, 5, 6, 7, 8, 9});
  CHECK(t.raw_key_error(s) < 1e-5);

  in.score = all_but({6});
  in.budgets = {7};
  const Outcome out = evict(policy, t, s, in);
  CHECK(out.report.status == Status::ok);
  CHECK(out.evicted[0] == Rows{6});  // g, not the row that is sixth now (i)
  CHECK(t.positions(s) == Rows{0, 1, 4, 5, 7, 8, 9});
  CHECK(t.raw_key_error(s) < 1e-5);
}

TEST_CASE("B020 a count of computed tokens falls by the evicted ones below it, and never rises",
          "[length][fault]") {
  // An engine that computes a prompt in chunks counts its first tokens that are in the cache. What a report lists, ascending,
  // says how many of those are gone: max(sinks, computed - evicted), the fault, is right for none that is below both.
  const auto computed_after = [](std::int32_t computed, const Rows& evicted) {
    return computed -
           static_cast<std::int32_t>(std::lower_bound(evicted.begin(), evicted.end(), computed) -
                                     evicted.begin());
  };
  TestCache t({.pages = 20, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.filled(60);
  const Outcome out = evict(StreamingSink<SinkForm::exact>({.sinks = 10, .recent = 30}), t, s);
  REQUIRE(out.report.status == Status::ok);
  for (const Rows& evicted : out.evicted) {
    REQUIRE(evicted == range(10, 30));
    CHECK(computed_after(5, evicted) == 5);
    CHECK(computed_after(15, evicted) == 10);
    CHECK(computed_after(40, evicted) == 20);
    for (const std::int32_t border : {0, 10, 11, 29, 30, 31, 60}) {
      CHECK(computed_after(border, evicted) <= border);
    }
    CHECK(computed_after(60, evicted) == t.cache.live_rows(s));
  }
  CHECK(raw(t.cache.next_position(s)) ==
        60);  // tokens seen: another number, that no eviction changes
}
