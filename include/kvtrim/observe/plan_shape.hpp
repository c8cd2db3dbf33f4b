// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/observe/observation.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim {

/// What the size of a workspace depends on. Every field is an upper bound except `kv_heads`: fewer of them mean larger
/// groups of query heads.
struct PlanShape {
  std::int32_t sequences = 1;            ///< sequences of the view
  std::int32_t layers = 1;               ///< layers of the view
  std::int32_t kv_heads = 1;             ///< KV heads
  TableScope scope = TableScope::group;  ///< of the view
  std::int32_t page_size = 1;            ///< rows per page
  std::int32_t pages = 0;                ///< pages in the pool
  /// Rows of the longest table, padding and a hole included; with reserved entries, all rows of its pages.
  std::int32_t max_rows = 0;
  std::int32_t query_heads = 0;  ///< query heads; 0: no queries
  std::int32_t query_rows = 0;   ///< query rows per sequence
  std::int32_t head_dim = 0;     ///< of the keys
  std::int32_t value_dim = 0;    ///< head dim of the values
  std::int32_t hidden = 0;       ///< width of `Observation::output`; 0: none
  std::int32_t workers = 1;      ///< of the executor
};

namespace detail {

// Whether counts of heads, and of floats per worker, are numbers that anything can have: what follows multiplies them.
[[nodiscard]] constexpr bool is_possible(const PlanShape& x) noexcept {
  const std::int64_t widest = std::max({x.head_dim, x.value_dim, x.hidden, x.max_rows, 1});
  constexpr std::int64_t most = 0x7FFF'FFFF;
  return saturated_product({x.sequences, x.layers, x.kv_heads}) <= most &&
         saturated_product({x.query_heads, x.query_rows}) <= most &&
         saturated_product({x.head_dim, x.head_dim, x.query_heads}) <= too_large / 64 &&
         saturated_product({std::max(1, x.query_heads), std::max(1, x.query_rows), widest}) <=
             too_large / 64;
}

}  // namespace detail

/// Bounds for the workspace of plans over `view` as it is now.
///
/// Set larger fields (above all `max_rows`) to allocate once for later, longer states. A length beyond its table counts as
/// what the table has room for: `plan` refuses it.
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
      const HeadRef head{view, SequenceId{s}, view.first_layer(t), view.first_head(t)};
      const std::int32_t extent = LiveRows(head).extent();
      if (extent == 0) { continue; }
      const std::int32_t rows = extent + view.first_row(head.sequence);
      shape.max_rows = std::max(shape.max_rows, rows);
      const std::int64_t reserved = view.reserved(head.sequence, t);
      if (reserved <= 0) { continue; }
      // A plan lists these entries too.
      const std::int64_t entries =
          std::min<std::int64_t>(pages_for(rows, view.page_size) + reserved,
                                 view.table.capacity(head.sequence, head.layer, head.head));
      shape.max_rows = static_cast<std::int32_t>(
          std::clamp<std::int64_t>(entries * view.page_size, shape.max_rows, 0x7FFF'FFFF));
    }
  }
  return shape;
}

}  // namespace kvtrim
