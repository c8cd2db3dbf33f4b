// SPDX-License-Identifier: Apache-2.0
#pragma once

// FlashInfer's paged caches (`paged_kv_t`): keys and values of any strides, tables in compressed rows. After an eviction,
// `CsrTables` writes indptr, indices and last_page_len; plan FlashInfer's wrappers anew then.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/engine/tensor_view.hpp>

namespace kvtrim::flashinfer {

/// Order of the last three axes.
enum class KvLayout : std::uint8_t { nhd, hnd };

/// Keys and values of one layer, `[pages, N, H, D]` or `[pages, H, N, D]` each.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView view(const Tensor<4>& keys,
                                    const Tensor<4>& values,
                                    KvLayout layout) {
  const char* const axes = layout == KvLayout::nhd ? "PNHD" : "PHND";
  return tensor_view(keys, axes, values, axes);
}

/// One tensor, `[pages, 2, N, H, D]` or `[pages, 2, H, N, D]`.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView view(const Tensor<5>& kv, KvLayout layout) {
  return view(kv.at(1, 0), kv.at(1, 1), layout);
}

using kvtrim::set_tables;

}  // namespace kvtrim::flashinfer
