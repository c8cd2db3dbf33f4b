// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tables in which a row's slot follows from its position, with a null page where pages went (vLLM's hybrid groups: sliding
// windows, and full attention beside them). The library's rows are dense, so a view leaves the null entries out, and a sink
// writes kept pages back where they were. Scorers, planner and kernels know nothing of it.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/evict/detail/freed_list.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// What a compacted view refers to. `states` belong to the sequences: keep them from step to step, and value-initialise one
/// whose sequence begins.
struct CompactMemory {
  std::span<std::int32_t> ids{};      ///< [sequences, max_pages]
  std::span<std::int32_t> lengths{};  ///< [sequences]
  std::span<Position> positions{};    ///< [sequences, max_pages * page_size]
  std::span<SequenceState> states{};  ///< [sequences]
  std::span<std::int32_t> reserved =
      {};  ///< [sequences]; needed only with `CacheView::reserved_pages`
};

namespace detail {
// Entries that positions before `length` use.
[[nodiscard]] constexpr std::int64_t position_entries(const CacheView& view,
                                                      std::int32_t length) noexcept {
  return (std::int64_t{length} + view.page_size - 1) / view.page_size;
}
}  // namespace detail

/// The same cache without null entries: its rows are those that are left, ascending by position, in whole pages but for the
/// last. Its length is the physical one, `SequenceState::next_position` the logical one.
///
/// A sequence all of whose entries are null has no rows: dummy sequences of a padded batch. Only pages leave the view
/// (`CacheView::fixed_rows`), and the one that the next position falls into stays. Observations and sequence planes are indexed
/// by its rows.
///
/// \param view    dense tables, one a sequence; `lengths` are positions, those that went included
/// \param memory  overwritten
/// \returns the view. A length that is negative or beyond its table becomes -1: `plan` then says `length_beyond_table`
/// \throws std::invalid_argument if the tables are not dense, not one a sequence, padded, or K and V have separate ids; or if a
///   part of `memory` is of another size
/// \par Complexity
/// O(entries + rows); no allocation
[[nodiscard]] inline CacheView compact_tables(const CacheView& view, const CompactMemory& memory) {
  if (view.scope != TableScope::group || view.table.indptr != nullptr || view.lengths == nullptr ||
      view.table.v_offset != 0 || view.first_rows != nullptr) {
    throw_invalid_argument(
        "kvtrim::compact_tables: tables must be dense, one a sequence, with lengths, one id for K "
        "and V and no padding");
  }
  const auto sequences = static_cast<std::size_t>(view.sequences);
  const auto pages = static_cast<std::size_t>(view.table.max_pages);
  const std::size_t rows = pages * static_cast<std::size_t>(view.page_size);
  const bool reserves = view.reserved_pages != nullptr;
  if (memory.ids.size() != sequences * pages || memory.lengths.size() != sequences ||
      memory.positions.size() != sequences * rows || memory.states.size() != sequences ||
      (reserves && memory.reserved.size() != sequences)) {
    throw_invalid_argument(
        "kvtrim::compact_tables: {} ids, {} lengths, {} positions, {} states and {} reserved "
        "numbers for {} sequences of {} pages of {} rows",
        memory.ids.size(),
        memory.lengths.size(),
        memory.positions.size(),
        memory.states.size(),
        memory.reserved.size(),
        sequences,
        pages,
        view.page_size);
  }
  for (std::size_t s = 0; s < sequences; ++s) {
    const SequenceId id{static_cast<std::int32_t>(s)};
    const std::int32_t length = view.lengths[view.length_rows(id, LayerId{0}, HeadId{0})];
    const std::int32_t kept_free = reserves ? view.reserved_pages[s] : 0;
    const std::int32_t* const entries = view.table.row(id, LayerId{0}, HeadId{0});
    const std::int64_t used = detail::position_entries(view, length);
    std::int32_t* const out = memory.ids.data() + s * pages;
    Position* const positions = memory.positions.data() + s * rows;
    std::fill_n(out, pages, view.table.null_id);
    SequenceState& state = memory.states[s];
    if (reserves) { memory.reserved[s] = kept_free; }
    if (length < 0 || kept_free < 0 || used + kept_free > view.table.max_pages) {
      memory.lengths[s] = -1;
      continue;
    }
    std::int32_t live = 0;
    std::int32_t count = 0;
    for (std::int32_t e = 0; e < used; ++e) {
      if (view.table.page(entries[e]) == null_page) { continue; }
      out[count++] = entries[e];
      const std::int32_t end = std::min((e + 1) * view.page_size, length);
      for (std::int32_t p = e * view.page_size; p < end; ++p) { positions[live++] = Position{p}; }
    }
    std::copy_n(entries + used, kept_free, out + count);
    memory.lengths[s] = live;
    state.steps += length > state.next_position ? 1 : 0;
    state.live_rows = live;
    state.next_position = state.next_rope_position = live == 0 ? 0 : length;
  }
  CacheView compact = view;
  compact.table.ids = memory.ids.data();
  compact.table.rows = compact.length_rows = {1, 0, 0};
  compact.table.row_stride = view.table.max_pages;
  compact.lengths = memory.lengths.data();
  compact.states = memory.states.data();
  compact.positions.base = reinterpret_cast<std::byte*>(memory.positions.data());
  compact.positions.element_bytes = sizeof(Position);
  compact.positions.row_stride = sizeof(Position);
  compact.positions.sequence_stride = static_cast<std::int64_t>(rows * sizeof(Position));
  compact.positions.layer_stride = compact.positions.head_stride = 0;
  if (reserves) { compact.reserved_pages = memory.reserved.data(); }
  compact.fixed_rows = true;
  return compact;
}

/// A `TableSink` for plans made from a compacted view: each kept page goes back to entry position / page_size, and the null
/// page stands elsewhere. The engine's lengths stay: they are positions. Compact anew before the next plan.
///
/// \par Allocation
/// none: the caller provides the memory
class NullInPlaceTables {
 public:
  /// \param view        what `compact_tables` was called with
  /// \param compact     what it returned, and the plan was made from
  /// \param ids         the same array as `view.table.ids`, writable
  /// \param ref_counts  the same array as `view.writable.ref_counts`, writable; null: every dropped page is free
  /// \param[out] freed  receives the free pages, tail first per table; if it is too small, the rest is only counted
  NullInPlaceTables(const CacheView& view,
                    const CacheView& compact,
                    std::int32_t* ids,
                    std::int32_t* ref_counts,
                    std::span<PageId> freed) noexcept
      : view_(view), compact_(compact), ids_(ids), ref_counts_(ref_counts), freed_(freed) {
    KVTRIM_ASSERT(compact.fixed_rows && view.table.ids == ids);
  }

  /// Stores one table.
  void update(const TableUpdate& u) noexcept {
    std::int32_t* const entries =
        ids_ + view_.table.rows(u.sequence, u.layer, u.head) * view_.table.row_stride;
    const auto used = static_cast<std::int32_t>(
        detail::position_entries(view_, view_.live_rows(u.sequence, u.layer, u.head)));
    const std::int32_t kept = pages_for(u.state.live_rows, view_.page_size);
    const std::int32_t reserved = static_cast<std::int32_t>(u.k_pages.size()) - kept;
    const std::int32_t end = used + compact_.reserved(u.sequence, u.table);
    std::fill(entries, entries + used, view_.table.null_id);
    std::fill(entries + used + reserved, entries + end, view_.table.null_id);
    for (std::int32_t e = 0; e < kept; ++e) {
      const Position first = compact_.position(u.sequence, u.layer, u.head, e * view_.page_size);
      entries[raw(first) / view_.page_size] = raw(u.k_pages[static_cast<std::size_t>(e)]);
    }
    compact_.states[compact_.table_index(u.sequence, u.table)] = u.state;
  }
  /// Drops one reference.
  bool release(PageId p) noexcept {
    if (!kvtrim::detail::drop_reference(ref_counts_, raw(p))) { return false; }
    freed_.add(p);
    return true;
  }
  /// Pages that became free so far.
  [[nodiscard]] std::span<const PageId> freed() const noexcept { return freed_.all(); }

 private:
  CacheView view_;
  CacheView compact_;
  std::int32_t* ids_;
  std::int32_t* ref_counts_;
  kvtrim::detail::FreedList<PageId> freed_;
};
static_assert(TableSink<NullInPlaceTables>);

}  // namespace kvtrim
