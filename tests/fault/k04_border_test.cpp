// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

#include <array>

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::for_each_value;

namespace {

PagedCache::Params small(std::int32_t pages, std::int32_t page_size) {
  return {.pages = pages,
          .page_size = page_size,
          .kv_heads = 2,
          .key_dim = 2,
          .value_dim = 2,
          .max_sequences = 2};
}

}  // namespace

TEST_CASE("B031 with room made first, a window of W shows a query W keys, its own among them",
          "[border][fault]") {
  const auto visible = [](std::int64_t sinks, std::int64_t window, std::int32_t last) {
    TestCache t(small(8, 4));
    const SequenceId s = t.create();
    const StreamingSink<SinkForm::exact> policy({.sinks = sinks, .recent = window});
    for (std::int32_t query = 0; query <= last; ++query) {
      REQUIRE(evict(policy.make_room(1), t, s).report.status == Status::ok);
      REQUIRE(t.append(s, 1) == Status::ok);  // here the query at this position attends
    }
    CHECK(t.positions(s, 0, 1) == t.positions(s, 0, 0));
    return t.positions(s);
  };
  CHECK(visible(0, 4, 9) == Rows{6, 7, 8, 9});
  CHECK(visible(0, 1, 9) == Rows{9});
  CHECK(visible(2, 4, 9) == Rows{0, 1, 6, 7, 8, 9});
  CHECK(visible(0, 4, 2) == Rows{0, 1, 2});
  CHECK_THROWS_AS(StreamingSink({.sinks = 0, .recent = 0}), std::invalid_argument);
}

TEST_CASE("B033 a page goes if and only if it holds no sink and no row of the window",
          "[border][fault]") {
  const auto entries_kept = [](std::int32_t n, std::int64_t sinks, std::int64_t window) {
    TestCache t(small(20, 4));
    const SequenceId s = t.filled(n);
    const Rows before = t.pages(s);
    const StreamingSink policy({.sinks = sinks, .recent = window});
    const Outcome out = evict(policy, t, s);
    CHECK(out.report.status == Status::ok);
    CHECK(out.report.bytes_moved == 0);
    Rows kept;
    for (const std::int32_t page : t.pages(s)) {
      kept.push_back(static_cast<std::int32_t>(std::find(before.begin(), before.end(), page) -
                                               before.begin()));
    }
    CHECK(t.cache.pool().in_use() == static_cast<std::int32_t>(kept.size()));
    return kept;
  };
  CHECK(entries_kept(13, 4, 8) == Rows{0, 1, 2, 3});  // first visible token 5: in page 1
  CHECK(entries_kept(16, 4, 8) == Rows{0, 2, 3});     // first visible token 8: page 1 is free
  for (const std::int32_t sinks : {4, 0, 3, 5}) {
    for (const std::int32_t window : {8, 1, 6}) {
      for (std::int32_t n = 1; n <= 64; ++n) {
        Rows expected;
        for (std::int32_t page = 0; page * 4 < n; ++page) {
          const std::int32_t first = page * 4;
          const std::int32_t last = std::min(n, first + 4) - 1;
          if (first < sinks || last >= n - window) { expected.push_back(page); }
        }
        INFO("sinks " << sinks << ", window " << window << ", n " << n);
        CHECK(entries_kept(n, sinks, window) == expected);
      }
    }
  }
}

TEST_CASE("B034 the window slides at the first token above it, not one early or late",
          "[border][fault]") {
  TestCache t(small(8, 4));
  const SequenceId s = t.filled(6);
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 8});
  const std::array<Rows, 4> expected{range(0, 7), range(0, 8), range(1, 9), range(2, 10)};
  for (std::int32_t length = 7; length <= 10; ++length) {
    REQUIRE(t.append(s, 1) == Status::ok);
    REQUIRE(evict(policy, t, s).report.status == Status::ok);
    INFO("length " << length);
    CHECK(t.positions(s) == expected[index(length - 7)]);
  }
}

TEST_CASE("B037 any delta is rotated by its own angle: there is no table to run out of",
          "[border][fault]") {
  Rope rope;
  rope.dim = 2;
  const std::array<double, 1> one{1.0};
  for (const std::int32_t n : {3, 9, 4096, 1'000'000}) {
    for (const std::int32_t delta : {-(n - 1), -n, -(n + 1), n}) {
      std::array<float, 2> key{1, 0};
      rotate_key(rope, one, delta, key.data());
      CHECK(std::abs(key[0] - std::cos(static_cast<double>(delta))) < 1e-6);
      CHECK(std::abs(key[1] - std::sin(static_cast<double>(delta))) < 1e-6);
    }
  }
  std::array<float, 2> key{1, 0};
  rotate_key(rope, one, std::numeric_limits<std::int32_t>::min(), key.data());
  CHECK(std::abs(key[0] - std::cos(-2147483648.0)) < 1e-5);

  // The first eviction after a long prompt has the largest delta of all.
  TestCache t({.pages = 1024, .page_size = 4, .kv_heads = 1, .key_dim = 2, .value_dim = 2});
  t.rotation = plain_rotation(2);
  const SequenceId s = t.filled(4096);
  const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 1});
  REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
  CHECK(t.positions(s) == Rows{0, 1, 2, 3} + Rows{4095});
  CHECK(t.raw_key_error(s) < 1e-5);
}

TEST_CASE("B038 max_pages counts the page more that a sliding window straddles",
          "[border][fault]") {
  // Peak over a run, the step that is attended before it is cut included.
  const auto peak = [](const auto& policy, std::int32_t page_size, std::int32_t chunk) {
    TestCache t(small(60, page_size));
    const SequenceId s = t.create();
    std::int32_t most = 0;
    for (std::int32_t n = 0; n < 100; n += chunk) {
      REQUIRE(t.append(s, chunk) == Status::ok);
      most = std::max(most, t.cache.pool().in_use());
      REQUIRE(evict(policy, t, s).report.status == Status::ok);
    }
    return most;
  };
  const StreamingSink window({.sinks = 0, .recent = 8});
  CHECK(window.max_pages(4) == 3);  // not 2
  CHECK(peak(window, 4, 1) == 3);
  const StreamingSink with_sinks({.sinks = 4, .recent = 8});
  CHECK(with_sinks.max_pages(4) == 4);
  CHECK(peak(with_sinks, 4, 1) == 4);
  for_each_value<SinkForm::pages, SinkForm::exact>([&](auto form) {
    for (const std::int64_t sinks : {0, 1, 4, 6}) {
      for (const std::int64_t recent : {1, 2, 7, 8, 9, 10}) {
        for (const std::int32_t page_size : {1, 3, 4}) {
          for (const std::int32_t chunk : {1, 2, 5}) {
            const StreamingSink<form> policy({.sinks = sinks, .recent = recent});
            INFO("sinks " << sinks << ", recent " << recent << ", page size " << page_size
                          << ", chunk " << chunk << ", exact " << (form == SinkForm::exact));
            CHECK(peak(policy, page_size, chunk) <= policy.max_pages(page_size, chunk));
          }
        }
      }
    }
  });
}
