// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the threads of a block find out together. All functions are for whole blocks of `Threads` threads, full warps; each
// has two barriers, so that the shared memory may be used again at once.

#include <kvtrim/cuda/detail/device.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Shared memory of one scan of `T` (4 or 8 bytes).
template <int Threads, class T>
struct BlockScan {
  T warps[Threads / 32];
};

/// Sum of `value` over the threads before this one; `total`: over all of them.
template <int Threads, class T>
KVTRIM_DEVICE T block_sum_before(T value, BlockScan<Threads, T>& shared, T& total) {
  static_assert(Threads % 32 == 0 && Threads <= 1024);
  const unsigned lane = threadIdx.x & 31U;
  const unsigned warp = threadIdx.x >> 5U;
  T upto = value;
  KVTRIM_UNROLL
  for (unsigned step = 1; step < 32; step <<= 1U) {
    const T other = __shfl_up_sync(full_warp, upto, step);
    if (lane >= step) { upto += other; }
  }
  if (lane == 31) { shared.warps[warp] = upto; }
  __syncthreads();
  T before = 0;
  T all = 0;
  KVTRIM_UNROLL
  for (unsigned w = 0; w < Threads / 32; ++w) {
    const T sum = shared.warps[w];
    before += w < warp ? sum : 0;
    all += sum;
  }
  __syncthreads();
  total = all;
  return before + upto - value;
}

/// Sum of `value` over all threads; every thread gets it.
template <int Threads, class T>
KVTRIM_DEVICE T block_sum(T value, BlockScan<Threads, T>& shared) {
  KVTRIM_UNROLL
  for (int step = 16; step > 0; step >>= 1) { value += __shfl_xor_sync(full_warp, value, step); }
  if ((threadIdx.x & 31U) == 0) { shared.warps[threadIdx.x >> 5U] = value; }
  __syncthreads();
  T all = 0;
  KVTRIM_UNROLL
  for (unsigned w = 0; w < Threads / 32; ++w) { all += shared.warps[w]; }
  __syncthreads();
  return all;
}

/// Largest `value` of all threads; every thread gets it.
template <int Threads>
KVTRIM_DEVICE std::int32_t block_max(std::int32_t value, BlockScan<Threads, std::int32_t>& shared) {
  value = __reduce_max_sync(full_warp, value);
  if ((threadIdx.x & 31U) == 0) { shared.warps[threadIdx.x >> 5U] = value; }
  __syncthreads();
  std::int32_t best = shared.warps[0];
  KVTRIM_UNROLL
  for (unsigned w = 1; w < Threads / 32; ++w) {
    best = shared.warps[w] > best ? shared.warps[w] : best;
  }
  __syncthreads();
  return best;
}
/// The smallest.
template <int Threads>
KVTRIM_DEVICE std::int32_t block_min(std::int32_t value, BlockScan<Threads, std::int32_t>& shared) {
  return ~block_max(~value, shared);
}

/// Number of threads before this one whose `flag` is set; `total`: of all of them.
template <int Threads>
KVTRIM_DEVICE std::int32_t block_rank(bool flag,
                                      BlockScan<Threads, std::int32_t>& shared,
                                      std::int32_t& total) {
  const unsigned lane = threadIdx.x & 31U;
  const unsigned warp = threadIdx.x >> 5U;
  const unsigned votes = __ballot_sync(full_warp, flag);
  if (lane == 0) { shared.warps[warp] = __popc(votes); }
  __syncthreads();
  std::int32_t before = 0;
  std::int32_t all = 0;
  KVTRIM_UNROLL
  for (unsigned w = 0; w < Threads / 32; ++w) {
    const std::int32_t sum = shared.warps[w];
    before += w < warp ? sum : 0;
    all += sum;
  }
  __syncthreads();
  total = all;
  return before + __popc(votes & ((1U << lane) - 1U));
}

}  // namespace kvtrim::cuda::detail
