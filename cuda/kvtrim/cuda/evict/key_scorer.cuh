// SPDX-License-Identifier: Apache-2.0
#pragma once

// The scores of KeyNorm and KeyDiff inside a device plan.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/score/key_scores.cuh>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

namespace detail {

/// Base of the scorers: `key_scores` into a plane of the workspace.
template <class Params, KeyScore Score>
struct KeyScorer {
  static constexpr bool by_position = false;
  static constexpr bool makes_scores = true;
  [[nodiscard]] static constexpr bool reads_positions(const Params&) noexcept { return false; }
  [[nodiscard]] static cudaError_t prepare(const Params&,
                                           const CacheView&,
                                           const DeviceObservation&) noexcept {
    return prepare_key_scores();
  }
  [[nodiscard]] static std::size_t workspace_bytes(const Params&,
                                                   const PlanBounds& shape) noexcept {
    CacheView view;
    view.sequences = shape.sequences;
    view.layers = shape.layers;
    view.kv_heads = shape.kv_heads;
    view.scope = shape.scope;
    view.k.head_dim = shape.head_dim;
    return key_scores_workspace_bytes(Score, view);
  }
  [[nodiscard]] static bool check(const Params&,
                                  const CacheView& view,
                                  const DeviceObservation&) noexcept {
    return keys_readable(view);
  }
  [[nodiscard]] static cudaError_t launch(const Params&,
                                          const CacheView& view,
                                          const DeviceObservation&,
                                          const ScorerCall& call,
                                          RowScores& rows) noexcept {
    const PlanBounds& shape = call.shape;
    if (view.k.head_dim > shape.head_dim) { return cudaErrorInvalidValue; }
    rows = call.made(view);
    return key_scores_into(Score,
                           view,
                           call.scores,
                           {shape.max_rows, 0, call.active},
                           call.workspace,
                           call.bytes,
                           call.stream);
  }
};

}  // namespace detail

/// Minus the length of a row's key.
template <>
struct DeviceScorer<KeyNormParams> : detail::KeyScorer<KeyNormParams, KeyScore::norm> {};

/// Minus the cosine between a row's key and the mean of all.
template <>
struct DeviceScorer<KeyDiffParams> : detail::KeyScorer<KeyDiffParams, KeyScore::diff> {};

}  // namespace kvtrim::cuda
