// SPDX-License-Identifier: Apache-2.0
// B132 and B137 count work: tests/counts/work_test.cpp.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("B134 one token too many costs one row, or one page, and never the whole cache",
          "[cost][fault]") {
  const auto run = [](const auto& policy, std::int32_t most, std::int32_t least_live) {
    TestCache t({.pages = 10, .page_size = 4, .kv_heads = 1, .key_dim = 1, .value_dim = 1});
    const SequenceId s = t.filled(32);
    static_cast<void>(evict(policy, t, s));
    std::int32_t wiped = 0, worst = 0, evictions = 0;
    for (std::int32_t step = 0; step < 1000; ++step) {
      REQUIRE(t.append(s, 1) == Status::ok);
      Input in;
      in.score = [step](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
        return noise(p, step);
      };
      const Report report = evict(policy, t, s, in).report;
      REQUIRE(report.status == Status::ok);
      worst = std::max(worst, static_cast<std::int32_t>(report.evicted_rows));
      evictions += report.evicted_rows > 0 ? 1 : 0;
      wiped += t.cache.live_rows(s) < least_live ? 1 : 0;
    }
    CHECK(worst == most);
    CHECK(evictions >= 1000 / most - 1);
    CHECK(wiped == 0);
  };
  run(StreamingSink<SinkForm::exact>({.sinks = 4, .recent = 28}), 1, 32);
  run(StreamingSink({.sinks = 4, .recent = 28}), 4, 32);
  run(HeavyHitter({.heavy = 16, .recent = 16}), 1, 32);
  run(HeavyHitter<AccumulateParams, HeavyMode::promote>({.heavy = 16, .recent = 16}), 1, 32);
}

TEST_CASE("B136 a window of 512 behind 4 sinks lists 34 of 1,024 pages to its readers",
          "[cost][fault]") {
  PagedCache cache({.pages = 2 * 1024,
                    .page_size = 16,
                    .layers = 2,
                    .kv_heads = 1,
                    .key_dim = 1,
                    .value_dim = 1,
                    .scope = TableScope::layer});
  const SequenceId s = cache.try_create().value();
  REQUIRE(cache.try_extend(s, 16'384) == Status::ok);
  REQUIRE(cache.written(s, LayerId{0}) == Status::ok);
  REQUIRE(cache.written(s, LayerId{1}) == Status::ok);
  const StreamingSink policy({.sinks = 4, .recent = 512});
  const CacheView windowed = cache.view(s, LayerId{0}, 1);  // the other layer attends to all
  auto sink = cache.sink_for(windowed);
  REQUIRE(evict_into(policy, windowed, sink).report.status == Status::ok);
  const auto listed = [&](std::int32_t l) {
    std::int32_t pages = 0;
    const CacheView view = cache.view(s, LayerId{l}, 1);
    for_each_run({view, {}, {}, {}}, [&](const Run&) { ++pages; });
    return pages;
  };
  CHECK(listed(0) <= 1 + 33);
  CHECK(listed(0) >= 1 + 32);
  CHECK(listed(1) == 1024);
  CHECK(cache.page_table(s, LayerId{0})[34] == -1);
}
