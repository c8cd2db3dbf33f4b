// SPDX-License-Identifier: Apache-2.0
#pragma once

// CUDA loads a kernel when it is first used, and a launch that needs much shared memory asks for it. Both are forbidden, or may
// wait for the device, while a stream is captured: what a step launches is loaded before.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/extend.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/evict/rerotate.cuh>
#include <kvtrim/cuda/observe/accumulate.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/policy.hpp>

#include <cstddef>

namespace kvtrim::cuda {

namespace detail {

/// What every step launches, whatever ranks the rows.
template <Policy P>
[[nodiscard]] cudaError_t prepare_stages(const PlanShape& shape) noexcept {
  const SelectBounds bounds = select_bounds(shape);
  const SharedBytes keys = keys_fit(bounds) ? key_bytes(bounds) : SharedBytes{};
  const cudaError_t all[] = {
      load(check_kernel<>),
      load(open_kernel<P>),
      load(select_kernel<true>, keys),
      load(select_kernel<false>),
      load(select_histogram_kernel<>),
      load(select_pick_kernel<>),
      load(select_count_kernel<>),
      load(select_emit_kernel<>),
      load(clear_spares_kernel<>),
      load(fix_pages_kernel<>),
      load(choose_again_kernel<true>, keys),
      load(choose_again_kernel<false>),
      load(close_kernel<>),
      load(lists_kernel<>),
      load(compare_kernel<>),
      load(gate_kernel<>),
      load(move_kernel<true>, pack_shared_bytes),
      load(move_kernel<false>, pack_shared_bytes),
      load(renumber_kernel<>, renumber_shared(PositionMode::in_cache, shape.max_rows)),
      load(references_kernel<>),
      load(commit_tables_kernel<>),
      load(csr_starts_kernel<>),
      load(csr_gather_kernel<>),
      load(csr_scatter_kernel<>),
      load(extend_kernel<>),
      load(written_kernel<>),
      load(&list_tiles_kernel<list_threads>),
      load(&accumulate_kernel<accumulate_threads>),
      load(&rerotate_kernel<rerotate_threads>)};
  if constexpr (DevicePolicy<P>::by_position) {
    if (const cudaError_t e = load(open_and_close_kernel<P>); e != cudaSuccess) { return e; }
  }
  if constexpr (DevicePolicy<P>::by_page) {
    const cudaError_t pages[] = {load(page_scores_kernel<>), load(choose_pages_kernel<>)};
    if (const cudaError_t e = first_error(pages); e != cudaSuccess) { return e; }
  }
  return first_error(all);
}

}  // namespace detail

/// Loads what a step by `policy` launches on the current device: `extend`, `written`, `plan` with its scorer, `apply`, `commit`,
/// `step`, `accumulate_probabilities` and `rerotate`, for views within `shape`. Call it once, before a capture, with what the plan
/// will be given; the host reads types, sizes and strides alone, so numbers on the device need not be there yet.
/// (`accumulate_column_sums` is loaded by `prepare_window_scores`.)
///
/// \returns the first status that is not `cudaSuccess`; `cudaErrorInvalidValue` if there is no kernel for these keys and queries
/// \par Stream
/// none; may wait for the device
template <Policy P>
[[nodiscard]] cudaError_t prepare(const P& policy,
                                  const CacheView& view,
                                  const DeviceObservation& obs,
                                  const PlanShape& shape) noexcept {
  using Scorer = typename detail::OwnScores<P>::Scorer;
  const cudaError_t e = Scorer::prepare(policy.scorer(), view, obs);
  return e != cudaSuccess ? e : detail::prepare_stages<P>(shape);
}
/// The same for scores that are given.
template <Policy P>
[[nodiscard]] cudaError_t prepare(const P&,
                                  const CacheView&,
                                  const GivenScores&,
                                  const PlanShape& shape) noexcept {
  return detail::prepare_stages<P>(shape);
}

}  // namespace kvtrim::cuda
