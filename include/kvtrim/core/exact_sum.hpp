// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums that do not depend on the order or the grouping of their addends, as those of floats do: a probability becomes an
// integer number of units, integers are added, and the sum becomes a float again by one division. Parts of a sum may
// so lie on several ranks. All steps are correctly rounded operations of IEEE 754 and integers: host and device agree.

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>

#include <bit>
#include <cstdint>
#include <limits>
#include <string_view>

namespace kvtrim {

/// How a score adds up probabilities.
///
/// Policies with exact sums: SnapKVSelector, PyramidKV, AdaKV and CriticalKV over it, ChunkKV, PageSelector by window
/// scores, Tova (softmax, queries and heads); HeavyHitter and PageSelector by accumulated attention (the sums of a step).
/// Other scores (norms, KeyDiff, LagKV, CurKV, RKV, ExpectedAttention, QFilter, surprisal) have floats alone: over ranks
/// only their maxima can be reduced.
enum class Sums : std::uint8_t {
  floating,  ///< floats in one fixed order: fastest
  exact,     ///< integers in any order: what runs over several ranks require
};

/// Units of a probability of 1.
inline constexpr double exact_one = 0x1p40;
/// Addends that 64 bits hold, as each is at most 1.
inline constexpr std::int64_t exact_addends = (std::int64_t{1} << 24) - 1;

/// A probability as units of 2^-40, to the nearest, ties to even.
///
/// The sum of n probabilities is off by at most n * 2^-41: n roundings by half a unit, and integers are added exactly. For
/// n = 131,072 that is 6e-8, an fp32 rounding of 1; for the most addends 7.7e-6.
///
/// \param p  above 1 (an LSE that is too small) counts as 1, below 0 and NaN as 0: no addend is more than `exact_one`
/// \par Complexity
/// O(1), without a branch
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint64_t exact_units(float p) noexcept {
  constexpr std::int32_t infinite = 0x7F80'0000;
  constexpr std::int32_t one = 0x3F80'0000;
  // By the bits and without a comparison, so that compilers make vector instructions of it: positive floats sort like
  // integers, and a shift by 31 makes a mask of a sign.
  const auto bits = std::bit_cast<std::int32_t>(p);
  const std::int32_t positive = bits & ~(bits >> 31);
  const std::int32_t number = positive & ~((infinite - positive) >> 31);
  const std::int32_t above = (one - number) & ((one - number) >> 31);
  const auto bounded = std::bit_cast<float>(number + above);
  // At 2^52 the last bit of a double is 1: the addition rounds, and its bits count the units. The product is exact, so a
  // fused multiply-add changes nothing.
  return std::bit_cast<std::uint64_t>(static_cast<double>(bounded) * exact_one + 0x1p52) -
         std::bit_cast<std::uint64_t>(0x1p52);
}

/// A sum of units, divided by `count`, as a float.
///
/// \param count  1: the sum itself; the number of addends: their mean
/// \pre `count >= 1`
/// \returns within 2^-23 of `units / (2^40 count)`, relative
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float exact_mean(std::uint64_t units,
                                                            std::int64_t count) noexcept {
  return static_cast<float>(static_cast<double>(units) / (static_cast<double>(count) * exact_one));
}

/// What an exponential relative to the maximum is multiplied with to become a probability: 1 / the sum of all of them.
///
/// The largest exponential is 1, so the sum is at least 1 and its relative error at most n * 2^-41 (`exact_units`); the
/// factor and the product add 2^-24 each.
///
/// \param units  sum of the exponentials of all ranks
/// \pre `units > 0`
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float exact_factor(std::uint64_t units) noexcept {
  return static_cast<float>(exact_one / static_cast<double>(units));
}

/// Scores that may be NaN, such as those of a row in the KV heads of a layer: addends that one sum may have.
inline constexpr std::int64_t exact_scores = (std::int64_t{1} << 12) - 1;
/// What a NaN counts in a sum of at most `exact_scores` addends: more than all others together.
inline constexpr std::uint64_t exact_nan = std::uint64_t{1} << 52;

/// As `exact_units`, but a NaN stays one: for sums of at most `exact_scores` addends.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint64_t exact_score_units(float score) noexcept {
  return is_nan(score) ? exact_nan : exact_units(score);
}
/// As `exact_mean`, but NaN if an addend was.
/// \pre the sum has at most `exact_scores` addends, all of `exact_score_units`; `count >= 1`
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float exact_score_mean(std::uint64_t units,
                                                                  std::int64_t count) noexcept {
  return units >= exact_nan ? std::numeric_limits<float>::quiet_NaN() : exact_mean(units, count);
}

/// Whether a sum of so many probabilities fits 64 bits.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool exact_sum_holds(std::int64_t addends) noexcept {
  return addends <= exact_addends;
}

/// Refuses sums that 64 bits may not hold.
///
/// \param who      in whose name
/// \param addends  the most that one sum may have: the rows that a sequence can have, or queries * query heads
/// \throws std::invalid_argument if they are more than `exact_addends`, with both numbers
constexpr void check_exact_sum(std::string_view who, std::int64_t addends) {
  if (!exact_sum_holds(addends)) {
    throw_invalid_argument(
        "{}: an exact sum of {} addends, but 64 bits hold at most {}", who, addends, exact_addends);
  }
}

}  // namespace kvtrim
