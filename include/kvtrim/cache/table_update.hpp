// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/cache/sequence_state.hpp>
#include <kvtrim/core/types.hpp>

#include <concepts>
#include <cstdint>
#include <span>

namespace kvtrim {

/// One page table as it is after an eviction.
struct TableUpdate {
  SequenceId sequence;              ///< sequence of the table
  std::int32_t table;               ///< which of the sequence's tables
  LayerId layer;                    ///< first layer it serves
  HeadId head;                      ///< first KV head it serves
  std::span<const PageId> k_pages;  ///< pages of the keys, in order
  std::span<const PageId> v_pages;  ///< pages of the values; the same span where one id serves both
  std::int32_t
      pages_before;  ///< entries the table had, reserved ones included; clear those beyond `k_pages`
  SequenceState state;  ///< live rows, positions and the row of the next append
  /// Entry that each of `k_pages` had before, not below its own; -1: the page is new. An entry that stays keeps what else
  /// stands in it (flag bits).
  std::span<const std::int32_t> sources{};
};

/// A page that left a table: which one, where layers or KV heads have pools of their own. A sink that does not ask takes it as
/// a `PageId`.
struct ReleasedPage {
  PageId page;          ///< the page
  SequenceId sequence;  ///< sequence of the table
  std::int32_t table;   ///< which of the sequence's tables
  LayerId layer;        ///< first layer it serves
  HeadId head;          ///< first KV head it serves
  KVTRIM_HOST_DEVICE constexpr operator PageId() const noexcept { return page; }
};

namespace detail {
struct TableSinkArchetype {
  void update(const TableUpdate&) noexcept {}
  bool release(PageId) noexcept { return true; }
};
}  // namespace detail

/// Writes the result of an eviction to the engine's own tables.
///
/// | expression    | returns   | meaning                                                                         |
/// |---------------|-----------|---------------------------------------------------------------------------------|
/// | `s.update(u)` | `void`    | store the table's pages, length and state                                       |
/// | `s.finish()`  | `void`    | optional: called once, after the last update and before the first release       |
/// | `s.release(p)`| to `bool` | page `p` left one table: drop one reference; true if nobody holds it any longer |
///
/// `p` is a `ReleasedPage`, or a `PageId` where every page has one count.
///
/// All are `noexcept`. Semantics the compiler cannot check: all updates come before the first release; the releases of a table
/// come tail first.
template <class S>
concept TableSink = requires(S& s, const TableUpdate& u, const ReleasedPage& p) {
  { s.update(u) } noexcept;
  { s.release(p) } noexcept -> std::convertible_to<bool>;
};
static_assert(TableSink<detail::TableSinkArchetype>);

}  // namespace kvtrim
