// SPDX-License-Identifier: Apache-2.0
#if !defined(KVTRIM_CUDA_KERNELS_ELSEWHERE)
#  define KVTRIM_CUDA_KERNELS_ELSEWHERE  // window_test.cu
#endif
#include <kvtrim/cuda/observe/column_sums.cuh>

#include "catch.hpp"
#include "cuda/score/cpu_scores.hpp"
#include "cuda/score/score_world.hpp"
#include "device_buffer.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;

namespace {

struct RowSums {
  std::vector<float> sums;
  std::vector<float> rests;
  std::vector<float> scores;
};

RowSums accumulate(ScoreWorld& w,
                   const AccumulateParams& params,
                   cuda::ScorePath path = cuda::ScorePath::automatic) {
  const std::size_t bytes = cuda::column_sums_workspace_bytes(w.view);
  DeviceBuffer<std::byte> workspace(bytes, "workspace");
  DeviceBuffer<float> scores(std::vector<float>(w.host_sums.size(), -7.0F), "scores");
  const cudaError_t error = cuda::accumulate_column_sums(
      params,
      w.view,
      w.queries,
      SequencePlane::dense(scores.data(), w.o.layers, w.o.kv_heads, w.max_rows),
      {.max_rows = w.max_rows},
      workspace.data(),
      bytes,
      nullptr,
      path);
  INFO(device_message());
  REQUIRE(error == cudaSuccess);
  REQUIRE(finish() == cudaSuccess);
  return {w.score_sums.download(), w.score_rests.download(), scores.download()};
}

struct Expected {
  double value;
  double error;
};

// What `before` becomes once all queries of the sequence have voted on row `r`.
Expected column_sum(ScoreWorld& w,
                    const AccumulateParams& params,
                    std::int32_t s,
                    std::int32_t l,
                    std::int32_t h,
                    std::int32_t r,
                    double before) {
  if (!w.finite_key(s, l, h, r)) { return {std::nan(""), 0}; }
  const std::int32_t count = w.query_count(s);
  const auto decay = static_cast<double>(params.decay);
  Expected out{before * std::pow(decay, count), 0};
  for (std::int32_t g = 0; g < w.o.group; ++g) {
    for (std::int32_t i = 0; i < count; ++i) {
      const double* const q = w.query(s, l, h * w.o.group + g, i);
      const double lse = w.lse(s, l, h * w.o.group + g, i);
      if (!w.sees(s, l, h, i, r) || !std::isfinite(lse) ||
          !std::all_of(q, q + w.o.dim, [](double v) { return std::isfinite(v); })) {
        continue;
      }
      const auto x = w.logit(s, l, h, g, i, r);
      const double p = std::exp(x.value - lse);
      const double weight = std::pow(decay, count - 1 - i) / w.o.group;
      out.value += (params.squared ? p * p : p) * weight;
      out.error += (params.squared ? 2 * p * p : p) * weight *
                   (std::ldexp(1, -20) +
                    std::ldexp(4 * x.size + 2 * std::fabs(x.value) + 2 * std::fabs(lse), -24));
    }
  }
  out.error += std::ldexp(std::fabs(before), -23);
  return out;
}

// Largest error in units of its bound after one call on planes that held `before` everywhere.
double worst_error(ScoreWorld& w,
                   const AccumulateParams& params,
                   const RowSums& got,
                   float before) {
  double worst = 0;
  for (std::int32_t s = 0; s < w.sequences; ++s) {
    for (std::int32_t l = 0; l < w.o.layers; ++l) {
      for (std::int32_t h = 0; h < w.o.kv_heads; ++h) {
        for (std::int32_t r = 0; r < w.max_rows; ++r) {
          const std::size_t i = at(w.row_index(s, l, h, r));
          if (r >= w.extent(s) || r == w.hole(s)) {
            if (got.sums[i] != before || got.scores[i] != -7.0F) { return HUGE_VAL; }
            continue;
          }
          const auto e = column_sum(w, params, s, l, h, r, static_cast<double>(before));
          const double x = static_cast<double>(got.sums[i]) + static_cast<double>(got.rests[i]);
          if (std::isnan(x) != std::isnan(e.value)) { return HUGE_VAL; }
          if (std::isnan(x)) { continue; }
          worst = std::max(worst, std::fabs(x - e.value) / e.error);
          const std::int32_t age = w.next_position(s) - w.position(s, l, h, r);
          const double score = params.age_normalised && age > 0 ? e.value / age : e.value;
          worst = std::max(worst,
                           std::fabs(static_cast<double>(got.scores[i]) - score) /
                               (e.error + std::ldexp(std::fabs(e.value), -22)));
        }
      }
    }
  }
  return worst;
}

void start_at(ScoreWorld& w, float before) {
  std::fill(w.host_sums.begin(), w.host_sums.end(), before);
  w.upload();
}

}  // namespace

TEST_CASE("cuda column sums: prompts and single steps equal a double reference", "[column_sums]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
    for (const std::int32_t queries : {1, 70}) {
      for (const bool decay : {false, true}) {
        WorldOptions o{
            .dtype = dtype, .dim = 64, .page_size = 3, .group = 3, .lengths = {70, 5, 140}};
        o.layers = 2;
        o.queries = queries;
        o.query_dtype = dtype == DType::bf16 ? DType::bf16 : DType::f32;
        o.score_planes = true;
        o.key_scales = dtype == DType::f8e4m3;
        o.lse_base = decay ? LseBase::two : LseBase::e;
        o.soft_cap = decay ? 7.0F : 0.0F;
        ScoreWorld w(o);
        const AccumulateParams params{
            .decay = decay ? 0.9F : 1.0F, .squared = decay, .age_normalised = decay};
        start_at(w, 0.375F);
        INFO(std::string(to_string(dtype)) << ", queries " << queries << ", decay " << decay);
        const auto path =
            dtype == DType::bf16 ? cuda::ScorePath::tensor_cores : cuda::ScorePath::fma;
        CHECK(worst_error(w, params, accumulate(w, params, path), 0.375F) <= 1);
      }
    }
  }
}

TEST_CASE("cuda column sums: a block goes from tile to tile", "[column_sums]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    WorldOptions o{.dtype = DType::f16, .dim = 64, .page_size = 16, .kv_heads = 3, .group = 2};
    o.lengths = {300, 20, 140, 5, 390};  // 30 tiles; the emulator has room for 16 blocks
    o.queries = 20;
    o.query_dtype = DType::f16;
    o.score_planes = true;
    ScoreWorld w(o);
    CHECK(worst_error(w, {}, accumulate(w, {}, path), 0.0F) <= 1);
  }
}

TEST_CASE("cuda column sums: rows out of order, holes and per-head tables equal a double reference",
          "[column_sums]") {
  WorldOptions o{.dtype = DType::f16, .dim = 80, .page_size = 4, .group = 2, .lengths = {33, 130}};
  o.queries = 12;
  o.score_planes = true;
  o.shuffled = true;
  o.hole = 5;
  o.tables = Tables::per_head;
  ScoreWorld w(o);
  const AccumulateParams params{.age_normalised = true};
  start_at(w, 0.0F);
  CHECK(worst_error(w, params, accumulate(w, params), 0.0F) <= 1);
}

TEST_CASE("cuda column sums: they equal the CPU's", "[column_sums][parity]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    WorldOptions o{.dtype = DType::f16, .dim = 128, .page_size = 16, .group = 2, .lengths = {150}};
    o.queries = 150;
    o.kv_heads = 1;
    o.query_dtype = DType::f16;
    o.score_planes = true;
    ScoreWorld w(o);
    const AccumulateParams params{.decay = 0.99F};
    start_at(w, 0.25F);
    const RowSums got = accumulate(w, params, path);
    cpu_column_sums(params, w.host_view, w.host_queries, SequenceId{0}, LayerId{0}, HeadId{0});
    for (std::int32_t r = 0; r < 150; ++r) {
      const double x = static_cast<double>(got.sums[at(r)]) + static_cast<double>(got.rests[at(r)]);
      const double y =
          static_cast<double>(w.host_sums[at(r)]) + static_cast<double>(w.host_rests[at(r)]);
      CHECK(std::fabs(x - y) <= 2e-6 * y);
    }
  }
}

TEST_CASE("cuda column sums: keys, queries and LSE that are not finite count as on the CPU",
          "[column_sums][nan]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    WorldOptions o{.dtype = DType::bf16, .dim = 64, .kv_heads = 1, .group = 2, .lengths = {20}};
    o.query_dtype = DType::bf16;
    o.score_planes = true;
    ScoreWorld w(o);
    w.put_key(0, 0, 0, 3, 1, std::nan(""));
    w.put_query(0, 0, 0, 2, 1, HUGE_VAL);
    start_at(w, 0.0F);
    const AccumulateParams params;
    const RowSums got = accumulate(w, params, path);
    CHECK(std::isnan(got.sums[3]));
    CHECK(worst_error(w, params, got, 0.0F) <= 1);
  }
}

TEST_CASE("cuda column sums: where the queries of a sequence lie does not change a bit",
          "[column_sums]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    WorldOptions o{.dtype = dtype, .group = 2, .layers = 2, .lengths = {30, 2, 45}};
    o.score_planes = true;
    o.queries = 20;
    o.query_dtype = dtype;
    const AccumulateParams params{.decay = 0.75F};
    ScoreWorld plain(o);
    const RowSums expected = accumulate(plain, params);
    for (const bool ring : {false, true}) {
      o.ring = ring;
      o.slots = {2, 0, 1};
      ScoreWorld w(o);
      const RowSums got = accumulate(w, params);
      CHECK(got.sums == expected.sums);
      CHECK(got.rests == expected.rests);
      CHECK(got.scores == expected.scores);
      CHECK(worst_error(w, params, got, 0) <= 1);
    }
  }
}

TEST_CASE("cuda column sums: step by step or at once, the sums agree", "[column_sums][property]") {
  WorldOptions o{.dtype = DType::f32, .dim = 64, .kv_heads = 1, .group = 1, .lengths = {40}};
  o.queries = 40;
  o.score_planes = true;
  ScoreWorld w(o);
  const AccumulateParams params{.decay = 0.95F};
  const RowSums whole = accumulate(w, params);
  start_at(w, 0.0F);
  RowSums steps;
  for (std::int32_t i = 0; i < 40; ++i) {  // one query per call, as in decode
    cuda::DeviceQueries all = w.queries;
    DeviceBuffer<std::int32_t> position(std::vector<std::int32_t>{i}, "position");
    w.queries.block.data += i * 64;
    w.queries.block.lse += i;
    w.queries.block.rows = 1;
    w.queries.block.row_counts = nullptr;
    w.queries.block.positions = reinterpret_cast<const Position*>(position.data());
    steps = accumulate(w, params);
    w.queries = all;
  }
  for (std::size_t r = 0; r < 40; ++r) {
    const double x = static_cast<double>(steps.sums[r]) + static_cast<double>(steps.rests[r]);
    const double y = static_cast<double>(whole.sums[r]) + static_cast<double>(whole.rests[r]);
    CHECK(std::fabs(x - y) <= 1e-6 * y);
  }
}

TEST_CASE("cuda column sums: what no kernel can do is refused before any launch",
          "[column_sums][edge]") {
  WorldOptions o{.dtype = DType::f32, .dim = 64, .lengths = {20}};
  o.score_planes = true;
  ScoreWorld w(o);
  const std::size_t enough = cuda::column_sums_workspace_bytes(w.view);
  DeviceBuffer<std::byte> workspace(enough, "workspace");
  struct Call {
    CacheView view;
    cuda::DeviceQueries queries;
    std::byte* memory;
    std::size_t bytes;
  };
  const auto refused = [&](void (*change)(Call&)) {
    Call c{w.view, w.queries, workspace.data(), enough};
    change(c);
    return cuda::accumulate_column_sums(
               {}, c.view, c.queries, {}, {.max_rows = w.max_rows}, c.memory, c.bytes, nullptr) ==
           cudaErrorInvalidValue;
  };
  CHECK_FALSE(refused([](Call&) {}));
  w.upload();  // the sums are 0 again
  CHECK(refused([](Call& c) { c.queries.block.lse = nullptr; }));
  CHECK(refused([](Call& c) { c.view.score_sums = {}; }));
  CHECK(refused([](Call& c) { c.view.score_compensations = {}; }));
  CHECK(refused([](Call& c) { c.view.score_sums.base += 1; }));
  CHECK(refused([](Call& c) { c.view.k.dtype = DType::i8; }));
  CHECK(refused([](Call& c) { c.view.k.head_dim = 65; }));
  CHECK(refused([](Call& c) { --c.bytes; }));
  CHECK(refused([](Call& c) { c.memory += 4; }));
  for (const float x : w.score_sums.download()) { CHECK(x == 0); }
}
