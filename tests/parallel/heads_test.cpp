// SPDX-License-Identifier: Apache-2.0
// Heads, or layers, on several ranks.
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/parallel/agreement.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/score_words.hpp>
#include <kvtrim/parallel/shared_budget.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/page_scores.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "parallel/rank_world.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;

namespace {

using Worlds = std::vector<std::unique_ptr<RankWorld>>;

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// A policy at a budget of 40 rows, its other parameters as they are.
template <class P>
P at_budget() {
  static const std::vector<double> frequencies{1, 0.1};
  typename P::Params p{};
  if constexpr (requires { p.scores.rope.dim = 4; }) {
    p.scores.rope = {.inverse_frequencies = frequencies, .dim = 4, .same_for_all_layers = true};
  }
  if constexpr (requires { p.recent = 20; }) { p.recent = 20; }
  if constexpr (requires { p.heavy = 20; }) { p.heavy = 20; }
  if constexpr (requires { p.inner.budget = 40; }) {
    p.inner.budget = 40, p.inner.window = Model::window;
  }
  if constexpr (requires { p.snapkv.budget = 40; }) {
    p.snapkv.budget = 40, p.snapkv.window = Model::window;
  }
  if constexpr (requires { p.budget = 40; }) { p.budget = 40; }
  if constexpr (requires { p.window = Model::window; }) { p.window = Model::window; }
  if constexpr (requires { p.scores.window = Model::window; }) { p.scores.window = Model::window; }
  if constexpr (requires { p.scores.lag = 8; }) { p.scores.lag = 8; }
  if constexpr (requires { p.recent + p.budget; }) { p.recent = Model::window; }
  return P(p);
}

}  // namespace

TEMPLATE_TEST_CASE(
    "tensor parallel: heads that choose by themselves exchange nothing but their counts",
    "[parallel]",
    (StreamingSink<SinkForm::exact>),
    SnapKVSelector<>,
    KeyNorm,
    KeyDiff,
    LagKV,
    RKV,
    CurKV,
    QFilter,
    ExpectedAttention,
    CriticalKV<SnapKVSelector<>>,
    HeavyHitter<>,
    PyramidKV) {
  for_each_ranks([&](Ranks& ranks) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Model model{.tokens = 64, .dtype = dtype, .scope = TableScope::layer};
      Worlds worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
      RankWorld one(model, whole(model));
      const auto policy = at_budget<TestType>();
      REQUIRE(one.execute(one.make(policy, one.observation())) == Status::ok);
      ranks.traffic = {};
      REQUIRE(evict_together(
                  ranks,
                  worlds,
                  [&](RankWorld& world, std::size_t) {
                    return world.make(policy, world.observation());
                  },
                  [](const PlanRef& plan, std::size_t) {
                    return plan_fingerprint(plan, RankSplit::heads, false);
                  }) == Status::ok);
      CHECK(ranks.traffic.rounds <= 1);
      require_same_rows(worlds, one);
    }
  });
}

TEST_CASE("tensor parallel: one set per layer by the maximum over heads of all ranks",
          "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const Scores scores : {Scores::random, Scores::few, Scores::equal, Scores::nan}) {
      const Model model{.tokens = 96,
                        .dtype = scores == Scores::few ? DType::bf16 : DType::f32,
                        .scope = TableScope::layer,
                        .scores = scores};
      Worlds worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
      RankWorld one(model, whole(model));
      using Merged = TopRows<PerLayer<ExternalParams>>;
      const Merged policy(
          {.budget = 40, .sinks = 2, .recent = 6, .scores = {.heads = Reduction::max}});
      const auto made_up = [](RankWorld& world) {
        return world.scored(
            [&](const HeadRef& head, std::int32_t r) { return world.score(head, r); });
      };
      REQUIRE(one.execute(one.make(policy, made_up(one))) == Status::ok);
      // Each rank merges its own heads as one rank does, then the words of all ranks.
      std::vector<std::vector<std::uint64_t>> words(worlds.size());
      std::vector<OneRound> runs;
      const auto rows = index(model.tokens);
      for (std::size_t i = 0; i < worlds.size(); ++i) {
        const Observation obs = made_up(*worlds[i]);
        const auto lists = worlds[i]->scores_by(policy.scorer(), obs);
        words[i].resize(rows * index(model.layers));
        for (std::int32_t l = 0; l < model.layers; ++l) {
          score_words(lists[index(l * worlds[i]->part().heads)],
                      std::span(words[i]).subspan(index(l) * rows, rows));
        }
        runs.emplace_back(RoundKind::max, words[i]);
      }
      REQUIRE(ranks.drive(runs) == Status::ok);
      REQUIRE(evict_together(
                  ranks,
                  worlds,
                  [&](RankWorld& world, std::size_t i) {
                    std::vector<float> merged(words[i].size());
                    scores_of_words(words[i], merged);
                    return world.make(policy,
                                      world.scored([&](const HeadRef& head, std::int32_t r) {
                                        return merged[index(raw(head.layer)) * rows + index(r)];
                                      }));
                  },
                  [](const PlanRef& plan, std::size_t) {
                    return plan_fingerprint(plan, RankSplit::heads, true);
                  }) == Status::ok);
      require_same_rows(worlds, one);
    }
  });
}

TEMPLATE_TEST_CASE("tensor parallel: one set per layer by exact sums over heads of all ranks",
                   "[parallel]",
                   Tova,
                   TopRows<PerLayer<WindowParams>>,
                   ChunkKV<>) {
  for_each_ranks([&](Ranks& ranks) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Model model{.tokens = 96, .dtype = dtype, .scope = TableScope::layer};
      Worlds worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
      RankWorld one(model, whole(model));
      typename TestType::Params params{.budget = 40, .recent = Model::window};
      WindowParams token{.window = Model::window, .sums = Sums::exact};
      std::int32_t chunk = 0;  // rows whose scores are averaged, by position; 0: none
      if constexpr (std::is_same_v<TestType, Tova>) {
        params.scores.sums = Sums::exact;
        token = {.window = 1, .kernel = 1, .own_columns = true, .sums = Sums::exact};
      } else if constexpr (std::is_same_v<TestType, ChunkKV<>>) {
        params.scores = token;
        params.chunk = chunk = 5;
      } else {
        params.scores.scores = token;
      }
      const TestType policy(params);
      REQUIRE(one.execute(one.make(policy, one.observation())) == Status::ok);
      const auto rows = index(model.tokens);
      std::vector<std::vector<std::uint64_t>> units(worlds.size());
      std::vector<OneRound> runs;
      for (std::size_t i = 0; i < worlds.size(); ++i) {
        const auto lists = worlds[i]->scores_by(token, worlds[i]->observation());
        units[i].resize(rows * index(model.layers));
        for (std::size_t h = 0; h < lists.size(); ++h) {
          const std::size_t layer = h / index(worlds[i]->part().heads);
          add_scores(lists[h], std::span(units[i]).subspan(layer * rows, rows));
        }
        runs.emplace_back(RoundKind::sum, units[i]);
      }
      REQUIRE(ranks.drive(runs) == Status::ok);
      REQUIRE(evict_together(
                  ranks,
                  worlds,
                  [&](RankWorld& world, std::size_t i) {
                    return world.make(
                        policy, world.scored([&](const HeadRef& head, std::int32_t r) {
                          const auto layer =
                              std::span(units[i]).subspan(index(raw(head.layer)) * rows, rows);
                          if (chunk == 0) {
                            return exact_score_mean(layer[index(r)], model.kv_heads);
                          }
                          const std::int32_t begin = r / chunk * chunk;
                          const std::int32_t end = std::min(begin + chunk, model.tokens);
                          std::uint64_t sum = 0;
                          for (std::int32_t j = begin; j < end; ++j) { sum += layer[index(j)]; }
                          return exact_score_mean(sum, end - begin);
                        }));
                  },
                  [](const PlanRef& plan, std::size_t) {
                    return plan_fingerprint(plan, RankSplit::heads, true);
                  }) == Status::ok);
      require_same_rows(worlds, one);
    }
  });
}

TEST_CASE("tensor and pipeline parallel: one set of pages for all layers and heads", "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const RankSplit split : {RankSplit::heads, RankSplit::layers}) {
      for (const Scores scores : {Scores::random, Scores::few, Scores::equal, Scores::nan}) {
        const bool heads = split == RankSplit::heads;
        const Model model{.layers = heads ? 2 : 8,
                          .kv_heads = heads ? 8 : 2,
                          .tokens = 64 + 3,
                          .dtype = heads ? DType::f32 : DType::bf16,
                          .scope = TableScope::group,
                          .scores = scores};
        Worlds worlds = worlds_of(ranks, model, [&](Rank rank) {
          return heads ? heads_of(model, rank) : layers_of(model, rank);
        });
        RankWorld one(model, whole(model));
        const PageSelector<ExternalParams> policy(
            {.unit = PageUnit::per_group, .budget = 30, .sinks = 1, .window = 6});
        const PageScoreParams& params = policy.page_scores();
        const auto made_up = [](RankWorld& world) {
          return world.scored(
              [&](const HeadRef& head, std::int32_t r) { return world.score(head, r); });
        };
        REQUIRE(one.execute(one.make(policy, made_up(one))) == Status::ok);
        const auto pages = index(pages_for(model.tokens, model.page_size));
        std::vector<std::vector<std::uint64_t>> words;
        std::vector<OneRound> runs;
        for (const auto& world : worlds) {
          std::vector<float> best(pages, -std::numeric_limits<float>::infinity());
          world->for_each_head([&](const HeadRef& head) {
            std::vector<float> rows(index(model.tokens)), scratch(4), own(pages);
            for (std::size_t r = 0; r < rows.size(); ++r) {
              rows[r] = world->score(head, static_cast<std::int32_t>(r));
            }
            page_scores(params, rows, 0, model.page_size, scratch, own);
            add_page_scores(params, own, best);
          });
          words.emplace_back(pages);
          score_words(best, words.back());
        }
        for (auto& own : words) { runs.emplace_back(RoundKind::max, own); }
        REQUIRE(ranks.drive(runs) == Status::ok);
        std::vector<std::vector<float>> merged(worlds.size(), std::vector<float>(pages));
        REQUIRE(evict_together(
                    ranks,
                    worlds,
                    [&](RankWorld& world, std::size_t i) {
                      scores_of_words(words[i], merged[i]);
                      Observation obs;
                      obs.page_scores = {merged[i].data(), 0, 0};
                      return world.make(policy, obs);
                    },
                    [&](const PlanRef& plan, std::size_t) {
                      return plan_fingerprint(plan, split, true);
                    }) == Status::ok);
        require_same_rows(worlds, one);
      }
    }
  });
}

TEMPLATE_TEST_CASE_SIG("tensor parallel: heads of all ranks share a budget as on one",
                       "[parallel]",
                       ((AdaptiveForm Form, AdaptiveOver Over), Form, Over),
                       (AdaptiveForm::safeguard, AdaptiveOver::heads_of_layer),
                       (AdaptiveForm::safeguard, AdaptiveOver::all_heads),
                       (AdaptiveForm::floor, AdaptiveOver::heads_of_layer),
                       (AdaptiveForm::floor, AdaptiveOver::all_heads),
                       (AdaptiveForm::floor_rounded, AdaptiveOver::heads_of_layer)) {
  for_each_ranks([&](Ranks& ranks) {
    for (const Scores scores : {Scores::random, Scores::few, Scores::equal, Scores::nan}) {
      for (const std::int64_t budget : {21, 90}) {  // 90: more than there is, nothing goes
        if (!ranks.takes(static_cast<std::int32_t>(scores) + static_cast<std::int32_t>(Form))) {
          continue;
        }
        const Model model{.tokens = 70,
                          .dtype = scores == Scores::few ? DType::bf16 : DType::f32,
                          .scores = scores};
        Worlds worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
        RankWorld one(model, whole(model));
        const External inner({.budget = budget, .sinks = 1, .recent = 4});
        const AdaKV<External> policy({.inner = inner.params(), .form = Form, .over = Over});
        const auto made_up = [](RankWorld& world) {
          return world.scored(
              [&](const HeadRef& head, std::int32_t r) { return world.score(head, r); });
        };
        const PlanRef alone = one.make(policy, made_up(one));
        REQUIRE(one.execute(alone) == Status::ok);
        // Of each head what competes, and its number among those that it shares with.
        const bool all = Over == AdaptiveOver::all_heads;
        std::vector<std::vector<std::vector<std::uint64_t>>> keys;
        std::vector<SharedBudget> runs;
        for (std::size_t i = 0; i < worlds.size(); ++i) {
          RankWorld& world = *worlds[i];
          keys.emplace_back();
          std::vector<RankedHead> heads;
          world.for_each_head([&](const HeadRef& head) {
            const CandidateRange range = candidates({1, 4}, head.live_rows());
            auto& own = keys.back().emplace_back();
            for (std::int32_t r = range.begin; r < range.end; ++r) {
              own.push_back(row_key(world.score(head, r), head.position(r)));
            }
          });
          world.for_each_head([&](const HeadRef& head) {
            const std::int32_t number = world.kv_head(head);
            heads.push_back({all ? 0 : raw(head.layer),
                             all ? raw(head.layer) * model.kv_heads + number : number,
                             {keys.back()[RankWorld::pair(head)],
                              5,
                              std::min(static_cast<std::int32_t>(budget), head.live_rows()),
                              0}});
          });
          const std::int32_t most = pages_for(model.kv_heads, ranks.count()) * model.layers;
          runs.emplace_back(ranks.here()[i],
                            policy.adaptive(),
                            all ? 1 : model.layers,
                            all ? model.layers * model.kv_heads : model.kv_heads,
                            most,
                            heads);
        }
        REQUIRE(ranks.drive(runs) == Status::ok);
        std::vector<std::vector<std::int32_t>> budgets(worlds.size());
        REQUIRE(evict_together(
                    ranks,
                    worlds,
                    [&](RankWorld& world, std::size_t i) {
                      REQUIRE(runs[i].status() == Status::ok);
                      for (std::size_t j = 0; j < keys[i].size(); ++j) {
                        budgets[i].push_back(runs[i].rows(j));
                      }
                      Observation obs = made_up(world);
                      obs.budgets = budgets[i].data();
                      obs.budget_rows = {0, world.part().heads, 1};
                      return world.make(inner, obs);
                    },
                    [&](const PlanRef&, std::size_t i) { return runs[i].fingerprint(); }) ==
                Status::ok);
        require_same_rows(worlds, one);
      }
    }
  });
}

TEST_CASE("tensor parallel: heads that share a budget are all there, each once",
          "[parallel][edge]") {
  for_each_ranks([&](Ranks& ranks) {
    const std::vector<std::uint64_t> keys{1, 2, 3};
    const auto status_of = [&](std::int32_t members, std::int32_t shift) {
      std::vector<SharedBudget> runs;
      for (const Rank& rank : ranks.here()) {
        const RankedHead head{0, (rank.index + shift * rank.index) % members, {keys, 0, 2, 0}};
        runs.emplace_back(rank, AdaptiveParams{}, 1, members, 1, std::span(&head, 1));
      }
      REQUIRE(ranks.drive(runs) == Status::ok);
      for (const SharedBudget& run : runs) { CHECK(run.status() == runs[0].status()); }
      return runs[0].status();
    };
    CHECK(status_of(ranks.count(), 0) == Status::ok);
    CHECK(status_of(ranks.count() + 1, 0) == Status::ranks_differ);  // one is nowhere
    if (ranks.count() > 1) {
      CHECK(status_of(ranks.count(), ranks.count() - 1) ==
            Status::ranks_differ);  // all are number 0
    }
  });
}
