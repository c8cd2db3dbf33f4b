// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::TaggedCache;

namespace {

// {0..S-1} and {T-R..T-1}, or all.
std::vector<std::int32_t> sinks_and_recent(std::int32_t tokens,
                                           std::int32_t sinks,
                                           std::int32_t recent) {
  std::vector<std::int32_t> kept;
  for (std::int32_t i = 0; i < tokens; ++i) {
    if (i < sinks || i >= tokens - recent) { kept.push_back(i); }
  }
  return kept;
}

DemandInput input(std::int32_t live, std::int32_t page_size, std::int32_t first_row = 0) {
  DemandInput in;
  in.live = live;
  in.page_size = page_size;
  in.first_row = first_row;
  return in;
}

// Live rows after whole pages without a protected row are gone.
std::int32_t rows_after_drop(const Demand& d,
                             std::int32_t live,
                             std::int32_t page_size,
                             std::int32_t first_row = 0) {
  if (d.keep >= live) { return live; }
  std::int32_t rows = 0;
  for (std::int32_t begin = -first_row; begin < live; begin += page_size) {
    bool stays = begin < 0;  // the padding's page
    for (std::int32_t r = std::max(0, begin); r < std::min(live, begin + page_size); ++r) {
      stays = stays || r < d.protection.sinks || r >= live - d.protection.recent;
    }
    if (stays) { rows += std::max(0, std::min(live, begin + page_size) - std::max(0, begin)); }
  }
  return rows;
}

}  // namespace

TEST_CASE("streaming: exact one-shot equals step by step", "[streaming][property]") {
  for (const std::int32_t sinks : {0, 1, 3, 4}) {
    for (const std::int32_t recent : {1, 2, 5, 8}) {
      for (const std::int32_t page_size : {1, 4}) {
        const StreamingSink<SinkForm::exact> policy({.sinks = sinks, .recent = recent});
        TaggedCache steps({.page_size = page_size, .max_rows = 40});
        const std::array chunks{1, 1, 3, 1, 1, 1, 7, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1};
        std::int32_t tokens = 0;
        for (const std::int32_t n : chunks) {
          REQUIRE(steps.append(0, n) == Status::ok);
          tokens += n;
          REQUIRE(steps.evict(policy).status == Status::ok);
          TaggedCache at_once({.page_size = page_size, .max_rows = 40});
          REQUIRE(at_once.append(0, tokens) == Status::ok);
          REQUIRE(at_once.evict(policy).status == Status::ok);
          INFO("sinks " << sinks << " recent " << recent << " tokens " << tokens);
          REQUIRE(steps.kept(0) == sinks_and_recent(tokens, sinks, recent));
          REQUIRE(at_once.kept(0) == steps.kept(0));
          REQUIRE(steps.fault() == "");
        }
      }
    }
  }
}

TEST_CASE("streaming: an exact decode step overwrites the oldest recent slot and moves nothing",
          "[streaming][paper]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 5});
  TaggedCache c({.max_rows = 20});
  REQUIRE(c.append(0, 7) == Status::ok);
  REQUIRE(c.evict(policy).status == Status::ok);
  for (std::int32_t step = 0; step < 23; ++step) {
    REQUIRE(c.append(0, 1) == Status::ok);
    const Report report = c.evict(policy);
    REQUIRE(report.status == Status::ok);
    CHECK(report.bytes_moved == 0);
    CHECK(report.evicted_rows == 1);
    // The ring: the hole is where the oldest of the window was; at the end of the table it is none.
    CHECK(c.cache.state(SequenceId{0}).append_row == (step % 6 == 5 ? -1 : 2 + step % 6));
    REQUIRE(c.fault() == "");
  }
}

TEST_CASE("streaming: pages keeps within its bounds for every small shape",
          "[streaming][property]") {
  for (std::int32_t page_size = 1; page_size <= 5; ++page_size) {
    for (std::int32_t sinks = 0; sinks <= 6; ++sinks) {
      for (std::int32_t recent = 1; recent <= 8; ++recent) {
        const StreamingSink policy({.sinks = sinks, .recent = recent});
        const std::int32_t least = sinks + recent;
        const std::int32_t most =
            (sinks + page_size - 1) / page_size * page_size + recent + page_size - 1;
        std::int32_t stepped = 0;
        for (std::int32_t tokens = 0; tokens <= 40; ++tokens) {
          const Demand at_once = policy.demand(input(tokens, page_size));
          const std::int32_t kept = rows_after_drop(at_once, tokens, page_size);
          stepped = rows_after_drop(policy.demand(input(stepped, page_size)), stepped, page_size);
          INFO("N " << page_size << " S " << sinks << " R " << recent << " T " << tokens);
          REQUIRE(at_once.status == Status::ok);
          REQUIRE(kept >= std::min(tokens, least));
          REQUIRE(kept <= std::max(most, std::min(tokens, least)));
          REQUIRE(stepped <= most);
          REQUIRE(stepped >= std::min(tokens, least));
          ++stepped;
        }
      }
    }
  }
}

TEST_CASE("streaming: pages on a cache moves no byte and keeps what the pages' arithmetic says",
          "[streaming][property]") {
  for (const std::int32_t page_size : {1, 3, 4}) {
    for (const std::int32_t sinks : {0, 1, 4, 5}) {
      for (const std::int32_t recent : {1, 4, 6}) {
        const StreamingSink policy({.sinks = sinks, .recent = recent});
        TaggedCache c({.page_size = page_size, .max_rows = 60});
        std::int32_t tokens = 0;
        std::vector<std::int32_t> expected;
        for (std::int32_t step = 0; step < 30; ++step) {
          const std::int32_t n = step == 0 ? 13 : step % 7 == 6 ? 4 : 1;
          REQUIRE(c.append(0, n) == Status::ok);
          for (std::int32_t i = 0; i < n; ++i) { expected.push_back(tokens++); }
          // Pages of the rows as they lie: one stays if it holds a sink or a recent row.
          const auto live = static_cast<std::int32_t>(expected.size());
          std::vector<std::int32_t> left;
          for (std::int32_t r = 0; r < live; ++r) {
            const std::int32_t begin = r / page_size * page_size;
            const std::int32_t end = std::min(live, begin + page_size);
            if (live <= sinks + recent || begin < sinks || end > live - recent) {
              left.push_back(expected[static_cast<std::size_t>(r)]);
            }
          }
          expected = left;
          const Report report = c.evict(policy);
          REQUIRE(report.status == Status::ok);
          REQUIRE(report.bytes_moved == 0);
          REQUIRE(c.kept(0) == expected);
          REQUIRE(c.fault() == "");
        }
      }
    }
  }
}

TEST_CASE("streaming: a hard budget is never exceeded, except where not one page fits",
          "[streaming][property]") {
  for (std::int32_t page_size = 1; page_size <= 5; ++page_size) {
    for (std::int32_t sinks = 0; sinks <= 5; ++sinks) {
      for (std::int32_t recent = 1; recent <= 7; recent += 2) {
        for (std::int32_t hard = sinks + 1; hard <= 16; ++hard) {
          for (const std::int32_t first_row : {0, 1, 7}) {
            const StreamingSink policy({.sinks = sinks, .recent = recent, .hard_budget = hard});
            for (std::int32_t live = 0; live <= 40; ++live) {
              const Demand d = policy.demand(input(live, page_size, first_row));
              const std::int32_t rows = rows_after_drop(d, live, page_size, first_row);
              INFO("N " << page_size << " S " << sinks << " R " << recent << " hard " << hard
                        << " live " << live << " padding " << first_row);
              // What cannot go: the pages of the sinks and of the padding, and the page of the newest row.
              const std::int32_t fixed =
                  rows_after_drop({0, {sinks, 1}, 1, Status::ok}, live, page_size, first_row);
              REQUIRE(rows <= std::max(hard, fixed));
              REQUIRE((d.status == Status::over_budget) == (rows > hard));
              REQUIRE(d.protection.sinks == sinks);
              REQUIRE(d.protection.recent >= 1);
              REQUIRE(d.protection.recent <= recent);
              if (live > hard) { REQUIRE(rows < live + (fixed == live ? 1 : 0)); }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("streaming: under a hard budget, one more page of window never fits",
          "[streaming][property]") {
  const StreamingSink policy({.sinks = 4, .recent = 12, .hard_budget = 16});
  for (std::int32_t live = 17; live < 60; ++live) {
    const std::int32_t rows = rows_after_drop(policy.demand(input(live, 4)), live, 4);
    CHECK(rows <= 16);
    CHECK(rows > 16 - 4);
  }
}

TEST_CASE("streaming: make_room cuts so that no query sees more than sinks + recent rows",
          "[streaming]") {
  for (const std::int32_t sinks : {0, 3}) {
    for (std::int32_t recent = 1; recent <= 6; ++recent) {
      const StreamingSink<SinkForm::exact> policy({.sinks = sinks, .recent = recent});
      REQUIRE(policy.max_chunk() == recent);
      for (std::int32_t chunk = 0; chunk <= recent; ++chunk) {
        for (std::int32_t tokens = 0; tokens <= 20; ++tokens) {
          TaggedCache c({.max_rows = 40});
          REQUIRE(c.append(0, tokens) == Status::ok);
          REQUIRE(c.evict(policy.make_room(chunk)).status == Status::ok);
          INFO("S " << sinks << " R " << recent << " T " << tokens << " n " << chunk);
          const auto expected = tokens + chunk <= sinks + recent
                                    ? sinks_and_recent(tokens, sinks, tokens)
                                    : sinks_and_recent(tokens, sinks, std::max(recent - chunk, 0));
          REQUIRE(c.kept(0) == expected);
          REQUIRE(c.append(0, chunk) == Status::ok);
          if (chunk > 0) { REQUIRE(c.cache.live_rows(SequenceId{0}) <= sinks + recent); }
        }
      }
      TaggedCache c({.max_rows = 40});
      REQUIRE(c.append(0, 20) == Status::ok);
      const auto before = c.bytes();
      CHECK(c.evict(policy.make_room(recent + 1)).status == Status::chunk_too_long);
      CHECK(c.bytes() == before);
    }
  }
}

TEST_CASE("streaming: make_room under a hard budget leaves room for the chunk", "[streaming]") {
  const StreamingSink policy({.sinks = 4, .recent = 12, .hard_budget = 16});
  for (std::int32_t live = 0; live < 60; ++live) {
    for (const std::int32_t chunk : {1, 3, 8}) {
      const Demand d = policy.make_room(chunk).demand(input(live, 4));
      CHECK(d.status == Status::ok);
      CHECK(rows_after_drop(d, live, 4) + chunk <= 16);
    }
  }
  CHECK(policy.make_room(13).demand(input(30, 4)).status == Status::chunk_too_long);
}

TEST_CASE("streaming: max_pages is never exceeded, and is reached", "[streaming][property]") {
  for (std::int32_t page_size = 1; page_size <= 5; ++page_size) {
    for (std::int32_t sinks = 0; sinks <= 5; ++sinks) {
      for (std::int32_t recent = 1; recent <= 7; ++recent) {
        for (const std::int32_t chunk : {1, 2, 5}) {
          const StreamingSink policy({.sinks = sinks, .recent = recent});
          const std::int32_t bound = policy.max_pages(page_size, chunk);
          std::int32_t most = 0;
          for (std::int32_t start = 1; start <= chunk; ++start) {
            std::int32_t live = 0;
            for (std::int32_t step = 0; step < 60; ++step) {
              live += step == 0 ? start : chunk;
              most = std::max(most, (live + page_size - 1) / page_size);
              live = rows_after_drop(policy.demand(input(live, page_size)), live, page_size);
            }
          }
          INFO("N " << page_size << " S " << sinks << " R " << recent << " chunk " << chunk);
          REQUIRE(most <= bound);
          if (chunk == 1) { REQUIRE(most == bound); }
        }
      }
    }
  }
}

TEST_CASE("streaming: recent is cut to the capacity and to the hard budget", "[streaming][edge]") {
  CHECK(StreamingSink({.sinks = 4, .recent = 100, .capacity = 64}).params().recent == 60);
  CHECK(StreamingSink({.sinks = 4, .recent = 100, .capacity = 104}).params().recent == 100);
  CHECK(StreamingSink({.sinks = 4, .recent = 100, .capacity = 5}).params().recent == 1);
  CHECK(StreamingSink({.sinks = 4, .recent = 100, .hard_budget = 64}).params().recent == 60);
  CHECK(StreamingSink({.sinks = 4, .recent = 100, .capacity = 64}).max_chunk() == 60);
}

TEST_CASE("streaming: the paper's sizes are the default", "[streaming][paper]") {
  constexpr StreamingSink policy;
  CHECK(policy.params().sinks == 4);
  CHECK(policy.params().recent == 1024);
  STATIC_REQUIRE(std::is_same_v<decltype(policy), const StreamingSink<SinkForm::pages>>);
  CHECK(policy.removal() == Removal::drop_pages);
  CHECK(StreamingSink<SinkForm::exact>().removal() == Removal::overwrite_slot);
}

TEST_CASE("streaming: the constructor refuses what cannot work, with the numbers",
          "[streaming][edge]") {
  using S = StreamingSink<>;
  CHECK_THROWS_WITH(S({.sinks = 4, .recent = 0}), ContainsSubstring("recent 0"));
  CHECK_THROWS_WITH(S({.sinks = -1}), ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(S({.sinks = std::int64_t{1} << 31}), ContainsSubstring("2147483648"));
  CHECK_THROWS_WITH(S({.sinks = 4, .recent = (std::int64_t{1} << 31) - 4}),
                    ContainsSubstring("sinks + recent 2147483648 must be at most 2147483647"));
  CHECK_THROWS_WITH(S({.sinks = 8, .capacity = 8}),
                    ContainsSubstring("sinks 8") && ContainsSubstring("capacity 8"));
  CHECK_THROWS_WITH(S({.sinks = 8, .capacity = -1}), ContainsSubstring("capacity -1"));
  CHECK_THROWS_WITH(S({.sinks = 8, .hard_budget = 8}), ContainsSubstring("hard_budget 8"));
  CHECK_THROWS_AS(S({.recent = -5}), std::invalid_argument);
  CHECK_NOTHROW(S({.sinks = 0, .recent = 1}));
}

TEST_CASE("streaming: a budget given at run time replaces sinks + recent", "[streaming][edge]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 3, .recent = 50});
  for (const std::int32_t budget : {0, 1, 2, 3, 4, 9}) {
    TaggedCache c({.max_rows = 40});
    REQUIRE(c.append(0, 12) == Status::ok);
    Observation obs;
    obs.budgets = &budget;
    obs.budget_rows = {0, 0, 0};
    INFO("budget " << budget);
    // Sinks are protected whatever the budget.
    CHECK(c.evict(policy, obs).status == (budget < 3 ? Status::over_budget : Status::ok));
    CHECK(c.kept(0) == sinks_and_recent(12, 3, std::max(0, budget - 3)));
    REQUIRE(c.fault() == "");
  }
  const std::int32_t below = 1;
  TaggedCache c({.max_rows = 40});
  REQUIRE(c.append(0, 2) == Status::ok);
  Observation obs;
  obs.budgets = &below;
  obs.budget_rows = {0, 0, 0};
  CHECK(c.evict(policy, obs).status == Status::over_budget);  // both are sinks
  CHECK(c.kept(0) == std::vector<std::int32_t>{0, 1});
}
