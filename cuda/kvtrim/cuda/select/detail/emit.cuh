// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lists of entries, once the threshold is known.

#include <kvtrim/cuda/detail/block_scan.cuh>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/select/detail/keys.cuh>
#include <kvtrim/cuda/select/detail/radix.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Writes the entries of [first, last): those that stay from `out[kept_before]` on, the others from `out[gone_from +
/// first - kept_before]` on, both ascending.
///
/// \param gone_from    below 0: those that stay are not written, the others from `out[first - kept_before]` on
/// \param ties_before  entries before `first` whose key is the threshold's
/// \param stays_tied   of the entries with the threshold's key: `int(e, ties before it)`, 1 if it stays
template <class KeyAt, class StaysTied>
KVTRIM_DEVICE void emit_entries(int first,
                                int last,
                                std::uint32_t threshold,
                                std::int32_t gone_from,
                                int sure_before,
                                int ties_before,
                                std::int32_t equal,
                                SelectShared& shared,
                                KeyAt key_at,
                                StaysTied stays_tied,
                                std::int32_t* out) {
  constexpr int per_thread = 4;
  const int thread = static_cast<int>(threadIdx.x);
  for (int base = first; base < last; base += select_threads * per_thread) {
    // Counts of this thread's entries: certain ones in the high half, ties in the low half. A tile has 2,048 entries.
    std::uint32_t sure = 0;
    std::uint32_t tie = 0;
    std::uint32_t own = 0;
    KVTRIM_UNROLL
    for (int j = 0; j < per_thread; ++j) {
      const int e = base + thread * per_thread + j;
      if (e >= last) { break; }
      const std::uint32_t key = key_at(e);
      if (key == key_none) { continue; }
      if (key > threshold) {
        sure |= 1U << j;
        own += 1U << 16U;
      } else if (key == threshold) {
        tie |= 1U << j;
        own += 1U;
      }
    }
    std::uint32_t all = 0;
    const std::uint32_t before = block_sum_before(own, shared.sums, all);
    int sure_here = sure_before + static_cast<int>(before >> 16U);
    int ties_here = ties_before + static_cast<int>(before & 0xFFFFU);
    KVTRIM_UNROLL
    for (int j = 0; j < per_thread; ++j) {
      const int e = base + thread * per_thread + j;
      if (e >= last) { break; }
      const bool tied = (tie >> j & 1U) != 0;
      const int kept_before = stays_tied.kept_before(sure_here, ties_here, equal);
      const bool stays = (sure >> j & 1U) != 0 || (tied && stays_tied(e, ties_here, equal));
      if (!stays) {
        out[(gone_from < 0 ? 0 : gone_from) + (e - kept_before)] = e;
      } else if (gone_from >= 0) {
        out[kept_before] = e;
      }
      sure_here += static_cast<int>(sure >> j & 1U);
      ties_here += tied ? 1 : 0;
    }
    sure_before += static_cast<int>(all >> 16U);
    ties_before += static_cast<int>(all & 0xFFFFU);
  }
}

/// Among equal scores in position order, the first `equal` stay.
struct FirstTiesStay {
  KVTRIM_DEVICE int kept_before(int sure, int ties, int equal) const {
    return sure + (ties < equal ? ties : equal);
  }
  KVTRIM_DEVICE bool operator()(int, int ties, int equal) const { return ties < equal; }
};
/// Ties were decided before: keys of those that stay are raised above the threshold, so none is left.
struct NoTiesLeft {
  KVTRIM_DEVICE int kept_before(int sure, int, int) const { return sure; }
  KVTRIM_DEVICE bool operator()(int, int, int) const { return false; }
};

}  // namespace kvtrim::cuda::detail
