// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dense caches, as Hugging Face and mlx hold them: `[B, H, S, D]` a layer, a sequence of the batch is one page of S rows. Rows
// are packed to the front (`stable_pack`) and the tensor is then sliced to the longest sequence, or slots are overwritten (a
// ring; needs states and positions). Pages cannot be dropped: a sequence has one.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/engine/tensor_view.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

namespace kvtrim::dense {

/// One layer: keys `[B, H, S, D]`, values `[B, H, S, Dv]`.
///
/// \throws as `tensor_view`
[[nodiscard]] inline CacheView view(const Tensor<4>& keys, const Tensor<4>& values) {
  return tensor_view(keys, "PHND", values, "PHND");
}

/// Shows `view` the rows in use.
///
/// \param[out] ids     [B] the view refers to it: sequence b lies in page b
/// \param lengths      [B] rows of each sequence, padding left out
/// \param left_padding [B] rows before them; null: none
/// \throws std::invalid_argument if `ids` is of another size than the batch
inline void set_batch(CacheView& view,
                      std::span<std::int32_t> ids,
                      const std::int32_t* lengths,
                      const std::int32_t* left_padding = nullptr) {
  if (ids.size() != static_cast<std::size_t>(view.pages)) {
    throw_invalid_argument(
        "kvtrim::dense: room for {} ids, but the batch has {} sequences", ids.size(), view.pages);
  }
  std::iota(ids.begin(), ids.end(), 0);
  set_tables(view,
             DenseTable{.ids = ids.data(),
                        .lengths = lengths,
                        .sequences = view.pages,
                        .row_stride = 1,
                        .max_pages = 1});
  view.first_rows = left_padding;
}

/// Rows to slice the tensors to after a commit: padding and rows of the longest sequence.
[[nodiscard]] inline std::int32_t extent(std::span<const std::int32_t> lengths,
                                         std::span<const std::int32_t> left_padding = {}) noexcept {
  std::int32_t most = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    most = std::max(most, lengths[b] + (left_padding.empty() ? 0 : left_padding[b]));
  }
  return most;
}

}  // namespace kvtrim::dense
