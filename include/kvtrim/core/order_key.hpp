// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only order of scores. Integer operations alone, so that host, device and every optimisation level agree
// (with -ffast-math, float comparisons would ignore NaN).

#include <kvtrim/core/types.hpp>

#include <bit>
#include <cstdint>

namespace kvtrim {

/// Maps a score to an integer that sorts like the score: higher is kept.
///
/// \param score any float
/// \returns a key; NaN of either sign and -inf share the lowest class (0), -0 equals +0, +inf is highest
/// \par Complexity
/// O(1), no branch on the value
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint32_t order_key(float score) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(score);
  const std::uint32_t magnitude = bits & 0x7FFF'FFFFU;
  const bool negative = (bits >> 31U) != 0U;
  const bool lowest = magnitude > 0x7F80'0000U || (negative && magnitude == 0x7F80'0000U);
  const std::uint32_t key =
      negative && magnitude != 0U ? 0x8000'0000U - magnitude : 0x8000'0000U + magnitude;
  return lowest ? 0U : key;
}

/// The score of a key: `order_key` of it is `key` again.
///
/// \returns -inf for 0, which NaN has too
/// \pre `key` came from `order_key`
/// \par Complexity
/// O(1)
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float score_of_key(std::uint32_t key) noexcept {
  return std::bit_cast<float>(key == 0U            ? 0xFF80'0000U
                              : key < 0x8000'0000U ? 0x8000'0000U | (0x8000'0000U - key)
                                                   : key - 0x8000'0000U);
}

/// Whether `score` is NaN, judged by its bits.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool is_nan(float score) noexcept {
  return (std::bit_cast<std::uint32_t>(score) & 0x7FFF'FFFFU) > 0x7F80'0000U;
}

/// Key that decides between rows: by score first, then the lower position among equals.
///
/// \returns `order_key(score) << 32 | ~position`; unique among rows of one head, so no selection depends on input order
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint64_t row_key(float score,
                                                                 Position position) noexcept {
  return (static_cast<std::uint64_t>(order_key(score)) << 32U) |
         static_cast<std::uint64_t>(~static_cast<std::uint32_t>(raw(position)));
}

}  // namespace kvtrim
