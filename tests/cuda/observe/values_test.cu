// SPDX-License-Identifier: Apache-2.0
// What stored bits are as floats, under -use_fast_math too, where a float that is subnormal on the way is 0.

#if !defined(KVTRIM_CUDA_KERNELS_ELSEWHERE)
#  define KVTRIM_CUDA_KERNELS_ELSEWHERE
#endif
#include <kvtrim/cuda/observe/detail/attention_fma.cuh>

#include "catch.hpp"
#include "cuda/score/score_world.hpp"
#include "device_buffer.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(KVTRIM_EMULATED) && defined(__SSE2__)
#  include <immintrin.h>
#endif

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;

/// The processor takes subnormal floats for 0, as a GPU does under -ftz=true.
struct FlushToZero {
#if defined(KVTRIM_EMULATED) && defined(__SSE2__)
  FlushToZero() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040U); }
  ~FlushToZero() { _mm_setcsr(before); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;
  unsigned before;
#endif
};

template <class T>
__global__ void values_kernel(const std::uint32_t* words, float* out) {
  float values[4 / sizeof(T)];
  cuda::detail::values_of<T>(words[threadIdx.x], values);
  for (std::size_t i = 0; i < 4 / sizeof(T); ++i) {
    out[threadIdx.x * 4 / sizeof(T) + i] = values[i];
  }
}

__global__ void queries_kernel(const std::uint16_t* bits, DType dtype, bool vector, float* out) {
  const float4 x = cuda::detail::load_query_4(bits, 4 * std::int64_t{threadIdx.x}, dtype, vector);
  out[4 * threadIdx.x] = x.x;
  out[4 * threadIdx.x + 1] = x.y;
  out[4 * threadIdx.x + 2] = x.z;
  out[4 * threadIdx.x + 3] = x.w;
}

bool same(float a, double b) {
  return std::isnan(b) ? std::isnan(a)
                       : std::bit_cast<std::uint32_t>(a) ==
                             std::bit_cast<std::uint32_t>(static_cast<float>(b));
}

template <class T>
std::vector<float> eight_bit_values() {
  std::vector<std::uint32_t> words;
  for (std::uint32_t b = 0; b < 256; b += 4) { words.push_back(b * 0x0101'0101U + 0x0302'0100U); }
  const DeviceBuffer<std::uint32_t> in(words, "bits");
  DeviceBuffer<float> out(256, "values");
  [[maybe_unused]] const FlushToZero flushed;
  REQUIRE(cuda::detail::launch(
              values_kernel<T>, dim3(1), dim3(64), 0, nullptr, in.data(), out.data()) ==
          cudaSuccess);
  return out.download();
}

// The definition of the format, in double.
double half_value(std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 10U & 31U);
  const double fraction = static_cast<double>(bits & 1023U) / 1024;
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  if (exponent == 31) { return fraction == 0 ? sign * HUGE_VAL : std::nan(""); }
  return exponent == 0 ? sign * std::ldexp(fraction, -14)
                       : sign * std::ldexp(1 + fraction, exponent - 15);
}

}  // namespace

TEST_CASE("cuda values: all 8-bit keys are what their formats say, subnormals too",
          "[cuda][edge]") {
  const auto e4m3 = eight_bit_values<__nv_fp8_e4m3>();
  const auto e5m2 = eight_bit_values<__nv_fp8_e5m2>();
  for (std::size_t b = 0; b < 256; ++b) {
    CAPTURE(b);
    CHECK(same(e4m3[b], kvtrim::test::fp8_value(static_cast<std::uint8_t>(b), DType::f8e4m3)));
    CHECK(same(e5m2[b], kvtrim::test::fp8_value(static_cast<std::uint8_t>(b), DType::f8e5m2)));
  }
}

TEST_CASE("cuda values: all f16 queries and keys are what the format says", "[cuda][edge]") {
  std::vector<std::uint16_t> bits(1024);
  for (std::uint32_t first = 0; first < 65536; first += 1024) {
    for (std::uint32_t i = 0; i < 1024; ++i) { bits[i] = static_cast<std::uint16_t>(first + i); }
    const DeviceBuffer<std::uint16_t> in(bits, "bits");
    DeviceBuffer<float> out(1024, "values");
    DeviceBuffer<float> keys(1024, "values");
    {
      [[maybe_unused]] const FlushToZero flushed;
      REQUIRE(cuda::detail::launch(queries_kernel,
                                   dim3(1),
                                   dim3(256),
                                   0,
                                   nullptr,
                                   in.data(),
                                   DType::f16,
                                   first % 2048 == 0,
                                   out.data()) == cudaSuccess);
      REQUIRE(cuda::detail::launch(values_kernel<__half>,
                                   dim3(1),
                                   dim3(512),
                                   0,
                                   nullptr,
                                   reinterpret_cast<const std::uint32_t*>(in.data()),
                                   keys.data()) == cudaSuccess);
    }
    const auto got = out.download();
    const auto of_keys = keys.download();
    std::uint32_t wrong = 0;
    for (std::uint32_t i = 0; i < 1024; ++i) {
      const double want = half_value(first + i);
      wrong += same(got[i], want) && same(of_keys[i], want) ? 0 : 1;
    }
    CAPTURE(first);
    CHECK(wrong == 0);
  }
}
