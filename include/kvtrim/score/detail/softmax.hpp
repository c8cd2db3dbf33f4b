// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace kvtrim::detail {

/// Softmax in double over those of `n` rows that take part: calls f(i, probability) for each of them, ascending.
///
/// \param takes_part  f(i) -> bool
/// \param logit       f(i) -> double
/// \returns false, without a call, if one of their logits is not finite
template <class TakesPart, class Logit, class F>
bool for_each_probability(std::size_t n,
                          const TakesPart& takes_part,
                          const Logit& logit,
                          F&& f) noexcept {
  double maximum = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < n; ++i) {
    if (!takes_part(i)) { continue; }
    if (!std::isfinite(logit(i))) { return false; }
    maximum = std::max(maximum, logit(i));
  }
  const auto exponential = [&](std::size_t i) { return std::exp(logit(i) - maximum); };
  double sum = 0;
  for (std::size_t i = 0; i < n; ++i) { sum += takes_part(i) ? exponential(i) : 0.0; }
  for (std::size_t i = 0; i < n; ++i) {
    if (takes_part(i)) { f(i, exponential(i) / sum); }
  }
  return true;
}

}  // namespace kvtrim::detail
