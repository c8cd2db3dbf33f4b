// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

PagedCache::Params of_dtype(DType dtype, std::int32_t pages = 8) {
  return {.pages = pages,
          .page_size = 4,
          .kv_heads = 1,
          .key_dim = 4,
          .value_dim = 2,
          .dtype = dtype,
          .scores = true};
}

float total(const CacheView& view, std::int32_t r) {
  return view.score_sums.at<float>({}, {}, {}, r) +
         view.score_compensations.at<float>({}, {}, {}, r);
}

}  // namespace

TEST_CASE("B056 300 unit steps rank below 400 in a bf16 cache, and 1024 steps of 1/1024 are 1",
          "[precision][fault]") {
  // What a sum in the cache's own dtype gives.
  std::array<float, 3> in_bf16{0, 0, 0};
  for (std::int32_t step = 0; step < 1024; ++step) {
    const std::array<float, 3> add{step < 300 ? 1.0F : 0.0F, step < 400 ? 1.0F : 0.0F, 1.0F / 1024};
    for (std::size_t i = 0; i < 3; ++i) {
      in_bf16[i] = bf16_to_float(float_to_bf16(in_bf16[i] + add[i]));
    }
  }
  CHECK(in_bf16 == std::array{256.0F, 256.0F, 0.25F});

  TestCache t(of_dtype(DType::bf16));
  const SequenceId s = t.filled(4);
  const CacheView view = t.cache.view(s);
  for (std::int32_t step = 0; step < 1024; ++step) {
    const std::array<float, 4> p{
        step < 300 ? 1.0F : 0.0F, step < 400 ? 1.0F : 0.0F, 1.0F / 1024, 0.0F};
    accumulate_probabilities({}, {view, {}, {}, {}}, {p.data(), 1, 0});
  }
  CHECK(total(view, 0) == 300.0F);
  CHECK(total(view, 1) == 400.0F);
  CHECK(total(view, 2) == 1.0F);
  REQUIRE(evict(HeavyHitter({.heavy = 1, .recent = 1}), t, s).report.status == Status::ok);
  CHECK(t.positions(s) == Rows{1, 3});  // of two sums of 256 the first would stay
}

TEST_CASE("B058 a logit of 741,455 from fp16 queries and keys of 256 stays finite",
          "[precision][fault]") {
  PagedCache::Params p = of_dtype(DType::f16);
  p.key_dim = 128;
  TestCache t(p);
  t.raw_key = [](std::int32_t, std::int32_t, std::int32_t) {
    return std::vector<float>(128, 256.0F);
  };
  const SequenceId s = t.filled(13);
  const CacheView view = t.cache.view(s);
  const std::vector<float> queries(2 * 128, f16_to_float(float_to_f16(256.0F)));
  Observation obs;
  obs.queries.data = queries.data();
  obs.queries.query_heads = 1;
  obs.queries.rows = 2;
  obs.queries.row_stride = 128;
  const WindowScorer scorer({.window = 2, .kernel = 1});
  std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
  std::vector<float> scores(13);
  scorer.score({view, {}, {}, {}}, obs, scratch, scores);
  for (std::size_t r = 0; r < 11; ++r) {
    CHECK(std::abs(scores[r] - (1.0F / 12 + 1.0F / 13) / 2) < 1e-6F);  // equal keys: uniform
  }
  // With 741,455.2 as the LSE each probability is 1: the logit is that number, and not 65,504 or infinity.
  const std::array<float, 2> lse{741'455.2F, 741'455.2F};
  obs.queries.lse = lse.data();
  scorer.score({view, {}, {}, {}}, obs, scratch, scores);
  for (std::size_t r = 0; r < 11; ++r) { CHECK(std::abs(scores[r] - 1.0F) < 0.1F); }
}

TEST_CASE("B058 accumulated scores beyond 65,504 keep their order in an fp16 cache",
          "[precision][fault]") {
  TestCache t(of_dtype(DType::f16));
  const SequenceId s = t.filled(4);
  const CacheView view = t.cache.view(s);
  const std::array<float, 4> p{70'000, 80'000, 69'999, 0};
  accumulate_probabilities({}, {view, {}, {}, {}}, {p.data(), 1, 0});
  CHECK(total(view, 0) == 70'000.0F);
  Input in;
  in.budgets = {3};
  REQUIRE(evict(HeavyHitter({.heavy = 1, .recent = 1}), t, s, in).report.status == Status::ok);
  CHECK(t.positions(s) == Rows{0, 1, 3});

  // Scores are fp32: an array of 2-byte scores is refused.
  std::array<std::uint16_t, 8> halves{};
  halves.fill(0x7C00);  // infinity
  Observation obs;
  obs.scores = SequencePlane::dense(halves.data(), 1, 1, 4);
  const HeavyHitter policy({.heavy = 1, .recent = 1});
  const CacheView now = t.cache.view(s);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(now, obs)));
  CHECK(kvtrim::plan(policy, now, obs, workspace).status() == Status::bad_observation);
}

TEST_CASE("B059 1,000 decode steps with renumbering cost a bf16 key one rotation, not 1,000",
          "[precision][fault]") {
  PagedCache::Params p{.pages = 70,
                       .page_size = 4,
                       .kv_heads = 1,
                       .key_dim = 64,
                       .value_dim = 2,
                       .dtype = DType::bf16,
                       .unrotated_keys = true};
  TestCache t(p);
  t.rotation = plain_rotation(64);
  const SequenceId s = t.filled(254);
  const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 250});
  std::int32_t wrong = 0;
  double worst = 0;
  for (std::int32_t step = 1; step <= 1000; ++step) {
    REQUIRE(t.append(s, 1) == Status::ok);
    wrong += evict(policy, t, s, in).report.status == Status::ok ? 0 : 1;
    if (step % 250 != 0) { continue; }  // by now every key of the window has moved 250 times
    for (const Row& r : t.rows(s)) {  // named by position: bf16 values do not hold a tag above 256
      const auto direct = t.rotation->turn(to_double(t.raw_key(r.position, 0, 0)), r.rope);
      double error = 0, size = 0;
      for (std::size_t d = 0; d < direct.size(); ++d) {
        error += (r.key[d] - direct[d]) * (r.key[d] - direct[d]);
        size += direct[d] * direct[d];
      }
      worst = std::max(worst, std::sqrt(error / size));
    }
  }
  CHECK(wrong == 0);
  CHECK(worst > 0);
  CHECK(worst <= 0.01);
  CHECK(t.ropes(s) == range(0, 254));

  // Without the keys before RoPE, repeated rotation is refused where the mode is bound to the view.
  for (const DType dtype : {DType::bf16, DType::f16}) {
    p.dtype = dtype;
    p.unrotated_keys = false;
    TestCache bare(p);
    CHECK_THAT(thrown_by([&] {
                 Rerotator(bare.cache.view(), t.rotation->rope(), PositionMode::in_cache);
               }),
               ContainsSubstring(std::string(to_string(dtype)) + " keys"));
    CHECK_NOTHROW(Rerotator(bare.cache.view(), t.rotation->rope(), PositionMode::keep));
  }
}

TEST_CASE("B061 window and sinks stay whatever the scores: protection is a range",
          "[precision][fault]") {
  CHECK(bf16_to_float(float_to_bf16(300.0F + 1.0F)) == 300.0F);  // where a sentinel is lost
  CHECK(1e9F + 1.0F == 1e9F);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float top : {300.0F, 1e9F, infinity}) {
    for (const float protected_score : {top, 0.0F, -1e9F, -infinity}) {
      const ScoreOf score = [&](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
        return p < 2 || p >= 10 ? protected_score : top;
      };
      const Rows expected{0, 1, 2, 3, 10, 11};  // sinks, the two lowest of equals, window
      const auto kept = [&](const auto& policy) {
        TestCache t(of_dtype(DType::bf16));
        const SequenceId s = t.filled(12);
        Input in;
        in.score = score;
        REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
        return t.positions(s);
      };
      CHECK(kept(HeavyHitter({.heavy = 2, .recent = 2, .sinks = 2})) == expected);
      CHECK(kept(HeavyHitter<AccumulateParams, HeavyMode::promote>(
                {.heavy = 2, .recent = 2, .sinks = 2})) == expected);
      CHECK(kept(SnapKVSelector({.window = 2, .budget = 6, .sinks = 2})) == expected);
    }
  }
}
