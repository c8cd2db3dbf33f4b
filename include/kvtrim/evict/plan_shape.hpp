// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/evict/removal.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace kvtrim {

/// How a plan is to be made.
struct PlanOptions {
  Removal removal = Removal::automatic;     ///< the policy's own, or this one
  SharedPages shared = SharedPages::leave;  ///< what happens to pages that must not be written
  std::span<const PageId> spare_pages =
      {};  ///< free pages that `SharedPages::copy` may take, from the front
  const Rerotator* rerotator = nullptr;  ///< position mode; null: positions are kept
};

/// Bounds for the workspace of plans over `view` as it is now.
///
/// Give larger fields (`max_rows` above all) to allocate once for later, longer states.
[[nodiscard]] inline PlanShape plan_shape(const CacheView& view,
                                          const Observation& obs = {},
                                          std::int32_t workers = 1) noexcept {
  PlanShape shape;
  shape.sequences = view.sequences;
  shape.layers = view.layers;
  shape.kv_heads = view.kv_heads;
  shape.scope = view.scope;
  shape.page_size = view.page_size;
  shape.pages = view.pages;
  shape.query_heads =
      std::max({obs.queries.query_heads, obs.statistics.query_heads, obs.output.query_heads});
  shape.head_dim = view.k.head_dim;
  shape.value_dim = view.v.head_dim;
  shape.hidden = obs.output.hidden;
  shape.workers = workers;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    shape.query_rows = std::max(shape.query_rows, obs.queries.count(SequenceId{s}));
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const std::int32_t extent = view.live_rows(SequenceId{s}, l, h) +
                                  (view.state(SequenceId{s}, l, h).append_row >= 0 ? 1 : 0);
      shape.max_rows = std::max(shape.max_rows, extent + view.first_row(SequenceId{s}));
    }
  }
  return shape;
}

}  // namespace kvtrim
