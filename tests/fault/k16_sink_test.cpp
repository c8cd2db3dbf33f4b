// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::for_each_value;

namespace {

PagedCache::Params small() {
  return {.pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2};
}

}  // namespace

TEST_CASE("B108 sinks stay with the lowest scores of all", "[sink][fault]") {
  const auto kept = [](const auto& policy, Removal way) {
    TestCache t(small());
    const SequenceId s = t.filled(8);
    Input in;
    in.score = scores_of({0, 0, 9, 8, 7, 1, 1, 1});
    in.options.removal = way;
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.positions(s, 0, 1) == t.positions(s, 0, 0));
    return t.positions(s);
  };
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    CHECK(kept(HeavyHitter({.heavy = 2, .recent = 2, .sinks = 2}), way) == Rows{0, 1, 2, 3, 6, 7});
    CHECK(kept(HeavyHitter<AccumulateParams, HeavyMode::promote>(
                   {.heavy = 2, .recent = 2, .sinks = 2}),
               way) == Rows{0, 1, 2, 3, 6, 7});
    CHECK(kept(HeavyHitter<AccumulateParams, HeavyMode::greedy>(
                   {.heavy = 2, .recent = 0, .sinks = 2}),
               way) == Rows{0, 1, 2, 3});
    CHECK(kept(SnapKVSelector({.window = 2, .budget = 6, .sinks = 2}), way) ==
          Rows{0, 1, 2, 3, 6, 7});
    CHECK(kept(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 2}), way) == Rows{0, 1, 6, 7});
    CHECK(kept(HeavyHitter({.heavy = 2, .recent = 2}), way) == Rows{2, 3, 6, 7});  // without sinks
  }
}

TEST_CASE("B108 sinks stay through a long decode in which they never score", "[sink][fault]") {
  for_each_value<HeavyMode::real_drop, HeavyMode::promote>([&](auto mode) {
    TestCache t(small());
    const SequenceId s = t.filled(4);
    const HeavyHitter<AccumulateParams, mode> policy({.heavy = 2, .recent = 2, .sinks = 2});
    Input in;
    in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
      return p < 2 ? -1.0F : 1.0F + noise(p);
    };
    for (std::int32_t token = 4; token < 60; ++token) {
      REQUIRE(t.append(s, 1) == Status::ok);
      REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
      const Rows live = t.positions(s, 0, 1);
      CHECK(Rows(live.begin(), live.begin() + 2) == Rows{0, 1});
    }
    CHECK(t.cache.live_rows(s) == 6);
  });
}

TEST_CASE("B110 the oldest rows behind the sinks go, and are listed ascending", "[sink][fault]") {
  for (const Removal way : {Removal::automatic, Removal::stable_pack, Removal::fill_holes}) {
    TestCache t(small());
    const SequenceId s = t.filled(8);
    Input in;
    in.options.removal = way;
    const Outcome out = evict(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 3}), t, s, in);
    CHECK(out.report.status == Status::ok);
    for (const Rows& evicted : out.evicted) { CHECK(evicted == Rows{2, 3, 4}); }
    CHECK(t.positions(s) == Rows{0, 1, 5, 6, 7});
  }
}

TEST_CASE("B112 sinks that fill the cache are an error, one free row is enough", "[sink][fault]") {
  CHECK_THROWS_AS(StreamingSink({.sinks = 8, .recent = 0}), std::invalid_argument);
  CHECK_THROWS_AS(StreamingSink({.sinks = 8, .recent = 8, .capacity = 8}), std::invalid_argument);
  CHECK_THROWS_AS(StreamingSink({.sinks = 9, .recent = 8, .capacity = 8}), std::invalid_argument);
  const StreamingSink<SinkForm::exact> policy({.sinks = 7, .recent = 1, .capacity = 8});
  CHECK(policy.params().recent == 1);
  // A cache of 8 rows: room is made before each token, and the newest is never the one that goes.
  TestCache t({.pages = 2, .page_size = 4, .kv_heads = 1, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.create();
  for (std::int32_t token = 0; token < 30; ++token) {
    REQUIRE(evict(policy.make_room(1), t, s).report.status == Status::ok);
    REQUIRE(t.append(s, 1) == Status::ok);
    CHECK(t.positions(s) == (token < 8 ? range(0, token + 1) : range(0, 7) + Rows{token}));
  }
}
