// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim {

/// One KV head of one layer of one sequence: what a scorer scores, what rows belong to.
///
/// Host only, made on the spot and passed on; it refers to the view, so it must not outlive it and is never stored.
struct HeadRef {
  const CacheView& view;  ///< the cache
  SequenceId sequence;    ///< sequence of the view
  LayerId layer;          ///< layer of the view
  HeadId head;            ///< KV head of the layer

  /// Live rows, as the tables say.
  [[nodiscard]] std::int32_t live_rows() const noexcept {
    return view.live_rows(sequence, layer, head);
  }
  /// State of the table that serves it.
  [[nodiscard]] SequenceState state() const noexcept { return view.state(sequence, layer, head); }
  /// Which of the sequence's tables serves it.
  [[nodiscard]] std::int32_t table() const noexcept { return view.table_of(layer, head); }
  /// Position of row `r`.
  [[nodiscard]] Position position(std::int32_t r) const noexcept {
    return view.position(sequence, layer, head, r);
  }
  /// Positions of the rows as integers; null where they do not lie side by side, or are not kept.
  [[nodiscard]] Int32View positions() const noexcept {
    return Int32View(view.positions.array<std::byte, 4>(sequence, layer, head));
  }
  /// First byte of the key of row `r`.
  [[nodiscard]] std::byte* key(std::int32_t r) const noexcept {
    return view.key(sequence, layer, head, r);
  }
  /// First byte of the value of row `r`.
  [[nodiscard]] std::byte* value(std::int32_t r) const noexcept {
    return view.value(sequence, layer, head, r);
  }
};
static_assert(std::is_trivially_copyable_v<HeadRef>);

/// Whether the positions of all rows are known (`CacheView::knows_positions`).
///
/// \par Complexity
/// O(tables) without a plane of positions
[[nodiscard]] inline bool knows_positions(const CacheView& view) noexcept {
  if (view.positions) { return true; }
  bool all = true;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      all = all && view.knows_positions(SequenceId{s}, t);
    }
  }
  return all;
}

/// Calls f(HeadRef) for the heads that table `t` of sequence `s` serves.
template <class F>
void for_each_head(const CacheView& view, SequenceId s, std::int32_t t, F&& f) noexcept {
  const std::int32_t layer = raw(view.first_layer(t));
  const std::int32_t head = raw(view.first_head(t));
  for (std::int32_t l = layer; l < layer + view.layers_per_table(); ++l) {
    for (std::int32_t h = head; h < head + view.heads_per_table(); ++h) {
      f(HeadRef{view, s, LayerId{l}, HeadId{h}});
    }
  }
}

}  // namespace kvtrim
