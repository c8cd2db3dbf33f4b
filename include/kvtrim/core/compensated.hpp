// SPDX-License-Identifier: Apache-2.0
#pragma once

// A running fp32 sum and its rounding error. Plain fp32 stops growing at 2^24 unit steps, bf16 at 256. The error goes
// back into the sum after each add: kept apart (Neumaier's sum), it would itself be a plain fp32 sum, and a million times
// 0.3 would be off by 5e-5. Never compile this with -ffast-math: it would cancel the compensation to zero.

#include <kvtrim/core/types.hpp>

namespace kvtrim {

/// Adds `x` to the pair (`sum`, `compensation`), whose value is `sum + compensation`.
///
/// \par Complexity
/// O(1). For 1,000,000 non-negative addends in any order, `sum + compensation` has a relative error below 1e-6.
/// \par Source
/// T. J. Dekker, 1971, Numer. Math. 18 (a double-length sum, renormalised); the branch-free two-sum of Knuth
KVTRIM_HOST_DEVICE constexpr void add_compensated(float& sum,
                                                  float& compensation,
                                                  float x) noexcept {
  const float total = sum + x;
  const float part = total - sum;
  const float rest = compensation + ((sum - (total - part)) + (x - part));
  sum = total + rest;
  compensation = rest - (sum - total);
}

/// Multiplies the pair (`sum`, `compensation`) by `factor`; the product is rounded to the pair, not to fp32.
///
/// Plain fp32 products are not good enough: a million steps with factor 0.9999 are off by 2e-4.
///
/// \par Complexity
/// O(1)
KVTRIM_HOST_DEVICE constexpr void scale_compensated(float& sum,
                                                    float& compensation,
                                                    double factor) noexcept {
  const double value = (static_cast<double>(sum) + static_cast<double>(compensation)) * factor;
  sum = static_cast<float>(value);
  compensation = static_cast<float>(value - static_cast<double>(sum));
}

}  // namespace kvtrim
