// SPDX-License-Identifier: Apache-2.0
// What may run on several threads at once, for the thread sanitizer (preset `tsan`): the work items of plan, scoring, apply and
// re-rotation, plans of one cache side by side, and `write` for different layers and sequences.
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

using namespace kvtrim;
using test::Threads;

namespace {

constexpr std::int32_t sequences = 3, layers = 3, heads = 2, dim = 8, rows = 40;

struct World {
  explicit World(TableScope scope, std::int32_t writers)
      : cache({.pages = 400,
               .page_size = 4,
               .layers = layers,
               .kv_heads = heads,
               .key_dim = dim,
               .scope = scope,
               .max_sequences = sequences,
               .max_rows = rows + 8,
               .scores = true}) {
    for (std::int32_t s = 0; s < sequences; ++s) { REQUIRE(cache.try_create()); }
    append(rows, writers);
    test::Random random(3);
    queries.resize(sequences * layers * 4 * 4 * dim);
    for (float& x : queries) { x = random.uniform(); }
  }

  // Every (sequence, layer) is written by whichever thread takes it.
  void append(std::int32_t n, std::int32_t writers) {
    for (std::int32_t s = 0; s < sequences; ++s) {
      REQUIRE(cache.try_extend(SequenceId{s}, n) == Status::ok);
    }
    std::atomic<std::int32_t> next{0}, failed{0};
    std::vector<std::thread> threads;
    for (std::int32_t w = 0; w < writers; ++w) {
      threads.emplace_back([&] {
        for (std::int32_t i = next++; i < sequences * layers; i = next++) {
          std::vector<float> data(static_cast<std::size_t>(n) * heads * dim);
          test::Random random(static_cast<std::uint64_t>(i * 1000 + n));
          for (float& x : data) { x = random.uniform(); }
          const Status status = cache.write(
              SequenceId{i / layers}, LayerId{i % layers}, {data.data()}, {data.data()});
          failed += status == Status::ok ? 0 : 1;
        }
      });
    }
    for (std::thread& t : threads) { t.join(); }
    REQUIRE(failed == 0);
    for (std::int32_t s = 0; s < sequences; ++s) {
      REQUIRE(cache.written(SequenceId{s}, {}) == Status::no_open_step);
      for (std::int32_t l = 0; l < layers; ++l) {
        REQUIRE_FALSE(cache.state(SequenceId{s}, LayerId{l}).open);
      }
    }
  }

  Observation seen() const {
    Observation obs;
    obs.queries = {.data = queries.data(), .query_heads = 4, .rows = 4};
    obs.queries.row_stride = dim;
    obs.queries.head_stride = 4 * dim;
    obs.queries.layer_stride = 16 * dim;
    obs.queries.sequence_stride = layers * 16 * dim;
    return obs;
  }

  // Keys, values, positions and tables, as a reader sees them.
  std::vector<std::byte> bytes() {
    std::vector<std::byte> all;
    const auto add = [&](const std::byte* from, std::int64_t n) {
      all.insert(all.end(), from, from + n);
    };
    const CacheView view = cache.view();
    for (std::int32_t i = 0; i < sequences * layers * heads; ++i) {
      const SequenceId s{i / layers / heads};
      const LayerId l{i / heads % layers};
      const HeadId h{i % heads};
      for (std::int32_t r = 0; r < view.state(s, l, h).extent(); ++r) {
        if (r == view.state(s, l, h).append_row) { continue; }
        add(view.key(s, l, h, r), view.k.row_bytes());
        add(view.value(s, l, h, r), view.v.row_bytes());
        add(view.positions.row(s, l, h, r), 4);
        add(view.rope_positions.row(s, l, h, r), 4);
      }
    }
    return all;
  }

  template <Policy P, Executor E>
  Status evict(const P& policy, const PlanOptions& options, const E& executor) {
    const CacheView view = cache.view();
    const Observation obs = seen();
    std::vector<std::byte> workspace(
        plan_workspace_bytes(policy, plan_shape(view, obs, executor.workers())));
    return kvtrim::evict(policy, cache, view, obs, workspace, options, executor).status;
  }

  PagedCache cache;
  std::vector<float> queries;
};

}  // namespace

TEST_CASE("threads: any number of them writes, plans, moves and rotates the same bytes as one",
          "[threads]") {
  const std::vector<double> frequencies = rope_frequencies(100, dim);
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    const auto run = [&](const auto& policy, bool renumber) {
      const auto after = [&](std::int32_t threads) {
        World world(scope, threads);
        const Rope rope{
            .inverse_frequencies = frequencies, .dim = dim, .same_for_all_layers = true};
        const Rerotator rerotator(world.cache.view(), rope, PositionMode::in_cache);
        PlanOptions options;
        if (renumber) { options.rerotator = &rerotator; }
        const Threads executor{threads};
        REQUIRE(world.evict(policy, options, executor) == Status::ok);
        world.append(3, threads);
        REQUIRE(world.evict(policy, options, executor) == Status::ok);
        return world.bytes();
      };
      const auto one = after(1);
      CHECK((after(4) == one));
    };
    run(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 20}), true);
    run(HeavyHitter({.heavy = 8, .recent = 8}), false);
    run(SnapKVSelector({.window = 4, .budget = 20}), true);
    run(KeyDiff({.budget = 20}), true);
  }
}

TEST_CASE("threads: one cache is planned for by several threads at once, each in its own workspace",
          "[threads]") {
  World world(TableScope::layer, 1);
  const SnapKVSelector policy({.window = 4, .budget = 20});
  const CacheView view = world.cache.view();
  const Observation obs = world.seen();
  const std::size_t bytes = plan_workspace_bytes(policy, plan_shape(view, obs));
  std::vector<std::vector<std::byte>> workspaces(4, std::vector<std::byte>(bytes));
  std::vector<PlanRef> plans(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    threads.emplace_back([&, i] { plans[i] = plan(policy, view, obs, workspaces[i]); });
  }
  for (std::thread& t : threads) { t.join(); }
  for (const PlanRef& p : plans) {
    CHECK(p.status() == Status::ok);
    CHECK(p == plans[0]);
  }
}
