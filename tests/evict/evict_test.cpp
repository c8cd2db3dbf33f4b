// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/evict.hpp>

#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"
#include "support/threads.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

using namespace kvtrim;
using test::ByScore;
using test::TaggedCache;

// Every allocation of this program is counted.
namespace {
std::atomic<std::int64_t> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* const p =
      alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__
          ? std::malloc(bytes == 0 ? 1 : bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) { throw std::bad_alloc(); }
  return p;
}
}  // namespace

void* operator new(std::size_t n) {
  return counted(n, 1);
}
void* operator new[](std::size_t n) {
  return counted(n, 1);
}
void* operator new(std::size_t n, std::align_val_t a) {
  return counted(n, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t n, std::align_val_t a) {
  return counted(n, static_cast<std::size_t>(a));
}
// Without these a sanitizer's own would be taken, and freed by ours.
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(n == 0 ? 1 : n);
}
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(n == 0 ? 1 : n);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

TEST_CASE("evict: plan, apply and commit allocate nothing", "[evict][property]") {
  if (std::getenv("KVTRIM_TEST_UNWRITTEN") != nullptr) {
    WARN("valgrind counts allocations in place of this program");
    return;
  }
  REQUIRE([] {
    const std::int64_t before = allocations;
    const std::vector<int> one(1);
    return allocations - before;
  }() == 1);  // the counter counts
  const std::array frequencies{1.0};
  for (const Removal way :
       {Removal::drop_pages, Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    for (const bool in_cache : {false, true}) {
      TaggedCache c({.pages = 200,
                     .layers = 2,
                     .kv_heads = 3,
                     .scope = TableScope::layer,
                     .sequences = 3,
                     .max_rows = 40,
                     .scores = true});
      for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(c.append(s, 15 + s) == Status::ok); }
      std::vector<float> scores(3 * 6 * 40);
      test::Random random(7);
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 2, 3, 40);
      const ByScore policy{.keep = 14, .recent = 2, .way = way};
      PlanShape most = plan_shape(c.view(), obs);
      most.max_rows = 40;
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, most));
      const CacheView view = c.view();
      const Rerotator rerotator =
          in_cache
              ? Rerotator(
                    view,
                    Rope{.inverse_frequencies = frequencies, .dim = 2, .same_for_all_layers = true},
                    PositionMode::in_cache)
              : Rerotator();
      std::int64_t during = 0;
      for (std::int32_t step = 0; step < 10; ++step) {
        for (float& x : scores) { x = random.uniform(); }
        const std::int64_t before = allocations;
        const PlanRef made = plan(policy, view, obs, workspace, {.rerotator = &rerotator});
        const Status applied = apply(made, view, rerotator);
        auto sink = c.cache.sink_for(view);
        const Report report = commit(made, view, sink);
        during += allocations - before;
        REQUIRE(usable(made.status()));
        REQUIRE(applied == Status::ok);
        REQUIRE(usable(report.status));
        for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(c.append(s, 1) == Status::ok); }
      }
      CHECK(during == 0);
    }
  }
}

TEST_CASE("evict: one call does what the three stages do", "[evict]") {
  TaggedCache one({.max_rows = 40});
  TaggedCache three({.max_rows = 40});
  REQUIRE(one.append(0, 23) == Status::ok);
  REQUIRE(three.append(0, 23) == Status::ok);
  const StreamingSink<SinkForm::exact> policy({.sinks = 3, .recent = 6});
  const Report a = one.evict(policy);
  const CacheView view = three.view();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  const PlanRef made = plan(policy, view, {}, workspace);
  REQUIRE(apply(made, view) == Status::ok);
  auto sink = three.cache.sink_for(view);
  const Report b = commit(made, view, sink);
  CHECK(a.status == b.status);
  CHECK(a.evicted_rows == b.evicted_rows);
  CHECK(a.kept_rows == b.kept_rows);
  CHECK(a.released_pages == b.released_pages);
  CHECK(a.bytes_moved == b.bytes_moved);
  CHECK(one.bytes() == three.bytes());
}

TEST_CASE("evict: a view of one sequence leaves the others alone", "[evict]") {
  TaggedCache c({.pages = 60, .kv_heads = 2, .sequences = 3, .max_rows = 40});
  for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(c.append(s, 20) == Status::ok); }
  const StreamingSink<SinkForm::exact> policy({.sinks = 3, .recent = 6});
  REQUIRE(c.evict(policy, c.view(1)).status == Status::ok);
  CHECK(c.kept(0).size() == 20);
  CHECK(c.kept(1) == std::vector<std::int32_t>{0, 1, 2, 14, 15, 16, 17, 18, 19});
  CHECK(c.kept(2).size() == 20);
  CHECK(c.fault() == "");
}

TEST_CASE("evict: a refused plan changes nothing and says why", "[evict][fault]") {
  TaggedCache c({.max_rows = 40});
  REQUIRE(c.append(0, 20) == Status::ok);
  const auto before = c.bytes();
  const StreamingSink policy({.sinks = 3, .recent = 6});
  std::vector<std::byte> small(8);
  const Report report = evict(policy, c.cache, c.view(), {}, small);
  CHECK(report.status == Status::workspace_too_small);
  CHECK(report.evicted_rows == 0);
  CHECK(c.bytes() == before);
}

TEST_CASE("evict: state after a cut says how many rows there are, and steps start over",
          "[evict]") {
  TaggedCache c({.max_rows = 40, .scores = true});
  const HeavyHitter policy({.heavy = 5, .recent = 3, .interval = 4});
  REQUIRE(c.append(0, 20) == Status::ok);
  for (std::int32_t cut = 0; cut < 4; ++cut) {
    REQUIRE(c.evict(policy).evicted_rows == (cut == 0 ? 12 : 4));
    const SequenceState& state = c.cache.state(SequenceId{0});
    CHECK(state.live_rows == 8);
    CHECK(state.rows_at_eviction == 8);
    CHECK(state.steps == 0);
    CHECK(state.next_position == 20 + 4 * cut);
    for (std::int32_t i = 0; i < 4; ++i) {
      REQUIRE(c.append(0, 1) == Status::ok);
      CHECK(c.cache.state(SequenceId{0}).steps == i + 1);
      if (i < 3) { CHECK(c.evict(policy).evicted_rows == 0); }
    }
  }
}

TEST_CASE("evict: threads decide and move as one thread does", "[evict][property]") {
  const HeavyHitter policy({.heavy = 7, .recent = 4});
  std::vector<std::vector<std::byte>> results;
  for (const bool threads : {false, true}) {
    TaggedCache c(
        {.pages = 300, .layers = 2, .kv_heads = 3, .sequences = 5, .max_rows = 40, .scores = true});
    test::Random random(23);
    for (std::int32_t s = 0; s < 5; ++s) { REQUIRE(c.append(s, 9 + 3 * s) == Status::ok); }
    const CacheView view = c.view();
    for (std::int32_t step = 0; step < 20; ++step) {
      for (std::int32_t s = 0; s < 5; ++s) {
        for (std::int32_t l = 0; l < 2; ++l) {
          for (std::int32_t h = 0; h < 3; ++h) {
            c.for_each_row(s, l, h, [&](std::int32_t r, std::int32_t) {
              view.score_sums.at<float>(SequenceId{s}, LayerId{l}, HeadId{h}, r) +=
                  static_cast<float>(random.below(4));
            });
          }
        }
      }
      std::vector<std::byte> workspace(
          plan_workspace_bytes(policy, plan_shape(view, {}, test::Threads{}.count)));
      const Report report = threads
                                ? evict(policy, c.cache, view, {}, workspace, {}, test::Threads{})
                                : evict(policy, c.cache, view, {}, workspace);
      REQUIRE(report.status == Status::ok);
      for (std::int32_t s = 0; s < 5; ++s) { REQUIRE(c.append(s, 1) == Status::ok); }
    }
    CHECK(c.fault() == "");
    results.push_back(c.bytes());
  }
  CHECK(results[0] == results[1]);
}
