// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/needs.hpp>

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
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/policy/tova.hpp>

#include "catch.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

using namespace kvtrim;

namespace {

// What is thrown by f(); empty: nothing.
template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) { return error.what(); }
  return {};
}

// A user's score, with a need of its own.
struct Mine {
  static constexpr std::string_view name = "mine";
  static constexpr std::string_view title = "Mine";
  static constexpr Protection protects{0, 0};
  std::int32_t queries = 6;
  constexpr void check(std::string_view) const noexcept {}
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.window = queries}; }
};

// A user's policy, with rules that need the output projection.
struct MyPolicy : TopRows<Mine> {
  static constexpr std::string_view name = "mine";
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.output = true, .scope = TableScope::layer};
  }
};

constexpr Needs window(std::int32_t n, TableScope scope = TableScope::group) {
  return {.window = n, .positions = true, .scope = scope};
}

}  // namespace

TEST_CASE("needs: policies that go by keys, values or positions need nothing to be recorded",
          "[needs]") {
  STATIC_REQUIRE(needs(Full{}) == Needs{});
  STATIC_REQUIRE(needs(StreamingSink<>{}) == Needs{});
  STATIC_REQUIRE(needs(KeyDiff{}) == Needs{});
  STATIC_REQUIRE(needs(KeyNorm{}) == Needs{});
  STATIC_REQUIRE(needs(CurKV{}) == Needs{});
  STATIC_REQUIRE(needs(LagKV{}) == Needs{});
  STATIC_REQUIRE(needs(RecursiveLagKV{}) == Needs{.states = true});
  STATIC_REQUIRE(needs(Random{}) == Needs{.positions = true});
}

TEST_CASE("needs: a window is as long as the score's", "[needs]") {
  STATIC_REQUIRE(needs(SnapKVSelector<>{}) == window(32));
  STATIC_REQUIRE(needs(SnapKVSelector({.window = 7, .budget = 50})) == window(7));
  STATIC_REQUIRE(needs(Tova{}) == window(1));
  STATIC_REQUIRE(needs(RKV{}) == window(8));
  STATIC_REQUIRE(needs(SnapKVSelector<KeyDiffParams>{}) == Needs{});
  STATIC_REQUIRE(needs(TopRows<Mine>(TopRows<Mine>::Params{})) == Needs{.window = 6});
}

TEST_CASE("needs: accumulated attention needs planes, and positions only to be ranked by age",
          "[needs]") {
  constexpr Needs h2o = needs(HeavyHitter<>{});
  STATIC_REQUIRE(h2o.accumulate == AccumulateParams{});
  STATIC_REQUIRE(h2o.score_planes);
  STATIC_REQUIRE((h2o.positions && h2o.states));  // it overwrites slots
  HeavyHitter<>::Params p;
  p.removal = Removal::stable_pack;
  p.decay = 0.5F;
  const Needs packed = needs(HeavyHitter<>(p));
  CHECK(packed.accumulate == AccumulateParams{.decay = 0.5F});
  CHECK((!packed.positions && !packed.states));
  p.age_normalised = true;
  const Needs aged = needs(HeavyHitter<>(p));
  CHECK((aged.positions && aged.states));
  HeavyHitter<AccumulateParams, HeavyMode::promote>::Params promote;
  promote.removal = Removal::stable_pack;
  CHECK(needs(HeavyHitter<AccumulateParams, HeavyMode::promote>(promote)).states);
  // By another score nothing is accumulated.
  CHECK_FALSE(needs(HeavyHitter<KeyDiffParams>{}).accumulate);
}

TEST_CASE("needs: moments leave out the sinks of the score; filters, W_O and scores are named",
          "[needs]") {
  STATIC_REQUIRE(needs(ExpectedAttention{}) == Needs{.moments = MomentParams{4}, .states = true});
  ExpectedAttention::Params p;
  p.scores.sinks = 9;
  CHECK(needs(ExpectedAttention(p)).moments == MomentParams{9});
  STATIC_REQUIRE(needs(QFilter{}) == Needs{.filters = true});
  STATIC_REQUIRE(needs(External{}) == Needs{.token_scores = true});
  STATIC_REQUIRE(needs(TopRows<OutputNorm<KeyNormParams>>{}) == Needs{.output = true});
}

TEST_CASE("needs: tables are as fine as what is chosen", "[needs]") {
  using enum TableScope;
  STATIC_REQUIRE(needs(PyramidKV{}).scope == layer);
  STATIC_REQUIRE(needs(AdaKV<KeyDiff>{}) == Needs{.scope = head});
  using Pages = PageSelector<KeyDiffParams>;
  STATIC_REQUIRE(needs(Pages({.unit = PageUnit::per_group})) == Needs{});
  STATIC_REQUIRE(needs(Pages({.unit = PageUnit::per_layer})) == Needs{.scope = layer});
  STATIC_REQUIRE(needs(Pages({.unit = PageUnit::per_table})) == Needs{.scope = head});
}

TEST_CASE("needs: whatever is put around a policy or a score passes on what it needs", "[needs]") {
  using enum TableScope;
  STATIC_REQUIRE(needs(TopRows<PerLayer<TovaParams>>{}) == window(1));
  STATIC_REQUIRE(needs(TopRows<ValueNorm<QFilterParams>>{}) == Needs{.filters = true});
  STATIC_REQUIRE(needs(TopRows<ValueNorm<PerLayer<ExternalParams>>>{}) ==
                 Needs{.token_scores = true});
  constexpr Needs chunks = needs(ChunkKV<>{});
  STATIC_REQUIRE((chunks.window == 32 && chunks.positions && chunks.states));
  STATIC_REQUIRE(needs(PageSelector<TovaParams>{}) == window(1, head));
  STATIC_REQUIRE(needs(PyramidKV{}).window == 32);
  STATIC_REQUIRE(needs(AdaKV<SnapKVSelector<>>{}) == window(32, head));
  STATIC_REQUIRE(needs(AdaKV<PyramidKV>{}).states);

  constexpr Needs critical = needs(CriticalKV<SnapKVSelector<>>{});
  STATIC_REQUIRE((critical.window == 32 && critical.output && critical.scope == group));
  constexpr Needs both = needs(CriticalKV<AdaKV<SnapKVSelector<>>>{});
  STATIC_REQUIRE((both.window == 32 && both.output && both.scope == head));
  STATIC_REQUIRE(needs(CriticalKV<PyramidKV>{}).scope == layer);
}

TEST_CASE("needs: a user's score and a user's policy take part by the same member", "[needs]") {
  STATIC_REQUIRE(needs(MyPolicy{}) ==
                 Needs{.window = 6, .output = true, .scope = TableScope::layer});
  STATIC_REQUIRE(needs(AdaKV<TopRows<Mine>>{}) == Needs{.window = 6, .scope = TableScope::head});
}

TEST_CASE("merge: of each need the larger, in either order", "[needs]") {
  const Needs a = needs(SnapKVSelector<>{});
  const Needs b = needs(PyramidKV({.snapkv = {.window = 8, .budget = 64}}));
  const Needs c = needs(HeavyHitter<>{});
  const Needs d = needs(ExpectedAttention{});
  const Needs e = needs(QFilter{});
  const Needs all = merge(merge(merge(a, b), merge(c, d)), e);
  CHECK(all == merge(e, merge(d, merge(c, merge(b, a)))));
  CHECK(all == merge(all, all));
  CHECK(merge(all, {}) == all);
  CHECK(all.window == 32);
  CHECK(all.accumulate == AccumulateParams{});
  CHECK(all.moments == MomentParams{4});
  CHECK((all.filters && !all.output && !all.token_scores && all.score_planes));
  CHECK((all.positions && all.states));
  CHECK(all.scope == TableScope::layer);
}

TEST_CASE("merge: how sums are ranked does not change them, how they are made does", "[needs]") {
  const Needs plain{.accumulate = AccumulateParams{}};
  const Needs aged{.accumulate = AccumulateParams{.age_normalised = true}};
  CHECK(merge(plain, aged) == merge(aged, plain));
  const Needs decayed{.accumulate = AccumulateParams{.decay = 0.75F}};
  const Needs squared{.accumulate = AccumulateParams{.squared = true}};
  CHECK(refusal([&] { static_cast<void>(merge(plain, decayed)); }) ==
        "kvtrim::merge: policies on one cache share one accumulated score, but one has decay 1, "
        "squared false, exact sums false, the other decay 0.75, squared false, exact sums false");
  CHECK(refusal([&] { static_cast<void>(merge(squared, plain)); }) ==
        "kvtrim::merge: policies on one cache share one accumulated score, but one has decay 1, "
        "squared true, exact sums false, the other decay 1, squared false, exact sums false");
  const Needs exact{.accumulate = AccumulateParams{.sums = Sums::exact}};
  CHECK(merge(exact, exact) == exact);
  CHECK(refusal([&] { static_cast<void>(merge(plain, exact)); }) ==
        "kvtrim::merge: policies on one cache share one accumulated score, but one has decay 1, "
        "squared false, exact sums false, the other decay 1, squared false, exact sums true");
}

TEST_CASE("merge: moments without different numbers of sinks are refused with both", "[needs]") {
  const Needs four{.moments = MomentParams{4}};
  const Needs none{.moments = MomentParams{0}};
  CHECK(merge(four, four) == four);
  CHECK(merge(four, {}) == four);
  CHECK(refusal([&] { static_cast<void>(merge(four, none)); }) ==
        "kvtrim::merge: policies on one cache share their queries' moments, but one leaves out 4 "
        "sinks, the other 0");
}
