// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tables in compressed rows can be written only when all of them are known: a row that became shorter moves all behind it.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/evict/detail/freed_list.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// A ready-made `TableSink`: writes tables in compressed rows (FlashInfer) and collects the pages that became free. `update`
/// shortens rows where they lie; `finish` closes the gaps and writes `indptr`.
///
/// \par Allocation
/// none: the caller provides the memory
/// \par Complexity
/// O(entries) in `finish`
class CsrTables {
 public:
  /// \param view           the view that the plan was made from: its table is CSR, with one id for K and V and no left padding
  /// \param indptr         the same array as `view.table.indptr`, writable
  /// \param indices        the same array as `view.table.ids`, writable
  /// \param last_page_len  the same array as `view.last_page_len`, writable
  /// \param ref_counts     the same array as `view.writable.ref_counts`, writable; null: every dropped page is free
  /// \param counts         [table rows] scratch
  /// \param[out] freed     receives the free pages, tail first per table; if it is too small, the rest is only counted
  CsrTables(const CacheView& view,
            std::int32_t* indptr,
            std::int32_t* indices,
            std::int32_t* last_page_len,
            std::int32_t* ref_counts,
            std::span<std::int32_t> counts,
            std::span<PageId> freed) noexcept
      : view_(view),
        indptr_(indptr),
        indices_(indices),
        last_page_len_(last_page_len),
        ref_counts_(ref_counts),
        counts_(counts),
        freed_(freed) {
    KVTRIM_ASSERT(view.table.indptr == indptr && view.table.v_offset == 0);
    KVTRIM_ASSERT(view.first_rows == nullptr && "the length of a padded table is not its pages'");
    for (std::size_t r = 0; r < counts_.size(); ++r) { counts_[r] = indptr_[r + 1] - indptr_[r]; }
  }

  /// Stores one table, at its old place.
  void update(const TableUpdate& u) noexcept {
    const std::int64_t r = view_.table.rows(u.sequence, u.layer, u.head);
    KVTRIM_ASSERT(static_cast<std::size_t>(r) < counts_.size());
    std::int32_t* const entries = indices_ + indptr_[r];
    // Ascending, and no entry moves up: none is overwritten before it is read.
    for (std::size_t e = 0; e < u.k_pages.size(); ++e) {
      const std::int32_t source = e < u.sources.size() ? u.sources[e] : -1;
      const bool same = source >= 0 && view_.table.page(entries[source]) == u.k_pages[e];
      entries[e] = same ? entries[source] : raw(u.k_pages[e]);
    }
    counts_[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(u.k_pages.size());
    const std::int32_t live = u.state.live_rows;
    last_page_len_[r] = live == 0 ? 0 : (live - 1) % view_.page_size + 1;
    if (view_.states != nullptr) { view_.states[view_.table_index(u.sequence, u.table)] = u.state; }
  }
  /// Closes the gaps between the rows.
  void finish() noexcept {
    std::int32_t end = counts_.empty() ? 0 : indptr_[0];
    std::int32_t begin = end;
    for (std::size_t r = 0; r < counts_.size(); ++r) {
      const std::int32_t next = indptr_[r + 1];
      if (begin != end) { std::copy_n(indices_ + begin, counts_[r], indices_ + end); }
      begin = next;
      end += counts_[r];
      indptr_[r + 1] = end;
    }
  }
  /// Drops one reference.
  bool release(const ReleasedPage& p) noexcept {
    if (!detail::drop_reference(ref_counts_, view_.writable.index(p.page, p.layer, p.head))) {
      return false;
    }
    freed_.add(p.page);
    return true;
  }
  /// Pages that became free so far.
  [[nodiscard]] std::span<const PageId> freed() const noexcept { return freed_.all(); }

 private:
  CacheView view_;
  std::int32_t* indptr_;
  std::int32_t* indices_;
  std::int32_t* last_page_len_;
  std::int32_t* ref_counts_;
  std::span<std::int32_t> counts_;
  detail::FreedList<PageId> freed_;
};
static_assert(TableSink<CsrTables>);

}  // namespace kvtrim
