// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moving one row means moving everything that belongs to it: key, value, page planes, sequence planes. This is the only
// place that knows the list, so nothing can be left behind.

#include <kvtrim/cache/detail/parts.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/removal.hpp>

#include <cstring>
#include <span>

namespace kvtrim {

/// Where a row lies: the page of its key, the page of its value, the slot in both.
struct RowPlace {
  PageId k_page;
  PageId v_page;
  Slot slot;
  friend bool operator==(const RowPlace&, const RowPlace&) = default;
};

/// Place of row `r` according to the current tables.
[[nodiscard]] inline RowPlace place_of(const HeadRef& head, std::int32_t r) noexcept {
  const auto& [view, s, l, h] = head;
  const std::int32_t at = r + view.first_row(s);
  return {view.k_page(s, l, h, at / view.page_size),
          view.v_page(s, l, h, at / view.page_size),
          Slot{at % view.page_size}};
}

namespace detail {

// Whether each row has an entry of its own.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool has_row_entries(const CacheView& view,
                                                                const PagePlane& plane) noexcept {
  return plane.rows_per_entry(view.page_size) == 1 && !plane.constant();
}
// Whether rows must stay with their entries: it belongs to several, which may part.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool ties_rows(const CacheView& view,
                                                          const PagePlane& plane) noexcept {
  return plane.rows_per_entry(view.page_size) != 1 && !plane.constant();
}

// A plane without a head (or layer) stride is common to the heads (or layers): it moves with the first one only.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool moves_with(const CacheView& view,
                                                           const PagePlane& plane,
                                                           LayerId l,
                                                           HeadId h) noexcept {
  if (!has_row_entries(view, plane)) { return false; }
  const bool common_heads = plane.head_stride == 0 && view.scope != TableScope::head;
  const bool common_layers = plane.layer_stride == 0 && view.scope == TableScope::group;
  return !(common_heads && raw(h) != 0) && !(common_layers && raw(l) != 0);
}
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool moves_with(const SequencePlane& plane,
                                                           LayerId l,
                                                           HeadId h) noexcept {
  return static_cast<bool>(plane) && !(plane.head_stride == 0 && raw(h) != 0) &&
         !(plane.layer_stride == 0 && raw(l) != 0);
}

// Whether values are moved on their own: not where there are none, or where they are part of the keys' rows.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool moves_values(const CacheView& view,
                                                             LayerId l) noexcept {
  return view.v && !values_in_keys(view, l);
}

// Calls f(plane) for every sequence plane of the view.
template <class F>
void for_each_sequence_plane(const CacheView& view, F&& f) noexcept {
  f(view.positions), f(view.rope_positions), f(view.score_sums), f(view.score_compensations);
  for (std::int32_t i = 0; i < view.more_plane_count; ++i) { f(view.more_planes[i]); }
}

}  // namespace detail

/// Bytes that moving one row of (layer, KV head) writes to pages: key, value, page planes.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t moved_row_bytes(const CacheView& view,
                                                                        LayerId l,
                                                                        HeadId h) noexcept {
  std::int64_t bytes = view.k ? view.k.row_bytes() : 0;
  if (detail::moves_values(view, l)) { bytes += view.v.row_bytes(); }
  if (view.unrotated_keys) { bytes += view.unrotated_keys.row_bytes(); }
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    if (detail::moves_with(view, view.page_planes[i], l, h)) {
      bytes += view.page_planes[i].row_bytes;
    }
  }
  return bytes;
}

/// Copies everything that pages hold of one row of one KV head to another place.
inline void move_page_data(const HeadRef& head, RowPlace from, RowPlace to) noexcept {
  const auto& [view, s, l, h] = head;
  const auto copy = [&](const Plane& plane, PageId source, PageId target) {
    copy_row(plane, plane.row(l, source, h, from.slot), plane.row(l, target, h, to.slot));
  };
  if (view.k) { copy(view.k, from.k_page, to.k_page); }
  if (detail::moves_values(view, l)) { copy(view.v, from.v_page, to.v_page); }
  if (view.unrotated_keys) { copy(view.unrotated_keys, from.k_page, to.k_page); }
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    const PagePlane& plane = view.page_planes[i];
    if (!detail::moves_with(view, plane, l, h)) { continue; }
    const PageId source = plane.of_values ? from.v_page : from.k_page;
    const PageId target = plane.of_values ? to.v_page : to.k_page;
    std::memcpy(plane.row(l, target, h, to.slot),
                plane.row(l, source, h, from.slot),
                static_cast<std::size_t>(plane.row_bytes));
  }
}

namespace detail {

// Calls f(from, to, index in the list) for each kept row, in an order in which no row is overwritten before it is read.
template <class F>
void for_each_target(std::span<const std::int32_t> kept, Removal removal, F&& f) noexcept {
  const auto n = static_cast<std::int32_t>(kept.size());
  const auto row = [&](std::int32_t i) { return kept[static_cast<std::size_t>(i)]; };
  if (removal != Removal::fill_holes) {
    for (std::int32_t i = 0; i < n; ++i) { f(row(i), i, i); }
    return;
  }
  std::int32_t stay = 0;  // rows below n stay; the others fill the holes below n, ascending
  while (stay < n && row(stay) < n) { ++stay; }
  std::int32_t filler = stay;
  std::int32_t i = 0;
  for (std::int32_t to = 0; to < n; ++to) {
    if (i < stay && row(i) == to) {
      f(to, to, i++);
    } else {
      f(row(filler), to, filler);
      ++filler;
    }
  }
}

// Blocks to copy, in the order given, many at a time. Rows that stay lie far apart, so each copy waits for memory. A branch
// mispredicted between two copies (which page? one run or two?) keeps the second from starting early: moves then took 1.7
// times as long as a loop over precomputed addresses. With addresses computed first and rows ahead prefetched, they take
// 0.9 of that loop's time. Merging neighbouring rows into longer copies did not help.
class CopyQueue {
 public:
  CopyQueue() = default;
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;
  ~CopyQueue() { flush(); }

  void push(const std::byte* from, std::byte* to, std::int64_t bytes) noexcept {
    if (count_ == most) { flush(); }
    blocks_[count_++] = {from, to, static_cast<std::size_t>(bytes)};
  }

 private:
  struct Block {
    const std::byte* from;
    std::byte* to;
    std::size_t bytes;
  };
  void flush() noexcept {
    for (std::uint32_t i = 0; i < count_; ++i) {
      if (i + ahead < count_) {
        const Block& later = blocks_[i + ahead];
        for (std::size_t b = 0; b < later.bytes; b += 256) { KVTRIM_PREFETCH(later.from + b); }
      }
      std::memcpy(blocks_[i].to, blocks_[i].from, blocks_[i].bytes);
    }
    count_ = 0;
  }
  static constexpr std::uint32_t most = 256;
  static constexpr std::uint32_t ahead = 8;
  Block blocks_[most];
  std::uint32_t count_ = 0;
};

}  // namespace detail

/// Copies row `from`'s elements of the sequence planes to row `to`.
inline void move_sequence_data(const HeadRef& head, std::int32_t from, std::int32_t to) noexcept {
  const auto& [view, s, l, h] = head;
  detail::for_each_sequence_plane(view, [&](const SequencePlane& plane) {
    if (!detail::moves_with(plane, l, h)) { return; }
    std::memcpy(plane.row(s, l, h, to),
                plane.row(s, l, h, from),
                static_cast<std::size_t>(plane.element_bytes));
  });
}

/// Whether a side plane is common to heads or layers that share a table, so that they must all keep the same rows.
[[nodiscard]] inline bool has_common_planes(const CacheView& view) noexcept {
  bool any = false;
  const auto note = [&](bool heads, bool layers) {
    any = any || (heads && view.kv_heads > 1) || (layers && view.layers > 1);
  };
  detail::for_each_sequence_plane(view, [&](const SequencePlane& p) {
    if (p) { note(p.head_stride == 0, p.layer_stride == 0); }
  });
  for (std::int32_t i = 0; i < view.page_plane_count; ++i) {
    const PagePlane& p = view.page_planes[i];
    if (detail::has_row_entries(view, p)) {
      note(p.head_stride == 0 && view.scope != TableScope::head,
           p.layer_stride == 0 && view.scope == TableScope::group);
    }
  }
  return any;
}

}  // namespace kvtrim
