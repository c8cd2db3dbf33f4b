// SPDX-License-Identifier: Apache-2.0
#define KVTRIM_CUDA_KERNELS_HERE
#include <kvtrim/cuda/score/window.cuh>

#include "catch.hpp"
#include "cpu_scores.hpp"
#include "device_buffer.hpp"
#include "window_reference.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;

namespace {

constexpr float untouched = -7.0F;

struct Outcome {
  cudaError_t error;
  std::vector<float> scores;  // [sequences, layers, kv_heads, max_rows]
};

Outcome score(ScoreWorld& w,
              const WindowParams& params,
              cuda::ScorePath path = cuda::ScorePath::automatic,
              cuda::ScoreBounds bounds = {}) {
  if (bounds.max_rows == 0) { bounds.max_rows = w.max_rows; }
  const std::size_t bytes = cuda::window_scores_workspace_bytes(params, w.view, w.queries, bounds);
  DeviceBuffer<std::byte> workspace(bytes, "workspace");
  DeviceBuffer<float> out(std::vector<float>(at(w.item(w.sequences, 0, 0) * w.max_rows), untouched),
                          "scores");
  const auto plane = SequencePlane::dense(out.data(), w.o.layers, w.o.kv_heads, w.max_rows);
  Outcome r{};
  r.error = cuda::window_scores(
      params, w.view, w.queries, plane, bounds, workspace.data(), bytes, nullptr, path);
  if (r.error == cudaSuccess) { r.error = finish(); }
  INFO(device_message());
  CHECK(r.error == cudaSuccess);
  r.scores = out.download();
  return r;
}

// Largest error in units of its bound; infinite where one alone is NaN or a row is written that must not be.
double worst_error(ScoreWorld& w,
                   const WindowParams& params,
                   const std::vector<float>& got,
                   cuda::ScorePath path = cuda::ScorePath::fma) {
  double worst = 0;
  for (std::int32_t s = 0; s < w.sequences; ++s) {
    for (std::int32_t l = 0; l < w.o.layers; ++l) {
      for (std::int32_t h = 0; h < w.o.kv_heads; ++h) {
        const auto expected =
            window_reference(w, params, s, l, h, path == cuda::ScorePath::fma ? 4 : 16);
        for (std::int32_t r = 0; r < w.max_rows; ++r) {
          const float x = got[at(w.row_index(s, l, h, r))];
          if (r >= w.extent(s)) {
            if (x != untouched) { return HUGE_VAL; }
            continue;
          }
          const Bounded& e = expected[at(r)];
          if (std::isnan(x) != std::isnan(e.value)) { return HUGE_VAL; }
          if (std::isnan(x) || static_cast<double>(x) == e.value) { continue; }
          worst = std::max(worst, std::fabs(static_cast<double>(x) - e.value) / e.error);
        }
      }
    }
  }
  return worst;
}

// Largest difference to the CPU, relative.
double worst_difference(ScoreWorld& w, const WindowParams& params, const std::vector<float>& got) {
  double worst = 0;
  for (std::int32_t s = 0; s < w.sequences; ++s) {
    for (std::int32_t l = 0; l < w.o.layers; ++l) {
      for (std::int32_t h = 0; h < w.o.kv_heads; ++h) {
        const auto cpu = cpu_window_scores(
            params, w.host_view, w.host_queries, SequenceId{s}, LayerId{l}, HeadId{h});
        for (std::int32_t r = 0; r < w.extent(s); ++r) {
          const float x = got[at(w.row_index(s, l, h, r))];
          const float y = cpu[at(r)];
          if (std::isnan(x) != std::isnan(y)) { return HUGE_VAL; }
          if (std::isnan(x) || x == y) { continue; }
          worst = std::max(worst, static_cast<double>(std::fabs(x - y) / std::fabs(y)));
        }
      }
    }
  }
  return worst;
}

std::string describe(const WorldOptions& o) {
  return std::string(to_string(o.dtype)) + ", dim " + std::to_string(o.dim) + ", page size " +
         std::to_string(o.page_size) + ", group " + std::to_string(o.group) + ", layout " +
         std::to_string(static_cast<int>(o.layout)) + ", tables " +
         std::to_string(static_cast<int>(o.tables)) + ", queries " +
         std::string(to_string(o.query_dtype)) + ", lse " + std::to_string(o.lse) + ", skew " +
         std::to_string(o.skew);
}

}  // namespace

TEST_CASE(
    "cuda window: every dtype and head dim equals a double reference, with and without an LSE",
    "[window][every]") {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
    for (const std::int32_t dim : {64, 80, 96, 128, 192, 256}) {
      for (const bool lse : {true, false}) {
        WorldOptions o{.dtype = dtype, .dim = dim, .page_size = 16, .group = 3, .lengths = {150}};
        o.lse = lse;
        o.key_scales = element_bytes(dtype) == 1;
        ScoreWorld w(o);
        const WindowParams params{.window = 5, .kernel = 3};
        const Outcome r = score(w, params, cuda::ScorePath::fma);
        INFO(describe(o));
        CHECK(worst_error(w, params, r.scores) <= 1);
      }
    }
  }
}

TEST_CASE("cuda window: layouts, tables, ragged batches and holes equal a double reference",
          "[window]") {
  std::mt19937 rng(3);
  const auto one_of = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> v{values...};
    return v[rng() % v.size()];
  };
  for (int trial = 0; trial < 24; ++trial) {
    WorldOptions o;
    o.dtype = one_of(DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2);
    o.dim = one_of(64, 80, 128);
    o.page_size = one_of(1, 3, 16);
    o.kv_heads = one_of(1, 2);
    o.group = one_of(1, 2, 5, 16);
    o.layers = one_of(1, 2);
    o.lengths = {one_of(1, 7, 33), one_of(0, 5, 130), 40};
    o.layout = one_of(Layout::nhd, Layout::hnd, Layout::padded, Layout::packed, Layout::transposed);
    o.tables = one_of(Tables::dense, Tables::csr, Tables::per_head, Tables::per_layer);
    o.shuffled = one_of(false, true);
    o.hole = one_of(-1, 0, 12);
    o.left_padding = one_of(0, 2);
    o.query_dtype = one_of(DType::f32, DType::f16, DType::bf16);
    o.queries = one_of(3, 9);
    o.lse = one_of(true, false);
    o.lse_base = one_of(LseBase::e, LseBase::two);
    o.scale = one_of(0.0F, 0.5F);
    o.soft_cap = one_of(0.0F, 5.0F);
    o.skew = one_of(0, 0, 1);
    o.key_scales = one_of(false, true);
    o.seed = static_cast<std::uint32_t>(trial);
    ScoreWorld w(o);
    WindowParams params;
    params.window = one_of(1, 4, 12);
    params.kernel = one_of(1, 5, 9);
    params.rows = one_of(Reduction::mean, Reduction::sum, Reduction::max);
    params.group = one_of(Reduction::mean, Reduction::sum, Reduction::max);
    params.pooling = one_of(Pooling::average, Pooling::max);
    params.columns = one_of(PoolColumns::candidates, PoolColumns::all_columns);
    const Outcome r = score(w, params);
    INFO("trial " << trial << ": " << describe(o) << ", window " << params.window);
    CHECK(worst_error(w, params, r.scores, cuda::ScorePath::automatic) <= 1);
    if (readable(o.dtype) && !o.key_scales) { CHECK(worst_difference(w, params, r.scores) < 1e-5); }
  }
}

TEST_CASE("cuda window: tensor cores equal a double reference", "[window][mma]") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int32_t dim : {64, 128}) {
      for (const bool lse : {true, false}) {
        WorldOptions o{.dtype = dtype, .dim = dim, .page_size = 16, .kv_heads = 1, .group = 2};
        o.lengths = {7, 140};
        o.query_dtype = dtype;
        o.queries = 11;
        o.lse = lse;
        o.shuffled = dim == 64;
        ScoreWorld w(o);
        const WindowParams params{
            .window = 11, .kernel = 3, .rows = dim == 64 ? Reduction::max : Reduction::mean};
        const Outcome r = score(w, params, cuda::ScorePath::tensor_cores);
        INFO(describe(o));
        CHECK(worst_error(w, params, r.scores, cuda::ScorePath::tensor_cores) <= 1);
        CHECK(worst_difference(w, params, r.scores) < 1e-5);
      }
    }
  }
}

TEST_CASE("cuda window: more queries than a block holds at once change nothing", "[window][mma]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    for (const bool lse : {true, false}) {
      WorldOptions o{.dtype = DType::bf16, .dim = 64, .page_size = 16, .kv_heads = 1, .group = 3};
      o.lengths = {150};
      o.query_dtype = DType::bf16;
      o.queries = 50;
      o.lse = lse;
      ScoreWorld w(o);
      const WindowParams params{.window = 50};
      const Outcome r = score(w, params, path);
      CHECK(worst_error(w, params, r.scores, path) <= 1);
    }
  }
}

TEST_CASE("cuda window: a block goes from tile to tile, of one head and of several",
          "[window][mma]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    for (const std::int32_t window : {3, 40}) {  // queries stay in shared memory, or come anew
      WorldOptions o{.dtype = DType::f16, .dim = 64, .page_size = 16, .kv_heads = 3, .group = 4};
      o.lengths = {300, 20, 140, 5, 390};  // 30 tiles; the emulator has room for 16 blocks
      o.query_dtype = DType::f16;
      o.queries = window;
      o.lse = window == 3;
      ScoreWorld w(o);
      const WindowParams params{.window = window};
      const Outcome r = score(w, params, path);
      CHECK(worst_error(w, params, r.scores, path) <= 1);
    }
  }
}

TEST_CASE("cuda window: keys, queries and LSE that are not finite count as on the CPU",
          "[window][nan]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    for (const bool lse : {true, false}) {
      for (const bool all : {false, true}) {  // no query has a vote
        WorldOptions o{.dtype = DType::f16, .dim = 64, .kv_heads = 2, .group = 2, .lengths = {30}};
        o.query_dtype = DType::f16;
        o.lse = lse;
        ScoreWorld w(o);
        w.put_key(0, 0, 0, 3, 63, std::nan(""));
        w.put_key(0, 0, 0, 17, 0, HUGE_VAL);
        w.put_key(0, 0, 1, 29, 5, -HUGE_VAL);
        for (std::int32_t head = 0; head < (all ? 4 : 1); ++head) {
          for (std::int32_t i = 0; i < 8; ++i) { w.put_query(0, 0, head, i, 8 * i, HUGE_VAL); }
        }
        w.put_query(0, 0, 3, 7, 1, std::nan(""));
        w.upload();
        const WindowParams params{.window = 8, .kernel = 3, .pooling = Pooling::max};
        const Outcome r = score(w, params, path);
        CHECK(worst_error(w, params, r.scores, path) <= 1);
        CHECK(worst_difference(w, params, r.scores) < 1e-5);
        CHECK(std::isnan(r.scores[at(w.row_index(0, 0, 0, 10))]) == all);
      }
    }
  }
}

TEST_CASE("cuda window: a score does not change by a bit with page size, place, batch or layout",
          "[window][property]") {
  const WindowParams params{.window = 5};
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    for (const bool lse : {true, false}) {
      std::vector<std::uint32_t> first;
      for (const std::int32_t page_size : {1, 5, 64}) {
        for (const std::int32_t others : {0, 2}) {
          for (const Layout layout : {Layout::nhd, Layout::transposed}) {
            WorldOptions o{
                .dtype = DType::bf16, .dim = 64, .page_size = page_size, .kv_heads = 1, .group = 2};
            o.lengths = {131};
            for (std::int32_t i = 0; i < others; ++i) {
              o.lengths.insert(o.lengths.begin(), 60 + i);
            }
            o.layout = layout;
            o.query_dtype = DType::bf16;
            o.lse = lse;
            ScoreWorld w(o);
            const std::int32_t s = w.sequences - 1;
            std::mt19937 rng(17);  // the same keys and queries wherever they are
            const auto draw = [&] { return static_cast<double>(rng() % 256) / 64 - 2; };
            for (std::int32_t r = 0; r < 131; ++r) {
              for (std::int32_t d = 0; d < 64; ++d) { w.put_key(s, 0, 0, r, d, draw()); }
            }
            for (std::int32_t i = 0; i < 16; ++i) {
              for (std::int32_t d = 0; d < 64; ++d) { w.put_query(s, 0, i / 8, i % 8, d, draw()); }
            }
            w.upload();
            const Outcome out = score(w, params, path);
            std::vector<std::uint32_t> bits;
            for (std::int32_t r = 0; r < 131; ++r) {
              bits.push_back(std::bit_cast<std::uint32_t>(out.scores[at(w.row_index(s, 0, 0, r))]));
            }
            if (first.empty()) { first = bits; }
            INFO("page size " << page_size << ", others " << others << ", lse " << lse);
            CHECK(bits == first);
          }
        }
      }
    }
  }
}

TEST_CASE("cuda window: where the queries of a sequence lie does not change a bit",
          "[window][mma]") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool lse : {true, false}) {
      WorldOptions o{.dtype = dtype, .kv_heads = 2, .group = 2, .layers = 2};
      o.lengths = {40, 3, 25, 61};
      o.query_dtype = dtype;
      o.lse = lse;
      const WindowParams params{.window = 5, .kernel = 3};
      ScoreWorld plain(o);
      const Outcome expected = score(plain, params);
      for (const bool ring : {false, true}) {
        for (const std::vector<std::int32_t>& slots :
             {std::vector<std::int32_t>{}, {2, 0, 3, 1}, {3, 2, 1, 0}}) {
          o.ring = ring;
          o.slots = slots;
          ScoreWorld w(o);
          const Outcome r = score(w, params);
          INFO(describe(o) << ", ring " << ring << ", slots " << slots.size());
          CHECK(r.scores == expected.scores);
          if (dtype == DType::f32) { CHECK(worst_difference(w, params, r.scores) < 1e-4); }
        }
      }
    }
  }
}

TEST_CASE("cuda window: layers may be separate buffers, aligned or not", "[window]") {
  for (const cuda::ScorePath path : {cuda::ScorePath::fma, cuda::ScorePath::tensor_cores}) {
    for (const std::int32_t skew :
         {0, 1}) {  // elements; tensor cores cannot take unaligned queries
      if (skew != 0 && path == cuda::ScorePath::tensor_cores) { continue; }
      WorldOptions o{.dtype = DType::bf16, .dim = 64, .group = 2, .layers = 2, .lengths = {70}};
      o.query_dtype = DType::bf16;
      o.skew = skew;
      ScoreWorld w(o);
      std::byte* const base = w.view.k.base;
      DeviceBuffer<std::byte*> bases(std::vector<std::byte*>{base, base + w.view.k.layer_stride},
                                     "layer bases");
      w.view.k.base = nullptr;
      w.view.k.layer_bases = bases.data();
      w.view.k.layer_stride = 12'345'677;  // unused then
      const WindowParams params{.window = 4};
      const Outcome r = score(w, params, path);
      CHECK(worst_error(w, params, r.scores, path) <= 1);
    }
  }
}

TEST_CASE("cuda window: tables within the budget are left out, and a batch may be empty",
          "[window][edge]") {
  WorldOptions o{.dim = 64, .lengths = {12, 20, 0}};
  ScoreWorld w(o);
  const WindowParams params{.window = 4};
  const Outcome r =
      score(w, params, cuda::ScorePath::automatic, {.max_rows = w.max_rows, .min_rows = 12});
  CHECK(r.scores[at(w.row_index(0, 0, 0, 0))] == untouched);
  CHECK(r.scores[at(w.row_index(1, 0, 0, 0))] > 0);
  CHECK(r.scores[at(w.row_index(2, 0, 0, 0))] == untouched);
  DeviceBuffer<std::int32_t> active(std::vector<std::int32_t>{1, 0, 1}, "active");
  const Outcome some = score(
      w, params, cuda::ScorePath::automatic, {.max_rows = w.max_rows, .active = active.data()});
  CHECK(some.scores[at(w.row_index(0, 0, 0, 0))] > 0);
  CHECK(some.scores[at(w.row_index(1, 0, 0, 0))] == untouched);
  CacheView none = w.view;
  none.sequences = 0;
  DeviceBuffer<float> out(1, "scores");
  const auto plane = SequencePlane::dense(out.data(), 1, 1, 1);
  CHECK(cuda::window_scores(
            params, none, w.queries, plane, {.max_rows = 20}, nullptr, 256, nullptr) ==
        cudaSuccess);
}

TEST_CASE("cuda window: a total of rows is enough, and one that is exceeded is a status",
          "[window][edge][fault]") {
  WorldOptions o{.dim = 64, .lengths = {300, 20, 0, 150}};
  o.lse = GENERATE(false, true);
  ScoreWorld w(o);
  const WindowParams params{.window = 4};
  const Outcome wide = score(w, params);
  DeviceBuffer<Status> status(std::vector<Status>{Status::ok}, "status");
  std::int64_t total = 0;
  for (std::int32_t s = 0; s < w.sequences; ++s) { total += w.extent(s); }
  cuda::ScoreBounds bounds{.max_rows = 4000, .total_rows = total, .status = status.data()};
  CHECK(cuda::window_scores_workspace_bytes(params, w.view, w.queries, bounds) <
        cuda::window_scores_workspace_bytes(params, w.view, w.queries, {.max_rows = 4000}));
  const Outcome tight = score(w, params, cuda::ScorePath::automatic, bounds);
  CHECK(std::equal(
      wide.scores.begin(), wide.scores.end(), tight.scores.begin(), [](float a, float b) {
        return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
      }));
  CHECK(to_string(status.download()[0]) == "ok");
  bounds.total_rows = 120;  // room for 5 tiles of a KV head; there are 6
  const Outcome refused = score(w, params, cuda::ScorePath::automatic, bounds);
  CHECK(to_string(status.download()[0]) == "workspace_too_small");
  for (const float x : refused.scores) { CHECK(x == untouched); }
  bounds.total_rows = -1;
  DeviceBuffer<std::byte> memory(1 << 20, "workspace");
  DeviceBuffer<float> out(wide.scores, "scores");
  CHECK(cuda::window_scores(params,
                            w.view,
                            w.queries,
                            SequencePlane::dense(out.data(), w.o.layers, w.o.kv_heads, w.max_rows),
                            bounds,
                            memory.data(),
                            memory.size(),
                            nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("cuda window: what no kernel can do is refused before any launch", "[window][edge]") {
  WorldOptions o{.dtype = DType::f16, .dim = 64, .lengths = {20}};
  ScoreWorld w(o);
  const WindowParams good{.window = 4};
  const cuda::ScoreBounds bounds{.max_rows = w.max_rows};
  const std::size_t enough = cuda::window_scores_workspace_bytes(good, w.view, w.queries, bounds);
  DeviceBuffer<std::byte> workspace(enough, "workspace");
  DeviceBuffer<float> out(std::vector<float>(at(2 * w.max_rows), untouched), "scores");
  const auto plane = SequencePlane::dense(out.data(), 1, 2, w.max_rows);
  struct Call {
    WindowParams params;
    CacheView view;
    cuda::DeviceQueries queries;
    SequencePlane scores;
    std::byte* memory;
    std::size_t bytes;
    cuda::ScorePath path = cuda::ScorePath::automatic;
  };
  const auto code = [&](void (*change)(Call&)) {
    Call c{good, w.view, w.queries, plane, workspace.data(), enough};
    change(c);
    return cuda::window_scores(
        c.params, c.view, c.queries, c.scores, bounds, c.memory, c.bytes, nullptr, c.path);
  };
  CHECK(code([](Call&) {}) == cudaSuccess);
  const std::vector<float> scored = out.download();
  out.upload(std::vector<float>(at(2 * w.max_rows), untouched));
  const auto refused = [&](void (*change)(Call&)) { return code(change) == cudaErrorInvalidValue; };
  CHECK(refused([](Call& c) { c.params.window = 0; }));
  CHECK(refused([](Call& c) { c.params.kernel = 4; }));
  CHECK(refused([](Call& c) { c.view.k.dtype = DType::i8; }));
  CHECK(refused([](Call& c) { c.view.k.dtype = DType::opaque; }));
  CHECK(refused([](Call& c) { c.view.k.head_dim = 72; }));
  CHECK(refused([](Call& c) { c.view.k.base += 1; }));
  CHECK(refused([](Call& c) { c.view.k.scales.in_row = 128; }));  // a tile has one scale
  CHECK(refused([](Call& c) { c.view.k.scales = {.base = c.memory, .token_stride = 4}; }));
  CHECK(refused([](Call& c) { c.view.k.page_stride += 1; }));
  CHECK(refused([](Call& c) { c.view.k.base = nullptr; }));
  CHECK(refused([](Call& c) { c.view.table.ids = nullptr; }));
  CHECK(refused([](Call& c) { c.queries.block.data = nullptr; }));
  CHECK(refused([](Call& c) { c.queries.dtype = DType::f8e4m3; }));
  CHECK(refused([](Call& c) { c.queries.block.query_heads = 3; }));
  CHECK(refused([](Call& c) { c.scores.base = nullptr; }));
  CHECK(refused([](Call& c) { c.scores.base += 2; }));
  CHECK(refused([](Call& c) { --c.bytes; }));
  CHECK(refused([](Call& c) { c.memory += 16; }));
  CHECK(refused([](Call& c) { c.path = cuda::ScorePath::tensor_cores; }));  // fp32 queries
  for (const float x : out.download()) { CHECK(x == untouched); }
  CHECK(scored[0] != untouched);
}

TEST_CASE("cuda window: the workspace does not shrink when a bound grows", "[window][property]") {
  WorldOptions o{.dim = 64, .lengths = {20}};
  o.lse = false;
  ScoreWorld w(o);
  std::size_t before = 0;
  for (const std::int32_t rows : {0, 1, 127, 128, 129, 5000}) {
    const std::size_t bytes =
        cuda::window_scores_workspace_bytes({.window = 4}, w.view, w.queries, {.max_rows = rows});
    CHECK(bytes >= before);
    CHECK(bytes % 256 == 0);
    before = bytes;
  }
}
