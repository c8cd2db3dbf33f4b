// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of the window (SnapKV, PyramidKV, PageSelector, TOVA) inside a device plan. Separate from device_scorer.cuh, because it
// brings all score kernels with it.

#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/score/window.cuh>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <cstddef>
#include <cstdint>

namespace kvtrim::cuda {

/// The attention of the last `window` queries, by `window_scores`.
template <>
struct DeviceScorer<WindowParams> {
  static constexpr bool by_position = false;
  static constexpr bool makes_scores = true;
  [[nodiscard]] static constexpr bool reads_positions(const WindowParams&) noexcept { return true; }
  [[nodiscard]] static cudaError_t prepare(const WindowParams&,
                                           const CacheView& view,
                                           const DeviceObservation& obs) noexcept {
    return prepare_window_scores(view, {obs.queries, obs.query_dtype});
  }

  [[nodiscard]] static std::size_t workspace_bytes(const WindowParams& params,
                                                   const PlanBounds& shape) noexcept {
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
    return window_scores_workspace_bytes(params, view, queries, score_bounds(shape));
  }
  /// What a plan's bounds say of the rows that are scored.
  [[nodiscard]] static ScoreBounds score_bounds(const PlanBounds& shape) noexcept {
    ScoreBounds bounds;
    bounds.max_rows = shape.max_rows;
    // As many as the entries that there is room for: more of them are refused before anything is scored.
    if (shape.total_rows > 0) {
      bounds.total_rows =
          shape.total_rows + static_cast<std::int64_t>(shape.sequences) * shape.page_size;
    }
    return bounds;
  }

  [[nodiscard]] static bool check(const WindowParams& params,
                                  const CacheView& view,
                                  const DeviceObservation& obs) noexcept {
    return params.sums == Sums::floating && obs.queries.data != nullptr &&
           obs.queries.query_heads >= view.kv_heads && obs.queries.query_heads % view.kv_heads == 0;
  }

  [[nodiscard]] static cudaError_t launch(const WindowParams& params,
                                          const CacheView& view,
                                          const DeviceObservation& obs,
                                          const ScorerCall& call,
                                          RowScores& rows) noexcept {
    const PlanBounds& shape = call.shape;
    if (obs.queries.query_heads > shape.query_heads || view.k.head_dim > shape.head_dim) {
      return cudaErrorInvalidValue;
    }
    rows = call.made(view);
    ScoreBounds bounds = score_bounds(shape);
    bounds.active = call.active;
    return detail::window_scores_into(params,
                                      view,
                                      {obs.queries, obs.query_dtype},
                                      call.scores,
                                      bounds,
                                      call.workspace,
                                      call.bytes,
                                      call.stream);
  }
};

namespace detail {

inline constexpr int layer_threads = 256;

// A block: a layer of a sequence. One set of scores for its heads, which must hold the same tokens in the same rows: the mean,
// added up in the host's order.
template <class = void>
__global__ void KVTRIM_LAUNCH_BOUNDS(layer_threads, 2) layer_mean_kernel(CacheView view,
                                                                         std::int32_t max_rows,
                                                                         const std::int32_t* active,
                                                                         ScoreRows scores,
                                                                         DevicePlan plan) {
  for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x); i < view.sequences * view.layers;
       i += static_cast<std::int32_t>(gridDim.x)) {
    const SequenceId s{i / view.layers};
    const LayerId l{i % view.layers};
    if (failed_before(plan, s, phase_scores)) { continue; }  // the lengths cannot be trusted
    const std::int32_t extent = bounded_extent(view, s, l, HeadId{0}, max_rows);
    const std::int32_t hole = view.state(s, l, HeadId{0}).append_row;
    const std::int64_t item = static_cast<std::int64_t>(i) * view.kv_heads;
    bool same = true;
    bool any = false;
    for (std::int32_t h = 0; h < view.kv_heads; ++h) {
      const HeadId head{h};
      same = same && bounded_extent(view, s, l, head, max_rows) == extent &&
             view.state(s, l, head).append_row == hole;
      any = any || active[view.table_index(s, view.table_of(l, head))] != 0;
    }
    const bool one_order = !view.positions || view.positions.head_stride == 0;
    for (std::int32_t r = static_cast<std::int32_t>(threadIdx.x); same && r < extent;
         r += layer_threads) {
      float sum = 0;
      for (std::int32_t h = 0; h < view.kv_heads && r != hole; ++h) {
        const HeadId head{h};
        same = same &&
               (one_order || view.position(s, l, head, r) == view.position(s, l, HeadId{0}, r));
        if (!any) { continue; }
        const float x = *scores.at(s, l, head, item + h, r);
        sum = h == 0 ? x : __fadd_rn(sum, x);
      }
      if (!any) { continue; }
      sum = __fdiv_rn(sum, static_cast<float>(view.kv_heads));
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        *scores.at(s, l, HeadId{h}, item + h, r) = sum;
      }
    }
    if (!same) {
      note_fault(plan, phase_scores, s, view.table_of(l, HeadId{0}), Status::bad_observation);
    }
  }
}

}  // namespace detail

/// The attention of the last query, one set of scores for the KV heads of a layer.
template <>
struct DeviceScorer<TovaParams> {
  using Window = DeviceScorer<WindowParams>;
  static constexpr bool by_position = false;
  static constexpr bool makes_scores = true;
  static constexpr WindowParams window{.window = 1, .kernel = 1, .own_columns = true};

  [[nodiscard]] static constexpr bool reads_positions(const TovaParams&) noexcept { return true; }
  [[nodiscard]] static cudaError_t prepare(const TovaParams&,
                                           const CacheView& view,
                                           const DeviceObservation& obs) noexcept {
    const cudaError_t e = detail::load(detail::layer_mean_kernel<>);
    return e != cudaSuccess ? e : Window::prepare(window, view, obs);
  }
  [[nodiscard]] static std::size_t workspace_bytes(const TovaParams&,
                                                   const PlanBounds& shape) noexcept {
    return Window::workspace_bytes(window, shape);
  }
  [[nodiscard]] static bool check(const TovaParams&,
                                  const CacheView& view,
                                  const DeviceObservation& obs) noexcept {
    return Window::check(window, view, obs);
  }
  [[nodiscard]] static cudaError_t launch(const TovaParams&,
                                          const CacheView& view,
                                          const DeviceObservation& obs,
                                          const ScorerCall& call,
                                          RowScores& rows) noexcept {
    const cudaError_t e = Window::launch(window, view, obs, call, rows);
    if (e != cudaSuccess) { return e; }
    const std::int64_t layers = static_cast<std::int64_t>(view.sequences) * view.layers;
    return detail::launch(detail::layer_mean_kernel<>,
                          dim3(detail::bounded_grid(layers)),
                          dim3(detail::layer_threads),
                          0,
                          call.stream,
                          view,
                          call.shape.max_rows,
                          call.active,
                          call.scores,
                          call.plan);
  }
};

}  // namespace kvtrim::cuda
