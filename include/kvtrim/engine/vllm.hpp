// SPDX-License-Identifier: Apache-2.0
#pragma once

// vLLM's caches. Its tensors are logical: strides tell NHD from HND, and the six physical orders of packed caches, apart.
// After an eviction, `DenseTables` over the block table, seq_lens and ref counts writes what the block pool wants.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/engine/tensor_view.hpp>

#include <cstdint>

namespace kvtrim::vllm {

/// The block that holds nothing: what stands in a block table where there is none.
inline constexpr std::int32_t null_block = 0;

/// PagedAttention (V0, and forks): keys `[blocks, H, D/x, N, x]`, values `[blocks, H, D, N]`. No row is one run of bytes, so
/// reading and moving is slower.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView legacy_view(const Tensor<5>& keys, const Tensor<4>& values) {
  return tensor_view(keys, "PHDNx", values, "PHDN");
}

/// FlashAttention: `[2, blocks, N, H, D]`.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView split_view(const Tensor<5>& kv) {
  return tensor_view(kv.at(0, 0), "PNHD", kv.at(0, 1), "PNHD");
}

/// FlashInfer, Triton: `[blocks, 2, N, H, D]`, as NHD or HND.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView joined_view(const Tensor<5>& kv) {
  return tensor_view(kv.at(1, 0), "PNHD", kv.at(1, 1), "PNHD");
}

/// One tensor for all layers, `[L, blocks, H, N, C]`: a row's key, then its value `value_first` elements behind it. Where each
/// has its scale behind it, that is beyond the key (see `set_scales_in_rows`).
/// \throws as `tensor_view`; std::invalid_argument if C has no room for both
[[nodiscard]] inline CacheView packed_view(const Tensor<5>& kv,
                                           std::int32_t key_dim,
                                           std::int32_t value_dim,
                                           std::int32_t value_first) {
  return tensor_view(
      kv.narrow(4, 0, key_dim), "LPHND", kv.narrow(4, value_first, value_dim), "LPHND");
}
/// The same without anything between key and value.
[[nodiscard]] inline CacheView packed_view(const Tensor<5>& kv, std::int32_t key_dim) {
  return packed_view(kv, key_dim, static_cast<std::int32_t>(kv.extents[4]) - key_dim, key_dim);
}

/// MLA: one latent a token, `[blocks, N, C]`, whose first `value_dim` features are the value. It moves once.
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView mla_view(const Tensor<3>& latents, std::int32_t value_dim) {
  return tensor_view(latents, "PND", latents.narrow(2, 0, value_dim), "PND");
}

/// Says that each row's fp32 scale lies right behind its elements (`fp8_per_token_head`, `int8_per_token_head`): it is read, and
/// moves, with the row. The extents of the view's keys and values are those without it.
inline void set_scales_in_rows(CacheView& view) noexcept {
  view.k.scales.in_row = view.k.head_dim * element_bytes(view.k.dtype);
  view.v.scales.in_row = view.v.head_dim * element_bytes(view.v.dtype);
}

/// Shows `view` a step's block table `[sequences, row_stride]` and `seq_lens`.
/// \throws as `kvtrim::set_tables`
inline void set_tables(CacheView& view, const DenseTable& table) {
  kvtrim::set_tables(view, table);
  view.table.null_id = null_block;
}

}  // namespace kvtrim::vllm
