// SPDX-License-Identifier: Apache-2.0
// The emulator against what the CUDA programming guide promises, and against what it forbids.

#include "device_buffer.hpp"

#include "catch.hpp"

#include <string>
#include <vector>

namespace {

namespace emulator = kvtrim::emulator;
using kvtrim::test::DeviceBuffer;

__global__ void collectives_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int* const o = out + threadIdx.x * 8;
  o[0] = __shfl_sync(~0U, lane * 10, 5);
  o[1] = __shfl_up_sync(~0U, lane * 10, 3U);
  o[2] = __shfl_down_sync(~0U, lane * 10, 3U, 8);
  o[3] = __shfl_xor_sync(~0U, lane * 10, 17);
  o[4] = __shfl_sync(~0U, lane * 10, 9, 8);
  o[5] = static_cast<int>(__ballot_sync(~0U, lane % 3 == 0));
  o[6] = static_cast<int>(__match_any_sync(~0U, lane / 8));
  o[7] = __reduce_min_sync(~0U, 7 - lane);
}
__global__ void half_warps_kernel(int* out) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int v = lane;
  if (lane < 16) {
    for (int i = 0; i < 5; ++i) { v += __shfl_xor_sync(0x0000'FFFFU, v, 1); }
  } else {
    v = static_cast<int>(__reduce_add_sync(0xFFFF'0000U, static_cast<unsigned>(v)));
  }
  __syncwarp();
  out[threadIdx.x] = v;
}
__global__ void short_warp_kernel(int* out) {
  const unsigned mask = threadIdx.x < 32 ? ~0U : 0xFFU;
  out[threadIdx.x] = static_cast<int>(__reduce_add_sync(mask, 1U)) +
                     100 * __syncthreads_count(static_cast<int>(threadIdx.x % 2));
}
__global__ void indices_kernel(int* out) {
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  atomicAdd(&out[b], static_cast<int>(t));
  atomicMax(&out[8], static_cast<int>(b * 100 + t));
}
__global__ void shared_kernel(int* out) {
  KVTRIM_SHARED(int, values, [64]);
  KVTRIM_DYNAMIC_SHARED(int, more);
  const unsigned t = threadIdx.x;
  values[t] = static_cast<int>(t);
  more[t] = 100;
  __syncthreads();
  out[t] = values[63 - t] + more[63 - t];
}
__global__ void async_kernel(const int* in, int* out) {
  KVTRIM_SHARED(uint4, stage, [32]);
  kvtrim::cuda::detail::async_copy_16(&stage[threadIdx.x], in + threadIdx.x * 4);
  kvtrim::cuda::detail::async_commit();
  kvtrim::cuda::detail::async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = static_cast<int>(stage[31 - threadIdx.x].y);
}
template <bool Waits>
__global__ void async_early_kernel(const int* in, int* out) {
  KVTRIM_SHARED(uint4, stage, [32]);
  stage[threadIdx.x] = {7, 7, 7, 7};
  __syncthreads();
  kvtrim::cuda::detail::async_copy_16(&stage[threadIdx.x], in + threadIdx.x * 4);
  kvtrim::cuda::detail::async_commit();
  if (Waits) { kvtrim::cuda::detail::async_wait<0>(); }
  __syncthreads();
  out[threadIdx.x] = static_cast<int>(stage[threadIdx.x].x);
  kvtrim::cuda::detail::async_wait<0>();
}
__global__ void warp_exchange_kernel(
    int* out) {  // neighbours in shared memory, ordered by __syncwarp alone
  KVTRIM_SHARED(int, values, [64]);
  const unsigned t = threadIdx.x;
  for (int i = 0; i < 4; ++i) {
    values[t] = static_cast<int>(t) + i;
    __syncwarp();
    const int v = values[t ^ 1U];
    __syncwarp();
    out[t] = v;
  }
}
template <bool Fence>
__global__ void last_block_kernel(int* out) {
  KVTRIM_SHARED(int, last, [1]);
  const unsigned t = threadIdx.x;
  out[64 + blockIdx.x * 32 + t] = static_cast<int>(t + blockIdx.x);
  if (Fence) { __threadfence(); }
  __syncthreads();
  if (t == 0) { last[0] = atomicAdd(&out[0], 1) == static_cast<int>(gridDim.x) - 1; }
  __syncthreads();
  if (last[0] == 0) { return; }
  if (Fence) { __threadfence(); }
  int sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) { sum += out[64 + i * 32 + t]; }
  sum = __reduce_add_sync(~0U, sum);
  if (t == 0) { out[1] = sum; }
}
template <bool Fence>
__global__ void last_writer_kernel(int* out) {  // the last block changes what all have read
  KVTRIM_SHARED(int, last, [1]);
  const unsigned t = threadIdx.x;
  const int before = out[2];
  out[64 + blockIdx.x * 32 + t] = before;
  __syncthreads();
  if (t == 0) {
    if (Fence) { __threadfence(); }
    last[0] = atomicAdd(&out[0], 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (last[0] != 0 && t == 0) { out[2] = before + 5; }
}
__global__ void whole_warp_kernel(int* out) {
  struct Operands {
    int in;
    int out;
  } mine{static_cast<int>(threadIdx.x), 0};
  emulator::whole_warp(
      "sum",
      &mine,
      [](void* const* lanes) {
        int sum = 0;
        for (int i = 0; i < 32; ++i) { sum += static_cast<Operands*>(lanes[i])->in; }
        for (int i = 0; i < 32; ++i) { static_cast<Operands*>(lanes[i])->out = sum + i; }
      },
      emulator::Site::here());
  out[threadIdx.x] = mine.out;
}

// What is forbidden.
__global__ void mask_beyond_block_kernel(int* out) {
  out[threadIdx.x] = __any_sync(~0U, 1);
}
__global__ void absent_lane_kernel(int* out) {
  if (threadIdx.x < 16) { out[threadIdx.x] = __shfl_down_sync(0xFFFFU, 1, 4U); }
}
__global__ void masks_disagree_kernel(int* out) {
  out[threadIdx.x] = __any_sync((threadIdx.x & 1U) != 0 ? ~0U : 0x7FFF'FFFFU, 1);
}
__global__ void not_in_mask_kernel(int* out) {
  out[threadIdx.x] = __any_sync(1U, 1);
}
__global__ void early_exit_kernel(int* out) {
  if (threadIdx.x >= 40) { return; }
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void divergent_shuffle_kernel(int* out) {
  int v = static_cast<int>(threadIdx.x);
  if (v < 20) { v = __shfl_xor_sync(~0U, v, 1); }
  out[threadIdx.x] = v;
}
__global__ void divergent_barrier_kernel(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
__global__ void unwaited_kernel(int* out) {
  KVTRIM_SHARED(uint4, stage, [32]);
  kvtrim::cuda::detail::async_copy_16(&stage[threadIdx.x], out + threadIdx.x * 4);
  kvtrim::cuda::detail::async_commit();
}
__global__ void shuffle_orders_nothing_kernel(int* out) {
  KVTRIM_SHARED(int, values, [32]);
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  static_cast<void>(__shfl_sync(~0U, t, 0));
  out[t] = values[t ^ 1];
}
__global__ void no_barrier_kernel(int* out) {
  KVTRIM_SHARED(int, values, [64]);
  values[threadIdx.x] = 0;
  __syncthreads();
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[63 - threadIdx.x];
}
__global__ void plain_add_kernel(int* out) {
  out[0] += 1;
}
__global__ void unwritten_kernel(int* out) {
  KVTRIM_SHARED(int, values, [64]);
  if (threadIdx.x < 63) { values[threadIdx.x] = 1; }
  __syncthreads();
  out[threadIdx.x] = values[63 - threadIdx.x];
}
__global__ void bytes_kernel(unsigned char* out) {
  out[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);
}
__global__ void one_beyond_kernel(int* out) {
  out[threadIdx.x + 1] = 1;
}

__global__ void misaligned_copy_kernel(int* out) {
  KVTRIM_SHARED(uint4, stage, [33]);
  kvtrim::cuda::detail::async_copy_16(&stage[threadIdx.x], out + threadIdx.x * 4 + 1);
  kvtrim::cuda::detail::async_commit();
  kvtrim::cuda::detail::async_wait<0>();
}
__global__ void misaligned_load_kernel(int* out) {
  out[0] = static_cast<int>(__ldg(reinterpret_cast<const uint2*>(out + 1)).x);
}
__global__ void misaligned_store_kernel(int* out) {
  __stcs(reinterpret_cast<uint4*>(out + 2), uint4{1, 2, 3, 4});
}
__global__ void no_dynamic_kernel(int* out) {
  KVTRIM_DYNAMIC_SHARED(int, more);
  more[threadIdx.x] = 1;
  out[threadIdx.x] = more[threadIdx.x];
}
__global__ void much_static_kernel(int* out) {  // 40 KiB
  KVTRIM_SHARED(int, values, [10 * 1024]);
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

struct WithSchedule {
  explicit WithSchedule(emulator::Schedule s) : before(emulator::options()) {
    emulator::options().schedule = s;
  }
  ~WithSchedule() { emulator::options() = before; }
  emulator::Options before;
};

std::vector<int> run(void (*kernel)(int*),
                     unsigned threads,
                     std::size_t count,
                     dim3 grid = dim3(1)) {
  DeviceBuffer<int> out(count);
  out.fill(0);
  const cudaError_t e =
      kvtrim::cuda::detail::launch(kernel, grid, dim3(threads), 256, nullptr, out.data());
  INFO(emulator::message());
  REQUIRE(e == cudaSuccess);
  return out.download();
}
std::string complaint(void (*kernel)(int*),
                      unsigned threads,
                      std::size_t count = 1024,
                      unsigned grid = 1) {
  DeviceBuffer<int> out(count);
  out.fill(0);
  const cudaError_t e =
      kvtrim::cuda::detail::launch(kernel, dim3(grid), dim3(threads), 0, nullptr, out.data());
  return e == cudaSuccess ? "no complaint" : emulator::message();
}

using Catch::Matchers::ContainsSubstring;

}  // namespace

TEST_CASE("emulator: shuffles, votes and reductions under every schedule", "[emulator]") {
  const auto schedule = GENERATE(
      emulator::Schedule::in_order, emulator::Schedule::reverse, emulator::Schedule::random);
  const WithSchedule with(schedule);
  const std::vector<int> got = run(collectives_kernel, 64, 512);
  for (int t = 0; t < 64; ++t) {
    const int lane = t & 31;
    const int* const o = &got[static_cast<std::size_t>(t) * 8];
    CAPTURE(t);
    CHECK(o[0] == 50);
    CHECK(o[1] == (lane < 3 ? lane : lane - 3) * 10);
    CHECK(o[2] == ((lane & 7) + 3 < 8 ? lane + 3 : lane) * 10);
    CHECK(o[3] == (lane ^ 17) * 10);
    CHECK(o[4] == ((lane & ~7) + 1) * 10);
    CHECK(static_cast<unsigned>(o[5]) == 0x4924'9249U);
    CHECK(static_cast<unsigned>(o[6]) == 0xFFU << (lane & ~7));
    CHECK(o[7] == -24);
  }
}

TEST_CASE("emulator: half warps meet independently of each other", "[emulator]") {
  const std::vector<int> got = run(half_warps_kernel, 64, 64);
  for (int t = 0; t < 64; ++t) {
    const int lane = t & 31;
    CHECK(got[static_cast<std::size_t>(t)] == (lane < 16 ? ((lane & ~1) * 2 + 1) * 16 : 376));
  }
}

TEST_CASE("emulator: a last warp of eight lanes", "[emulator]") {
  const std::vector<int> got = run(short_warp_kernel, 40, 40);
  for (std::size_t t = 0; t < 40; ++t) { CHECK(got[t] == (t < 32 ? 32 : 8) + 2000); }
}

TEST_CASE("emulator: three-dimensional indices and atomics", "[emulator]") {
  DeviceBuffer<int> out(9);
  out.fill(0);
  REQUIRE(kvtrim::cuda::detail::launch(
              indices_kernel, dim3(2, 2, 2), dim3(4, 3, 5), 0, nullptr, out.data()) == cudaSuccess);
  const auto got = out.download();
  for (std::size_t b = 0; b < 8; ++b) { CHECK(got[b] == 60 * 59 / 2); }
  CHECK(got[8] == 759);
}

TEST_CASE("emulator: shared memory, asynchronous copies, __syncwarp", "[emulator]") {
  const auto shared = run(shared_kernel, 64, 64);
  for (std::size_t t = 0; t < 64; ++t) { CHECK(shared[t] == 163 - static_cast<int>(t)); }
  const auto exchanged = run(warp_exchange_kernel, 64, 64);
  for (std::size_t t = 0; t < 64; ++t) { CHECK(exchanged[t] == static_cast<int>(t ^ 1U) + 3); }
  std::vector<int> values(128);
  for (std::size_t i = 0; i < 128; ++i) { values[i] = static_cast<int>(i); }
  const DeviceBuffer<int> in(values);
  DeviceBuffer<int> out(32);
  REQUIRE(kvtrim::cuda::detail::launch(
              async_kernel, dim3(1), dim3(32), 0, nullptr, in.data(), out.data()) == cudaSuccess);
  const auto got = out.download();
  for (std::size_t t = 0; t < 32; ++t) { CHECK(got[t] == static_cast<int>((31 - t) * 4 + 1)); }
}

TEST_CASE("emulator: a copy that nobody waited for has not arrived", "[emulator]") {
  const DeviceBuffer<int> in(std::vector<int>(128, 1));
  DeviceBuffer<int> out(32);
  REQUIRE(kvtrim::cuda::detail::launch(
              async_early_kernel<true>, dim3(1), dim3(32), 0, nullptr, in.data(), out.data()) ==
          cudaSuccess);
  CHECK(out.download() == std::vector<int>(32, 1));
  REQUIRE(kvtrim::cuda::detail::launch(
              async_early_kernel<false>, dim3(1), dim3(32), 0, nullptr, in.data(), out.data()) ==
          cudaSuccess);
  CHECK(out.download() == std::vector<int>(32, 7));
}

TEST_CASE("emulator: an instruction of a whole warp sees all lanes", "[emulator]") {
  const auto got = run(whole_warp_kernel, 32, 32);
  for (std::size_t t = 0; t < 32; ++t) { CHECK(got[t] == 496 + static_cast<int>(t)); }
}

TEST_CASE("emulator: the last block sees what the others fenced", "[emulator]") {
  const auto got = run(last_block_kernel<true>, 32, 1024, dim3(7));
  CHECK(got[1] == 7 * 496 + 32 * 21);
  CHECK(run(last_writer_kernel<true>, 32, 1024, dim3(7))[2] == 5);
}

TEST_CASE("emulator: collectives that CUDA leaves undefined are errors", "[emulator]") {
  CHECK_THAT(complaint(mask_beyond_block_kernel, 40),
             ContainsSubstring("beyond the end of the block"));
  CHECK_THAT(complaint(absent_lane_kernel, 32), ContainsSubstring("not in the mask"));
  CHECK_THAT(complaint(masks_disagree_kernel, 32), ContainsSubstring("disagree"));
  CHECK_THAT(complaint(not_in_mask_kernel, 32), ContainsSubstring("not in its own mask"));
  CHECK_THAT(complaint(early_exit_kernel, 64), ContainsSubstring("exit"));
  CHECK_THAT(complaint(divergent_barrier_kernel, 64), ContainsSubstring("barrier divergence"));
  CHECK_THAT(complaint(unwaited_kernel, 32), ContainsSubstring("never waited for"));
  CHECK(complaint(divergent_shuffle_kernel, 32) != "no complaint");
  CHECK_THAT(complaint(indices_kernel, 2048), ContainsSubstring("invalid block size"));
}

TEST_CASE("emulator: vectors at other addresses than theirs are errors", "[emulator]") {
  CHECK_THAT(complaint(misaligned_copy_kernel, 32), ContainsSubstring("not aligned to 16"));
  CHECK_THAT(complaint(misaligned_load_kernel, 1), ContainsSubstring("8 bytes is not aligned"));
  CHECK_THAT(complaint(misaligned_store_kernel, 1), ContainsSubstring("16 bytes is not aligned"));
}

TEST_CASE("emulator: shared memory is limited as by the runtime", "[emulator]") {
  DeviceBuffer<int> out(32);
  const auto run_with = [&](std::size_t dynamic) {
    const auto* const kernel = reinterpret_cast<const void*>(much_static_kernel);
    const emulator::Launch what{kernel, nullptr, dim3(1), dim3(32), dynamic, 0, sizeof(int*)};
    return emulator::launch(much_static_kernel, what, out.data());
  };
  const auto* const kernel = reinterpret_cast<const void*>(much_static_kernel);
  CHECK_THAT(complaint(no_dynamic_kernel, 32), ContainsSubstring("the launch asked for none"));
  emulator::unload_kernels();
  CHECK(run_with(8 * 1024) == cudaSuccess);
  CHECK(emulator::launches().back().static_bytes == 40 * 1024);
  CHECK(run_with(8 * 1024 + 4) != cudaSuccess);  // together beyond 48 KiB
  CHECK(run_with(60 * 1024) == cudaErrorInvalidValue);
  constexpr auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  REQUIRE(cudaFuncSetAttribute(kernel, limit, 60 * 1024) == cudaSuccess);
  CHECK(run_with(60 * 1024) == cudaSuccess);
  CHECK(run_with(60 * 1024 + 4) == cudaErrorInvalidValue);
  REQUIRE(cudaFuncSetAttribute(kernel, limit, 16) == cudaSuccess);  // lowered
  CHECK(run_with(60 * 1024) == cudaErrorInvalidValue);
  REQUIRE(cudaFuncSetAttribute(kernel, limit, 227 * 1024) == cudaSuccess);
  CHECK(run_with(16) != cudaSuccess);  // static arrays leave less than that
  CHECK_THAT(emulator::message(), ContainsSubstring("could not have been set"));
  CHECK(cudaFuncSetAttribute(kernel, limit, 228 * 1024) == cudaErrorInvalidValue);
  emulator::unload_kernels();
}

TEST_CASE("emulator: a capture keeps launches, and loads and sets nothing", "[emulator]") {
  DeviceBuffer<int> out(64);
  out.fill(0);
  emulator::unload_kernels();
  const auto go = [&] {
    return kvtrim::cuda::detail::launch(
        warp_exchange_kernel, dim3(1), dim3(64), 0, nullptr, out.data());
  };
  const auto* const kernel = reinterpret_cast<const void*>(warp_exchange_kernel);
  cudaFuncAttributes attributes{};
  emulator::Graph graph;
  emulator::capture = &graph;
  CHECK(go() == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaFuncGetAttributes(&attributes, kernel) == cudaErrorStreamCaptureUnsupported);
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 16) ==
        cudaErrorStreamCaptureUnsupported);
  emulator::capture = nullptr;
  REQUIRE(cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess);
  emulator::capture = &graph;
  CHECK(go() == cudaSuccess);
  emulator::capture = nullptr;
  CHECK(out.download() == std::vector<int>(64, 0));
  CHECK(graph.run() == cudaSuccess);
  CHECK(out.download()[0] == 4);
}

TEST_CASE("emulator: a failed launch leaves the next one whole", "[emulator]") {
  CHECK(complaint(early_exit_kernel, 64) != "no complaint");
  CHECK(run(warp_exchange_kernel, 64, 64)[0] == 4);
  CHECK(emulator::message().empty());
}

TEST_CASE("racecheck: a race of each kind is found, and nothing else", "[emulator][race]") {
  if (!emulator::checks_races()) { return; }
  CHECK_THAT(complaint(no_barrier_kernel, 64), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(plain_add_kernel, 64), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(plain_add_kernel, 1, 1024, 2), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(shuffle_orders_nothing_kernel, 32), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(last_block_kernel<false>, 32, 1024, 7), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(last_writer_kernel<false>, 32, 1024, 7), ContainsSubstring("hazard"));
  CHECK_THAT(complaint(unwritten_kernel, 64), ContainsSubstring("never written"));
  CHECK_THAT(complaint(one_beyond_kernel, 32, 32), ContainsSubstring("memcheck"));
  DeviceBuffer<unsigned char> bytes(64);
  const cudaError_t e =
      kvtrim::cuda::detail::launch(bytes_kernel, dim3(1), dim3(64), 0, nullptr, bytes.data());
  INFO(emulator::message());
  CHECK(e == cudaSuccess);  // neighbours in one word
}
