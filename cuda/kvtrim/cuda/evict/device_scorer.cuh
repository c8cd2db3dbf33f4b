// SPDX-License-Identifier: Apache-2.0
#pragma once

// What ranks the rows of a policy on the device: the counterpart of `ScorerOf`.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/observe/detail/queries.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/scorer.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// What a plan may look at besides the cache; every pointer is a device pointer.
struct DeviceObservation {
  QueryBlock queries{};  ///< `data` in elements of `query_dtype`, strides in elements
  DType query_dtype = DType::f32;
  const std::int32_t* budgets =
      nullptr;           ///< rows to keep, instead of the policy's own budget; null: the policy's
  RowMap budget_rows{};  ///< index of (sequence, layer, KV head) in `budgets`
};

/// Ready-made scores, used instead of the policy's own: any policy that ranks rows or pages can be planned by them, whether or
/// not there are kernels for its scores.
struct GivenScores {
  explicit GivenScores(const SequencePlane& plane) noexcept : scores(plane) {}

  SequencePlane scores;                   ///< fp32 by row, on the device; higher is kept
  const std::int32_t* budgets = nullptr;  ///< as `DeviceObservation::budgets`
  RowMap budget_rows{};                   ///< likewise
};

/// What a scorer is given besides the view.
struct ScorerCall {
  PlanBounds shape{};  ///< bounds
  const std::int32_t* active =
      nullptr;  ///< device, [sequences, tables]: tables whose rows compete; others are not looked at
  void* workspace = nullptr;  ///< device, `workspace_bytes(params, shape)`, aligned to 256 bytes
  std::size_t bytes = 0;
  cudaStream_t stream = nullptr;
  DevicePlan plan{};   ///< what is wrong with an input that lies on the device goes into it
  ScoreRows scores{};  ///< where scores go, if the scorer makes any: a list on the device

  /// The scores as `top_k` reads them.
  [[nodiscard]] RowScores made(const CacheView& view) const noexcept {
    RowScores rows;
    rows.positions = view.positions;
    rows.list = scores.list;
    return rows;
  }
};

/// Scorer parameters on the device. Specialised for every kind that has kernels.
///
/// | member                                  | meaning                                                  |
/// |-----------------------------------------|----------------------------------------------------------|
/// | `by_position`                           | there are no scores                                      |
/// | `makes_scores`                          | whether they are computed, into `ScorerCall::scores`     |
/// | `reads_positions(params)`               | whether a score depends on the positions of rows         |
/// | `workspace_bytes(params, shape)`        | device bytes of a call, pure and monotone; needed no     |
/// |                                         | longer than `launch` runs on the device                  |
/// | `check(params, view, obs)`              | whether what it needs is there, as far as the host knows |
/// | `launch(params, view, obs, call, rows)` | queues the scoring; `rows` is what `top_k` is to read    |
/// | `prepare(params, view, obs)`            | loads the kernels that `launch` would use                |
template <class Params>
struct DeviceScorer {
  static_assert(
      sizeof(Params) == 0,
      "kvtrim::cuda: no kernel scores rows by these parameters here. Window scores (SnapKV, "
      "PyramidKV, TOVA, PageSelector) are in <kvtrim/cuda/evict/window_scorer.cuh>, key "
      "scores (KeyNorm, KeyDiff) in <kvtrim/cuda/evict/key_scorer.cuh>; for all others "
      "pass kvtrim::cuda::GivenScores");
};

template <>
struct DeviceScorer<NoScores> {
  static constexpr bool by_position = true;
  static constexpr bool makes_scores = false;
  [[nodiscard]] static constexpr bool reads_positions(const NoScores&) noexcept { return false; }
  [[nodiscard]] static cudaError_t prepare(const NoScores&,
                                           const CacheView&,
                                           const DeviceObservation&) noexcept {
    return cudaSuccess;
  }
  [[nodiscard]] static std::size_t workspace_bytes(const NoScores&, const PlanBounds&) noexcept {
    return 0;
  }
  [[nodiscard]] static bool check(const NoScores&,
                                  const CacheView&,
                                  const DeviceObservation&) noexcept {
    return true;
  }
  [[nodiscard]] static cudaError_t launch(const NoScores&,
                                          const CacheView& view,
                                          const DeviceObservation&,
                                          const ScorerCall&,
                                          RowScores& rows) noexcept {
    rows = {};
    rows.positions = view.positions;
    return cudaSuccess;
  }
};

/// Accumulated attention is ranked where it lies: sum plus compensation, divided by age if `age_normalised`.
template <>
struct DeviceScorer<AccumulateParams> {
  static constexpr bool by_position = false;
  static constexpr bool makes_scores = false;
  [[nodiscard]] static constexpr bool reads_positions(const AccumulateParams& params) noexcept {
    return params.age_normalised;
  }
  [[nodiscard]] static cudaError_t prepare(const AccumulateParams&,
                                           const CacheView&,
                                           const DeviceObservation&) noexcept {
    return cudaSuccess;
  }
  [[nodiscard]] static std::size_t workspace_bytes(const AccumulateParams&,
                                                   const PlanBounds&) noexcept {
    return 0;
  }
  [[nodiscard]] static bool check(const AccumulateParams&,
                                  const CacheView& view,
                                  const DeviceObservation&) noexcept {
    return view.score_sums && view.score_compensations;
  }
  [[nodiscard]] static cudaError_t launch(const AccumulateParams& params,
                                          const CacheView& view,
                                          const DeviceObservation&,
                                          const ScorerCall&,
                                          RowScores& rows) noexcept {
    rows = {
        view.score_sums, view.score_compensations, view.positions, params.age_normalised, nullptr};
    return cudaSuccess;
  }
};

}  // namespace kvtrim::cuda
