// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the selection kernels share: histograms of one digit of a key, and the walk from the highest digit down to the one
// that holds the k-th key. All functions are for a whole block of `select_threads` threads.

#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

inline constexpr int select_threads = 512;
inline constexpr int radix_bins = 2048;
inline constexpr int radix_digits = 3;  // 11 + 11 + 10 bits, as in the host's top_k

/// Where a digit lies in a 32-bit key.
struct Digit {
  int shift;
  int bits;
};
KVTRIM_DEVICE constexpr Digit digit_of(int i) {
  return i == 0 ? Digit{21, 11} : i == 1 ? Digit{10, 11} : Digit{0, 10};
}

/// The digits found so far (`prefix`, in their places) and how many of the keys that share them are still wanted.
struct RadixState {
  std::uint32_t prefix = 0;
  std::int32_t left = 0;
};

/// Whether `key` agrees with all digits before digit `i`.
KVTRIM_DEVICE bool has_prefix(std::uint32_t key, std::uint32_t prefix, int i) {
  const Digit d = digit_of(i);
  return i == 0 || (key >> (d.shift + d.bits)) == (prefix >> (d.shift + d.bits));
}

/// Shared memory of a selecting block.
struct SelectShared {
  std::uint32_t counts[radix_bins];
  BlockScan<select_threads, std::uint32_t> sums;
  std::uint32_t digit;
  std::int32_t left;
};

KVTRIM_DEVICE void clear_counts(SelectShared& shared) {
  for (int i = static_cast<int>(threadIdx.x); i < radix_bins; i += select_threads) {
    shared.counts[i] = 0;
  }
}

/// Finds digit `i` of the `state.left`-th highest key from `counts` and adds it to `state`. `counts` may be global.
///
/// Begins with a barrier, so that the counts are complete, and ends with one.
KVTRIM_DEVICE void pick_digit(const std::uint32_t* counts,
                              int i,
                              RadixState& state,
                              SelectShared& shared) {
  constexpr int per_thread = radix_bins / select_threads;
  const int thread = static_cast<int>(threadIdx.x);
  const Digit d = digit_of(i);
  const int top = (1 << d.bits) - 1;
  __syncthreads();
  std::uint32_t own[per_thread];
  std::uint32_t sum = 0;
  KVTRIM_UNROLL
  for (int j = 0; j < per_thread; ++j) {
    const int bin = top - (thread * per_thread + j);
    own[j] = bin >= 0 ? counts[bin] : 0U;
    sum += own[j];
  }
  std::uint32_t all = 0;
  std::uint32_t seen = block_sum_before(sum, shared.sums, all);  // keys with higher digits
  const auto wanted = static_cast<std::uint32_t>(state.left);
  if (seen < wanted && wanted <= seen + sum) {  // true for exactly one thread
    int bin = top - thread * per_thread;
    KVTRIM_UNROLL
    for (int j = 0; j + 1 < per_thread;
         ++j) {  // constant indices only, so that `own` stays in registers
      if (bin == top - (thread * per_thread + j) && seen + own[j] < wanted) {
        seen += own[j];
        --bin;
      }
    }
    shared.digit = static_cast<std::uint32_t>(bin);
    shared.left = static_cast<std::int32_t>(wanted - seen);
  }
  __syncthreads();
  state.prefix |= shared.digit << static_cast<unsigned>(d.shift);
  state.left = shared.left;
}

/// The `k`-th highest of the keys that `key_at(i)` gives for i in [0, n); entries for which it says false take no part.
///
/// \param key_at  `bool(int i, std::uint32_t& key)`
/// \pre 1 <= k <= number of keys that take part
/// \returns the key, and how many keys equal to it are among the k highest
template <class KeyAt>
KVTRIM_DEVICE RadixState
block_radix_select(int n, std::int32_t k, SelectShared& shared, KeyAt key_at) {
  RadixState state{0, k};
  for (int i = 0; i < radix_digits; ++i) {
    const Digit d = digit_of(i);
    clear_counts(shared);
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < n; e += select_threads) {
      std::uint32_t key = 0;
      if (key_at(e, key) && has_prefix(key, state.prefix, i)) {
        atomicAdd(&shared.counts[(key >> static_cast<unsigned>(d.shift)) & ((1U << d.bits) - 1U)],
                  1U);
      }
    }
    pick_digit(shared.counts, i, state, shared);
  }
  return state;
}

}  // namespace kvtrim::cuda::detail
