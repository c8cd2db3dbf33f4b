// SPDX-License-Identifier: Apache-2.0
#pragma once

// SGLang names tokens by slots: `req_to_token[request, i]` is the slot of row i, in buffers `[slots, H, D]` a layer. With a
// page size above 1 slots come in pages, whose first slots the table of a view names. Requests of a batch are no neighbours
// in `req_to_token`, so their rows are gathered (as SGLang does for its attention), and written back by `SlotTables`.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/cache/table_update.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/engine/tensor_view.hpp>
#include <kvtrim/evict/detail/freed_list.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim::sglang {

/// Page of the slots that padded tokens are written to; never in a table.
inline constexpr std::int32_t dummy_page = 0;

namespace detail {
[[nodiscard]] inline Tensor<4> paged(const Tensor<3>& slots, std::int32_t page_size) {
  if (page_size < 1) {
    throw_invalid_argument("kvtrim::sglang: page_size {} must be at least 1", page_size);
  }
  const auto& [n, h, d] = slots.extents;
  return {slots.data,
          {n / page_size, page_size, h, d},
          {slots.strides[0] * page_size, slots.strides[0], slots.strides[1], slots.strides[2]},
          slots.dtype};
}
}  // namespace detail

/// One layer: keys `[slots, H, D]`, values `[slots, H, Dv]`, the slots of dummy tokens included.
/// \throws as `tensor_view`; std::invalid_argument if the page size is below 1 or above the slots
[[nodiscard]] inline CacheView view(const Tensor<3>& keys,
                                    const Tensor<3>& values,
                                    std::int32_t page_size = 1) {
  return tensor_view(
      detail::paged(keys, page_size), "PNHD", detail::paged(values, page_size), "PNHD");
}

/// MLA: `[slots, 1, C]`, of which the first `value_dim` features are the value.
/// \throws as `view`
[[nodiscard]] inline CacheView mla_view(const Tensor<3>& latents,
                                        std::int32_t value_dim,
                                        std::int32_t page_size = 1) {
  return view(latents, latents.narrow(2, 0, value_dim), page_size);
}

/// `req_to_token`, and which of its rows are the batch.
struct Requests {
  std::int32_t* req_to_token = nullptr;     ///< [requests, max_context] slots
  std::int64_t row_stride = 0;              ///< slots between requests
  std::span<const std::int32_t> rows{};     ///< [sequences] `req_pool_indices`
  std::span<const std::int32_t> lengths{};  ///< [sequences] `seq_lens`
};

/// Entries of the longest request: how wide a gathered table is.
[[nodiscard]] inline std::int32_t max_pages(const Requests& batch,
                                            std::int32_t page_size) noexcept {
  std::int32_t most = 0;
  for (const std::int32_t n : batch.lengths) { most = std::max(most, n); }
  return pages_for(most, page_size);
}

/// Gathers the pages of a batch's rows.
///
/// \param[out] ids  [sequences * max_pages(batch, page_size)] the view refers to it
/// \returns `ok`. `page_out_of_range`: rows of a page do not lie side by side from its first slot on; `length_beyond_table`: a
///   length is negative or beyond `row_stride`. `view` is not changed then
/// \throws std::invalid_argument if `ids` is of another size, or there are not as many lengths as rows
[[nodiscard]] inline Status set_tables(CacheView& view,
                                       const Requests& batch,
                                       std::span<std::int32_t> ids) {
  const std::int32_t size = view.page_size;
  const std::int32_t width = max_pages(batch, size);
  if (batch.rows.size() != batch.lengths.size() ||
      ids.size() != batch.rows.size() * static_cast<std::size_t>(width)) {
    throw_invalid_argument(
        "kvtrim::sglang: {} requests with {} lengths, room for {} ids of {} each",
        batch.rows.size(),
        batch.lengths.size(),
        ids.size(),
        width);
  }
  for (std::size_t s = 0; s < batch.rows.size(); ++s) {
    if (batch.lengths[s] < 0 || batch.lengths[s] > batch.row_stride) {
      return Status::length_beyond_table;
    }
    const std::int32_t* const slots = batch.req_to_token + batch.rows[s] * batch.row_stride;
    std::int32_t* const out = ids.data() + s * static_cast<std::size_t>(width);
    std::fill_n(out, width, dummy_page);
    for (std::int32_t r = 0; r < batch.lengths[s]; ++r) {
      if (r % size == 0) { out[r / size] = slots[r] / size; }
      if (slots[r] != out[r / size] * size + r % size) { return Status::page_out_of_range; }
    }
  }
  kvtrim::set_tables(view,
                     DenseTable{.ids = ids.data(),
                                .lengths = batch.lengths.data(),
                                .sequences = static_cast<std::int32_t>(batch.rows.size()),
                                .row_stride = width,
                                .max_pages = width});
  view.table.null_id = dummy_page;
  return Status::ok;
}

/// A `TableSink`: writes rows back to `req_to_token` and lists the slots that `token_to_kv_pool_allocator.free` takes. Gather
/// anew before the next plan.
///
/// \par Allocation
/// none: the caller provides the memory
class SlotTables {
 public:
  /// \param view          the view that the plan was made from
  /// \param batch         what its tables were gathered from
  /// \param[out] lengths  [sequences] `seq_lens` of the batch's rows, to write
  /// \param ref_counts    the same array as `view.writable.ref_counts`, writable; null: every dropped page is free
  /// \param[out] freed    receives the free slots, page by page; if it is too small, the rest is only counted
  SlotTables(const CacheView& view,
             const Requests& batch,
             std::int32_t* lengths,
             std::int32_t* ref_counts,
             std::span<std::int32_t> freed) noexcept
      : view_(view), batch_(batch), lengths_(lengths), ref_counts_(ref_counts), freed_(freed) {}

  /// Stores one table.
  void update(const TableUpdate& u) noexcept {
    const auto s = static_cast<std::size_t>(raw(u.sequence));
    std::int32_t* const slots = batch_.req_to_token + batch_.rows[s] * batch_.row_stride;
    const std::int32_t rows = u.state.extent();
    for (std::int32_t r = 0; r < rows; ++r) {
      const PageId page = u.k_pages[static_cast<std::size_t>(r / view_.page_size)];
      slots[r] = raw(page) * view_.page_size + r % view_.page_size;
    }
    lengths_[s] = u.state.live_rows;
    if (view_.states != nullptr) { view_.states[view_.table_index(u.sequence, u.table)] = u.state; }
  }
  /// Drops one reference.
  bool release(PageId p) noexcept {
    if (!kvtrim::detail::drop_reference(ref_counts_, raw(p))) { return false; }
    for (std::int32_t i = 0; i < view_.page_size; ++i) { freed_.add(raw(p) * view_.page_size + i); }
    return true;
  }
  /// Slots that became free so far.
  [[nodiscard]] std::span<const std::int32_t> freed() const noexcept { return freed_.all(); }

 private:
  CacheView view_;
  Requests batch_;
  std::int32_t* lengths_;
  std::int32_t* ref_counts_;
  kvtrim::detail::FreedList<std::int32_t> freed_;
};
static_assert(TableSink<SlotTables>);

}  // namespace kvtrim::sglang
