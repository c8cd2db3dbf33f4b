// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA loads a kernel when it is first used. This may wait for the device, which is forbidden while a stream is captured.
// Score kernels are loaded by one call outside a capture (window_scores, accumulate_probabilities, accumulate_column_sums).

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/policy.hpp>

#include <cstddef>

namespace kvtrim::cuda {

/// Loads what `plan` (except for its scorer), `apply` and `commit` launch for `policy` and views within `shape`, on the current
/// device. Call it once, before a capture.
///
/// \returns the first status that is not `cudaSuccess`
/// \par Stream
/// none; may wait for the device
template <Policy P>
[[nodiscard]] cudaError_t prepare(const P& policy, const PlanShape& shape) noexcept {
  using namespace detail;
  static_cast<void>(policy);
  const SelectBounds bounds = select_bounds(shape);
  const SharedBytes keys = keys_fit(bounds) ? key_bytes(bounds) : SharedBytes{};
  const cudaError_t all[] = {load(clear_kernel<>),
                             load(check_kernel<>),
                             load(layout_kernel<>),
                             load(more_planes_kernel<>),
                             load(open_kernel<P>),
                             load(select_kernel<true>, keys),
                             load(select_kernel<false>),
                             load(select_histogram_kernel<>),
                             load(select_pick_kernel<>),
                             load(select_count_kernel<>),
                             load(select_emit_kernel<>),
                             load(close_kernel<>),
                             load(finish_kernel<>),
                             load(lists_kernel<>),
                             load(gate_kernel<>),
                             load(move_kernel<true>),
                             load(move_kernel<false>),
                             load(pack_kernel<true>, pack_shared_bytes),
                             load(pack_kernel<false>, pack_shared_bytes),
                             load(commit_tables_kernel<>),
                             load(release_kernel<>)};
  for (const cudaError_t e : all) {
    if (e != cudaSuccess) { return e; }
  }
  return cudaSuccess;
}

}  // namespace kvtrim::cuda
