// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/order_key.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

/// How neighbouring scores are pooled.
enum class Pooling : std::uint8_t {
  average,  ///< centred mean; divides by the kernel at the borders too, as if there were zeros outside
  max,      ///< centred maximum; ignores what is outside
};

/// Pools `in` over a centred window of `kernel` scores, stride 1.
///
/// \param in      scores in position order
/// \param kernel  odd, at least 1; may be longer than `in`
/// \param[out] out  as many scores as `in`; must not overlap it
/// \par Ties
/// irrelevant. NaN: with `average` it spreads to every window that holds it; `max` ignores it if the window holds another score
/// \par Complexity
/// O(scores * kernel) time; no allocation. The addends of each output come in one fixed order
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV's avg_pool1d / max_pool1d with padding kernel / 2), as written
inline void pool(std::span<const float> in,
                 Pooling pooling,
                 std::int32_t kernel,
                 std::span<float> out) noexcept {
  KVTRIM_ASSERT(kernel >= 1 && kernel % 2 == 1 && in.size() == out.size());
  const auto n = static_cast<std::int64_t>(in.size());
  const std::int64_t half = kernel / 2;
  const auto at = [&](std::int64_t i) { return in[static_cast<std::size_t>(i)]; };
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t begin = std::max<std::int64_t>(0, i - half);
    const std::int64_t end = std::min(n, i + half + 1);
    float value = at(begin);
    for (std::int64_t j = begin + 1; j < end; ++j) {
      if (pooling == Pooling::average) {
        value += at(j);
      } else if (order_key(at(j)) > order_key(value)) {
        value = at(j);
      }
    }
    out[static_cast<std::size_t>(i)] =
        pooling == Pooling::average ? value / static_cast<float>(kernel) : value;
  }
}

}  // namespace kvtrim
