// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/parallel/agreement.hpp>
#include <kvtrim/parallel/lock_step.hpp>
#include <kvtrim/parallel/over_ranks.hpp>
#include <kvtrim/parallel/policy_hash.hpp>
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
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include "catch.hpp"
#include "parallel/rank_world.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;
using Catch::Matchers::ContainsSubstring;

namespace {

// What every rank is told where `change(header, rank)` has been at the headers; empty: they agree.
std::string message_of(Ranks& ranks,
                       RankSplit split,
                       const std::function<void(RankHeader&, std::int32_t)>& change) {
  std::vector<HeaderAgreement> runs;
  for (const Rank& rank : ranks.here()) {
    RankHeader header{.split = split,
                      .ranks = rank.count,
                      .policy = policy_hash(SnapKVSelector<>{}),
                      .layers = 30,
                      .kv_heads = 16,
                      .sequences = 2,
                      .budgets = budgets_hash(std::vector<std::int32_t>{1024, 512})};
    const std::int32_t all = split == RankSplit::heads ? 16 : 30;
    header.first_part = first_of(rank, all);
    header.parts = first_of({rank.index + 1, rank.count}, all) - header.first_part;
    change(header, rank.index);
    runs.emplace_back(rank, header);
  }
  REQUIRE(ranks.drive(runs) == Status::ok);
  for (const HeaderAgreement& run : runs) {
    REQUIRE(run.message() == runs[0].message());
    REQUIRE(run.status() == (run.message().empty() ? Status::ok : Status::ranks_differ));
  }
  return runs[0].message();
}

}  // namespace

TEST_CASE("agreement: ranks of one mind go on", "[parallel]") {
  for_each_ranks([&](Ranks& ranks) {
    for (const RankSplit split : {RankSplit::heads, RankSplit::layers, RankSplit::rows}) {
      CHECK(message_of(ranks, split, [](RankHeader&, std::int32_t) {}) == "");
    }
  });
}

TEST_CASE("agreement: what differs is named, with the ranks, on every rank", "[parallel][fault]") {
  for_each_ranks([&](Ranks& ranks) {
    const auto last = ranks.count() - 1;
    const auto on_last = [&](auto&& change) {
      return message_of(ranks, RankSplit::heads, [&](RankHeader& header, std::int32_t r) {
        if (r == last) { change(header); }
      });
    };
    const std::string where = " on rank " + std::to_string(last);
    // A communicator of another size than the engine's is seen even by a rank that is alone.
    CHECK_THAT(
        message_of(ranks, RankSplit::rows, [](RankHeader& h, std::int32_t) { h.ranks += 2; }),
        ContainsSubstring("a communicator of " + std::to_string(ranks.count()) +
                          " ranks, where the engine has " + std::to_string(ranks.count() + 2)));
    CHECK_THAT(on_last([](RankHeader& h) { h.parts = 0; }),
               ContainsSubstring("rank " + std::to_string(last) + " has none of the 16 KV heads"));
    CHECK_THAT(on_last([](RankHeader& h) { h.first_part = 15, h.parts = 2; }),
               ContainsSubstring("has 2 KV heads from number 15 on, of 16"));
    CHECK_THAT(on_last([](RankHeader& h) { h.first_part = -1; }), ContainsSubstring("of 16"));
    CHECK_THAT(on_last([](RankHeader& h) { --h.parts; }),
               ContainsSubstring("15 of 16 KV heads are on a rank"));
    CHECK_THAT(
        message_of(ranks,
                   RankSplit::rows,
                   [](RankHeader& h, std::int32_t) { h.addends = exact_addends + 1; }),
        ContainsSubstring("an exact sum of 16777216 addends, but 64 bits hold at most 16777215"));
    CHECK(message_of(ranks, RankSplit::rows, [](RankHeader& h, std::int32_t) {
            h.addends = exact_addends;
          }) == "");
    if (last == 0) { return; }
    CHECK_THAT(on_last([](RankHeader& h) { --h.first_part, ++h.parts; }),
               ContainsSubstring("ranks " + std::to_string(last - 1) + " and " +
                                 std::to_string(last) + " have KV heads in common"));
    CHECK_THAT(on_last([](RankHeader& h) { h.layers = 29; }),
               ContainsSubstring("layers 30 on rank 0, 29" + where));
    CHECK_THAT(on_last([](RankHeader& h) { h.kv_heads = 8; }),
               ContainsSubstring("kv_heads 16 on rank 0, 8" + where));
    CHECK_THAT(on_last([](RankHeader& h) { h.sequences = 3; }),
               ContainsSubstring("sequences 2 on rank 0, 3" + where));
    CHECK_THAT(on_last([](RankHeader& h) { h.split = RankSplit::layers; }),
               ContainsSubstring("split 0 on rank 0, 1" + where));
    CHECK_THAT(
        on_last([](RankHeader& h) { h.policy = policy_hash(SnapKVSelector<>({.budget = 512})); }),
        ContainsSubstring("policy ") && ContainsSubstring(where));
    CHECK_THAT(on_last([](RankHeader& h) {
                 h.budgets = budgets_hash(std::vector<std::int32_t>{1024, 513});
               }),
               ContainsSubstring("budgets ") && ContainsSubstring(where));
    CHECK_THAT(on_last([](RankHeader& h) { h.layers = 29, h.sequences = 1; }),
               ContainsSubstring("layers") && ContainsSubstring("; sequences"));
  });
}

TEST_CASE("agreement: a rank that is out of pages stops all before anything moves",
          "[parallel][fault]") {
  for_each_ranks([&](Ranks& ranks) {
    const Model model{.tokens = 64, .scope = TableScope::group};
    auto worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
    const std::int32_t last = ranks.count() - 1;
    std::vector<RankWorld::Rows> before;
    for (std::size_t i = 0; i < worlds.size(); ++i) {
      // On the last rank, a fork shares all pages, and there are no spare ones to copy them to.
      if (ranks.here()[i].index == last) {
        PagedCache& cache = worlds[i]->cache();
        for (const std::int32_t page : cache.page_table(SequenceId{0}, LayerId{0}, HeadId{0})) {
          if (page >= 0) { cache.pool().retain(PageId{page}); }
        }
      }
      before.push_back(worlds[i]->rows());
    }
    const SnapKVSelector<> policy({.window = Model::window, .budget = 24});
    CHECK(evict_together(
              ranks,
              worlds,
              [&](RankWorld& world, std::size_t) {
                return world.make(policy, world.observation(), {.shared = SharedPages::copy});
              },
              [](const PlanRef& plan, std::size_t) {
                return plan_fingerprint(plan, RankSplit::heads, false);
              }) == Status::out_of_pages);
    for (std::size_t i = 0; i < worlds.size(); ++i) { CHECK(worlds[i]->rows() == before[i]); }
  });
}

TEST_CASE("agreement: plans that keep different rows are refused by all", "[parallel][fault]") {
  for_each_ranks([&](Ranks& ranks) {
    if (ranks.count() == 1) { return; }
    const Model model{.layers = 1, .tokens = 64, .scope = TableScope::group};
    auto worlds = worlds_of(ranks, model, [&](Rank rank) { return heads_of(model, rank); });
    std::vector<RankWorld::Rows> before;
    for (const auto& world : worlds) { before.push_back(world->rows()); }
    for (const bool same_count : {true, false}) {
      const auto plan_of = [&](RankWorld& world, std::size_t i) {
        const bool other = ranks.here()[i].index == 1;
        return world.make_kept([&](const HeadRef&, std::int32_t r) {
          return same_count ? r % 2 == (other ? 1 : 0) : r % (other ? 4 : 2) == 0;
        });
      };
      const auto agreed = [&](bool same_rows) {
        return evict_together(ranks, worlds, plan_of, [&](const PlanRef& plan, std::size_t) {
          return plan_fingerprint(plan, RankSplit::heads, same_rows);
        });
      };
      CHECK(agreed(true) == Status::ranks_differ);
      if (!same_count) { CHECK(agreed(false) == Status::ranks_differ); }
    }
    for (std::size_t i = 0; i < worlds.size(); ++i) { CHECK(worlds[i]->rows() == before[i]); }
  });
}

TEST_CASE("agreement: rounds that are not alike are refused in lock step", "[parallel][fault]") {
  std::vector<std::uint64_t> a(4), b(6);
  std::vector<OneRound> sizes{{RoundKind::sum, a}, {RoundKind::sum, b}};
  CHECK(drive_in_lock_step(std::span(sizes)) == Status::ranks_differ);
  std::vector<OneRound> kinds{{RoundKind::sum, a}, {RoundKind::max, std::span(b).first(4)}};
  CHECK(drive_in_lock_step(std::span(kinds)) == Status::ranks_differ);
  std::vector<OneRound> ends{{RoundKind::sum, a}, {RoundKind::sum, {}}};
  CHECK(drive_in_lock_step(std::span(ends)) == Status::ranks_differ);
  std::vector<OneRound> odd{{RoundKind::gather, std::span(a).first(3)},
                            {RoundKind::gather, std::span(b).first(3)}};
  CHECK(drive_in_lock_step(std::span(odd)) == Status::ranks_differ);
}

TEST_CASE("over ranks: which policies have a meaning, and why the others have none", "[parallel]") {
  const auto refused = [](const auto& policy, RankSplit split) {
    return std::string(why_not_over_ranks(policy, split));
  };
  using enum RankSplit;
  const auto everywhere = [&](const auto& policy) {
    return refused(policy, heads) + refused(policy, layers) + refused(policy, rows);
  };
  CHECK(everywhere(StreamingSink<>{}) == "");
  CHECK(everywhere(External{}) == "");
  CHECK(everywhere(KeyNorm{}) == "");
  CHECK(everywhere(HeavyHitter<>{}) == "");
  CHECK(everywhere(SnapKVSelector<>({.sums = Sums::exact})) == "");
  CHECK(everywhere(Tova({.scores = {.sums = Sums::exact}})) == "");
  CHECK(everywhere(ChunkKV<>({.scores = {.sums = Sums::exact}})) == "");
  CHECK(everywhere(PageSelector<>({.scores = {.sums = Sums::exact}})) == "");
  CHECK(everywhere(TopRows<PerLayer<KeyNormParams>>({.scores = {.heads = Reduction::max}})) == "");
  CHECK(everywhere(TopRows<ValueNorm<KeyNormParams>>{}) == "");
  // Floats are added over ranks.
  CHECK_THAT(refused(SnapKVSelector<>{}, rows), ContainsSubstring("sums = exact"));
  CHECK(refused(SnapKVSelector<>{}, heads) == "");
  CHECK_THAT(refused(Tova{}, heads), ContainsSubstring("sums = exact"));
  CHECK_THAT(refused(ChunkKV<>{}, heads), ContainsSubstring("sums = exact"));
  CHECK_THAT(refused(TopRows<PerLayer<KeyNormParams>>{}, heads),
             ContainsSubstring("maximum over heads"));
  CHECK_THAT(refused(PageSelector<>{}, rows), ContainsSubstring("sums = exact"));
  CHECK(refused(PageSelector<>{}, heads) == "");  // the maximum
  CHECK_THAT(refused(PageSelector<>({.pages = {.heads = Reduction::sum}}), heads),
             ContainsSubstring("sums = exact"));
  CHECK_THAT(refused(PageSelector<>({.pages = {.heads = Reduction::sum}}), layers),
             ContainsSubstring("sums = exact"));
  // Rows that are elsewhere decide.
  CHECK_THAT(refused(KeyDiff{}, rows), ContainsSubstring("on other ranks"));
  CHECK_THAT(refused(ExpectedAttention{}, rows), ContainsSubstring("on other ranks"));
  CHECK_THAT(refused(LagKV{}, rows), ContainsSubstring("on other ranks"));
  CHECK_THAT(refused(RKV{}, rows), ContainsSubstring("on other ranks"));
  CHECK_THAT(refused(CurKV{}, rows), ContainsSubstring("on other ranks"));
  CHECK_THAT(refused(TopRows<ValueNorm<KeyDiffParams>>{}, rows),
             ContainsSubstring("on other ranks"));
  CHECK(refused(KeyDiff{}, heads) == "");
  CHECK_THAT(refused(AdaKV<KeyNorm>{}, rows), ContainsSubstring("safe rows"));
  CHECK(refused(AdaKV<KeyNorm>{}, heads) == "");
  CHECK_THAT(refused(CriticalKV<KeyNorm>{}, rows), ContainsSubstring("second stage"));
  CHECK_THAT(refused(kvtrim::Random{}, heads), ContainsSubstring("number that a KV head has"));
  CHECK(refused(kvtrim::Random{}, rows) == "");
}

TEST_CASE("policy_hash: every parameter counts", "[parallel]") {
  std::set<std::uint64_t> hashes;
  const auto other = [&](const auto& policy) {
    CHECK(policy_hash(policy) == policy_hash(policy));
    CHECK(hashes.insert(policy_hash(policy)).second);
  };
  using P = SnapKVSelector<>;
  other(P{});
  other(P({.window = 31}));
  other(P({.budget = 1025}));
  other(P({.kernel = 7}));
  other(P({.rows = Reduction::max}));
  other(P({.group = Reduction::max}));
  other(P({.pooling = Pooling::max}));
  other(P({.columns = PoolColumns::all_columns}));
  other(P({.sinks = 1}));
  other(P({.sums = Sums::exact}));
  other(AdaKV<P>{});
  other(AdaKV<P>({.safeguard = 0.25}));
  other(AdaKV<P>({.inner = {.kernel = 7}}));  // of what it is put around
  other(Tova{});
  other(PageSelector<>{});
  other(PageSelector<>({.pages = {.top_m = 5}}));
  static_assert(policy_hash(Tova{}) != 0);
}
