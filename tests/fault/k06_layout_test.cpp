// SPDX-License-Identifier: Apache-2.0
// B048 with strides by hand is a test of the view; here the two layouts come from the two factories.
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE(
    "B045 the reduction over a group's query heads is an argument, the result one row per KV head",
    "[layout][fault]") {
  // With one-hot keys, scale 1 and LSE 0 the probability of (query head, row) is exp of the query's feature.
  const std::array<std::array<float, 4>, 4> wanted{{{0, 9, 0, 1},  // query heads 0, 1: KV head 0
                                                    {0, 0, 4, 4},
                                                    {1, 0, 0, 5},  // query heads 2, 3: KV head 1
                                                    {2, 0, 3, 0}}};
  TestCache t({.pages = 3, .page_size = 2, .kv_heads = 2, .key_dim = 5, .value_dim = 2});
  t.raw_key = [](std::int32_t tag, std::int32_t, std::int32_t) {
    std::vector<float> key(5, 0.0F);
    key[index(tag)] = 1;
    return key;
  };
  const SequenceId s = t.filled(5);  // row 4 is the window
  std::vector<float> queries;
  for (const auto& head : wanted) {
    for (const float p : head) { queries.push_back(p > 0 ? std::log(p) : -200.0F); }
    queries.push_back(0);
  }
  const std::vector<float> lse(4, 0.0F);
  Observation obs;
  obs.queries.data = queries.data();
  obs.queries.query_heads = 4;
  obs.queries.rows = 1;
  obs.queries.head_stride = 5;
  obs.queries.lse = lse.data();
  obs.queries.lse_head_stride = 1;
  obs.queries.scale = 1;
  const CacheView view = t.cache.view(s);
  const auto scores = [&](Reduction group, std::int32_t h) {
    const WindowScorer scorer({.window = 1, .kernel = 1, .group = group});
    REQUIRE(scorer.check(view, obs) == Status::ok);
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
    std::vector<float> out(5);
    scorer.score({view, {}, {}, HeadId{h}}, obs, scratch, out);
    return out;
  };
  CHECK(distance(scores(Reduction::mean, 0), std::vector{0.0, 4.5, 2.0, 2.5, 0.0}) < 1e-5);
  CHECK(distance(scores(Reduction::max, 0), std::vector{0.0, 9.0, 4.0, 4.0, 0.0}) < 1e-5);
  CHECK(distance(scores(Reduction::sum, 0), std::vector{0.0, 9.0, 4.0, 5.0, 0.0}) < 1e-5);
  CHECK(distance(scores(Reduction::mean, 1), std::vector{1.5, 0.0, 1.5, 2.5, 0.0}) < 1e-5);
  CHECK(distance(scores(Reduction::max, 1), std::vector{2.0, 0.0, 3.0, 5.0, 0.0}) < 1e-5);

  const auto kept = [&](Reduction group, std::int32_t h) {
    const SnapKVSelector policy({.window = 1, .budget = 3, .kernel = 1, .group = group});
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    const PlanRef plan = kvtrim::plan(policy, view, obs, workspace);
    REQUIRE(plan.status() == Status::ok);
    const auto list = plan.kept_list({}, {}, HeadId{h});
    return Rows(list.begin(), list.end());
  };
  CHECK(kept(Reduction::mean, 0) == Rows{1, 3, 4});
  CHECK(kept(Reduction::max, 0) == Rows{1, 2, 4});  // 4 = 4: the lower index
  CHECK(kept(Reduction::mean, 1) == Rows{0, 3, 4});
  CHECK(kept(Reduction::max, 1) == Rows{2, 3, 4});
}

TEST_CASE("B045 accumulated attention takes the mean over the group", "[layout][fault]") {
  TestCache t(
      {.pages = 2, .page_size = 3, .kv_heads = 2, .key_dim = 2, .value_dim = 2, .scores = true});
  const SequenceId s = t.filled(4);
  const std::array<float, 8> group0{0, 9, 0, 1, 0, 0, 4, 4};
  const CacheView view = t.cache.view(s);
  accumulate_probabilities({}, {view, {}, {}, HeadId{0}}, {group0.data(), 2, 4});
  const AccumulatedScorer scorer(AccumulateParams{});
  std::vector<float> out(4);
  scorer.score({view, {}, {}, HeadId{0}}, {}, {}, out);
  CHECK(out == std::vector<float>{0, 4.5F, 2, 2.5F});
  scorer.score({view, {}, {}, HeadId{1}}, {}, {}, out);
  CHECK(out == std::vector<float>{0, 0, 0, 0});  // the other KV head has seen nothing
}

TEST_CASE("B047 a cut cache holds KV heads, not query heads: 4,194,304 bytes per layer",
          "[layout][fault]") {
  // 32 query heads on 8 KV heads: stored per query head it would be 16,777,216.
  TestCache t({.pages = 66, .page_size = 16, .kv_heads = 8, .key_dim = 128, .dtype = DType::bf16});
  const SequenceId s = t.create();
  REQUIRE(t.cache.try_extend(s, 1050) == Status::ok);
  REQUIRE(t.cache.written(s, {}) == Status::ok);
  const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 1020});
  REQUIRE(evict(policy, t, s).report.status == Status::ok);
  CHECK(t.cache.live_rows(s) == 1024);
  CHECK(t.cache.pool().in_use() == 64);
  CHECK(t.cache.pool().in_use() * t.cache.page_bytes() == 4'194'304);
  const CacheView view = t.cache.view(s);
  CHECK(1024 * 8 * (view.k.row_bytes() + view.v.row_bytes()) == 4'194'304);
}

TEST_CASE("B048 two layouts of equal extents are two factories, and neither reads the other's rows",
          "[layout][fault]") {
  // Page size 2 and 2 KV heads: [pages, 2, 2, d] in both.
  constexpr std::int32_t d = 4, pages = 3;
  const PlaneShape shape{2, 2, d, DType::f32};
  std::vector<float> memory(pages * 2 * 2 * d, 0.0F);
  const Plane by_token = Plane::nhd(memory.data(), shape);
  const Plane by_head = Plane::hnd(memory.data(), shape);
  CHECK(by_token.page_stride == by_head.page_stride);
  CHECK((by_token.token_stride != by_head.token_stride &&
         by_token.head_stride != by_head.head_stride));
  const auto mark = [](std::int32_t p, std::int32_t h, std::int32_t slot) {
    return std::vector<float>(d, static_cast<float>(p * 100 + h * 10 + slot + 1));
  };
  const auto each = [](auto f) {
    for (std::int32_t p = 0; p < pages; ++p) {
      for (const std::int32_t h : {0, 1}) {
        for (const std::int32_t slot : {0, 1}) { f(p, h, slot); }
      }
    }
  };
  each([&](std::int32_t p, std::int32_t h, std::int32_t slot) {
    store_row(
        by_token, by_token.row({}, PageId{p}, HeadId{h}, Slot{slot}), mark(p, h, slot).data());
  });
  each([&](std::int32_t p, std::int32_t h, std::int32_t slot) {
    std::vector<float> row(d);
    load_row(by_token, by_token.row({}, PageId{p}, HeadId{h}, Slot{slot}), row.data());
    CHECK(row == mark(p, h, slot));
    load_row(by_head, by_head.row({}, PageId{p}, HeadId{h}, Slot{slot}), row.data());
    CHECK((row == mark(p, h, slot)) == (h == slot));  // equal only on the diagonal
  });
}

TEST_CASE("B049 query heads that are not a multiple of the KV heads are refused, others are fine",
          "[layout][fault]") {
  // The case wants a configuration error with both numbers. Here no constructor sees both: the view has the one, each
  // observation the other. So the plan has the status bad_observation, and nothing is evicted.
  const auto status = [](std::int32_t query_heads, std::int32_t kv_heads) {
    TestCache t({.pages = 4, .page_size = 4, .kv_heads = kv_heads, .key_dim = 4, .value_dim = 2});
    const SequenceId s = t.filled(13);
    const Queries q = make_queries(11, 2, query_heads, 4);
    Input in;
    in.queries.data = q.data.data();
    in.queries.query_heads = query_heads;
    in.queries.rows = 2;
    in.queries.row_stride = query_heads * 4;
    in.queries.head_stride = 4;
    const Outcome out = evict(SnapKVSelector({.window = 2, .budget = 6}), t, s, in);
    CHECK(t.cache.live_rows(s) == (out.report.status == Status::ok ? 6 : 13));
    return out.report.status;
  };
  CHECK(status(6, 4) == Status::bad_observation);
  CHECK(status(2, 4) == Status::bad_observation);
  CHECK(status(6, 3) == Status::ok);
  CHECK(status(8, 1) == Status::ok);
  CHECK(status(5, 5) == Status::ok);
}
