// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/chunk_kv.hpp>

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "score/kv_fixture.hpp"

#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace score_test;

namespace {

using OfGiven = ChunkKV<ExternalParams>;

constexpr std::int32_t row_capacity = 256;

class Chunks {
 public:
  explicit Chunks(std::int32_t tokens)
      : data_(make_kv(2, 4, 4, row_capacity, 1)), cache_(params()) {
    REQUIRE(cache_.try_create());
    append(tokens);
  }
  void append(std::int32_t n) {
    REQUIRE(cache_.try_extend(SequenceId{0}, n) == Status::ok);
    REQUIRE(cache_.write(SequenceId{0}, LayerId{0}, {data_.key(0, 0)}, {data_.value(0, 0)}) ==
            kvtrim::Status::ok);
  }
  // A token's score is that of its chunk of 10 in `by_chunk`.
  template <class F>
  Status evict(const OfGiven& policy, F&& by_chunk) {
    const CacheView view = cache_.view();
    std::vector<float> scores(at(2 * row_capacity), nan_f);
    for (std::int32_t h = 0; h < 2; ++h) {
      for (std::int32_t r = 0; r < view.live_rows(SequenceId{0}, LayerId{0}, HeadId{h}); ++r) {
        const std::int32_t position = raw(view.position(SequenceId{0}, LayerId{0}, HeadId{h}, r));
        scores[at(h * row_capacity + r)] = by_chunk(position / 10);
      }
    }
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 1, 2, row_capacity);
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    return kvtrim::evict(policy, cache_, view, obs, workspace).status;
  }
  std::vector<std::int32_t> positions() {
    const CacheView view = cache_.view();
    std::vector<std::int32_t> out;
    for (std::int32_t r = 0; r < view.live_rows(SequenceId{0}, LayerId{0}, HeadId{0}); ++r) {
      out.push_back(raw(view.position(SequenceId{0}, LayerId{0}, HeadId{0}, r)));
    }
    return out;
  }

 private:
  static PagedCache::Params params() {
    PagedCache::Params p;
    p.pages = 64;
    p.page_size = 4;
    p.kv_heads = 2;
    p.key_dim = 4;
    p.max_rows = row_capacity;
    return p;
  }
  KvData data_;
  PagedCache cache_;
};

std::vector<std::int32_t> ranges(
    std::initializer_list<std::pair<std::int32_t, std::int32_t>> parts) {
  std::vector<std::int32_t> out;
  for (const auto& [begin, end] : parts) {
    for (std::int32_t t = begin; t < end; ++t) { out.push_back(t); }
  }
  return out;
}

}  // namespace

TEST_CASE("chunk_kv: protection is rounded up to whole chunks", "[chunk_kv]") {
  OfGiven::Params p;
  p.budget = 60;
  p.chunk = 10;
  p.sinks = 1;
  p.recent = 12;
  const OfGiven policy(p);
  DemandInput in;
  for (in.live = 61; in.live < 100; ++in.live) {
    in.state.next_position = in.live;
    const Demand demand = policy.demand(in);
    CHECK(demand.keep == 60);
    CHECK(demand.protection.sinks == 10);
    const std::int32_t first = in.live - demand.protection.recent;
    CHECK(first % 10 == 0);
    CHECK(first <= in.live - 12);
    CHECK(first > in.live - 12 - 10);
  }
  p.recent = 0;
  CHECK(OfGiven(p).demand(in).protection.recent == 0);
}

TEST_CASE("chunk_kv: whole chunks go, and a budget that cuts one keeps its lower positions",
          "[chunk_kv]") {
  OfGiven::Params p;
  p.budget = 56;
  p.chunk = 10;
  p.recent = 4;
  Chunks c(103);  // the window touches chunks 9 and 10
  const float by_chunk[] = {3, 1, 9, 2, 8, 0, 4, 9, 5, 0, 0};
  REQUIRE(c.evict(OfGiven(p), [&](std::int32_t chunk) { return by_chunk[chunk]; }) == Status::ok);
  // 13 rows of the window's chunks, then chunks 2, 7, 4, 8 and three rows of chunk 6.
  CHECK(c.positions() == ranges({{20, 30}, {40, 50}, {60, 63}, {70, 80}, {80, 90}, {90, 103}}));

  // Chunk borders do not move with the rows: what is left of chunk 6 is the worst of it.
  c.append(20);
  p.budget = 60;
  REQUIRE(c.evict(OfGiven(p), [&](std::int32_t chunk) { return chunk == 6 ? -1.0F : 1.0F; }) ==
          Status::ok);
  CHECK(c.positions() == ranges({{20, 30}, {40, 50}, {70, 97}, {110, 123}}));
}

TEST_CASE("chunk_kv: a chunk that holds NaN goes first", "[chunk_kv][nan]") {
  OfGiven::Params p;
  p.budget = 30;
  p.chunk = 10;
  Chunks c(40);
  REQUIRE(c.evict(OfGiven(p), [](std::int32_t chunk) { return chunk == 2 ? nan_f : -5.0F; }) ==
          Status::ok);
  CHECK(c.positions() == ranges({{0, 20}, {30, 40}}));
}

TEST_CASE("chunk_kv: any token score, with what its method protects", "[chunk_kv]") {
  CHECK(ChunkKV<>().params().recent == 32);
  CHECK(ChunkKV<>().params().sinks == 0);
  CHECK(ChunkKV<KeyDiffParams>().params().recent == 0);
  CHECK(ChunkKV<ExpectedAttentionParams>().params().sinks == 4);
  DemandInput in;
  in.live = 2000;
  CHECK(ChunkKV<ExpectedAttentionParams>().demand(in).protection.sinks == 20);
  STATIC_REQUIRE(Policy<ChunkKV<KeyDiffParams>>);
}

TEST_CASE("chunk_kv: kvpress's rows are its truncated chunks, the last one partly filled",
          "[chunk_kv][parity]") {
  CHECK(kvpress_chunk_rows(203, 0.5, 20) == 83);
  CHECK(kvpress_chunk_rows(203, 0.75, 20) == 23);
  CHECK(kvpress_chunk_rows(203, 0.99, 20) == 3);
  CHECK(kvpress_chunk_rows(200, 0.5, 20) == 100);
  CHECK(kvpress_chunk_rows(7, 0.0, 20) == 7);
}

TEST_CASE("chunk_kv: parameters out of range are refused by name and value", "[chunk_kv][edge]") {
  const auto with = [](auto change) {
    ChunkKV<>::Params p;
    change(p);
    return ChunkKV<>(p);
  };
  CHECK_THROWS_WITH(with([](auto& p) { p.chunk = 0; }),
                    "kvtrim::ChunkKV: chunk 0 must be at least 1");
  CHECK_THROWS_WITH(with([](auto& p) { p.budget = 50; }),
                    "kvtrim::ChunkKV: budget 50 must be at least 51: sinks 0 and "
                    "recent 32 in whole chunks of 20");
  CHECK_THROWS_WITH(
      with([](auto& p) { p.scores.kernel = 4; }),
      "kvtrim::ChunkKV: scores.kernel 4 must be odd (scores.window 32, scores.kernel 4)");
  CHECK_THROWS_WITH(with([](auto& p) { p.recent = 31; }),
                    "kvtrim::ChunkKV: recent 31 must be at least 32: the scores leave so many of "
                    "the last rows without one");
  CHECK_THROWS_AS(with([](auto& p) { p.sinks = -1; }), std::invalid_argument);
  CHECK_THROWS_AS(with([](auto& p) { p.recent = -1; }), std::invalid_argument);
  CHECK_THROWS_AS(with([](auto& p) { p.chunk = std::int64_t{1} << 31; }), std::invalid_argument);
  ChunkKV<ExpectedAttentionParams>::Params p;
  p.scores.future = 0;
  CHECK_THROWS_AS(ChunkKV<ExpectedAttentionParams>(p), std::invalid_argument);
}

TEST_CASE("chunked_params: kvpress's chunk, any token score", "[chunked]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<Chunked<WindowParams>>);
  STATIC_REQUIRE(std::is_aggregate_v<Chunked<WindowParams>>);
  CHECK(Chunked<WindowParams>{}.chunk == 20);
  CHECK(Chunked<WindowParams>{}.scores.window == 32);
}
