// SPDX-License-Identifier: Apache-2.0
#pragma once

// A radix select: two histograms find the key of the last row that stays, one more pass writes the rows in order.
// The time does not depend on the values, which a quickselect's does (all-equal and sorted scores are its bad cases).

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

namespace detail {

// Of the `k` highest keys: the lowest one, and how many keys equal to it belong to the `k`.
struct Threshold {
  std::uint32_t key = 0;
  std::int32_t equal = 0;
};

template <unsigned Bits>
struct RadixDigit {
  std::uint32_t digit = 0;
  std::int32_t left = 0;
};

// Digit of the k-th highest count, and what of k is left inside it.
template <unsigned Bits>
[[nodiscard]] constexpr RadixDigit<Bits> pick_digit(
    const std::array<std::int32_t, (1U << Bits)>& counts, std::int32_t k) noexcept {
  std::uint32_t digit = (1U << Bits) - 1U;
  while (digit > 0 && counts[digit] < k) { k -= counts[digit--]; }
  return {digit, k};
}

[[nodiscard]] inline Threshold threshold_of(std::span<const std::uint32_t> keys,
                                            std::int32_t k) noexcept {
  KVTRIM_ASSERT(k >= 1 && static_cast<std::size_t>(k) <= keys.size());
  // 11 + 11 + 10 bits: each table of counts stays in the first-level cache.
  std::array<std::int32_t, 2048> counts{};
  for (const std::uint32_t key : keys) { ++counts[key >> 21U]; }
  const auto high = pick_digit<11>(counts, k);
  counts.fill(0);
  for (const std::uint32_t key : keys) {
    if (key >> 21U == high.digit) { ++counts[(key >> 10U) & 0x7FFU]; }
  }
  const auto middle = pick_digit<11>(counts, high.left);
  const std::uint32_t prefix = high.digit << 11U | middle.digit;
  std::array<std::int32_t, 1024> low_counts{};
  for (const std::uint32_t key : keys) {
    if (key >> 10U == prefix) { ++low_counts[key & 0x3FFU]; }
  }
  const auto low = pick_digit<10>(low_counts, middle.left);
  return {prefix << 10U | low.digit, low.left};
}

}  // namespace detail

/// Writes the indices of the `kept.size()` highest keys, ascending.
///
/// \param keys  order keys (`order_key`), in position order
/// \param[out] kept  indices into `keys`; not more than there are keys
/// \par Ties
/// the lower index, which is the lower position, is kept. NaN: by `order_key` the lowest class
/// \par Complexity
/// O(keys) time whatever the values; no allocation
inline void top_k(std::span<const std::uint32_t> keys, std::span<std::int32_t> kept) noexcept {
  KVTRIM_ASSERT(kept.size() <= keys.size());
  if (kept.empty()) { return; }
  if (kept.size() == keys.size()) {
    for (std::size_t i = 0; i < kept.size(); ++i) { kept[i] = static_cast<std::int32_t>(i); }
    return;
  }
  const detail::Threshold threshold =
      detail::threshold_of(keys, static_cast<std::int32_t>(kept.size()));
  std::int32_t equal = threshold.equal;
  std::size_t n = 0;
  for (std::size_t i = 0; n < kept.size(); ++i) {
    const bool tied = keys[i] == threshold.key && equal > 0;
    kept[n] = static_cast<std::int32_t>(i);  // overwritten unless it stays: no branch to mispredict
    n += keys[i] > threshold.key || tied ? 1U : 0U;
    equal -= tied ? 1 : 0;
  }
}

/// Writes the order keys of `scores`.
///
/// \param[out] keys [scores.size()]
/// \returns how many scores are NaN
/// \par Complexity
/// O(scores), no branch
inline std::int64_t order_keys(std::span<const float> scores,
                               std::span<std::uint32_t> keys) noexcept {
  KVTRIM_ASSERT(keys.size() == scores.size());
  std::uint32_t nan = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    keys[i] = order_key(scores[i]);
    nan += is_nan(scores[i]) ? 1U : 0U;
  }
  return static_cast<std::int64_t>(nan);
}

}  // namespace kvtrim
