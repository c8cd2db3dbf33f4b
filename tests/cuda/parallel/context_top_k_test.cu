// SPDX-License-Identifier: Apache-2.0
// Ranks are simulated: each has its own device memory, and the words of a round are exchanged in lock step.
#include <kvtrim/cuda/parallel/context_top_k.cuh>

#include "device_buffer.hpp"

#include "catch.hpp"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;

// Items of one sequence: their rows' scores by position, and what competes.
struct World {
  std::int32_t layers = 2;
  std::int32_t kv_heads = 2;
  std::int32_t rows = 0;  // of all ranks, at positions 0, 1, ...
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t wanted = 0;
  std::vector<float> scores;  // [items, rows]

  [[nodiscard]] std::int32_t items() const { return layers * kv_heads; }
  [[nodiscard]] float score(std::int32_t item, std::int32_t row) const {
    return scores[static_cast<std::size_t>(item * rows + row)];
  }
};

// Positions that stay, by sorting.
std::vector<bool> kept_of(const World& w, std::int32_t item) {
  std::vector<std::int32_t> order;
  for (std::int32_t p = w.begin; p < w.end; ++p) { order.push_back(p); }
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return order_key(w.score(item, a)) > order_key(w.score(item, b));
  });
  std::vector<bool> kept(static_cast<std::size_t>(w.rows), true);
  for (std::size_t i = static_cast<std::size_t>(std::max(0, w.wanted)); i < order.size(); ++i) {
    kept[static_cast<std::size_t>(order[i])] = false;
  }
  return kept;
}

// The memory and the run of one rank.
struct RankMemory {
  RankMemory(const World& w,
             std::vector<std::int32_t> own,
             std::int32_t holes,
             std::int32_t claimed)
      : positions(std::move(own)), max_rows(static_cast<std::int32_t>(positions.size()) + holes) {
    std::vector<float> s;
    std::vector<std::int32_t> p;
    std::vector<cuda::RankedTask> t;
    for (std::int32_t item = 0; item < w.items(); ++item) {
      const std::int32_t hole = holes == 0 ? -1 : item % max_rows;
      for (std::int32_t e = 0, next = 0; e < max_rows; ++e) {
        const bool is_hole = e == hole;
        const std::int32_t position =
            is_hole ? w.begin : positions[static_cast<std::size_t>(next++)];
        s.push_back(is_hole ? std::numeric_limits<float>::infinity() : w.score(item, position));
        p.push_back(position);
      }
      t.push_back({max_rows, hole, w.begin, w.end, claimed, w.wanted, w.rows});
    }
    scores.emplace(s, "scores"), places.emplace(p, "positions"), tasks.emplace(t, "tasks");
    const auto n = static_cast<std::size_t>(w.items());
    stays.emplace(n * static_cast<std::size_t>(max_rows), "stays");
    statuses.emplace(n, "statuses");
    stays->fill(0x5A);
    bounds = {1, w.layers, w.kv_heads, max_rows};
    workspace.emplace(cuda::ContextTopK::workspace_bytes(bounds), "workspace");
    workspace->fill(0xA5);
    cuda::RowScores rows;
    rows.scores = SequencePlane::dense(scores->data(), w.layers, w.kv_heads, max_rows);
    rows.positions = SequencePlane::dense(places->data(), w.layers, w.kv_heads, max_rows);
    run.emplace(rows,
                tasks->data(),
                bounds,
                stays->data(),
                statuses->data(),
                workspace->data(),
                workspace->size(),
                nullptr);
  }

  std::vector<std::int32_t> positions;
  std::int32_t max_rows;
  cuda::SelectBounds bounds;
  std::optional<DeviceBuffer<float>> scores;
  std::optional<DeviceBuffer<std::int32_t>> places;
  std::optional<DeviceBuffer<cuda::RankedTask>> tasks;
  std::optional<DeviceBuffer<std::uint8_t>> stays;
  std::optional<DeviceBuffer<Status>> statuses;
  std::optional<DeviceBuffer<std::byte>> workspace;
  std::optional<cuda::ContextTopK> run;
};

std::vector<std::uint64_t> words_from(std::span<const std::uint64_t> device) {
  std::vector<std::uint64_t> words(device.size());
#if defined(KVTRIM_EMULATED)
  std::copy(device.begin(), device.end(), words.begin());
#else
  REQUIRE(cudaMemcpy(words.data(), device.data(), device.size_bytes(), cudaMemcpyDeviceToHost) ==
          cudaSuccess);
#endif
  return words;
}
void words_to(std::span<std::uint64_t> device, const std::vector<std::uint64_t>& words) {
#if defined(KVTRIM_EMULATED)
  std::copy(words.begin(), words.end(), device.begin());
  emulator::device_written(device.data(), device.size_bytes());
#else
  REQUIRE(cudaMemcpy(device.data(), words.data(), device.size_bytes(), cudaMemcpyHostToDevice) ==
          cudaSuccess);
#endif
}

// What an all-reduce does; the number of rounds.
int drive_all(std::deque<RankMemory>& ranks) {
  for (int rounds = 0;; ++rounds) {
    std::vector<Round> each;
    for (RankMemory& r : ranks) {
      each.push_back(r.run->next());
      INFO(kvtrim::test::device_message());
      REQUIRE(r.run->error() == cudaSuccess);
    }
    for (const Round& r : each) { REQUIRE(r.words.size() == each.front().words.size()); }
    if (!each.front()) { return rounds; }
    std::vector<std::uint64_t> sum(each.front().words.size(), 0);
    for (const Round& r : each) {
      REQUIRE(r.kind == RoundKind::sum);
      const auto own = words_from(r.words);
      for (std::size_t i = 0; i < sum.size(); ++i) { sum[i] += own[i]; }
    }
    for (const Round& r : each) { words_to(r.words, sum); }
  }
}

World world_of(std::int32_t rows, std::mt19937& rng, int kind) {
  World w;
  w.rows = rows;
  w.begin = std::min(rows, 3);
  w.end = std::max(w.begin, rows - 5);
  w.wanted = static_cast<std::int32_t>(rng() % static_cast<unsigned>(w.end - w.begin + 1));
  for (std::int32_t i = 0; i < w.items() * rows; ++i) {
    const float values[] = {static_cast<float>(rng() % 1000) - 500.0F,
                            0.25F,
                            rng() % 2 == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.0F,
                            rng() % 2 == 0 ? -0.0F : 0.0F};
    w.scores.push_back(values[kind]);
  }
  return w;
}

}  // namespace

TEST_CASE("cuda::context_top_k: rows on any ranks are kept as by sorting all of them",
          "[context_top_k][ties][nan]") {
  std::mt19937 rng(1);
  for (const std::int32_t rows : {1, 8, 9, 300}) {
    for (int kind = 0; kind < 4; ++kind) {
      const World w = world_of(rows, rng, kind);
      for (const std::size_t count : {1U, 2U, 4U}) {
        std::vector<std::vector<std::int32_t>> parts(count);
        const bool last_is_empty = count == 4;
        for (std::int32_t p = 0; p < rows; ++p) {
          parts[rng() % (last_is_empty ? count - 1 : count)].push_back(p);
        }
        std::deque<RankMemory> ranks;
        for (auto& own : parts) {
          std::shuffle(own.begin(), own.end(), rng);
          ranks.emplace_back(
              w, own, own.empty() ? 0 : static_cast<std::int32_t>(rng() % 2), w.end - w.begin);
        }
        CHECK(drive_all(ranks) == 8);
        INFO(rows << " rows, kind " << kind << ", " << count << " ranks, wanted " << w.wanted);
        for (const RankMemory& r : ranks) {
          const auto stays = r.stays->download();
          const auto tasks = r.tasks->download();
          for (const Status status : r.statuses->download()) { CHECK(status == Status::ok); }
          for (std::int32_t item = 0; item < w.items(); ++item) {
            const auto kept = kept_of(w, item);
            const std::int32_t hole = tasks[static_cast<std::size_t>(item)].hole;
            for (std::int32_t e = 0, next = 0; e < r.max_rows; ++e) {
              const auto got = stays[static_cast<std::size_t>(item * r.max_rows + e)];
              const bool expected =
                  e != hole &&
                  kept[static_cast<std::size_t>(r.positions[static_cast<std::size_t>(next++)])];
              if (got != (expected ? 1 : 0)) { FAIL_CHECK("item " << item << ", entry " << e); }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("cuda::context_top_k: where ranks do not have the rows that compete, all stay",
          "[context_top_k][fault]") {
  std::mt19937 rng(2);
  const World w = world_of(40, rng, 0);
  std::vector<std::int32_t> all(40);
  for (std::int32_t p = 0; p < 40; ++p) { all[static_cast<std::size_t>(p)] = p; }
  std::deque<RankMemory> ranks;
  ranks.emplace_back(w, all, 0, w.end - w.begin + 1);
  CHECK(drive_all(ranks) == 8);
  for (const Status status : ranks.front().statuses->download()) {
    CHECK(status == Status::ranks_differ);
  }
  for (const std::uint8_t stays : ranks.front().stays->download()) { CHECK(stays == 1); }
}

TEST_CASE("cuda::context_top_k: what cannot run is refused before any round",
          "[context_top_k][edge]") {
  const cuda::SelectBounds bounds{1, 2, 2, 16};
  DeviceBuffer<cuda::RankedTask> tasks(4);
  DeviceBuffer<std::uint8_t> stays(64);
  DeviceBuffer<Status> statuses(4);
  const std::size_t bytes = cuda::ContextTopK::workspace_bytes(bounds);
  DeviceBuffer<std::byte> workspace(bytes);
  const auto error_of =
      [&](const cuda::RankedTask* t, std::uint8_t* s, std::byte* memory, std::size_t n) {
        cuda::ContextTopK run({}, t, bounds, s, statuses.data(), memory, n, nullptr);
        const bool none = !run.next();
        return none ? run.error() : cudaSuccess;
      };
  CHECK(error_of(nullptr, stays.data(), workspace.data(), bytes) == cudaErrorInvalidValue);
  CHECK(error_of(tasks.data(), nullptr, workspace.data(), bytes) == cudaErrorInvalidValue);
  CHECK(error_of(tasks.data(), stays.data(), workspace.data(), bytes - 1) == cudaErrorInvalidValue);
  CHECK(error_of(tasks.data(), stays.data(), workspace.data() + 8, bytes) == cudaErrorInvalidValue);
  cuda::ContextTopK nothing({}, nullptr, {0, 2, 2, 16}, nullptr, nullptr, nullptr, 0, nullptr);
  CHECK(!nothing.next());
  CHECK(nothing.error() == cudaSuccess);
}
