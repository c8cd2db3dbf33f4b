// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// The ways in which rows leave a table.
enum class Removal : std::uint8_t {
  /// The policy's own. Where the view has no states or no positions, so that nothing could tell the order of its rows
  /// afterwards, `stable_pack` takes the place of a way that loses their order.
  automatic,
  drop_pages,  ///< whole pages leave the table, which closes up: 0 bytes moved
  /// For one row too many: its slot takes the next append, and at most one row moves. Otherwise the same as `stable_pack`.
  overwrite_slot,
  fill_holes,   ///< rows from the tail fill the holes: fewest bytes, slot order is lost
  stable_pack,  ///< rows close up in order
};

/// Name of `r`, spelled as in the enumeration.
[[nodiscard]] constexpr std::string_view to_string(Removal r) noexcept {
  return detail::enumerator_name(
      r, {"automatic", "drop_pages", "overwrite_slot", "fill_holes", "stable_pack"});
}

/// What happens to the entries that a table keeps for rows to come (`CacheView::reserved_pages`) when rows go.
enum class ReservedPages : std::uint8_t {
  follow,   ///< they stay, right behind the kept pages
  release,  ///< they leave the table with the pages that go
};

/// What happens to rope positions when rows go.
enum class PositionMode : std::uint8_t {
  keep,          ///< unchanged: keys stay as they are, the next token goes on counting
  in_cache,      ///< kept rows are numbered 0..k-1, the next token gets k (StreamingLLM)
  sinks_follow,  ///< the window stays absolute, the sinks are rotated to stand right before it
};

/// Name of `m`, spelled as in the enumeration.
[[nodiscard]] constexpr std::string_view to_string(PositionMode m) noexcept {
  return detail::enumerator_name(m, {"keep", "in_cache", "sinks_follow"});
}

/// What happens to rows in pages that other sequences also hold. Shared pages are never written.
enum class SharedPages : std::uint8_t {
  leave,  ///< their rows stay and count, unless no row of the page is wanted
  copy,   ///< pages that must be written are copied to spare pages first
};

}  // namespace kvtrim
