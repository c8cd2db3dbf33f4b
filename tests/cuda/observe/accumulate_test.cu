// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/observe/accumulate.cuh>

#include "catch.hpp"
#include "cuda/score/cpu_scores.hpp"
#include "cuda/score/score_world.hpp"
#include "device_buffer.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::test;

namespace {

std::vector<float> random_probabilities(std::size_t count, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<float> out(count);
  for (float& x : out) { x = static_cast<float>(rng() % 100'000) / 65'536; }
  return out;
}

struct Case {
  std::int32_t hole;
  std::int32_t pad;  // floats between rows of heads beyond the rows: 16-byte alignment is kept at 0
  AccumulateParams params;
};

}  // namespace

TEST_CASE("cuda accumulate: sums and scores equal the CPU's, bit for bit without decay",
          "[accumulate][parity]") {
  for (const Case& c : {Case{-1, 0, {}},
                        Case{-1, 1, {}},
                        Case{-1, 0, {.decay = 0.75F, .age_normalised = true}},
                        Case{-1, 3, {.decay = 0.75F, .age_normalised = true}},
                        Case{-1, 0, {.decay = 0.9999F}}}) {
    WorldOptions o{.dtype = DType::f16, .dim = 64, .kv_heads = 2, .group = 3, .layers = 2};
    o.lengths = {7, 523, 0, 64};
    o.score_planes = true;
    o.lse = false;
    ScoreWorld w(o);
    REQUIRE(w.max_rows == 524);
    const std::int64_t heads = 2 * 3;
    const std::int64_t stride = w.max_rows + c.pad;
    std::vector<float> scores_at_end;
    for (std::uint32_t step = 0; step < 3; ++step) {
      const auto values = random_probabilities(at(4 * 2 * heads * stride), step);
      DeviceBuffer<float> data(values, "probabilities");
      const cuda::DeviceProbabilities probabilities{data.data(),
                                                    static_cast<std::int32_t>(heads),
                                                    2 * heads * stride,
                                                    heads * stride,
                                                    stride};
      const std::size_t bytes = cuda::accumulate_workspace_bytes(w.view);
      DeviceBuffer<std::byte> workspace(bytes, "workspace");
      DeviceBuffer<float> scores(std::vector<float>(w.host_sums.size(), -7.0F), "scores");
      const cudaError_t error =
          cuda::accumulate_probabilities(c.params,
                                         w.view,
                                         probabilities,
                                         SequencePlane::dense(scores.data(), 2, 2, w.max_rows),
                                         w.max_rows,
                                         workspace.data(),
                                         bytes,
                                         nullptr);
      INFO(device_message());
      REQUIRE(error == cudaSuccess);
      REQUIRE(finish() == cudaSuccess);
      scores_at_end = scores.download();
      for (std::int32_t s = 0; s < 4; ++s) {
        for (std::int32_t l = 0; l < 2; ++l) {
          for (std::int32_t h = 0; h < 2; ++h) {
            cpu_probabilities(c.params,
                              w.host_view,
                              SequenceId{s},
                              LayerId{l},
                              HeadId{h},
                              values.data() + ((s * 2 + l) * heads + h * 3) * stride,
                              3,
                              stride);
          }
        }
      }
    }
    const auto sums = w.score_sums.download();
    const auto rests = w.score_rests.download();
    std::size_t different = 0;
    double worst = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto total = [](float sum, float rest) {
        return static_cast<double>(sum) + static_cast<double>(rest);
      };
      const double expected = total(w.host_sums[i], w.host_rests[i]);
      worst =
          std::max(worst, std::fabs(total(sums[i], rests[i]) - expected) / std::max(expected, 1.0));
      different += sums[i] != w.host_sums[i] || rests[i] != w.host_rests[i] ? 1 : 0;
    }
    CHECK((c.params.decay != 1 || different == 0));
    CHECK(worst <= std::ldexp(1, -40));
    for (std::int32_t s = 0; s < 4; ++s) {
      const auto expected =
          cpu_accumulated_scores(c.params, w.host_view, SequenceId{s}, LayerId{1}, HeadId{1});
      for (std::int32_t r = 0; r < w.max_rows; ++r) {
        const float x = scores_at_end[at(w.row_index(s, 1, 1, r))];
        const float y = r < w.live(s) ? expected[at(r)] : -7.0F;
        CHECK((c.params.decay != 1 ? std::fabs(x - y) <= 1e-6F * std::fabs(y) : x == y));
      }
    }
  }
}

TEST_CASE("cuda accumulate: a hole keeps what it holds", "[accumulate]") {
  WorldOptions o{.dtype = DType::f16, .dim = 64, .kv_heads = 1, .lengths = {10}};
  o.hole = 3;
  o.score_planes = true;
  o.lse = false;
  ScoreWorld w(o);
  const auto values = random_probabilities(at(w.max_rows + 1), 9);
  DeviceBuffer<float> data(values, "probabilities");
  const std::size_t bytes = cuda::accumulate_workspace_bytes(w.view);
  DeviceBuffer<std::byte> workspace(bytes, "workspace");
  REQUIRE(cuda::accumulate_probabilities({.squared = true},
                                         w.view,
                                         {data.data(), 1, 0, 0, 0},
                                         {},
                                         w.max_rows,
                                         workspace.data(),
                                         bytes,
                                         nullptr) == cudaSuccess);
  const auto sums = w.score_sums.download();
  for (std::size_t r = 0; r < 11; ++r) {
    CHECK(sums[r] == (r == 3 ? 0.0F : values[r] * values[r]));
  }
}

TEST_CASE("cuda accumulate: what cannot be done is refused before any launch",
          "[accumulate][edge]") {
  WorldOptions o{.dtype = DType::f16, .dim = 64, .lengths = {10}};
  o.score_planes = true;
  o.lse = false;
  ScoreWorld w(o);
  const std::size_t enough = cuda::accumulate_workspace_bytes(w.view);
  DeviceBuffer<std::byte> workspace(enough, "workspace");
  DeviceBuffer<float> data(std::vector<float>(at(4 * w.max_rows), 0.5F), "probabilities");
  struct Call {
    CacheView view;
    cuda::DeviceProbabilities probabilities;
    std::byte* memory;
    std::size_t bytes;
    std::int32_t max_rows;
  };
  const auto refused = [&](void (*change)(Call&)) {
    Call c{w.view,
           {data.data(), 4, 4 * w.max_rows, 0, w.max_rows},
           workspace.data(),
           enough,
           w.max_rows};
    c.probabilities.query_heads = 2;
    change(c);
    return cuda::accumulate_probabilities(
               {}, c.view, c.probabilities, {}, c.max_rows, c.memory, c.bytes, nullptr) ==
           cudaErrorInvalidValue;
  };
  CHECK_FALSE(refused([](Call&) {}));
  w.upload();
  CHECK(refused([](Call& c) { c.view.score_sums = {}; }));
  CHECK(refused([](Call& c) { c.view.score_compensations.row_stride = 2; }));
  CHECK(refused([](Call& c) { c.probabilities.data = nullptr; }));
  CHECK(refused([](Call& c) { c.probabilities.query_heads = 3; }));
  CHECK(refused([](Call& c) { c.max_rows = -1; }));
  CHECK(refused([](Call& c) { c.view.score_sums.head_stride = 0; }));
  CHECK(refused([](Call& c) { --c.bytes; }));
  CHECK(refused([](Call& c) { c.memory += 4; }));
  for (const float x : w.score_sums.download()) { CHECK(x == 0); }
}
