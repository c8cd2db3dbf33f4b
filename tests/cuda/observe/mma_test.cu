// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/observe/detail/attention_mma.cuh>
#include <kvtrim/cuda/observe/detail/mma.cuh>

#include "catch.hpp"
#include "device_buffer.hpp"

#include <cstdint>
#include <random>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::cuda::detail;
using kvtrim::test::DeviceBuffer;

namespace {

// Two mistakes: the middle registers of a exchanged, the two of b.
struct WrongA {
  static KVTRIM_DEVICE void add(float (&d)[4],
                                const std::uint32_t (&a)[4],
                                const std::uint32_t (&b)[2]) {
    const std::uint32_t wrong[4] = {a[0], a[2], a[1], a[3]};
    WarpProduct<__half>::add(d, wrong, b);
  }
};
struct WrongB {
  static KVTRIM_DEVICE void add(float (&d)[4],
                                const std::uint32_t (&a)[4],
                                const std::uint32_t (&b)[2]) {
    const std::uint32_t wrong[2] = {b[1], b[0]};
    WarpProduct<__half>::add(d, a, wrong);
  }
};

// Fragments as the PTX manual numbers their elements a0..a7, b0..b3, c0..c3 (mma.m16n8k16, 16-bit types).
template <class Mma>
__global__ void product_kernel(const std::uint16_t* a, const std::uint16_t* b, float* d) {
  const int lane = static_cast<int>(threadIdx.x);
  const int group = lane >> 2;
  const int in_group = lane % 4;
  std::uint16_t a_elements[8];
  for (int i = 0; i < 8; ++i) {
    const bool upper_rows = (i >= 0 && i < 2) || (i >= 4 && i < 6);
    const int row = upper_rows ? group : group + 8;
    const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
    a_elements[i] = a[row * 16 + column];
  }
  std::uint16_t b_elements[4];
  for (int i = 0; i < 4; ++i) {
    const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    b_elements[i] = b[row * 8 + group];
  }
  std::uint32_t a_registers[4];
  std::uint32_t b_registers[2];
  for (int i = 0; i < 4; ++i) {
    a_registers[i] = a_elements[2 * i] | static_cast<std::uint32_t>(a_elements[2 * i + 1]) << 16U;
  }
  for (int i = 0; i < 2; ++i) {
    b_registers[i] = b_elements[2 * i] | static_cast<std::uint32_t>(b_elements[2 * i + 1]) << 16U;
  }
  float c[4];
  for (int i = 0; i < 4; ++i) { c[i] = d[(group + (i < 2 ? 0 : 8)) * 8 + in_group * 2 + (i & 1)]; }
  Mma::add(c, a_registers, b_registers);
  for (int i = 0; i < 4; ++i) { d[(group + (i < 2 ? 0 : 8)) * 8 + in_group * 2 + (i & 1)] = c[i]; }
}

// Small integers: every product and sum is exact, so equality is exact.
template <class Mma>
bool right_product(std::uint16_t (*store)(float)) {
  std::mt19937 rng(5);
  std::vector<int> a(16 * 16);
  std::vector<int> b(16 * 8);
  std::vector<float> d(16 * 8);
  std::vector<std::uint16_t> a_bits;
  std::vector<std::uint16_t> b_bits;
  for (auto& x : a) {
    a_bits.push_back(store(static_cast<float>(x = static_cast<int>(rng() % 17) - 8)));
  }
  for (auto& x : b) {
    b_bits.push_back(store(static_cast<float>(x = static_cast<int>(rng() % 17) - 8)));
  }
  for (auto& x : d) { x = static_cast<float>(rng() % 5); }
  DeviceBuffer<std::uint16_t> device_a(a_bits, "a");
  DeviceBuffer<std::uint16_t> device_b(b_bits, "b");
  DeviceBuffer<float> device_d(d, "d");
  REQUIRE(launch(&product_kernel<Mma>,
                 dim3(1),
                 dim3(32),
                 0,
                 nullptr,
                 device_a.data(),
                 device_b.data(),
                 device_d.data()) == cudaSuccess);
  const std::vector<float> got = device_d.download();
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      int sum = static_cast<int>(d[i * 8 + j]);
      for (std::size_t k = 0; k < 16; ++k) { sum += a[i * 16 + k] * b[k * 8 + j]; }
      if (got[i * 8 + j] != static_cast<float>(sum)) { return false; }
    }
  }
  return true;
}

// All dots of 128 keys of one page with 8 queries, through the product that the attention kernel uses.
template <class Mma>
__global__ void dots_kernel(AttentionArgs a, const std::uint16_t* queries, float* out) {
  using Product = MmaProduct<__half, 64, Mma>;
  KVTRIM_SHARED(uint4, staged, [8 * Product::chunks]);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 8 * Product::chunks) {
    const int q = thread / Product::chunks;
    const int c = thread % Product::chunks;
    staged[Product::place(q, c)] = reinterpret_cast<const uint4*>(queries)[thread];
  }
  __syncthreads();
  Product product(staged);
  const int first = thread / 32 * 32 + (thread & 31) / 4;
  for (int j = 0; j < 4; ++j) {
    const std::byte* const row = a.view.k.base + (first + 8 * j) * a.view.k.token_stride;
    product.take_key(j, [&](int c) { return load_chunk(a, row, c); });
  }
  float dots[2][4];
  product.dots(0, dots);
  for (int n = 0; n < 2; ++n) {
    for (int j = 0; j < 4; ++j) { out[(first + 8 * j) * 8 + Product::query_of(0, n)] = dots[n][j]; }
  }
}

template <class Mma>
bool right_dots() {
  std::mt19937 rng(6);
  std::vector<int> keys(128 * 64);
  std::vector<int> queries(8 * 64);
  std::vector<std::uint16_t> key_bits;
  std::vector<std::uint16_t> query_bits;
  for (auto& x : keys) {
    key_bits.push_back(float_to_f16(static_cast<float>(x = static_cast<int>(rng() % 17) - 8)));
  }
  for (auto& x : queries) {
    query_bits.push_back(float_to_f16(static_cast<float>(x = static_cast<int>(rng() % 17) - 8)));
  }
  DeviceBuffer<std::uint16_t> device_keys(key_bits, "keys");
  DeviceBuffer<std::uint16_t> device_queries(query_bits, "queries");
  DeviceBuffer<float> out(128 * 8, "dots");
  AttentionArgs a{};
  a.view.k = Plane::nhd(device_keys.data(), {128, 1, 64, DType::f16});
  a.chunk_stride = 16;
  REQUIRE(launch(&dots_kernel<Mma>,
                 dim3(1),
                 dim3(128),
                 0,
                 nullptr,
                 a,
                 device_queries.data(),
                 out.data()) == cudaSuccess);
  const std::vector<float> got = out.download();
  for (std::size_t k = 0; k < 128; ++k) {
    for (std::size_t q = 0; q < 8; ++q) {
      int sum = 0;
      for (std::size_t d = 0; d < 64; ++d) { sum += keys[k * 64 + d] * queries[q * 64 + d]; }
      if (got[k * 8 + q] != static_cast<float>(sum)) { return false; }
    }
  }
  return true;
}

}  // namespace

TEST_CASE("cuda mma: fragments lie where the PTX manual says", "[mma]") {
  CHECK(right_product<WarpProduct<__half>>(&float_to_f16));
  CHECK(right_product<WarpProduct<__nv_bfloat16>>(&float_to_bf16));
}

TEST_CASE("cuda mma: a wrong fragment is caught", "[mma][fault]") {
  CHECK_FALSE(right_product<WrongA>(&float_to_f16));
  CHECK_FALSE(right_product<WrongB>(&float_to_f16));
}

TEST_CASE("cuda mma: chunks of keys and queries as they lie in memory give every dot product",
          "[mma]") {
  CHECK(right_dots<WarpProduct<__half>>());
}

TEST_CASE("cuda mma: dot products through a wrong fragment are wrong", "[mma][fault]") {
  CHECK_FALSE(right_dots<WrongA>());
  CHECK_FALSE(right_dots<WrongB>());
}
