// SPDX-License-Identifier: Apache-2.0

// Continuous batching with a tiny model: what streams get does not depend on who else is there, and pages never run over.
#include "batch/scheduler.hpp"

#include <kvtrim/cache/live_rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "tiny_model.hpp"

using batch::Outcome;
using batch::Request;
using batch::Scheduler;
using batch::Settings;
using Catch::Matchers::ContainsSubstring;
using kvtrim::HeadId;
using kvtrim::LayerId;
using kvtrim::PageId;
using kvtrim::SequenceId;
using program::Token;
using Round = batch::Scheduler::Round;
using Tokens = std::vector<Token>;

namespace {

constexpr std::int32_t page_size = 4;
constexpr std::int32_t tables = program_test::tiny_heads;

Tokens random_tokens(std::size_t n, std::uint32_t seed) {
  std::mt19937 random(seed);
  Tokens tokens(n);
  for (auto& t : tokens) t = static_cast<Token>(' ' + random() % 95);
  return tokens;
}

// Prompts of 20 to 50 tokens that want 1 to 24 more and arrive in bursts.
std::vector<Request> some_requests(std::size_t n, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<Request> requests;
  std::int64_t arrival = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (random() % 3 == 0) arrival += random() % 20;
    requests.push_back({"r" + std::to_string(i),
                        arrival,
                        random_tokens(20 + random() % 31, static_cast<std::uint32_t>(random())),
                        "",
                        static_cast<std::int32_t>(1 + random() % 24)});
  }
  return requests;
}

engine::LlamaModel& model() {
  static const engine::GgufFile file = program_test::tiny_model().file();
  static engine::LlamaModel instance(file);
  return instance;
}

/// A scheduler and all it works on.
struct World {
  program::PolicySpec spec;
  std::vector<Request> requests;
  Tokens prefix;
  kvtrim::PagedCache cache;
  program::Evictor evictor;
  Scheduler scheduler;

  World(const std::string& policy,
        std::vector<Request> list,
        std::int32_t pages_per_table,
        const Settings& settings,
        Tokens before = {})
      : spec(policy),
        requests(std::move(list)),
        prefix(std::move(before)),
        cache(params(pages_per_table, settings.streams)),
        evictor(model(),
                cache,
                program::needs_of(spec.make(64, kvtrim::SinkForm::pages)),
                {},
                Scheduler::recorder_slots(spec, settings.streams, !prefix.empty())),
        scheduler(model(), cache, evictor, spec, settings, requests, prefix) {}

  [[nodiscard]] kvtrim::PagedCache::Params params(std::int32_t pages, std::int32_t streams) const {
    auto p = model().cache_params();
    p.pages = pages * tables;
    p.page_size = page_size;
    p.scope = kvtrim::TableScope::head;
    p.max_sequences = Scheduler::sequences_for(streams, !prefix.empty());
    p.max_rows = 160;
    p.scores = true;
    return p;
  }

  // Runs to the end, at most `most` rounds. \returns what each stream had generated, and the positions that it held, by the
  // number of its rows
  void run(int most = 5000) {
    Round round = Round::worked;
    for (int i = 0; round == Round::worked && i < most; ++i) {
      round = scheduler.round();
      check_pages();
      note_positions();
    }
    REQUIRE(round == Round::over);
  }

  void check_pages() {
    const std::int64_t in_use = cache.pool().in_use();
    if (!scheduler.settings().overcommit) {
      CHECK(in_use <= scheduler.reserved_pages());
      CHECK(scheduler.counters().peak_pages <= scheduler.capacity());
      CHECK(scheduler.reserved_pages() <= scheduler.capacity());
    }
    CHECK(scheduler.live().size() <= static_cast<std::size_t>(scheduler.settings().streams));
  }

  using Positions = std::vector<std::int32_t>;
  std::map<std::pair<std::string, std::int32_t>, Positions> positions;  // by id and tokens seen
  void note_positions() {
    for (const auto& [request, s] : scheduler.live()) {
      Positions held;
      const kvtrim::CacheView view = cache.view(s);
      for (std::int32_t l = 0; l < view.layers; ++l) {
        for (std::int32_t h = 0; h < view.kv_heads; ++h) {
          Positions head;
          for (std::int32_t r = 0; r < cache.live_rows(s, LayerId{l}, HeadId{h}); ++r) {
            head.push_back(kvtrim::raw(view.position(SequenceId{0}, LayerId{l}, HeadId{h}, r)));
          }
          std::sort(head.begin(), head.end());
          held.insert(held.end(), head.begin(), head.end());
        }
      }
      const std::int32_t seen = kvtrim::raw(cache.next_position(s));
      const auto [at, fresh] = positions.emplace(std::pair(requests[request].id, seen), held);
      CHECK((fresh || at->second == held));  // a replay holds what the stream held before
    }
  }

  [[nodiscard]] std::vector<Tokens> tokens() const {
    std::vector<Tokens> all;
    for (const Outcome& o : scheduler.outcomes()) all.push_back(o.tokens);
    return all;
  }
  [[nodiscard]] std::int32_t pages_of_prefix() const {
    return prefix.empty()
               ? 0
               : tables * kvtrim::pages_for(static_cast<std::int32_t>(prefix.size()), page_size);
  }
};

const std::vector<std::string> policies{"full",
                                        "page:budget=16,window=4,kernel=3",
                                        "page:budget=24,score=surprisal",
                                        "snapkv:budget=12,window=4",
                                        "snapkv:removed=0.6,window=4",
                                        "streaming:sinks=2,budget=14",
                                        "streaming:sinks=2,budget=14,form=exact",
                                        "h2o:budget=12",
                                        "h2o:budget=12,interval=3",
                                        "h2o:budget=12,mode=promote",
                                        "tova:budget=12",
                                        "adakv:budget=12,window=4",
                                        "pyramidkv:budget=12,window=4",
                                        "expected:budget=12",
                                        "keydiff:budget=12"};

}  // namespace

TEST_CASE("batch: every stream gets the tokens and keeps the rows that it would alone",
          "[program][property]") {
  for (const std::string& policy : policies) {
    INFO(policy);
    const auto requests = some_requests(12);
    World alone(policy, requests, 40, {.streams = 1, .chunk = 8});
    alone.run();
    World many(policy, requests, 60, {.streams = 6, .chunk = 8});
    many.run();
    CHECK(alone.scheduler.counters().streams == 1);
    CHECK(many.scheduler.counters().streams > 2);
    CHECK(many.tokens() == alone.tokens());
    for (const auto& [key, held] : many.positions) {
      const auto at = alone.positions.find(key);
      if (at != alone.positions.end()) CHECK(at->second == held);
    }
    for (std::size_t i = 0; i < requests.size(); ++i) {
      CHECK(many.scheduler.outcomes()[i].end == Outcome::End::done);
      CHECK(many.tokens()[i].size() == static_cast<std::size_t>(requests[i].max_tokens));
      CHECK(many.scheduler.outcomes()[i].times.size() == many.tokens()[i].size());
    }
    CHECK(many.cache.pool().in_use() == 0);
    CHECK(many.scheduler.counters().preempted == 0);
  }
}

TEST_CASE("batch: reserved pages are never exceeded, and some run needs them all",
          "[program][property]") {
  for (const std::string& policy : policies) {
    INFO(policy);
    std::int64_t tightest = 1 << 20;
    for (std::uint32_t seed = 2; seed < 6; ++seed) {
      World world(policy, some_requests(10, seed), 30, {.streams = 5, .chunk = 16});
      for (Round round = Round::worked; round != Round::over;) {
        round = world.scheduler.round();
        REQUIRE(round != Round::stuck);
        world.check_pages();
        // With one stream in prefill, whose whole prompt is read in the next round, nothing is left over.
        tightest = std::min<std::int64_t>(
            tightest, world.scheduler.reserved_pages() - world.cache.pool().in_use());
      }
    }
    CHECK(tightest == 0);
  }
}

TEST_CASE("batch: streams that are preempted and replayed keep the same rows and say the same",
          "[program][fault]") {
  for (const std::string& policy : policies) {
    INFO(policy);
    const auto requests = some_requests(12, 3);
    World calm(policy, requests, 200, {.streams = 6, .chunk = 8});
    calm.run();
    CHECK(calm.scheduler.counters().preempted == 0);
    World tight(policy, requests, 19, {.streams = 6, .chunk = 8, .overcommit = true});
    tight.run();  // a replay is compared with what the stream held before
    CHECK(tight.tokens() == calm.tokens());
    for (const auto& [key, held] : tight.positions) {
      const auto at = calm.positions.find(key);
      if (at != calm.positions.end()) CHECK(at->second == held);
    }
    CHECK(tight.cache.pool().in_use() == 0);
    if (policy == "full") CHECK(tight.scheduler.counters().preempted > 0);
  }
}

TEST_CASE("batch: with more than 16 rows a step, tokens are equal until two are about as likely",
          "[program][fault]") {
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 24; ++i)
    requests.push_back({"r" + std::to_string(i), 0, random_tokens(20 + i, i), "", 40});
  for (const char* policy : {"full", "snapkv:budget=12,window=4", "tova:budget=16"}) {
    INFO(policy);
    World alone(policy, requests, 40, {.streams = 1, .chunk = 8});
    alone.run();
    std::vector<std::vector<float>> margins(requests.size());
    const auto watch = [&](std::size_t request, std::span<const float> logits) {
      std::vector<float> top(logits.begin(), logits.end());
      std::nth_element(top.begin(), top.begin() + 1, top.end(), std::greater<>());
      margins[request].push_back(top[0] - top[1]);
    };
    World many(
        policy, requests, 200, {.streams = 24, .chunk = 32, .overcommit = true, .watches = watch});
    many.run();
    CHECK(many.scheduler.counters().streams > 16);
    if (policy == std::string("full")) CHECK(many.scheduler.counters().preempted > 0);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto a = alone.tokens()[i], b = many.tokens()[i];
      REQUIRE(a.size() == b.size());
      const auto at =
          static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
      if (at < a.size()) CHECK(margins[i][at] < 1e-3F);
    }
  }
}

TEST_CASE("batch: where others take the pages, streams wait and come back", "[program][fault]") {
  for (const std::string& policy : policies) {
    INFO(policy);
    const auto requests = some_requests(8, 4);
    World calm(policy, requests, 60, {.streams = 4, .chunk = 8});
    calm.run();
    World robbed(policy, requests, 60, {.streams = 4, .chunk = 8});
    for (int i = 0; i < 12; ++i) {
      REQUIRE(robbed.scheduler.round() == Round::worked);
      robbed.note_positions();
    }
    std::vector<PageId> taken;
    Round round = Round::worked;
    for (int i = 0; i < 200 && round == Round::worked; ++i) {
      while (const auto page = robbed.cache.pool().try_acquire()) taken.push_back(*page);
      round = robbed.scheduler.round();
      robbed.note_positions();
    }
    CHECK(round == Round::stuck);
    CHECK(robbed.scheduler.live().empty());
    for (const PageId page : taken) robbed.cache.pool().release(page);
    robbed.run();
    // One that overwrites a slot at each step never needs another page.
    const bool overwrites = policy.ends_with("form=exact");
    CHECK((overwrites || robbed.scheduler.counters().preempted > 0));
    for (const auto& [key, held] : robbed.positions) {
      const auto at = calm.positions.find(key);
      if (at != calm.positions.end()) CHECK(at->second == held);
    }
    CHECK(robbed.tokens() == calm.tokens());
    CHECK(robbed.cache.pool().in_use() == 0);
  }
}

TEST_CASE(
    "batch: a common prefix is counted once, never written, and says what it says in front of each "
    "prompt",
    "[program]") {
  const Tokens prefix = random_tokens(18, 99);  // four whole pages, and half of one
  for (const std::string& policy : policies) {
    INFO(policy);
    const auto requests = some_requests(8, 5);
    World world(policy, requests, 70, {.streams = 5, .chunk = 8}, prefix);
    const auto bytes = [&] {
      std::vector<float> all;
      const kvtrim::CacheView view = world.cache.view(SequenceId{0});
      for (std::int32_t l = 0; l < view.layers; ++l) {
        for (std::int32_t h = 0; h < view.kv_heads; ++h) {
          kvtrim::for_each_run({view, SequenceId{0}, LayerId{l}, HeadId{h}},
                               [&](const kvtrim::Run& run) {
                                 for (std::int32_t r = 0; r < run.count; ++r) {
                                   const kvtrim::Slot slot{kvtrim::raw(run.slot) + r};
                                   for (const auto* plane : {&view.k, &view.v}) {
                                     const auto page = plane == &view.k ? run.k_page : run.v_page;
                                     const auto* row = reinterpret_cast<const float*>(
                                         plane->row(LayerId{l}, page, HeadId{h}, slot));
                                     all.insert(all.end(), row, row + plane->head_dim);
                                   }
                                 }
                               });
        }
      }
      return all;
    };
    const auto before = bytes();
    CHECK(before.size() == std::size_t{18} * tables * 2 * program_test::tiny_dim);
    CHECK(world.cache.pool().in_use() == world.pages_of_prefix());
    world.run();
    CHECK(bytes() == before);
    CHECK(world.cache.pool().in_use() == world.pages_of_prefix());
    World alone(policy, requests, 70, {.streams = 1, .chunk = 8}, prefix);
    alone.run();
    CHECK(world.tokens() == alone.tokens());
    if (policy != "full") continue;
    // The same as prompts that begin with it, up to rounding: a full cache forgets nothing.
    auto longer = requests;
    for (Request& r : longer) r.prompt.insert(r.prompt.begin(), prefix.begin(), prefix.end());
    World apart(policy, longer, 200, {.streams = 5, .chunk = 18});
    apart.run();
    CHECK(world.tokens() == apart.tokens());
    CHECK(world.scheduler.counters().peak_pages < apart.scheduler.counters().peak_pages);
  }
}

TEST_CASE(
    "batch: a request that could not be alone in the pool is refused with the numbers, the others "
    "run",
    "[program][edge]") {
  auto requests = some_requests(4, 6);
  requests[1].prompt = random_tokens(90, 7);
  World world("full", requests, 20, {.streams = 4, .chunk = 8});
  const Outcome& refused = world.scheduler.outcomes()[1];
  const int rows = 90 + requests[1].max_tokens - 1;
  CHECK(refused.end == Outcome::End::refused);
  CHECK_THAT(
      refused.refusal,
      ContainsSubstring("needs " + std::to_string(kvtrim::pages_for(rows, page_size) * tables) +
                        " pages at its peak, but the pool has 120"));
  world.run();
  CHECK(world.tokens()[1].empty());
  for (const std::size_t i : {0U, 2U, 3U})
    CHECK(world.scheduler.outcomes()[i].end == Outcome::End::done);
  // With a smaller peak it fits.
  World smaller("streaming:sinks=2,budget=10", requests, 24, {.streams = 4, .chunk = 8});
  smaller.run();
  CHECK(smaller.scheduler.outcomes()[1].end == Outcome::End::done);
}

TEST_CASE("batch: a pool that holds exactly so many full streams holds more under a policy",
          "[program]") {
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 16; ++i)
    requests.push_back({"r" + std::to_string(i), 0, random_tokens(64, i), "", 17});
  // 64 + 16 rows: 20 pages of 4. A budget of 3 pages runs in 4: 9 x 4 + 16 = 52 <= 60, and 44 / 4 + 1 = 12 streams.
  World full("full", requests, 60, {.streams = 16, .chunk = 16});
  full.run();
  CHECK(full.scheduler.counters().streams == 3);
  CHECK(full.scheduler.counters().peak_pages > 57 * tables);
  CHECK(full.scheduler.counters().peak_pages <= 60 * tables);
  World page("page:budget=12,window=4", requests, 60, {.streams = 16, .chunk = 16});
  CHECK(page.scheduler.footprint().streams(requests) == 12);
  page.run();
  CHECK(page.scheduler.counters().streams == 12);
}

TEST_CASE("batch: requests start in order and not before they arrive; a lone one is not waited for",
          "[program][edge]") {
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 3; ++i)
    requests.push_back({"r" + std::to_string(i), 0, random_tokens(8, i), "", 3});
  requests[1].arrival = 2;
  requests[2].arrival = 1000;
  World world("full", requests, 40, {.streams = 4, .chunk = 8});
  CHECK(world.scheduler.round() == Round::worked);
  CHECK(world.scheduler.live().size() == 1);
  CHECK(world.scheduler.round() == Round::worked);
  CHECK(world.scheduler.outcomes()[0].tokens.size() == 3);  // one of the prompt, two of rounds
  CHECK(world.scheduler.clock() == 2);
  CHECK(world.scheduler.round() == Round::worked);
  CHECK(world.scheduler.outcomes()[1].tokens.size() == 2);
  world.run(10);  // nobody counts to 1,000
  CHECK(world.scheduler.clock() >= 1000);
  CHECK(world.scheduler.round() == Round::over);
}

TEST_CASE("batch: a policy that acts once takes one slot of the recorder, whatever the streams",
          "[program]") {
  const program::PolicySpec once("snapkv:budget=12,window=4");
  const program::PolicySpec always("tova:budget=12");
  CHECK(Scheduler::recorder_slots(once, 64, false) == 1);
  CHECK(Scheduler::recorder_slots(once, 64, true) == 2);
  CHECK(Scheduler::recorder_slots(always, 64, false) == 64);
  CHECK(Scheduler::recorder_slots(always, 64, true) == 65);
}

TEST_CASE("batch: streams end where the model ends its text, if asked", "[program][edge]") {
  const auto requests = some_requests(6, 8);
  World whole("full", requests, 60, {.streams = 3, .chunk = 8});
  whole.run();
  const Token last = whole.tokens()[0].back();
  World stopped(
      "full", requests, 60, {.streams = 3, .chunk = 8, .ends = [&](Token t) { return t == last; }});
  stopped.run();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Tokens expected = whole.tokens()[i];
    const auto end = std::find(expected.begin(), expected.end(), last);
    if (end != expected.end()) expected.erase(end + 1, expected.end());
    CHECK(stopped.tokens()[i] == expected);
  }
}

TEST_CASE("batch: a prefix larger than the pool is refused with the numbers", "[program][edge]") {
  CHECK_THROWS_WITH(
      World("full", some_requests(1), 4, {.streams = 1, .chunk = 8}, random_tokens(20, 1)),
      ContainsSubstring("the prefix of 20 tokens needs 30 pages, but the pool has 24"));
}
