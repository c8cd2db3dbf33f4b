// SPDX-License-Identifier: Apache-2.0
#pragma once

// SnapKV's scores inside a device plan. Separate from device_scorer.cuh, because it brings all score kernels with it.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/score/window.cuh>
#include <kvtrim/policy/window_params.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// The attention of the last `window` queries, by `window_scores`.
template <>
struct DeviceScorer<WindowParams> {
  static constexpr bool by_position = false;

  [[nodiscard]] static std::size_t workspace_bytes(const WindowParams& params,
                                                   const PlanShape& shape) noexcept {
    // A view and queries as large as the shape allows: ragged rows, no LSE, states and positions.
    static const std::int32_t ragged = 0;
    static SequenceState state;
    CacheView view;
    view.sequences = shape.sequences;
    view.layers = shape.layers;
    view.kv_heads = shape.kv_heads;
    view.scope = shape.scope;
    view.page_size = shape.page_size;
    view.k.head_dim = shape.head_dim;
    view.states = &state;
    view.positions.base = reinterpret_cast<std::byte*>(&state);
    DeviceQueries queries;
    queries.block.query_heads = shape.query_heads;
    queries.block.rows = shape.query_rows;
    queries.block.row_counts = &ragged;
    detail::WorkspaceLayout layout;
    static_cast<void>(layout.take<float>(rows_of(shape)));
    return layout.bytes() +
           window_scores_workspace_bytes(params, view, queries, {shape.max_rows, 0});
  }

  [[nodiscard]] static bool check(const WindowParams&,
                                  const CacheView& view,
                                  const DeviceObservation& obs) noexcept {
    return obs.queries.data != nullptr && obs.queries.query_heads >= view.kv_heads &&
           obs.queries.query_heads % view.kv_heads == 0;
  }

  [[nodiscard]] static cudaError_t launch(const WindowParams& params,
                                          const CacheView& view,
                                          const DeviceObservation& obs,
                                          const ScorerCall& call,
                                          RowScores& rows) noexcept {
    const PlanShape& shape = call.shape;
    if (obs.queries.query_heads > shape.query_heads || view.k.head_dim > shape.head_dim) {
      return cudaErrorInvalidValue;
    }
    detail::WorkspaceLayout layout(call.workspace, call.bytes);
    float* const scores = layout.take<float>(rows_of(shape));
    if (!layout.ok()) { return cudaErrorInvalidValue; }
    rows = {};
    rows.scores = SequencePlane::dense(scores, shape.layers, shape.kv_heads, shape.max_rows);
    rows.positions = view.positions;
    ScoreBounds bounds;
    bounds.max_rows = shape.max_rows;
    bounds.active = call.active;
    return window_scores(params,
                         view,
                         {obs.queries, obs.query_dtype},
                         rows.scores,
                         bounds,
                         static_cast<std::byte*>(call.workspace) + layout.bytes(),
                         call.bytes - layout.bytes(),
                         call.stream);
  }

 private:
  [[nodiscard]] static std::int64_t rows_of(const PlanShape& shape) noexcept {
    return static_cast<std::int64_t>(shape.sequences) * shape.layers * shape.kv_heads *
           shape.max_rows;
  }
};

}  // namespace kvtrim::cuda
