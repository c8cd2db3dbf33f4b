// SPDX-License-Identifier: Apache-2.0
#pragma once

// A radix select: histograms find the key of the last row that stays, and one more pass writes the rows in order. No
// branch depends on a key, so the time hardly depends on the values. A quickselect's does (all-equal and sorted scores
// are its bad cases), and so did a first version of this one (a branch on the digit cost 5 ns per key on two random values).

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvtrim {

namespace detail {

// The lowest of the `k` highest keys, and how many keys equal to it are among the `k`.
struct Threshold {
  std::uint32_t key = 0;
  std::int32_t equal = 0;
};

struct RadixDigit {
  std::uint32_t digit = 0;
  std::int32_t left = 0;
};

// Digit of the k-th highest key, and how much of k is left within that digit.
template <unsigned Bits>
[[nodiscard]] constexpr RadixDigit pick_digit(const std::array<std::int32_t, (1U << Bits)>& counts,
                                              std::int32_t k) noexcept {
  std::uint32_t digit = (1U << Bits) - 1U;
  while (digit > 0 && counts[digit] < k) { k -= counts[digit--]; }
  return {digit, k};
}

// Counts digit (key >> Shift) of the keys whose higher digits are `prefix`. Two tables are used alternately: otherwise runs
// of equal keys would wait for their own counter.
template <unsigned Shift, unsigned Bits>
[[nodiscard]] std::array<std::int32_t, (1U << Bits)> count_digits(
    std::span<const std::uint32_t> keys, std::uint32_t prefix) noexcept {
  constexpr std::uint32_t mask = (1U << Bits) - 1U;
  std::array<std::int32_t, (1U << Bits)> even{};
  std::array<std::int32_t, (1U << Bits)> odd{};
  const auto matches = [&](std::uint32_t key) {
    if constexpr (Shift + Bits >= 32U) {
      return 1;
    } else {
      return key >> (Shift + Bits) == prefix ? 1 : 0;
    }
  };
  std::size_t i = 0;
  for (; i + 1 < keys.size(); i += 2) {
    even[(keys[i] >> Shift) & mask] += matches(keys[i]);
    odd[(keys[i + 1] >> Shift) & mask] += matches(keys[i + 1]);
  }
  if (i < keys.size()) { even[(keys[i] >> Shift) & mask] += matches(keys[i]); }
  for (std::size_t d = 0; d < even.size(); ++d) { even[d] += odd[d]; }
  return even;
}

// `scratch`: one word per key that is wanted; overwritten. 11 + 11 + 10 bits: the tables stay in the first-level cache.
[[nodiscard]] inline Threshold threshold_of(std::span<const std::uint32_t> keys,
                                            std::span<std::int32_t> scratch) noexcept {
  const auto k = static_cast<std::int32_t>(scratch.size());
  KVTRIM_ASSERT(k >= 1 && static_cast<std::size_t>(k) <= keys.size());
  const auto high_counts = count_digits<21, 11>(keys, 0);
  const auto high = pick_digit<11>(high_counts, k);
  const auto finish = [&](auto rest) {
    const auto middle = pick_digit<11>(count_digits<10, 11>(rest, high.digit), high.left);
    const std::uint32_t prefix = high.digit << 11U | middle.digit;
    const auto low = pick_digit<10>(count_digits<0, 10>(rest, prefix), middle.left);
    return Threshold{prefix << 10U | low.digit, low.left};
  };
  const std::int32_t same = high_counts[high.digit];
  if (same >= k) { return finish(keys); }
  // Usually few keys share the first digit; only those are looked at again. One more word is written than there are such keys.
  std::int32_t n = 0;
  for (const std::uint32_t key : keys) {
    scratch[static_cast<std::size_t>(n)] = static_cast<std::int32_t>(key);
    n += key >> 21U == high.digit ? 1 : 0;
  }
  return finish(std::span(reinterpret_cast<const std::uint32_t*>(scratch.data()),
                          static_cast<std::size_t>(same)));
}

}  // namespace detail

/// Writes the indices of the `kept.size()` highest keys, ascending.
///
/// \param keys  order keys (`order_key`), in position order
/// \param[out] kept  indices into `keys`; not more than there are keys
/// \par Ties
/// the lower index, which is the lower position, is kept. NaN: the lowest class, by `order_key`
/// \par Complexity
/// O(keys) time whatever the values; no allocation
inline void top_k(std::span<const std::uint32_t> keys, std::span<std::int32_t> kept) noexcept {
  KVTRIM_ASSERT(kept.size() <= keys.size());
  if (kept.empty()) { return; }
  if (kept.size() == keys.size()) {
    for (std::size_t i = 0; i < kept.size(); ++i) { kept[i] = static_cast<std::int32_t>(i); }
    return;
  }
  const detail::Threshold threshold = detail::threshold_of(keys, kept);
  // Up to the last tie that stays, every key that reaches the threshold stays; after it, only keys above the threshold.
  std::int32_t* to = kept.data();
  std::int32_t* const end = to + kept.size();
  std::size_t i = 0;
  for (std::int32_t equal = threshold.equal; equal > 0; ++i) {
    *to = static_cast<std::int32_t>(i);  // overwritten unless it stays: no branch to mispredict
    to += keys[i] >= threshold.key ? 1 : 0;
    equal -= keys[i] == threshold.key ? 1 : 0;
  }
  for (; to < end; ++i) {
    *to = static_cast<std::int32_t>(i);
    to += keys[i] > threshold.key ? 1 : 0;
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
