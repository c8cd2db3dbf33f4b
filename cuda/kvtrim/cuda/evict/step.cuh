// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an engine runs after every step: `plan`, `apply` and `commit` with nothing between, so that nothing is verified twice.
// Six launches at most for a policy that ranks rows in one block per KV head, four where pages leave by position, the same
// number whatever there is to do:
//
//   check                     lengths, ids, planes; closes the open step, if told so
//   open      open and close  the policy's demand; totals in the last block
//   select    |               rows that stay; two launches more where pages are shared and stay
//   close     |               pages, moves, costs; totals in the last block
//   move                      rows; pages that leave lose a reference; how many are free in the last block
//   renumber                  only with a position mode: rope positions and keys of the rows that stay
//   commit                    tables, lengths, states, lists of free pages

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_tables.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/policy/policy.hpp>

namespace kvtrim::cuda {

/// How to make a step: a plan's options, and what is known of the open step.
struct DeviceStepOptions : DevicePlanOptions {
  /// The rows of the open step (`extend`) are written in all layers: the step is closed first, in the same launch that checks
  /// the tables. The counterpart of `written` for all layers.
  bool written = false;
};

namespace detail {

template <Policy P, class Source>
[[nodiscard]] cudaError_t step_by(const P& policy,
                                  const CacheView& view,
                                  const Source& source,
                                  const PlanWorkspace& workspace,
                                  const DeviceTables& out,
                                  cudaStream_t stream,
                                  const DeviceStepOptions& options) noexcept {
  if (!tables_fit(view, out) || out.indptr != nullptr) { return cudaErrorInvalidValue; }
  const PlanPass pass{true, options.written};
  cudaError_t e = with_ranking(policy, source, [&](const auto& ranking, const auto& input) {
    return plan_by(policy, view, ranking, input, workspace, stream, options, pass);
  });
  if (e != cudaSuccess || view.sequences == 0) { return e; }
  const DevicePlan plan = device_plan(workspace);
  e = move_rows(view, plan, {true, out}, stream);
  if (e == cudaSuccess) { e = renumber_rows(view, plan, options.rotation, stream); }
  if (e != cudaSuccess) { return e; }
  return launch(commit_tables_kernel<>,
                dim3(bounded_grid(plan.all_tables())),
                dim3(table_threads),
                0,
                stream,
                view,
                plan,
                out,
                2U);
}

}  // namespace detail

/// Evicts: what `plan`, `apply` and `commit` do one after the other, in fewer launches. Kept rows, bytes, tables, lengths, states
/// and report are the same.
///
/// \param policy     any that `plan` takes
/// \param view       as for `plan`; a dense table
/// \param obs        as for `plan`
/// \param workspace  as for `plan`, of as many bytes
/// \param out        the engine's arrays, as for `commit`
/// \param options    way of removal, shared and spare pages; whether the open step is written. Where the view says which pages may
///   be written, shared pages that stay cost two launches more. Spare pages cost one, two where shared pages are copied to them,
///   three where a slot may be overwritten besides; a position mode one
/// \returns `cudaErrorInvalidValue` before any launch for what `plan` or `commit` refuse so; otherwise the launches' status.
///   Statuses are those of `plan`: a sequence that is refused stays as it is, the others are evicted from
/// \par Ties
/// as `plan`
/// \par Complexity
/// as `plan`, `apply` and `commit`, without the comparisons of tables with what they were
/// \par Stream
/// asynchronous on `stream`; never synchronises, allocates nothing, may be captured into a graph. Freed pages may be handed to
/// another stream only behind an event recorded after this
template <Policy P>
[[nodiscard]] cudaError_t step(const P& policy,
                               const CacheView& view,
                               const DeviceObservation& obs,
                               const PlanWorkspace& workspace,
                               const DeviceTables& out,
                               cudaStream_t stream,
                               const DeviceStepOptions& options = {}) noexcept {
  return detail::step_by(policy, view, obs, workspace, out, stream, options);
}
/// The same by ready-made scores.
template <Policy P>
[[nodiscard]] cudaError_t step(const P& policy,
                               const CacheView& view,
                               const GivenScores& given,
                               const PlanWorkspace& workspace,
                               const DeviceTables& out,
                               cudaStream_t stream,
                               const DeviceStepOptions& options = {}) noexcept {
  return detail::step_by(policy, view, given, workspace, out, stream, options);
}

}  // namespace kvtrim::cuda
