// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/split.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "gguf_builder.hpp"
#include "llama_engine/llama.hpp"

using Catch::Matchers::ContainsSubstring;
using engine::LayerObservation;
using engine::LlamaModel;
using engine::LogitRows;
using engine::Segment;
using engine::Split;
using engine_test::tiny_llama;
using kvtrim::PagedCache;
using kvtrim::SequenceId;
using kvtrim::Status;

namespace {

/// Claims of threads that did not hold: Catch2's own are for one thread.
std::atomic<int> broken = 0;
void claim(bool holds) {
  broken += holds ? 0 : 1;
}

/// Ranks that are threads: what each has to give lies open between two barriers.
class Meeting {
 public:
  explicit Meeting(std::int32_t size) : parts_(static_cast<std::size_t>(size)), barrier_(size) {}

  template <class Read>
  void meet(std::int32_t rank, std::span<const float> own, Read read) {
    parts_[static_cast<std::size_t>(rank)] = own;
    barrier_.arrive_and_wait();
    read(parts_);
    barrier_.arrive_and_wait();
  }

 private:
  std::vector<std::span<const float>> parts_;
  std::barrier<> barrier_;
};

class ThreadRanks final : public engine::Ranks {
 public:
  ThreadRanks(Meeting& meeting, std::int32_t rank, std::int32_t size)
      : meeting_(&meeting), rank_(rank), size_(size) {}

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return size_; }
  void sum(std::span<float> numbers) override {
    std::vector<float> sums(numbers.size());
    meeting_->meet(rank_, numbers, [&](const auto& parts) { add(parts, 0, sums); });
    std::copy(sums.begin(), sums.end(), numbers.begin());
  }
  void gather(std::span<const float> own,
              std::span<const std::int32_t> counts,
              std::span<float> all) override {
    claim(own.size() == static_cast<std::size_t>(counts[static_cast<std::size_t>(rank_)]));
    meeting_->meet(rank_, own, [&](const auto& parts) {
      auto to = all.begin();
      for (const auto& part : parts) to = std::copy(part.begin(), part.end(), to);
    });
  }
  void sum_parts(std::span<const float> all,
                 std::span<const std::int32_t> counts,
                 std::span<float> own) override {
    std::size_t first = 0;
    for (std::int32_t r = 0; r < rank_; ++r)
      first += static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
    meeting_->meet(rank_, all, [&](const auto& parts) { add(parts, first, own); });
  }

 private:
  static void add(const std::vector<std::span<const float>>& parts,
                  std::size_t first,
                  std::span<float> sums) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = 0;
      for (const auto& part : parts) sums[i] += part[first + i];
    }
  }
  Meeting* meeting_;
  std::int32_t rank_;
  std::int32_t size_;
};

/// What a rank saw of the work below.
struct Seen {
  std::vector<float> logits, lse, queries;
  std::int64_t rows = 0;
};

PagedCache cache_for(const LlamaModel& model, std::int32_t pages = 400) {
  auto params = model.cache_params();
  params.pages = pages;
  params.page_size = 4;
  params.max_sequences = 4;
  params.max_rows = 160;
  return PagedCache(params);
}

/// Two prompts in chunks, one of them forked, then three sequences together.
Seen work(LlamaModel& model) {
  std::mt19937 random(3);
  std::vector<std::int32_t> tokens(150);
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 11);
  const std::span<const std::int32_t> all(tokens);
  Seen seen;
  const auto keep = [&] {
    const auto& rows = model.logits();
    seen.logits.insert(seen.logits.end(), rows.data(), rows.data() + rows.size());
  };
  const auto observe = [&](const LayerObservation& step) {
    seen.lse.insert(seen.lse.end(), step.lse.begin(), step.lse.end());
    seen.queries.insert(seen.queries.end(), step.queries.begin(), step.queries.end());
  };
  PagedCache cache = cache_for(model);
  const SequenceId a = *cache.try_create(), b = *cache.try_create();
  claim(model.prefill(cache, a, all.first(103), observe, 37) == Status::ok);
  keep();
  claim(model.prefill(cache, b, all.subspan(90, 2), observe) == Status::ok);
  keep();
  const SequenceId c = *cache.try_fork(a);
  for (std::size_t i = 0; i < 9; ++i) {
    const std::vector<Segment> step{
        {a, all.subspan(103 + i, 1)}, {b, all.subspan(92 + i, 1)}, {c, all.subspan(3 * i, 3)}};
    claim(model.forward(cache, step, i == 4 ? LogitRows::all : LogitRows::last, observe) ==
          Status::ok);
    keep();
  }
  for (const SequenceId s : {a, b, c}) seen.rows += cache.live_rows(s);
  claim(cache.next_position(c) == kvtrim::Position{130});
  claim(cache.next_rope_position(b) == 11);
  return seen;
}

/// Runs `f` on every rank, each in a thread.
void on_ranks(std::int32_t size, const std::function<void(ThreadRanks&)>& f) {
  Meeting meeting(size);
  std::vector<std::thread> threads;
  for (std::int32_t r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      omp_set_num_threads(1);
      ThreadRanks ranks(meeting, r, size);
      f(ranks);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(broken.exchange(0) == 0);
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
  return worst;
}

}  // namespace

TEST_CASE("split: heads or tokens on several ranks give the logits of one", "[llama][split]") {
  const engine::GgufFile file = tiny_llama().file();
  LlamaModel whole(file);
  const Seen expected = work(whole);
  CHECK(broken == 0);
  const struct {
    Split::By by;
    std::int32_t ranks, stripe;
  } cases[]{{Split::By::heads, 1, 0},
            {Split::By::heads, 3, 0},
            {Split::By::context, 1, 4},
            {Split::By::context, 2, 1},
            {Split::By::context, 4, 4},
            {Split::By::context, 3, 64}};  // ranks without a row of the short sequence
  for (const auto& c : cases) {
    CAPTURE(c.ranks, c.stripe);
    std::vector<Seen> seen(static_cast<std::size_t>(c.ranks));
    on_ranks(c.ranks, [&](ThreadRanks& ranks) {
      LlamaModel model(file, {&ranks, c.by, c.stripe});
      seen[static_cast<std::size_t>(ranks.rank())] = work(model);
    });
    std::int64_t rows = 0;
    for (const Seen& rank : seen) {
      CHECK(distance(rank.logits, expected.logits) < 1e-4);
      CHECK(rank.logits == seen[0].logits);
      rows += rank.rows;
      if (c.by == Split::By::heads) {
        CHECK(rank.rows == expected.rows);
        continue;
      }
      // What decides which rows stay is the same on all ranks, bit for bit.
      CHECK(distance(rank.lse, expected.lse) < 1e-4);
      CHECK(distance(rank.queries, expected.queries) < 1e-4);
      CHECK(rank.lse == seen[0].lse);
      CHECK(rank.queries == seen[0].queries);
    }
    if (c.by == Split::By::context) CHECK(rows == expected.rows);
  }
}

TEST_CASE("split: a rank without room is all ranks' refusal, and nothing has changed",
          "[llama][split][fault]") {
  const engine::GgufFile file = tiny_llama().file();
  for (const Split::By by : {Split::By::heads, Split::By::context}) {
    on_ranks(3, [&](ThreadRanks& ranks) {
      LlamaModel model(file, {&ranks, by, 4});
      PagedCache cache = cache_for(model, ranks.rank() == 1 ? 1 : 20);
      const std::vector<std::int32_t> tokens(40, 5);
      const SequenceId a = *cache.try_create(), b = *cache.try_create();
      const std::vector<Segment> step{{a, std::span(tokens).first(2)}, {b, tokens}};
      claim(model.forward(cache, step, LogitRows::last) == Status::out_of_pages);
      for (const SequenceId s : {a, b}) {
        claim(cache.live_rows(s) == 0);
        claim(cache.next_position(s) == kvtrim::Position{0});
      }
      claim(model.forward(cache, {step.data(), 1}, LogitRows::last) == Status::ok);
    });
  }
}

TEST_CASE("split: ranks that do not divide the KV heads are refused", "[llama][split]") {
  const engine::GgufFile file = tiny_llama().file();
  Meeting meeting(2);
  ThreadRanks two(meeting, 0, 2);
  CHECK_THROWS_WITH(LlamaModel(file, {&two}),
                    ContainsSubstring("3 KV heads") && ContainsSubstring("2 ranks"));
}
