// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/lag_kv_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

namespace {
constexpr LagKVParams once{.sinks = 4, .lag = 10, .judged_once = true};

SequenceState state_of(std::int32_t next, std::int32_t rows_at_eviction) {
  SequenceState s;
  s.next_position = next;
  s.rows_at_eviction = rows_at_eviction;
  return s;
}
}  // namespace

TEST_CASE("lag_kv_params: the defaults are kvpress's", "[lag_kv]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<LagKVParams>);
  constexpr LagKVParams p;
  STATIC_REQUIRE(p.sinks == 4);
  STATIC_REQUIRE(p.lag == 128);
  STATIC_REQUIRE_FALSE(p.cross_scoring);
}

TEST_CASE("lag_layout: all full partitions but the last are scored", "[lag_kv]") {
  constexpr LagKVParams p{.sinks = 4, .lag = 10};
  for (const auto& [live, partitions, scored] : {std::tuple{0, 0, 0},
                                                 {3, 0, 0},
                                                 {13, 0, 0},
                                                 {23, 1, 0},
                                                 {24, 2, 10},
                                                 {33, 2, 10},
                                                 {34, 3, 20}}) {
    const LagLayout layout = lag_layout(p, state_of(live, 0), live);
    INFO(live << " rows");
    CHECK(layout.begin == std::min(4, live));
    CHECK(layout.partitions == partitions);
    CHECK(layout.scored(10) == scored);
  }
}

TEST_CASE("lag_layout: with judged_once what was scored is known from rows and positions alone",
          "[lag_kv]") {
  // 37 tokens: 4 sinks, partitions [4, 14) and [14, 24) cut to 5 each, [24, 34) and a remainder of 3.
  const std::int32_t rows = 4 + 5 + 5 + 10 + 3;
  for (std::int32_t more = 0; more < 20; ++more) {
    const LagLayout layout = lag_layout(once, state_of(37 + more, rows), rows + more);
    INFO(more << " tokens later");
    CHECK(layout.begin == 14);
    CHECK(layout.partitions == (13 + more) / 10);
  }
  // An eviction before there was anything to judge, and none at all.
  CHECK(lag_layout(once, state_of(20, 12), 12).begin == 4);
  CHECK(lag_layout(once, state_of(37, 0), 37).begin == 4);
  // Of another policy, which kept less than the last partition: nothing is counted twice or below the sinks.
  CHECK(lag_layout(once, state_of(400, 6), 6).begin == 4);
}
