// SPDX-License-Identifier: Apache-2.0
#pragma once

// What must hold of tables and lengths before a row is read. They change with every step, so their check returns a status.
// Lengths are checked of all tables, whatever is planned; entries only where something goes.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/core/status.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// What is wrong with a view, and where. `sequence` -1: nothing is wrong.
struct ViewFault {
  Status status = Status::ok;
  std::int32_t sequence = -1;
  std::int32_t table = -1;    ///< of the sequence
  std::int32_t entry = -1;    ///< of the table
  std::int64_t value = 0;     ///< the page id, or the number, found there
  std::int64_t expected = 0;  ///< `states_disagree`: the number that it contradicts
};

namespace detail {

// Entries of a table that hold rows, padding included; 64 bits: the length is not trusted yet. A table without rows has
// those that only its padding uses: reserved ones are behind them.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t used_entries(const CacheView& view,
                                                                     SequenceId s,
                                                                     LayerId l,
                                                                     HeadId h) noexcept {
  const std::int64_t live = view.live_rows(s, l, h);
  const std::int64_t rows =
      live + (view.state(s, l, h).append_row >= 0 ? 1 : 0) + view.first_row(s);
  return live <= 0 ? view.first_row(s) / view.page_size
                   : (rows + view.page_size - 1) / view.page_size;
}

[[nodiscard]] KVTRIM_HOST_DEVICE constexpr ViewFault check_length(const CacheView& view,
                                                                  SequenceId s,
                                                                  std::int32_t t) noexcept {
  const LayerId l = view.first_layer(t);
  const HeadId h = view.first_head(t);
  const auto fault = [&](Status status, std::int64_t value, std::int64_t expected = 0) {
    return ViewFault{status, raw(s), t, -1, value, expected};
  };
  const std::int64_t room = view.table.capacity(s, l, h) - std::int64_t{view.reserved(s, t)};
  if (view.last_page_len != nullptr) {  // 0 without pages, otherwise within the last one
    const std::int64_t last = view.last_page_len[view.table.rows(s, l, h)];
    if (room == 0 ? last != 0 : last < 1 || last > view.page_size) {
      return fault(Status::length_beyond_table, last);
    }
  }
  const std::int64_t live = view.live_rows(s, l, h);
  const SequenceState state = view.state(s, l, h);
  const std::int64_t rows = live + (state.append_row >= 0 ? 1 : 0) + view.first_row(s);
  if (live < 0 || view.first_row(s) < 0 || view.reserved(s, t) < 0 || rows > 0x7FFF'FFFF ||
      rows > room * view.page_size) {
    return fault(Status::length_beyond_table, live);
  }
  if (view.states == nullptr) { return {}; }
  if (state.live_rows != live) { return fault(Status::states_disagree, live, state.live_rows); }
  if (state.append_row < -1 || state.append_row > live) {
    return fault(Status::states_disagree, state.append_row, live);
  }
  if (live > 0 && state.next_position < live) {
    return fault(Status::states_disagree, state.next_position, live);
  }
  // Slots out of order, or a hole, and nothing that says which row is which.
  if (!view.positions && (!state.ordered || state.append_row >= 0)) {
    return fault(Status::states_disagree, state.append_row, -1);
  }
  return {};
}

// Whether each page is within the pool, and none is twice where it may be written.
class EntryCheck {
 public:
  EntryCheck(const CacheView& view, std::span<std::uint64_t> scratch) noexcept
      : view_(view),
        all_writable_(view.writable.all()),
        seen_(scratch.first(scratch.size() / 2)),
        own_(scratch.subspan(scratch.size() / 2, scratch.size() / 2)) {
    std::fill(own_.begin(), own_.end(), 0);
  }

  void forget() const noexcept { std::fill(seen_.begin(), seen_.end(), 0); }

  [[nodiscard]] ViewFault table(SequenceId s, std::int32_t t) const noexcept {
    const LayerId l = view_.first_layer(t);
    const HeadId h = view_.first_head(t);
    const std::int32_t* const entries = view_.table.row(s, l, h);
    const std::int64_t v_offset = view_.table.v_offset;
    const std::int64_t used = used_entries(view_, s, l, h);
    const auto end = static_cast<std::int32_t>(used + view_.reserved(s, t));
    // Entries that only padding uses are not looked at: null pages may stand there.
    const auto first = static_cast<std::int32_t>(
        std::min<std::int64_t>(view_.first_row(s) / view_.page_size, used));
    ViewFault fault;
    const auto sound = [&](std::int32_t e, PageId p, bool of_values) {
      const Status status =
          view_.table.on_step(p, of_values) ? visit(p, l, h) : Status::page_out_of_range;
      if (status != Status::ok) { fault = {status, raw(s), t, e, raw(p), 0}; }
      return status == Status::ok;
    };
    for (std::int32_t e = first; e < end; ++e) {
      if (!sound(e, view_.table.page(entries[e]), false)) { return fault; }
      if (v_offset != 0 && !sound(e, view_.table.page(entries[e + v_offset]), true)) {
        return fault;
      }
    }
    for (std::int32_t e = first; !all_writable_ && e < end; ++e) {
      const PageId k = view_.table.page(entries[e]);
      const PageId v = view_.table.page(entries[e + v_offset]);
      own_[word(k)] &= ~bit(k);
      own_[word(v)] &= ~bit(v);
    }
    return fault;
  }

 private:
  // Where every page is writable, none may be seen twice, and its owner does not matter.
  [[nodiscard]] Status visit(PageId p, LayerId l, HeadId h) const noexcept {
    if (raw(p) < 0 || raw(p) >= view_.pages) { return Status::page_out_of_range; }
    const std::uint64_t before = seen_[word(p)];
    const bool twice = all_writable_ ? (before & bit(p)) != 0
                                     : (own_[word(p)] & bit(p)) != 0 ||
                                           ((before & bit(p)) != 0 && view_.writable(p, l, h));
    if (twice) { return Status::page_twice; }
    seen_[word(p)] = before | bit(p);
    if (!all_writable_) { own_[word(p)] |= bit(p); }
    return Status::ok;
  }
  static std::uint64_t bit(PageId p) noexcept {
    return std::uint64_t{1} << static_cast<unsigned>(raw(p) % 64);
  }
  static std::size_t word(PageId p) noexcept { return static_cast<std::size_t>(raw(p) / 64); }

  const CacheView& view_;
  bool all_writable_;
  std::span<std::uint64_t> seen_;
  std::span<std::uint64_t> own_;  // of the table that is looked at
};

}  // namespace detail

/// Checks lengths and states: lengths fit their tables, and states agree with them and with themselves. No entry is read.
///
/// \returns the first fault, in the order of tables, then sequences
/// \par Complexity
/// O(tables); no allocation
[[nodiscard]] inline ViewFault check_lengths(const CacheView& view) noexcept {
  for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      const ViewFault fault = detail::check_length(view, SequenceId{s}, t);
      if (fault.status != Status::ok) { return fault; }
    }
  }
  return {};
}

/// 64-bit words of scratch that `check_entries` and `check_tables` need.
[[nodiscard]] constexpr std::int64_t check_tables_words(std::int32_t pages) noexcept {
  return 2 * ((static_cast<std::int64_t>(pages) + 63) / 64);
}

/// Checks the entries of the tables: pages are within the pool, no page occurs twice.
///
/// A page may be in two sequences, or in two tables whose pages lie in the same memory, only if it is not writable.
/// Nothing beyond the used and the reserved entries is read, nor any entry that only left padding would use: null pages are
/// allowed there.
///
/// \param scratch [check_tables_words(view.pages)]
/// \pre `check_lengths(view)` found nothing
/// \returns the first fault, in the order of tables, then sequences
/// \par Complexity
/// O(used table entries + tables * pages / 64); no allocation
[[nodiscard]] inline ViewFault check_entries(const CacheView& view,
                                             std::span<std::uint64_t> scratch) noexcept {
  KVTRIM_ASSERT(static_cast<std::int64_t>(scratch.size()) >= check_tables_words(view.pages));
  const detail::EntryCheck check(view, scratch);
  // Tables of layers or heads without a stride of their own name pages of one pool.
  const bool own_layers = detail::has_own_layers(view.k);
  const bool own_heads = detail::has_own_heads(view);
  for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
    if (t == 0 || own_heads || (own_layers && raw(view.first_head(t)) == 0)) { check.forget(); }
    for (std::int32_t s = 0; s < view.sequences; ++s) {
      const ViewFault fault = check.table(SequenceId{s}, t);
      if (fault.status != Status::ok) { return fault; }
    }
  }
  return {};
}

/// `check_lengths`, then `check_entries`: for those who want to know now. `plan` checks all lengths, and entries once
/// something goes.
///
/// \param scratch [check_tables_words(view.pages)]
[[nodiscard]] inline ViewFault check_tables(const CacheView& view,
                                            std::span<std::uint64_t> scratch) noexcept {
  const ViewFault fault = check_lengths(view);
  return fault.status != Status::ok ? fault : check_entries(view, scratch);
}

}  // namespace kvtrim
