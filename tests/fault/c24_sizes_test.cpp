// SPDX-License-Identifier: Apache-2.0
// Sizes that are no numbers of 64 bits: refused with the numbers, never wrapped around to something small.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("C24 a cache whose tables or bytes cannot be counted is not made", "[fault][sizes]") {
  const auto words = [](const PagedCache::Params& params) {
    try {
      PagedCache cache(params);
    } catch (const std::length_error& error) { return std::string(error.what()); }
    return std::string();
  };
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    const std::string heads =
        words({.pages = 1, .layers = 65'536, .kv_heads = 65'536, .key_dim = 1, .scope = scope});
    CHECK_THAT(heads, Catch::Matchers::ContainsSubstring("65536 layers of 65536 KV heads"));
    CHECK(words({.pages = 1,
                 .layers = 1 << 15,
                 .kv_heads = 1 << 15,
                 .key_dim = 1,
                 .scope = scope,
                 .max_sequences = 2}) != "");
  }
  const std::string bytes = words({.pages = 0x7FFF'FFFF,
                                   .page_size = 1,
                                   .layers = 0x4000,
                                   .kv_heads = 0x8000,
                                   .key_dim = 0x7FFF'FFFF});
  CHECK_THAT(bytes, Catch::Matchers::ContainsSubstring("2147483647 pages"));
}

TEST_CASE("C24 strides that reach beyond 64 bits are refused by name", "[fault][sizes]") {
  const auto words = [](const auto& change) {
    EnginePages engine(16, 4, 2, 2, {{0, 1}, {2, 3}});
    engine.fill(0, 8);
    CacheView view = engine.view();
    check_layout(view);
    change(view);
    try {
      check_layout(view);
    } catch (const std::invalid_argument& error) { return std::string(error.what()); }
    return std::string();
  };
  constexpr std::int64_t far = std::int64_t{1} << 62;
  const auto beyond = Catch::Matchers::ContainsSubstring("beyond 64 bits");
  const auto page = words([](CacheView& v) { v.k.page_stride = far; });
  CHECK_THAT(
      page,
      beyond && Catch::Matchers::ContainsSubstring("16 pages at a stride of 4611686018427387904"));
  CHECK_THAT(words([](CacheView& v) { v.v.page_stride = far; }), beyond);
  CHECK_THAT(words([](CacheView& v) { v.layers = 4, v.k.layer_stride = v.v.layer_stride = far; }),
             beyond);
  std::int32_t number = 0;
  CHECK_THAT(words([&](CacheView& v) {
               v.positions = SequencePlane::dense(&number, 1, 2, 8);
               v.positions.sequence_stride = too_large - 3;
             }),
             beyond);
  CHECK_THAT(words([](CacheView& v) { v.table.row_stride = far; }), beyond);
  CHECK_THAT(words([](CacheView& v) { v.table.rows.sequence = too_large; }), beyond);
  CHECK_THAT(words([](CacheView& v) { v.length_rows.sequence = far; }), beyond);
  CHECK_THAT(words([](CacheView& v) { v.table.v_offset = too_large; }), beyond);
  CHECK_THAT(words([](CacheView& v) { v.layers = v.kv_heads = 65'536; }),
             Catch::Matchers::ContainsSubstring("2 sequences of 65536 layers of 65536 KV heads"));
}

TEST_CASE("C24 what cannot be allocated is said to be too large", "[fault][sizes]") {
  constexpr std::int32_t most = 0x7FFF'FFFF;
  const std::size_t huge = std::size_t{1} << 61U;
  const HeavyHitter<> policy({.heavy = 4, .recent = 4});
  PlanShape shape;
  shape.sequences = shape.layers = shape.kv_heads = 1;
  const auto bytes = [&](auto member, std::int32_t value) {
    PlanShape larger = shape;
    larger.*member = value;
    return plan_workspace_bytes(policy, larger);
  };
  CHECK(bytes(&PlanShape::sequences, 2) < 1 << 20);
  for (const auto member : {&PlanShape::sequences, &PlanShape::layers, &PlanShape::kv_heads}) {
    PlanShape wide = shape;
    wide.sequences = wide.layers = wide.kv_heads = 1 << 12;
    wide.*member = most;
    CHECK(plan_workspace_bytes(policy, wide) > huge);
  }
  PlanShape rows = shape;
  rows.sequences = rows.layers = 1 << 15;
  rows.max_rows = most;
  CHECK(plan_workspace_bytes(policy, rows) > huge);

  CHECK(QueryRing::bytes({most, most, most, most, 0x3FFF'FFFF, true}) > huge);
  CHECK(QueryMoments::bytes({most, most, most, most, 4}) > huge);
  CHECK_THROWS_AS(QueryRing({1 << 20, 1 << 20, 1 << 20, 64, 64, false}), std::length_error);
  CHECK_THROWS_AS(QueryRing({.head_dim = 1, .window = 1 << 30}), std::invalid_argument);
  CHECK_THROWS_AS(QueryMoments({1 << 20, 1 << 20, 1 << 20, 64, 4}), std::length_error);
  Needs needs;
  needs.window = 64;
  Recorder::Params params;
  params.sequences = params.layers = params.query_heads = params.kv_heads = 1 << 20;
  params.head_dim = 64;
  CHECK(Recorder::bytes(needs, params) > huge);
  CHECK_THROWS_AS(Recorder(needs, params), std::length_error);
}

TEST_CASE("B130 sizes whose sum wraps around, and negative ones, are errors with their numbers",
          "[fault][sizes]") {
  // An unsigned SIZE_MAX - 31 is -32 in the 64 bits that sizes are given in.
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  const auto unsigned_size = [](std::size_t x) { return static_cast<std::int64_t>(x); };
  CHECK_THAT(
      thrown_by([&] { StreamingSink({.sinks = unsigned_size(SIZE_MAX - 31), .recent = 64}); }),
      Catch::Matchers::ContainsSubstring("sinks -32"));
  CHECK_THAT(thrown_by([&] { HeavyHitter({.heavy = unsigned_size(SIZE_MAX), .recent = 1}); }),
             Catch::Matchers::ContainsSubstring("heavy -1"));
  for (const std::int64_t x : {most, most - 31, std::int64_t{1} << 32, std::int64_t{1} << 31}) {
    CHECK_THAT(thrown_by([&] { StreamingSink({.sinks = x, .recent = 64}); }),
               Catch::Matchers::ContainsSubstring("sinks " + std::to_string(x)));
    CHECK_THAT(thrown_by([&] { StreamingSink({.sinks = 4, .recent = x}); }),
               Catch::Matchers::ContainsSubstring("recent " + std::to_string(x)));
    CHECK_THAT(thrown_by([&] { HeavyHitter({.heavy = x, .recent = 1}); }),
               Catch::Matchers::ContainsSubstring("heavy " + std::to_string(x)));
  }
  // Each fits, their sum does not.
  constexpr std::int64_t half = std::int64_t{1} << 30;
  CHECK_THROWS_AS(StreamingSink({.sinks = half, .recent = half}), std::invalid_argument);
  CHECK_THROWS_AS(HeavyHitter({.heavy = half, .recent = half}), std::invalid_argument);
  CHECK_NOTHROW(StreamingSink({.sinks = half, .recent = half - 1}));
  CHECK_NOTHROW(HeavyHitter({.heavy = half, .recent = half - 1}));
  for (const int negative : {-1, -32}) {
    CHECK_THROWS_AS(StreamingSink({.sinks = negative, .recent = 64}), std::invalid_argument);
    CHECK_THROWS_AS(StreamingSink({.sinks = 4, .recent = negative}), std::invalid_argument);
    CHECK_THROWS_AS(HeavyHitter({.heavy = negative, .recent = 1}), std::invalid_argument);
    CHECK_THROWS_AS(HeavyHitter({.heavy = 1, .recent = negative}), std::invalid_argument);
    CHECK_THROWS_AS(HeavyHitter({.heavy = 1, .recent = 1, .sinks = negative}),
                    std::invalid_argument);
  }
}
