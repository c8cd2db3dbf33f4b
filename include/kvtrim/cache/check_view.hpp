// SPDX-License-Identifier: Apache-2.0
#pragma once

// What must hold before a byte of a view is trusted. Strides are checked once, by `check_layout`, which throws; tables and
// lengths change with every step, so their check returns a status.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/core/status.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace kvtrim {

/// What is wrong with a view, and where. `sequence` -1: nothing is wrong.
struct ViewFault {
  Status status = Status::ok;
  std::int32_t sequence = -1;
  std::int32_t table = -1;  ///< of the sequence
  std::int32_t entry = -1;  ///< of the table
  std::int64_t value = 0;   ///< the page id, or the length, found there
};

/// 64-bit words of scratch that `check_tables` needs.
[[nodiscard]] constexpr std::int64_t check_tables_words(std::int32_t pages) noexcept {
  return 2 * ((static_cast<std::int64_t>(pages) + 63) / 64);
}

/// Checks the contents of the tables: lengths fit them, pages are within the pool, no page occurs twice.
///
/// A page may be in two sequences, or in two tables whose pages lie in the same memory, only if it is not writable.
/// Nothing beyond the live rows is read, nor any entry that only left padding would use: null pages are allowed there.
///
/// \param scratch [check_tables_words(view.pages)]
/// \returns the first fault, in the order of tables, then sequences
/// \par Complexity
/// O(used table entries + tables * pages / 64); no allocation
[[nodiscard]] inline ViewFault check_tables(const CacheView& view,
                                            std::span<std::uint64_t> scratch) noexcept {
  const std::size_t words = scratch.size() / 2;
  KVTRIM_ASSERT(static_cast<std::int64_t>(scratch.size()) >= check_tables_words(view.pages));
  const auto seen = scratch.first(words);
  const auto own = scratch.subspan(words, words);
  std::fill(own.begin(), own.end(), 0);
  const auto bit = [](PageId p) { return std::uint64_t{1} << static_cast<unsigned>(raw(p) % 64); };
  const auto word = [](PageId p) { return static_cast<std::size_t>(raw(p) / 64); };
  for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
    const LayerId l = view.first_layer(t);
    const HeadId h = view.first_head(t);
    // Tables of layers or heads without a stride of their own name pages of one pool.
    const bool own_layers = view.k.layer_stride != 0 || view.k.layer_bases != nullptr;
    const bool own_heads = view.scope == TableScope::head && view.k.head_stride != 0;
    if (t == 0 || own_heads || (own_layers && raw(h) == 0)) {
      std::fill(seen.begin(), seen.end(), 0);
    }
    for (std::int32_t i = 0; i < view.sequences; ++i) {
      const SequenceId s{i};
      const std::int64_t live = view.live_rows(s, l, h);
      const std::int64_t rows =
          live + (view.state(s, l, h).append_row >= 0 ? 1 : 0) + view.first_row(s);
      const std::int64_t used = (rows + view.page_size - 1) / view.page_size;
      if (live < 0 || view.first_row(s) < 0 || used > view.table.capacity(s, l, h)) {
        return {Status::length_beyond_table, i, t, -1, live};
      }
      if (live == 0) { continue; }
      ViewFault fault;
      const std::int32_t first = view.first_row(s) / view.page_size;
      // Where every page is writable, none may be seen twice, and its owner does not matter.
      const bool all_writable =
          view.writable.ref_counts == nullptr && view.writable.bits == nullptr;
      const auto visit = [&](std::int32_t entry, PageId p) {
        if (raw(p) < 0 || raw(p) >= view.pages) {
          fault = {Status::page_out_of_range, i, t, entry, raw(p)};
          return false;
        }
        const std::uint64_t before = seen[word(p)];
        const bool twice = all_writable ? (before & bit(p)) != 0
                                        : (own[word(p)] & bit(p)) != 0 ||
                                              ((before & bit(p)) != 0 && view.writable(p));
        if (twice) {
          fault = {Status::page_twice, i, t, entry, raw(p)};
          return false;
        }
        seen[word(p)] = before | bit(p);
        if (!all_writable) { own[word(p)] |= bit(p); }
        return true;
      };
      const std::int32_t* const entries = view.table.row(s, l, h);
      const std::int64_t v_offset = view.table.v_offset;
      for (std::int32_t e = first; e < used; ++e) {
        if (!visit(e, view.table.page(entries[e]))) { return fault; }
        if (v_offset != 0 && !visit(e, view.table.page(entries[e + v_offset]))) { return fault; }
      }
      if (all_writable) { continue; }
      for (std::int32_t e = first; e < used; ++e) {
        const PageId k = view.table.page(entries[e]);
        const PageId v = view.table.page(entries[e + v_offset]);
        own[word(k)] &= ~bit(k);
        own[word(v)] &= ~bit(v);
      }
    }
  }
  return {};
}

/// Hash of everything a plan depends on: lengths, states, used table entries and whether they may be written.
///
/// \par Complexity
/// O(used table entries)
[[nodiscard]] inline std::uint64_t generation_of(const CacheView& view) noexcept {
  std::uint64_t hash = 0x9E37'79B9'7F4A'7C15U;
  const auto mixed = [](std::uint64_t h, std::uint64_t x) {
    h = (h ^ x) * 0xD6E8'FEB8'6659'FD93U;
    return h ^ (h >> 32U);
  };
  for (std::int32_t i = 0; i < view.sequences; ++i) {
    for (std::int32_t t = 0; t < view.tables_per_sequence(); ++t) {
      const SequenceId s{i};
      const LayerId l = view.first_layer(t);
      const HeadId h = view.first_head(t);
      const SequenceState state = view.state(s, l, h);
      const std::int32_t live = view.live_rows(s, l, h);
      hash = mixed(
          hash,
          static_cast<std::uint64_t>(live) << 32U | static_cast<std::uint32_t>(state.append_row));
      hash = mixed(hash, state.generation);
      if (live <= 0) { continue; }
      const std::int64_t rows =
          static_cast<std::int64_t>(live) + (state.append_row >= 0 ? 1 : 0) + view.first_row(s);
      const std::int64_t used = (rows + view.page_size - 1) / view.page_size;
      if (used > view.table.capacity(s, l, h)) { continue; }
      const std::int32_t* const entries = view.table.row(s, l, h);
      const bool all_writable =
          view.writable.ref_counts == nullptr && view.writable.bits == nullptr;
      const auto held = [&](PageId p) {
        return raw(p) >= 0 && raw(p) < view.pages && view.writable(p);
      };
      const auto word = [&](std::int64_t e) {
        const PageId k = view.table.page(entries[e]);
        const PageId v = view.table.page(entries[e + view.table.v_offset]);
        const std::uint64_t pages = static_cast<std::uint64_t>(static_cast<std::uint32_t>(raw(k)))
                                        << 32U |
                                    static_cast<std::uint32_t>(raw(v));
        if (all_writable) { return pages; }
        return pages ^ (std::uint64_t{(held(k) ? 1U : 0U) | (held(v) ? 2U : 0U)} << 62U);
      };
      // Three interleaved chains: a single one would wait for its multiplications.
      std::uint64_t c0 = 1;
      std::uint64_t c1 = 2;
      std::uint64_t c2 = 3;
      std::int64_t e = 0;
      if (all_writable && view.table.v_offset == 0) {  // only the entry counts: two make a word
        const auto id = [&](std::int64_t entry) {
          return std::uint64_t{static_cast<std::uint32_t>(raw(view.table.page(entries[entry])))};
        };
        for (; e + 6 <= used; e += 6) {
          c0 = mixed(c0, id(e) << 32U | id(e + 1));
          c1 = mixed(c1, id(e + 2) << 32U | id(e + 3));
          c2 = mixed(c2, id(e + 4) << 32U | id(e + 5));
        }
      }
      for (; e + 3 <= used; e += 3) {
        c0 = mixed(c0, word(e));
        c1 = mixed(c1, word(e + 1));
        c2 = mixed(c2, word(e + 2));
      }
      for (; e < used; ++e) { c0 = mixed(c0, word(e)); }
      hash = mixed(mixed(mixed(hash, c0), c1), c2);
    }
  }
  return hash;
}

}  // namespace kvtrim
