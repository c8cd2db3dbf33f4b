// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a plan depends on, in one number per table: so that other sequences and layers may go on between plan, apply and
// commit.

#include <kvtrim/cache/check_tables.hpp>

#include <cstdint>

namespace kvtrim {

namespace detail {

[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t hash, std::uint64_t x) noexcept {
  hash = (hash ^ x) * 0xD6E8'FEB8'6659'FD93U;
  return hash ^ (hash >> 32U);
}

// What one step of the counters adds to a table's generation.
inline constexpr std::uint64_t state_step = 0x9E37'79B9'7F4A'7C15U;
inline constexpr std::uint64_t generation_step = 0xC2B2'AE3D'27D4'EB4FU;

// Counts a change of a table where there are counters.
//
// \returns what it adds to the table's generation
inline std::uint64_t raise_generation(const CacheView& view, std::int64_t table) noexcept {
  std::uint64_t added = 0;
  if (view.states != nullptr) {
    ++view.states[table].generation;
    added += state_step;
  }
  if (view.generations != nullptr) {
    ++view.generations[table];
    added += generation_step;
  }
  return added;
}

}  // namespace detail

/// Hash of everything that a plan for table `t` of sequence `s` depends on: its length, hole, used and reserved entries,
/// whether they may be written, and the counters of `CacheView::states` and `generations`.
///
/// Without counters, a table that was changed and then got the same pages and length again looks the same.
///
/// \param writable  whether it matters which pages may be written: not any more once rows are moved, when a sequence that
///   shares them may end
/// \par Complexity
/// O(used table entries)
[[nodiscard]] inline std::uint64_t table_generation(const CacheView& view,
                                                    SequenceId s,
                                                    std::int32_t t,
                                                    bool writable = true) noexcept {
  using detail::mixed;
  const LayerId l = view.first_layer(t);
  const HeadId h = view.first_head(t);
  const SequenceState state = view.state(s, l, h);
  const std::uint64_t counters =
      (view.states == nullptr ? 0 : state.generation * detail::state_step) +
      (view.generations == nullptr
           ? 0
           : view.generations[view.table_index(s, t)] * detail::generation_step);
  const std::int64_t live = view.live_rows(s, l, h);
  const std::int64_t first = view.first_row(s);
  const std::uint64_t hash =
      mixed(static_cast<std::uint64_t>(live) << 32U | static_cast<std::uint32_t>(state.append_row),
            static_cast<std::uint32_t>(first));
  // The length may be any by now: nothing is read beyond the table.
  const std::int64_t rows = live + (state.append_row >= 0 ? 1 : 0) + first;
  const std::int64_t used =
      (live <= 0 ? first / view.page_size : (rows + view.page_size - 1) / view.page_size) +
      view.reserved(s, t);
  if (used < 0 || used > view.table.capacity(s, l, h)) { return hash + counters; }
  const std::int32_t* const entries = view.table.row(s, l, h);
  const bool all_writable = !writable || view.writable.all();
  const auto held = [&](PageId p) {
    return raw(p) >= 0 && raw(p) < view.pages && view.writable(p, l, h);
  };
  const auto word = [&](std::int64_t e) {
    const PageId k = view.table.page(entries[e]);
    const PageId v = view.table.page(entries[e + view.table.v_offset]);
    const std::uint64_t pages = std::uint64_t{static_cast<std::uint32_t>(raw(k))} << 32U |
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
  return mixed(mixed(mixed(hash, c0), c1), c2) + counters;
}

}  // namespace kvtrim
