// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/parallel/context_pages.hpp>
#include <kvtrim/parallel/context_top_k.hpp>
#include <kvtrim/parallel/page_norm_rounds.hpp>
#include <kvtrim/parallel/pooled_scores.hpp>
#include <kvtrim/parallel/window_rounds.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/exact_window.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/page_scores.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "parallel/rank_world.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;

namespace {

using Worlds = std::vector<std::unique_ptr<RankWorld>>;
using ScoreOf = std::function<float(RankWorld&, const HeadRef&, std::int32_t)>;

constexpr Spread spreads[]{
    Spread::contiguous, Spread::zigzag, Spread::page_striped, Spread::token_striped};

std::size_t index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// One list for each (layer, KV head) of a world, and spans over them.
template <class T>
struct Lists {
  std::vector<std::vector<T>> lists;
  std::vector<std::span<const T>> spans() const { return {lists.begin(), lists.end()}; }
};

Lists<std::uint64_t> keys_of(RankWorld& world, const ScoreOf& score) {
  Lists<std::uint64_t> out;
  world.for_each_head([&](const HeadRef&) { out.lists.emplace_back(); });
  world.for_each_row([&](const HeadRef& head, std::int32_t r) {
    out.lists[RankWorld::pair(head)].push_back(row_key(score(world, head, r), head.position(r)));
  });
  return out;
}

// Evicts rows by ranks together: of `live` rows `keep` stay in each head.
Status evict_rows(Ranks& ranks,
                  Worlds& worlds,
                  const std::vector<RankedDemand>& demands,
                  const ScoreOf& score) {
  std::vector<Lists<std::uint64_t>> keys;
  for (const auto& world : worlds) { keys.push_back(keys_of(*world, score)); }
  std::vector<ContextTopK> runs;
  for (const auto& list : keys) { runs.emplace_back(demands, list.spans()); }
  if (const Status status = ranks.drive(runs); status != Status::ok) { return status; }
  if (!usable(runs[0].status())) { return runs[0].status(); }
  return evict_together(
      ranks,
      worlds,
      [&](RankWorld& world, std::size_t i) {
        return world.make_kept([&](const HeadRef& head, std::int32_t r) {
          return runs[i].keeps(RankWorld::pair(head),
                               row_key(score(world, head, r), head.position(r)));
        });
      },
      [&](const PlanRef&, std::size_t i) { return runs[i].fingerprint(); });
}

std::vector<RankedDemand> demands_of(RankWorld& one, std::int32_t keep, const Protection& p) {
  std::vector<RankedDemand> out;
  one.for_each_head([&](const HeadRef& head) {
    out.push_back({head.live_rows(), head.state().next_position, keep, p});
  });
  return out;
}

// Scores that were made before, [world][head][row].
ScoreOf looked_up(const Worlds& worlds,
                  const std::vector<std::vector<std::vector<float>>>& scores) {
  return [&](RankWorld& world, const HeadRef& head, std::int32_t r) {
    const auto at = std::ranges::find(worlds, &world, &std::unique_ptr<RankWorld>::get);
    return scores[index(at - worlds.begin())][RankWorld::pair(head)][index(r)];
  };
}

// What a policy demands of all rows.
template <class P>
std::vector<RankedDemand> demands_by(RankWorld& one, const P& policy) {
  std::vector<RankedDemand> out;
  one.for_each_head([&](const HeadRef& head) {
    DemandInput in;
    in.state = head.state();
    in.live = head.live_rows();
    in.layer = head.view.model_layer(head.layer);
    in.layers = head.view.layers_of_model();
    const Demand demand = policy.demand(in);
    out.push_back({in.live, in.state.next_position, demand.keep, demand.protection});
  });
  return out;
}

float made_up(RankWorld& world, const HeadRef& head, std::int32_t r) {
  return world.score(head, r);
}
float made_up_again(RankWorld& world, const HeadRef& head, std::int32_t r) {
  return world.score(head, r, 1);
}

}  // namespace

TEST_CASE("context parallel: rows on several ranks are kept as on one", "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const Scores scores : {Scores::random, Scores::few, Scores::equal, Scores::nan}) {
      for (const Spread spread : spreads) {
        const auto n = static_cast<std::int32_t>(scores) + 4 * static_cast<std::int32_t>(spread);
        if (!ranks.takes(n)) { continue; }
        const Model model{.kv_heads = 2,
                          .tokens = 64 + 448 * n / 15,
                          .dtype = n % 2 == 0 ? DType::f32 : DType::bf16,
                          .scores = scores};
        CAPTURE(n);
        const Placement placement(spread, ranks.count(), model.tokens, model.page_size);
        Worlds worlds =
            worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
        RankWorld one(model, whole(model));
        const External first({.budget = model.tokens * 2 / 3, .sinks = 3, .recent = 9});
        const auto evict_one = [&](const External& policy, const auto& score) {
          return one.execute(one.make(policy, one.scored([&](const HeadRef& head, std::int32_t r) {
            return score(one, head, r);
          })));
        };
        const auto demands = demands_of(one, model.tokens * 2 / 3, {3, 9});
        REQUIRE(evict_one(first, made_up) == Status::ok);
        REQUIRE(evict_rows(ranks, worlds, demands, made_up) == Status::ok);
        require_same_rows(worlds, one);
        // Rows are gone, so the borders of what is protected must be found: more sinks than before, fewer recent rows.
        const External second({.budget = 31, .sinks = 7, .recent = 5});
        const auto again = demands_of(one, 31, {7, 5});
        REQUIRE(evict_one(second, made_up_again) == Status::ok);
        REQUIRE(evict_rows(ranks, worlds, again, made_up_again) == Status::ok);
        require_same_rows(worlds, one);
      }
    }
  });
}

TEST_CASE("context parallel: rounds and bytes do not depend on tokens", "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    if (ranks.here().size() < 2) { return; }  // not counted over MPI
    for (const std::int32_t tokens : {64, 512}) {
      const Model model{.tokens = tokens};
      const Placement placement(Spread::page_striped, ranks.count(), tokens, model.page_size);
      Worlds worlds =
          worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
      RankWorld one(model, whole(model));
      const std::int64_t pairs = std::int64_t{model.layers} * model.kv_heads;
      const std::int64_t agreed = 3 * 8;
      ranks.traffic = {};
      REQUIRE(evict_rows(ranks, worlds, demands_of(one, 40, {2, 8}), made_up) == Status::ok);
      CHECK(ranks.traffic.rounds == 8 + 1);
      CHECK(ranks.traffic.bytes == 8 * pairs * 256 * 8 + agreed);
      REQUIRE(one.execute(one.make(External({.budget = 40, .sinks = 2, .recent = 8}),
                                   one.scored([&](const HeadRef& head, std::int32_t r) {
                                     return one.score(head, r);
                                   }))) == Status::ok);
      ranks.traffic = {};
      REQUIRE(evict_rows(ranks, worlds, demands_of(one, 20, {2, 8}), made_up) == Status::ok);
      CHECK(ranks.traffic.rounds == 4 + 8 + 1);
      CHECK(ranks.traffic.bytes == 4 * pairs * 2 * 256 * 8 + 8 * pairs * 256 * 8 + agreed);
      ranks.traffic = {};
      REQUIRE(evict_rows(ranks, worlds, demands_of(one, 40, {2, 8}), made_up) == Status::ok);
      CHECK(ranks.traffic.rounds == 1);  // nothing goes
    }
  });
}

TEST_CASE("context parallel: what does not fit is over budget on all ranks", "[parallel][edge]") {
  for_each_ranks([&](Ranks& ranks) {
    const Model model{.kv_heads = 1, .tokens = 64};
    const Placement placement(Spread::zigzag, ranks.count(), 64, model.page_size);
    Worlds worlds =
        worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
    RankWorld one(model, whole(model));
    std::vector<Lists<std::uint64_t>> keys;
    for (const auto& world : worlds) { keys.push_back(keys_of(*world, made_up)); }
    const auto status_of = [&](const std::vector<RankedDemand>& demands) {
      std::vector<ContextTopK> runs;
      for (const auto& list : keys) { runs.emplace_back(demands, list.spans()); }
      REQUIRE(ranks.drive(runs) == Status::ok);
      for (const ContextTopK& run : runs) { CHECK(run.status() == runs[0].status()); }
      return runs[0].status();
    };
    CHECK(status_of(demands_of(one, 8, {6, 6})) == Status::over_budget);
    CHECK(status_of(demands_of(one, 12, {6, 6})) == Status::ok);
    // A length that is not the ranks' rows together: a rank has lost some, or counts others.
    auto wrong = demands_of(one, 12, {6, 6});
    ++wrong[1].live;
    CHECK(status_of(wrong) == Status::ranks_differ);
  });
}

namespace {

// At a budget of 70 rows.
template <class P>
P at_budget() {
  typename P::Params p{};
  if constexpr (requires { p.budget = 70; }) { p.budget = 70; }
  if constexpr (requires { p.heavy = 60; }) { p.heavy = 60, p.sinks = 2; }
  if constexpr (requires { p.scores.heads = Reduction::max; }) { p.scores.heads = Reduction::max; }
  p.recent = 5;
  return P(p);
}

}  // namespace

TEMPLATE_TEST_CASE("context parallel: scores that a row has by itself, by the library's scorers",
                   "[parallel]",
                   KeyNorm,
                   kvtrim::Random,
                   QFilter,
                   HeavyHitter<>,
                   TopRows<ValueNorm<KeyNormParams>>,
                   TopRows<OutputNorm<KeyNormParams>>,
                   TopRows<PerLayer<KeyNormParams>>) {
  for_each_ranks([&](Ranks& ranks) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Model model{.kv_heads = 3, .tokens = 120, .dtype = dtype};
      const Placement placement(Spread::token_striped, ranks.count(), model.tokens, 1);
      Worlds worlds =
          worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
      RankWorld one(model, whole(model));
      const auto policy = at_budget<TestType>();
      std::vector<std::vector<std::vector<float>>> scores;
      for (const auto& world : worlds) {
        scores.push_back(world->scores_by(policy.scorer(), world->observation()));
      }
      const auto demands = demands_by(one, policy);
      REQUIRE(one.execute(one.make(policy, one.observation())) == Status::ok);
      REQUIRE(evict_rows(ranks, worlds, demands, looked_up(worlds, scores)) == Status::ok);
      require_same_rows(worlds, one);
    }
  });
}

TEST_CASE("context parallel: rows that stay by their position take no round of scores",
          "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    const Model model{.kv_heads = 1, .tokens = 90, .scope = TableScope::group};
    const Placement placement(Spread::zigzag, ranks.count(), model.tokens, 4);
    Worlds worlds =
        worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
    RankWorld one(model, whole(model));
    const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 20});
    const auto demands = demands_of(one, 24, {4, 20});
    REQUIRE(one.execute(one.make(policy, {})) == Status::ok);
    REQUIRE(evict_rows(ranks, worlds, demands, made_up) == Status::ok);
    require_same_rows(worlds, one);
  });
}

TEST_CASE("context parallel: scores of neighbours are pooled over the borders of ranks",
          "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const Spread spread : {Spread::contiguous, Spread::zigzag, Spread::page_striped}) {
      for (const std::int32_t kernel : {1, 3, 7, 21}) {
        for (const Pooling pooling : {Pooling::average, Pooling::max}) {
          if (!ranks.takes(kernel / 2 + static_cast<std::int32_t>(spread))) { continue; }
          const Model model{.layers = 1,
                            .kv_heads = 2,
                            .tokens = 64 + kernel,
                            .scores = pooling == Pooling::max ? Scores::nan : Scores::random};
          const Placement placement(spread, ranks.count(), model.tokens, model.page_size);
          Worlds worlds =
              worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
          RankWorld one(model, whole(model));
          // Some rows are gone, and the neighbours of a row with them; some runs are empty.
          const auto stays = [](const HeadRef& head, std::int32_t r) {
            const std::int32_t p = raw(head.position(r));
            return (p < 20 || p > 31) && p % 5 != raw(head.head);
          };
          for (const auto& world : worlds) {
            REQUIRE(world->execute(world->make_kept(stays)) == Status::ok);
          }
          REQUIRE(one.execute(one.make_kept(stays)) == Status::ok);
          const auto lists_of = [](RankWorld& world) {
            std::vector<std::vector<float>> scores;
            std::vector<std::vector<Position>> positions;
            world.for_each_head([&](const HeadRef& head) {
              scores.emplace_back();
              positions.emplace_back();
              for (std::int32_t r = 0; r < head.live_rows(); ++r) {
                scores.back().push_back(world.score(head, r));
                positions.back().push_back(head.position(r));
              }
            });
            return std::pair(scores, positions);
          };
          const auto [all_scores, all_positions] = lists_of(one);
          std::vector<decltype(lists_of(one))> lists;
          for (const auto& world : worlds) { lists.push_back(lists_of(*world)); }
          std::vector<PooledScores> runs;
          for (std::size_t i = 0; i < worlds.size(); ++i) {
            std::vector<RankedScores> pairs;
            for (std::size_t h = 0; h < 2; ++h) {
              pairs.push_back({lists[i].first[h], lists[i].second[h]});
            }
            runs.emplace_back(ranks.here()[i], placement, model.tokens, pooling, kernel, pairs);
          }
          REQUIRE(ranks.drive(runs) == Status::ok);
          for (std::size_t h = 0; h < 2; ++h) {
            std::vector<float> all(all_scores[h].size());
            pool(all_scores[h], pooling, kernel, all);
            for (std::size_t i = 0; i < worlds.size(); ++i) {
              std::vector<float> own(lists[i].first[h].size());
              runs[i].pooled(h, own);
              for (std::size_t r = 0; r < own.size(); ++r) {
                const auto at = std::ranges::find(all_positions[h], lists[i].second[h][r]) -
                                all_positions[h].begin();
                REQUIRE(std::bit_cast<std::uint32_t>(own[r]) ==
                        std::bit_cast<std::uint32_t>(all[static_cast<std::size_t>(at)]));
              }
            }
          }
        }
      }
    }
  });
}

TEST_CASE("context parallel: pooling over striped tokens is refused, with the reason",
          "[parallel][edge]") {
  const Placement striped(Spread::token_striped, 4, 64, 1);
  CHECK_NOTHROW(PooledScores({0, 4}, striped, 64, Pooling::max, 1, {}));
  CHECK_THROWS_WITH(PooledScores({0, 4}, striped, 64, Pooling::max, 5, {}),
                    Catch::Matchers::ContainsSubstring("kernel 5 over striped tokens"));
  CHECK_THROWS_WITH(PooledScores({0, 4}, striped, 64, Pooling::max, 4, {}),
                    Catch::Matchers::ContainsSubstring("kernel 4 is not an odd number"));
}

namespace {

// Scores [world][head][row] of a window's attention, as one rank's `WindowScorer` makes them: denominators from the rows of all
// ranks, then pooling over their borders, then the window's own rows cut.
std::vector<std::vector<std::vector<float>>> window_scores(Ranks& ranks,
                                                           const Worlds& worlds,
                                                           const Model& model,
                                                           const Placement& placement,
                                                           const WindowParams& params,
                                                           std::span<const float> lse) {
  const std::int32_t heads = model.kv_heads * Model::group;
  const std::int32_t scored = model.tokens - params.unscored();
  std::vector<Position> asked;
  for (std::int32_t i = Model::window; i > 0; --i) { asked.push_back(Position{model.tokens - i}); }
  std::vector<CacheView> views;
  std::vector<Observation> observations;
  for (const auto& world : worlds) {
    views.push_back(world->view());
    Observation& obs = observations.emplace_back(world->observation());
    obs.queries.positions = asked.data();
    if (!lse.empty()) {
      obs.queries.lse = lse.data();
      obs.queries.lse_head_stride = Model::window;
      obs.queries.lse_layer_stride = heads * Model::window;
    }
  }
  std::vector<std::vector<std::byte>> scratch;
  std::vector<std::vector<std::unique_ptr<ExactWindow>>> windows(worlds.size());
  std::vector<WindowRounds> rounds;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    std::vector<ExactWindow*> list;
    for (std::int32_t h = 0; h < model.kv_heads * model.layers; ++h) {
      auto& bytes = scratch.emplace_back(
          ExactWindow::scratch_bytes(params, plan_shape(views[i], observations[i])));
      windows[i].push_back(std::make_unique<ExactWindow>(
          params,
          HeadRef{views[i], SequenceId{0}, LayerId{h / model.kv_heads}, HeadId{h % model.kv_heads}},
          observations[i].queries,
          bytes));
      list.push_back(windows[i].back().get());
    }
    rounds.emplace_back(list);
  }
  ranks.traffic = {};
  REQUIRE(ranks.drive(rounds) == Status::ok);
  if (ranks.here().size() > 1) {
    CHECK(ranks.traffic.rounds == (lse.empty() ? 2 : 0));
    CHECK(ranks.traffic.bytes == ranks.traffic.rounds * 8 * model.layers * heads * params.window);
  }
  std::vector<std::vector<std::vector<float>>> scores(worlds.size());
  std::vector<std::vector<Position>> positions(worlds.size());
  std::vector<PooledScores> pooling;
  const bool all = params.columns == PoolColumns::all_columns;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    for (const std::int32_t p : worlds[i]->part().positions) {
      if (all || p < scored) { positions[i].push_back(Position{p}); }
    }
    std::vector<RankedScores> pairs;
    for (const auto& window : windows[i]) {
      const auto columns = window->columns();
      scores[i].emplace_back(columns.begin(), columns.end());
    }
    for (const auto& list : scores[i]) {
      pairs.push_back({std::span(list).first(positions[i].size()), positions[i]});
    }
    pooling.emplace_back(
        ranks.here()[i], placement, model.tokens, params.pooling, params.kernel, pairs);
  }
  REQUIRE(ranks.drive(pooling) == Status::ok);
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    for (std::size_t h = 0; h < scores[i].size(); ++h) {
      std::vector<float> own(positions[i].size());
      pooling[i].pooled(h, own);
      own.resize(scores[i][h].size());
      for (std::size_t r = 0; r < own.size(); ++r) {
        if (worlds[i]->part().positions[r] >= scored) { own[r] = 0; }
      }
      scores[i][h] = own;
    }
  }
  return scores;
}

Observation with_lse(RankWorld& one, const Model& model, std::span<const float> lse) {
  Observation obs = one.observation();
  if (!lse.empty()) {
    obs.queries.lse = lse.data();
    obs.queries.lse_head_stride = Model::window;
    obs.queries.lse_layer_stride = model.kv_heads * Model::group * Model::window;
  }
  return obs;
}

}  // namespace

TEMPLATE_TEST_CASE(
    "context parallel: the window's attention with exact sums, and with the LSE of all rows",
    "[parallel]",
    SnapKVSelector<>,
    PyramidKV) {
  for_each_ranks([&](Ranks& ranks) {
    for (const Spread spread : {Spread::contiguous, Spread::zigzag, Spread::page_striped}) {
      for (const bool has_lse : {false, true}) {
        if (!ranks.takes(static_cast<std::int32_t>(spread))) { continue; }
        const Model model{.kv_heads = 2,
                          .tokens = 150,
                          .dtype = spread == Spread::zigzag ? DType::bf16 : DType::f32};
        const Placement placement(spread, ranks.count(), model.tokens, model.page_size);
        Worlds worlds =
            worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
        RankWorld one(model, whole(model));
        const SnapKVSelector<>::Params snapkv{
            .window = Model::window, .budget = 60, .kernel = 5, .sums = Sums::exact};
        typename TestType::Params params{};
        if constexpr (std::is_same_v<TestType, PyramidKV>) {
          params.snapkv = snapkv;
        } else {
          params = snapkv;
        }
        const TestType policy(params);
        // Which numbers an LSE has does not matter here, as long as all ranks have the same.
        std::vector<float> lse;
        for (std::int32_t i = 0; has_lse && i < 8 * Model::group * Model::window; ++i) {
          lse.push_back(5 + 0.01F * static_cast<float>(i % 37));
        }
        const auto scores = window_scores(ranks, worlds, model, placement, policy.scorer(), lse);
        const auto demands = demands_by(one, policy);
        REQUIRE(one.execute(one.make(policy, with_lse(one, model, lse))) == Status::ok);
        REQUIRE(evict_rows(ranks, worlds, demands, looked_up(worlds, scores)) == Status::ok);
        require_same_rows(worlds, one);
      }
    }
  });
}

TEST_CASE("context parallel: one set per layer, and chunks, with exact sums over heads and rows",
          "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    const Model model{.kv_heads = 3, .tokens = 101, .scope = TableScope::layer};
    constexpr std::int32_t chunk = 5;  // not a multiple of the page: chunks lie on two ranks
    const Placement placement(Spread::page_striped, ranks.count(), model.tokens, model.page_size);
    for (const bool chunked : {false, true}) {
      Worlds worlds =
          worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
      RankWorld one(model, whole(model));
      WindowParams token{.window = 1, .kernel = 1, .own_columns = true, .sums = Sums::exact};
      if (chunked) { token = {.window = Model::window, .kernel = 3, .sums = Sums::exact}; }
      const Tova tova({.budget = 40, .scores = {.sums = Sums::exact}});
      const ChunkKV<> chunks(
          {.budget = 40, .chunk = chunk, .recent = Model::window, .scores = token});
      auto scores = window_scores(ranks, worlds, model, placement, token, {});
      // Of each row the units of all heads, which are here; of each chunk those of its rows, and their number.
      const std::size_t all = index(pages_for(model.tokens, chunk));
      std::vector<std::vector<std::uint64_t>> units(worlds.size());
      std::vector<OneRound> runs;
      for (std::size_t i = 0; i < worlds.size(); ++i) {
        const auto& positions = worlds[i]->part().positions;
        units[i].resize(index(model.layers) * all * 2);
        for (std::int32_t l = 0; l < model.layers; ++l) {
          std::vector<std::uint64_t> rows(positions.size());
          const auto heads = std::span(scores[i]).subspan(index(l * 3), 3);
          for (const auto& list : heads) { add_scores(list, rows); }
          for (std::size_t r = 0; r < rows.size(); ++r) {
            const std::size_t c = 2 * (index(l) * all + index(positions[r] / chunk));
            units[i][c] += rows[r];
            units[i][c + 1] += 1;
            for (auto& list : heads) { list[r] = exact_score_mean(rows[r], 3); }
          }
        }
        runs.emplace_back(RoundKind::sum, units[i]);
      }
      if (chunked) {
        REQUIRE(ranks.drive(runs) == Status::ok);
        for (std::size_t i = 0; i < worlds.size(); ++i) {
          for (std::size_t h = 0; h < scores[i].size(); ++h) {
            for (std::size_t r = 0; r < scores[i][h].size(); ++r) {
              const std::size_t c =
                  2 * (h / 3 * all + index(worlds[i]->part().positions[r] / chunk));
              scores[i][h][r] =
                  exact_score_mean(units[i][c], static_cast<std::int64_t>(units[i][c + 1]));
            }
          }
        }
      }
      const auto demands = chunked ? demands_by(one, chunks) : demands_by(one, tova);
      REQUIRE(one.execute(chunked ? one.make(chunks, one.observation())
                                  : one.make(tova, one.observation())) == Status::ok);
      REQUIRE(evict_rows(ranks, worlds, demands, looked_up(worlds, scores)) == Status::ok);
      require_same_rows(worlds, one);
    }
  });
}

namespace {

// One eviction of pages by ranks together, one set for all layers and heads.
Status evict_pages(Ranks& ranks,
                   Worlds& worlds,
                   const Model& model,
                   const PageScoreParams& params,
                   const RankedDemand& demand,
                   const ScoreOf& score) {
  std::vector<std::vector<std::vector<float>>> rows(worlds.size());
  std::vector<std::vector<Position>> positions(worlds.size());
  std::vector<PageNormRounds> norms;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    worlds[i]->for_each_head([&](const HeadRef& head) {
      auto& list = rows[i].emplace_back();
      for (std::int32_t r = 0; r < head.live_rows(); ++r) {
        list.push_back(score(*worlds[i], head, r));
        if (RankWorld::pair(head) == 0) { positions[i].push_back(head.position(r)); }
      }
    });
    const std::vector<std::span<const float>> spans(rows[i].begin(), rows[i].end());
    norms.emplace_back(params, spans);
  }
  if (const Status status = ranks.drive(norms); status != Status::ok) { return status; }
  std::vector<std::vector<RankedPage>> pages(worlds.size());
  std::vector<ContextPages> runs;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    const auto live = static_cast<std::int32_t>(positions[i].size());
    std::vector<float> best, own(index(pages_for(live, model.page_size)));
    for (std::size_t h = 0; h < rows[i].size(); ++h) {
      std::vector<float> scratch(index(model.page_size));
      page_scores(params, rows[i][h], 0, model.page_size, norms[i].of(h), scratch, own);
      if (h == 0) {
        best = own;
      } else {
        add_page_scores(params, own, best);
      }
    }
    for (std::int32_t begin = 0; begin < live; begin += model.page_size) {
      const std::int32_t end = std::min(begin + model.page_size, live);
      pages[i].push_back({best[index(begin / model.page_size)],
                          positions[i][index(begin)],
                          positions[i][index(end - 1)],
                          end - begin});
    }
    const std::span<const RankedPage> set(pages[i]);
    const std::span<const Position> all(positions[i]);
    runs.emplace_back(
        std::span(&demand, 1), std::span(&set, 1), std::span(&all, 1), model.page_size);
  }
  if (const Status status = ranks.drive(runs); status != Status::ok) { return status; }
  const Status chosen = runs[0].status();
  const Status done = evict_together(
      ranks,
      worlds,
      [&](RankWorld& world, std::size_t i) {
        return world.make_kept(
            [&](const HeadRef&, std::int32_t r) {
              return runs[i].keeps(0, pages[i][index(r / model.page_size)]);
            },
            {.removal = Removal::drop_pages});
      },
      [&](const PlanRef& own, std::size_t i) {
        CHECK(own.bytes_moved() == 0);
        return runs[i].fingerprint();
      });
  return done == Status::ok ? chosen : done;
}

}  // namespace

TEST_CASE("context parallel: whole pages on several ranks are kept as on one", "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const Scores scores : {Scores::random, Scores::few, Scores::equal, Scores::nan}) {
      for (const Spread spread : {Spread::contiguous, Spread::zigzag, Spread::page_striped}) {
        if (!ranks.takes(static_cast<std::int32_t>(scores) + static_cast<std::int32_t>(spread))) {
          continue;
        }
        const Model model{.kv_heads = 2,
                          .tokens = scores == Scores::few ? 512 : 64 + 30,
                          .dtype = spread == Spread::zigzag ? DType::bf16 : DType::f32,
                          .scope = TableScope::group,
                          .scores = scores};
        const Placement placement(spread, ranks.count(), model.tokens, model.page_size);
        Worlds worlds =
            worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
        RankWorld one(model, whole(model));
        // The second time pages are gone from the middle, and more are protected than the budget has room for.
        for (const std::int32_t budget : {61, 20}) {
          PageSelector<ExternalParams>::Params p{.budget = budget, .sinks = 3, .window = 10};
          p.pages.norm = HeadNorm::none;
          const PageSelector<ExternalParams> policy(p);
          RankedDemand demand;
          one.for_each_head([&](const HeadRef& head) {
            demand = {head.live_rows(), head.state().next_position, budget, {3, 10}};
          });
          const PlanRef plan = one.make(
              policy,
              one.scored([&](const HeadRef& head, std::int32_t r) { return one.score(head, r); }));
          const Status planned = plan.status();
          REQUIRE(usable(planned));
          REQUIRE(one.execute(plan) == Status::ok);
          REQUIRE(evict_pages(ranks, worlds, model, policy.page_scores(), demand, made_up) ==
                  planned);
          require_same_rows(worlds, one);
        }
      }
    }
  });
}

TEST_CASE("context parallel: pages by the attention of the window, as PageSelector is by default",
          "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const Spread spread : {Spread::contiguous, Spread::zigzag, Spread::page_striped}) {
      const Model model{.kv_heads = 2, .tokens = 130, .scope = TableScope::group};
      const Placement placement(spread, ranks.count(), model.tokens, model.page_size);
      Worlds worlds =
          worlds_of(ranks, model, [&](Rank rank) { return rows_of(model, rank, placement); });
      RankWorld one(model, whole(model));
      PageSelector<>::Params p{.budget = 60, .window = Model::window};
      p.scores.window = Model::window;
      p.scores.sums = p.pages.sums = Sums::exact;
      const PageSelector<> policy(p);
      const auto scores = window_scores(ranks, worlds, model, placement, policy.scorer(), {});
      REQUIRE(one.execute(one.make(policy, one.observation())) == Status::ok);
      const RankedDemand demand{model.tokens, model.tokens, 60, {1, Model::window}};
      REQUIRE(evict_pages(
                  ranks, worlds, model, policy.page_scores(), demand, looked_up(worlds, scores)) ==
              Status::ok);
      require_same_rows(worlds, one);
    }
  });
}
