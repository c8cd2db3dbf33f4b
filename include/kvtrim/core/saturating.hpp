// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sizes are products of extents that a caller gives. Beyond 64 bits they would wrap around and look small, so they stop at
// the largest number: no memory is that large, and whoever is asked for it says so.

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace kvtrim {

/// What a product or sum beyond 64 bits is.
inline constexpr std::int64_t too_large = std::numeric_limits<std::int64_t>::max();

/// Product of numbers that are not negative; at most `too_large`.
[[nodiscard]] constexpr std::int64_t saturated_product(
    std::initializer_list<std::int64_t> factors) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t x : factors) {
    if (x == 0) { return 0; }
    product = product > too_large / x ? too_large : product * x;
  }
  return product;
}

/// Sum of numbers that are not negative; at most `too_large`.
[[nodiscard]] constexpr std::int64_t saturated_sum(
    std::initializer_list<std::int64_t> terms) noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t x : terms) { sum = sum > too_large - x ? too_large : sum + x; }
  return sum;
}

}  // namespace kvtrim
