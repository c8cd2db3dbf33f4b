// SPDX-License-Identifier: Apache-2.0
// Methods without attention weights: their scores against kvpress 0.5.5, computed in double.
#include "golden_file.hpp"

#include <kvtrim/core/rope.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

using namespace kvtrim;
using golden::Layer;

namespace {

constexpr SequenceId seq{0};
constexpr LayerId layer{0};
constexpr double protected_row = 1.0;  // kvpress's mark, where it is not the maximum + 1

// Largest |got - expected| / |expected| of rows [begin, end).
double worst_of(const std::vector<float>& got,
                const std::vector<double>& expected,
                std::int32_t begin,
                std::int32_t end) {
  double worst = 0;
  for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
    const double error =
        std::fabs(static_cast<double>(got[i]) - expected[i]) / std::fabs(expected[i]);
    worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
  }
  return worst;
}

template <class S>
std::vector<float> scores_of(const S& scorer,
                             const CacheView& view,
                             std::int32_t h,
                             const Observation& obs = {}) {
  REQUIRE(scorer.check(view, obs) == Status::ok);
  std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view, obs)));
  std::vector<float> out(static_cast<std::size_t>(view.live_rows(seq, layer, HeadId{h})));
  scorer.score({view, seq, layer, HeadId{h}}, obs, scratch, out);
  return out;
}

}  // namespace

TEST_CASE("golden: ExpectedAttention's scores equal kvpress's, for any chunks of the prompt",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    PagedCache cache = l.make_cache(16);
    l.extend(cache, 0, l.tokens);
    const auto frequencies = l.file["inv_freq"].values;
    const auto queries = l.file["query_pre"].floats();
    ExpectedAttentionParams params;
    params.rope.inverse_frequencies = frequencies;
    params.rope.dim = l.dim;
    params.rope.same_for_all_layers = true;
    QueryMoments moments({.query_heads = l.heads, .head_dim = l.dim});
    for (std::int32_t first = 0, n = 0; first < l.tokens; first += n) {
      n = std::min(first + 3, l.tokens - first);
      QueryBlock chunk = l.block(first, n, false);
      chunk.data = queries.data() + static_cast<std::ptrdiff_t>(first) * l.dim;
      moments.accumulate(seq, layer, chunk, layer);
    }
    moments.finish(seq);
    Observation obs;
    obs.statistics = moments.statistics();
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
      INFO(shape << ", head " << h);
      CHECK(worst_of(scores_of(ExpectedAttentionScorer(params), cache.view(), h, obs),
                     l.file["expected_attention"].row(h),
                     params.sinks,
                     l.tokens) < 1e-5);
      ExpectedAttentionParams plain = params;
      plain.epsilon = 0.01F;
      plain.covariance = false;
      CHECK(worst_of(scores_of(ExpectedAttentionScorer(plain), cache.view(), h, obs),
                     l.file["expected_attention_eps_nocov"].row(h),
                     params.sinks,
                     l.tokens) < 1e-5);
    }
  }
}

TEST_CASE("golden: LagKV's scores equal kvpress's, and it protects the same rows",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const std::int32_t page_size : {1, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      DemandInput in;
      in.live = l.tokens;
      in.state.next_position = l.tokens;
      const Demand demand = LagKV({.budget = 100, .lag = 32}).demand(in);
      const auto range = candidates(demand.protection, l.tokens);
      for (const bool cross : {false, true}) {
        const LagKVScorer scorer({.lag = 32, .cross_scoring = cross});
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
          const auto expected = l.file[cross ? "lagkv_l32_cross" : "lagkv_l32"].row(h);
          const auto got = scores_of(scorer, cache.view(), h);
          INFO(shape << ", head " << h << ", cross " << cross);
          std::int32_t different = 0;
          for (std::int32_t r = 0; r < l.tokens; ++r) {
            const auto x = static_cast<double>(got[static_cast<std::size_t>(r)]);
            const double y = expected[static_cast<std::size_t>(r)];
            const bool candidate = r >= range.begin && r < range.end;
            different += (candidate ? std::fabs(x - y) > 1e-5 * y : y != protected_row) ? 1 : 0;
          }
          CHECK(different == 0);
        }
      }
    }
  }
}

TEST_CASE("golden: CurKV's scores equal kvpress's, and it protects the same rows",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const std::int32_t page_size : {1, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      const auto sinks = static_cast<std::int32_t>(CurKV().params().sinks);
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        const auto expected = l.file["cur"].row(h);
        INFO(shape << ", head " << h);
        CHECK(worst_of(scores_of(CurScorer({}), cache.view(), h), expected, sinks, l.tokens) <
              1e-5);
        CHECK(std::count(expected.begin(), expected.begin() + sinks, protected_row) == sinks);
      }
    }
  }
}

TEST_CASE("golden: ChunkKV keeps kvpress's chunks of SnapKV's scores", "[golden][policy][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const std::int32_t page_size : {1, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      // At 0.75 kvpress keeps fewer rows than the window has: no budget here.
      const ChunkKV<> policy({.scores = {.sums = page_size == 1 ? Sums::exact : Sums::floating}});
      const std::int32_t budget = kvpress_chunk_rows(l.tokens, 0.5, 20);
      Observation obs;
      obs.budgets =
          &budget;  // for mha no more than the window's chunks, which the policy's own may not be
      obs.queries = l.block(l.tokens - 32, 32, false);
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.view(), obs)));
      const PlanRef made = plan(policy, cache.view(), obs, workspace);
      REQUIRE(made.status() == Status::ok);
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        std::vector<double> kept;
        made.for_each_kept(seq, layer, HeadId{h}, [&](std::int32_t r) { kept.push_back(r); });
        INFO(shape << ", head " << h << ", page size " << page_size);
        CHECK(kept == l.file["kept_chunkkv20_snapkv_w32_k5_0.5"].row(h));
      }
    }
  }
}
