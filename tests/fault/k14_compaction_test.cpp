// SPDX-License-Identifier: Apache-2.0
// B097 is a test of the cache: it needs no eviction.
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <bit>
#include <random>
#include <thread>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

const auto& greedy() {
  static const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy({.heavy = 1});
  return policy;
}

// Runs the items in random order, as if on three workers.
struct Shuffled {
  std::uint32_t seed = 0;
  [[nodiscard]] std::int32_t workers() const { return 3; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    std::vector<std::int64_t> items(index(n));
    std::iota(items.begin(), items.end(), 0);
    std::shuffle(items.begin(), items.end(), std::mt19937(seed));
    for (const std::int64_t item : items) { f(item, static_cast<std::int32_t>(item % 3)); }
  }
};
static_assert(Executor<Shuffled>);

// Each worker is a thread.
struct Threads {
  [[nodiscard]] std::int32_t workers() const { return 3; }
  template <class F>
  void for_each(std::int64_t n, F&& f) const noexcept {
    std::vector<std::thread> threads;
    for (std::int32_t worker = 0; worker < 3; ++worker) {
      threads.emplace_back([&, worker] {
        for (std::int64_t item = worker; item < n; item += 3) { f(item, worker); }
      });
    }
    for (std::thread& t : threads) { t.join(); }
  }
};
static_assert(Executor<Threads>);

}  // namespace

TEST_CASE("B099 each of the 4,096 keep patterns over 12 rows is compacted exactly",
          "[compaction][fault]") {
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::automatic}) {
    TestCache t({.pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    std::int32_t wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 4096; ++pattern) {
      const SequenceId s = t.filled(12);
      const auto kept = static_cast<std::int32_t>(std::popcount(pattern));
      Input in;
      // Head 1 keeps the mirrored pattern: as many rows, others.
      in.score = [&](std::int32_t, std::int32_t p, std::int32_t, std::int32_t h) {
        return static_cast<float>(pattern >> static_cast<unsigned>(h == 0 ? p : 11 - p) & 1U);
      };
      in.budgets = {kept};
      in.options.removal = way;
      const Outcome out = evict(greedy(), t, s, in);
      Rows expected, mirrored;
      for (std::int32_t p = 0; p < 12; ++p) {
        if ((pattern >> static_cast<unsigned>(p) & 1U) != 0) { expected.push_back(p); }
        if ((pattern >> static_cast<unsigned>(11 - p) & 1U) != 0) { mirrored.push_back(p); }
      }
      bool right = out.report.status == Status::ok && t.positions(s, 0, 0) == expected &&
                   t.positions(s, 0, 1) == mirrored && t.raw_key_error(s, 0, 1) == 0;
      if (way == Removal::stable_pack) { right = right && t.slots(s) == expected; }
      // One row less leaves its slot as a hole for the next append: the pages of 12 rows, unless it is the last.
      const bool hole = t.cache.state(s).append_row >= 0;
      right = right && (way == Removal::automatic || !hole);
      const std::int32_t pages = pages_for(kept + (hole ? 1 : 0), 4);
      right = right && out.report.released_pages == 3 - pages && t.cache.pool().in_use() == pages;
      right = right && t.cache.live_rows(s) == kept;
      wrong += right ? 0 : 1;
      if (!right) {
        INFO(to_string(way) << ", pattern " << pattern);
        REQUIRE(right);
      }
      t.cache.destroy(s);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("B101 rows 4..11 move to 2..9 over themselves, in order", "[compaction][fault]") {
  TestCache t({.pages = 3, .page_size = 4, .kv_heads = 1, .key_dim = 4, .value_dim = 2});
  const SequenceId s = t.filled(12);
  Input in;
  in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
    return p == 2 || p == 3 ? 0.0F : 1.0F;
  };
  in.budgets = {10};
  in.options.removal = Removal::stable_pack;
  const CacheView view = t.cache.view(s);
  Prepared prepared(view, in);
  const PlanRef plan = prepared.plan(greedy(), view, in.options);
  REQUIRE(plan.status() == Status::ok);
  const auto kept = plan.kept_list({}, {}, {});
  CHECK(Rows(kept.begin(), kept.end()) == Rows{0, 1} + range(4, 12));
  // Safe in this order: no row is written before it was read.
  for (std::size_t to = 0; to < kept.size(); ++to) { CHECK(kept[to] >= static_cast<int>(to)); }
  CHECK(plan.bytes_moved() == 8 * (4 + 2) * 4);
  REQUIRE(evict(greedy(), t, s, in).report.status == Status::ok);
  CHECK(t.slots(s) == Rows{0, 1} + range(4, 12));
  CHECK(t.positions(s) == Rows{0, 1} + range(4, 12));  // the tag in each row
  CHECK(t.raw_key_error(s) == 0);
}

TEST_CASE("B101 the batches are the heads: run in any order, on any thread, each row arrives",
          "[compaction][fault]") {
  const auto run = [](const auto& executor, Removal way, std::uint32_t seed) {
    TestCache t({.pages = 20,
                 .page_size = 4,
                 .layers = 2,
                 .kv_heads = 3,
                 .key_dim = 4,
                 .value_dim = 2,
                 .max_sequences = 3});
    t.rotation = plain_rotation(4);
    for (const std::int32_t n : {12, 23, 17}) { t.filled(n); }
    const Rerotator rerotator(t.cache.view(), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.score = [seed](std::int32_t s, std::int32_t p, std::int32_t l, std::int32_t h) {
      return noise(p, s * 8 + l, h, static_cast<std::int32_t>(seed));
    };
    in.budgets = {10, 11, 3};
    in.options.removal = way;
    in.options.rerotator = &rerotator;
    REQUIRE(evict_all(greedy(), t, in, executor).report.status == Status::ok);
    std::vector<Rows> out;
    for (const std::int32_t s : {0, 1, 2}) {
      for (const std::int32_t l : {0, 1}) {
        for (const std::int32_t h : {0, 1, 2}) {
          CHECK(t.raw_key_error(SequenceId{s}, l, h) < 1e-5);
          CHECK(t.ropes(SequenceId{s}, l, h) == range(0, in.budgets[index(s)]));
          const Rows positions = t.positions(SequenceId{s}, l, h);
          CHECK(std::count(positions.begin(), positions.end(), -1) == 0);
          out.push_back(t.slots(SequenceId{s}, l, h));
        }
      }
    }
    return out;
  };
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    for (std::uint32_t seed = 0; seed < 10; ++seed) {
      const auto serial = run(Serial{}, way, seed);
      CHECK(run(Shuffled{seed}, way, seed) == serial);
      CHECK(run(Threads{}, way, seed) == serial);
    }
  }
}
