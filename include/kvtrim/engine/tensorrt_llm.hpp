// SPDX-License-Identifier: Apache-2.0
#pragma once

// TensorRT-LLM's caches. The C++ manager's offsets count pieces of `[H, N, D]`, of which a block has one for K and one for V in
// each layer: the id of K is block * 2 * layers, the id of V one more. A set top bit names the secondary pool, which is other
// memory: such an entry is refused (`page_out_of_range`), bring the block back first.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/engine/tensor_view.hpp>

#include <cstdint>
#include <limits>

namespace kvtrim::tensorrt_llm {

/// What stands in an offset array where there is no block.
inline constexpr std::int32_t no_block = std::numeric_limits<std::int32_t>::max();

/// The C++ manager's primary pool of some layers, `[blocks, layers, 2, H, N, D]`, as its offsets see it.
/// \throws as `tensor_view`; std::invalid_argument if ids are beyond 31 bits
[[nodiscard]] inline CacheView pool_view(const Tensor<6>& pool) {
  const std::int64_t step = 2 * pool.extents[1];
  const std::int64_t ids = pool.extents[0] * step;
  if (ids > std::numeric_limits<std::int32_t>::max() || pool.strides[0] % step != 0 ||
      pool.strides[2] != pool.strides[0] / step) {
    throw_invalid_argument(
        "kvtrim::tensorrt_llm: {} blocks of {} layers at strides of {} and {} elements: offsets "
        "count equal pieces without gaps, within 31 bits",
        pool.extents[0],
        pool.extents[1],
        pool.strides[0],
        pool.strides[1]);
  }
  CacheView view = tensor_view(pool.at(2, 0), "PLHND", pool.at(2, 0), "PLHND");
  view.pages = static_cast<std::int32_t>(ids);
  view.k.page_stride /= step;
  view.v.page_stride /= step;
  view.table.id_step = static_cast<std::int32_t>(step);
  return view;
}

/// Shows `pool_view` a step's offsets `[sequences * beam_width, 2, max_blocks]`: rows of K, each before that of V.
///
/// \param table  its `row_stride` is that between sequences, its `max_pages` is `max_blocks`; beams share pages, so the view
///   shows each sequence's first, and a sequence of several beams is not evicted from
/// \throws std::invalid_argument if a row has no room for V's ids, or as `kvtrim::set_tables`
inline void set_offsets(CacheView& view, const DenseTable& table) {
  if (table.row_stride < 2 * std::int64_t{table.max_pages}) {
    throw_invalid_argument(
        "kvtrim::tensorrt_llm: {} entries of K and as many of V at a stride of {}",
        table.max_pages,
        table.row_stride);
  }
  kvtrim::set_tables(view, table);
  view.table.v_offset = table.max_pages;
  view.table.null_id = no_block;
}

/// The PyTorch manager's pool of one layer, `[blocks, 2, H, N, D]`. Its tables are dense (`kvtrim::set_tables`), one per layer
/// group; lengths are the cached ones.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView view(const Tensor<5>& kv) {
  return tensor_view(kv.at(1, 0), "PHND", kv.at(1, 1), "PHND");
}

using kvtrim::set_tables;

}  // namespace kvtrim::tensorrt_llm
