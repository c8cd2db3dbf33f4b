// SPDX-License-Identifier: Apache-2.0
// Ids that are not the cache's: a broken precondition, which an assertion names. Each runs in a process of its own.
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>

#include "catch.hpp"
#include "support/planned.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

// What `f` prints before it aborts; empty: it returned.
std::string words_of_abort(const std::function<void()>& f) {
  std::array<int, 2> ends{};
  REQUIRE(pipe(ends.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // not Catch's report
    dup2(ends[1], STDERR_FILENO);
    f();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  std::array<char, 256> block{};
  for (ssize_t n = 0; (n = read(ends[0], block.data(), block.size())) > 0;) {
    text.append(block.data(), static_cast<std::size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? text : "";
}

struct Call {
  const char* words;  // of the assertion
  std::function<void(std::int32_t)> call;
};

}  // namespace

TEST_CASE("C23 every id of the public API is checked by an assertion with words", "[fault][ids]") {
  test::Planned x(18, TableScope::head);  // 2 sequences, layers and KV heads
  PagedCache& cache = x.c.cache;
  const PlanRef plan = x.make(test::ByScore{.keep = 6});
  REQUIRE(usable(plan.status()));
  CacheView view = x.c.view();
  QueryRing ring({.sequences = 2, .layers = 2, .query_heads = 2, .head_dim = 2, .window = 4});
  QueryMoments moments({.sequences = 2, .layers = 2, .query_heads = 2, .head_dim = 2});
  const std::vector<float> rows(64);
  const RowSource source{rows.data()};
  const SequenceId s0{0};
  const LayerId l0{0};
  const HeadId h0{0};
  const auto seq = [](std::int32_t i) { return SequenceId{i}; };
  const auto layer = [](std::int32_t i) { return LayerId{i}; };
  const auto head = [](std::int32_t i) { return HeadId{i}; };
  const auto use = [](const auto& value) { static_cast<void>(value); };
  const std::vector<Call> calls{
      {"no such sequence of the cache", [&](auto i) { use(cache.live_rows(seq(i))); }},
      {"no such layer of the cache", [&](auto i) { use(cache.live_rows(s0, layer(i))); }},
      {"no such KV head of the cache", [&](auto i) { use(cache.live_rows(s0, l0, head(i))); }},
      {"no such sequence of the cache", [&](auto i) { use(cache.total_live_rows(seq(i))); }},
      {"no such sequence of the cache", [&](auto i) { use(cache.live_bytes(seq(i))); }},
      {"no such sequence of the cache", [&](auto i) { use(cache.next_position(seq(i))); }},
      {"no such layer of the cache", [&](auto i) { use(cache.next_rope_position(s0, layer(i))); }},
      {"no such KV head of the cache", [&](auto i) { use(cache.state(s0, l0, head(i))); }},
      {"no such layer of the cache", [&](auto i) { use(cache.page_table(s0, layer(i))); }},
      {"no such sequence of the cache", [&](auto i) { use(cache.view(seq(i))); }},
      {"no such layers of the cache", [&](auto i) { use(cache.view(s0, layer(i), 1)); }},
      {"no such layer of the cache",
       [&](auto i) { use(cache.write(s0, layer(i), source, source)); }},
      {"no such layer of the cache", [&](auto i) { use(cache.written(s0, layer(i))); }},
      {"no such page of the pool",
       [&](auto i) { use(cache.pool().ref_count(PageId{i == 2 ? 80 : i})); }},
      {"no such page of the pool", [&](auto i) { cache.pool().retain(PageId{i == 2 ? 80 : i}); }},
      {"of the view", [&](auto i) { use(view.live_rows(seq(i), l0, h0)); }},
      {"of the view", [&](auto i) { use(view.state(s0, layer(i), h0)); }},
      {"of the view", [&](auto i) { use(view.k_page(s0, l0, head(i), 0)); }},
      {"of the view", [&](auto i) { use(view.v_page(seq(i), l0, h0, 0)); }},
      {"of the view", [&](auto i) { use(view.key(s0, layer(i), h0, 0)); }},
      {"of the view", [&](auto i) { use(view.value(s0, l0, head(i), 0)); }},
      {"no such sequence of the plan", [&](auto i) { use(plan.table(seq(i), 0)); }},
      {"no such table of the plan", [&](auto i) { use(plan.table(s0, i == 2 ? 4 : i)); }},
      {"no such layer of the plan", [&](auto i) { use(plan.head(s0, layer(i), h0)); }},
      {"no such KV head of the plan", [&](auto i) { use(plan.kept_list(s0, l0, head(i))); }},
      {"no such sequence of the plan", [&](auto i) { use(plan.evicted(seq(i), l0, h0)); }},
      {"no such table of the plan", [&](auto i) { use(plan.released(s0, i == 2 ? 4 : i)); }},
      {"no such sequence of the ring", [&](auto i) { use(ring.count(seq(i), l0)); }},
      {"no such layer of the ring", [&](auto i) { use(ring.last(s0, layer(i))); }},
      {"no such sequence of the ring", [&](auto i) { ring.truncate(seq(i), Position{0}); }},
      {"no such sequence of the ring", [&](auto i) { ring.reset(seq(i)); }},
      {"no such sequence of the ring", [&](auto i) { ring.fork(s0, seq(i)); }},
      {"no such sequence of the ring", [&](auto i) { use(ring.queries(seq(i))); }},
      {"no such sequence of the moments", [&](auto i) { moments.finish(seq(i)); }},
      {"no such layer of the moments", [&](auto i) { moments.advance(s0, layer(i), 1); }},
      {"no such sequence of the moments", [&](auto i) { moments.reset(seq(i)); }},
      {"no such sequence of the moments", [&](auto i) { moments.fork(seq(i), s0); }},
      {"no such sequence of the moments", [&](auto i) { use(moments.statistics(seq(i))); }},
  };
  for (std::size_t n = 0; n < calls.size(); ++n) {
    for (const std::int32_t id : {-1, 2, 0x7FFF'FFFF}) {
      INFO("call " << n << ", id " << id);
      CHECK_THAT(words_of_abort([&] { calls[n].call(id); }),
                 Catch::Matchers::ContainsSubstring(calls[n].words));
    }
    CHECK(words_of_abort([&] { calls[n].call(n < 28 ? 0 : 1); }) == "");
  }
}
