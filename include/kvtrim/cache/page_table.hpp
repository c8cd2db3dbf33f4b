// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <cstdint>

namespace kvtrim {

/// Index of the table row, or of the length, of (sequence, layer, KV head): a sum of multiples.
///
/// A multiplier of 0 means "common to": a table for all layers has `layer = 0`, a table for all heads `head = 0`.
struct RowMap {
  std::int64_t sequence = 1;  ///< rows between sequences
  std::int64_t layer = 0;     ///< rows between layers
  std::int64_t head = 0;      ///< rows between KV heads

  /// The index.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t operator()(SequenceId s,
                                                                     LayerId l,
                                                                     HeadId h) const noexcept {
    return raw(s) * sequence + raw(l) * layer + raw(h) * head;
  }
};

/// The engine's page tables: the pages that hold the rows of (sequence, layer, KV head), in order.
///
/// Dense: row r is `ids[r * row_stride ...]`, at most `max_pages` entries. CSR (`indptr` set): row r is
/// `ids[indptr[r] .. indptr[r + 1])`. One-token slots are a dense table with page size 1. The ids stay the engine's
/// integers; a `PageId` is made on access.
struct PageTable {
  const std::int32_t* ids = nullptr;     ///< page ids of K, and of V where `v_offset` is 0
  const std::int32_t* indptr = nullptr;  ///< CSR row starts, or null
  RowMap rows{};                         ///< table row of (sequence, layer, KV head)
  std::int64_t row_stride = 0;           ///< dense: ids between rows
  std::int32_t max_pages = 0;            ///< dense: entries per row
  std::int64_t v_offset = 0;  ///< ids from K's entry to V's (TensorRT-LLM); 0: one id for both
  std::int32_t null_id = -1;  ///< the id that means "no page"
  std::int32_t id_mask = -1;  ///< bits of an entry that hold the id (the others are flags)
  /// Ids count pieces of a block, so that those of K are multiples of this, and those of V, where they are separate, one more
  /// (TensorRT-LLM: 2 * layers). 1: any.
  std::int32_t id_step = 1;

  /// First entry of a row.
  [[nodiscard]] KVTRIM_HOST_DEVICE const std::int32_t* row(SequenceId s,
                                                           LayerId l,
                                                           HeadId h) const noexcept {
    const std::int64_t r = rows(s, l, h);
    // Without entries there is no first one, and a stride may be anything.
    return ids + (indptr != nullptr ? indptr[r] : max_pages > 0 ? r * row_stride : 0);
  }

  /// Entries a row has room for; -1 where row starts descend, which no length fits.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t capacity(SequenceId s,
                                                                   LayerId l,
                                                                   HeadId h) const noexcept {
    if (indptr == nullptr) { return max_pages; }
    const std::int64_t r = rows(s, l, h);
    const std::int64_t entries = std::int64_t{indptr[r + 1]} - indptr[r];
    return entries < 0 || entries > 0x7FFF'FFFF ? -1 : static_cast<std::int32_t>(entries);
  }

  /// The page an entry names.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr PageId page(std::int32_t entry) const noexcept {
    return entry == null_id ? null_page : PageId{entry & id_mask};
  }
  /// Whether `p` may be the id of a page of K, or of V.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool on_step(PageId p, bool of_values) const noexcept {
    return id_step <= 1 || raw(p) % id_step == (of_values && v_offset != 0 ? 1 : 0);
  }
};

/// Which pages may be written. All of them when both pointers are null.
struct Writable {
  const std::int32_t* ref_counts =
      nullptr;  ///< [pages]; a page is writable while its count is at most 1
  const std::uint64_t* bits = nullptr;  ///< [pages / 64]; a set bit is a writable page
  /// Pages between the counts, or the bits, of layers that have a pool of their own: page 3 is other memory in each of them.
  /// 0: one count serves all layers.
  std::int64_t layer_stride = 0;
  std::int64_t head_stride = 0;  ///< the same between KV heads

  /// Whether every page may be written.
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool all() const noexcept {
    return ref_counts == nullptr && bits == nullptr;
  }
  /// Place of the count, or the bit, of page `p` of (layer, KV head).
  [[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int64_t index(PageId p,
                                                                LayerId l,
                                                                HeadId h) const noexcept {
    return raw(p) + raw(l) * layer_stride + raw(h) * head_stride;
  }
  /// Whether page `p` of (layer, KV head) may be written.
  [[nodiscard]] KVTRIM_HOST_DEVICE bool operator()(PageId p, LayerId l, HeadId h) const noexcept {
    const std::int64_t i = index(p, l, h);
    if (ref_counts != nullptr && ref_counts[i] > 1) { return false; }
    return bits == nullptr || ((bits[i / 64] >> static_cast<unsigned>(i % 64)) & 1U) != 0U;
  }
};

}  // namespace kvtrim
