// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether a view fits the bounds of a workspace: what the host can see of it.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cuda/evict/detail/layout.cuh>
#include <kvtrim/cuda/evict/detail/row_plane.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/select/select_task.cuh>
#include <kvtrim/observe/plan_shape.hpp>

namespace kvtrim::cuda::detail {

/// What a selection over all heads of a plan's shape is bounded by.
[[nodiscard]] inline SelectBounds select_bounds(const PlanBounds& shape) noexcept {
  return {shape.sequences, shape.layers, shape.kv_heads, shape.max_rows, shape.max_evicted};
}

/// Whether everything the host can check is in order.
[[nodiscard]] inline bool fits(const CacheView& view, const PlanShape& shape) noexcept {
  return view.sequences >= 0 && view.sequences == shape.sequences && view.layers == shape.layers &&
         view.kv_heads == shape.kv_heads && view.scope == shape.scope && view.layers >= 1 &&
         view.kv_heads >= 1 && view.page_size == shape.page_size && view.page_size >= 1 &&
         view.pages <= shape.pages && shape.max_rows >= 1 && view.table.ids != nullptr &&
         (view.lengths != nullptr || view.last_page_len != nullptr || view.states != nullptr) &&
         view.is_of_model() && row_planes(view).count > 0 && layout_fits(view);
}

}  // namespace kvtrim::cuda::detail
