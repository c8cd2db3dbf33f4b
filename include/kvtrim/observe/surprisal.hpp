// SPDX-License-Identifier: Apache-2.0
#pragma once

// Before the question is known, attention cannot say what it will be about. What the model could not have guessed, it
// cannot reconstruct either: those tokens are worth their rows. The logits of the prompt's steps are all that is needed.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Surprisal of a token: minus the natural logarithm of its probability under the logits of the token before it.
///
/// A token score, the same for all layers and KV heads: pass it as `Observation::scores` with a layer stride and a head
/// stride of 0, smoothed by `pool` over its neighbours. The first token of a sequence has none; give it 0.
///
/// \param logits  [vocabulary]
/// \param token   the token that came
/// \returns at least 0; NaN if a logit is NaN or the highest is infinite
/// \pre `token` is within the vocabulary
/// \par Complexity
/// O(vocabulary) time; no allocation
/// \par Source
/// Shannon, 1948; as a reason to keep a token: ours, measured in bench/README.md
[[nodiscard]] inline float surprisal(std::span<const float> logits, std::int32_t token) noexcept {
  KVTRIM_ASSERT(token >= 0 && static_cast<std::size_t>(token) < logits.size());
  const Eigen::Map<const Eigen::ArrayXf> row(logits.data(),
                                             static_cast<Eigen::Index>(logits.size()));
  // Neither Eigen's maximum nor its exponential is sure to pass on a NaN.
  bool nan = false;
  for (const float x : logits) { nan |= is_nan(x); }
  const float top = row.maxCoeff();
  if (nan || !(std::abs(top) <= std::numeric_limits<float>::max())) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  // Sums of 4,096 terms in float, their sum in double: a vocabulary of 2^17 loses nothing.
  double sum = 0;
  for (Eigen::Index begin = 0; begin < row.size(); begin += 4096) {
    const Eigen::Index n = row.size() - begin < 4096 ? row.size() - begin : 4096;
    sum += static_cast<double>((row.segment(begin, n) - top).exp().sum());
  }
  return static_cast<float>(static_cast<double>(top) + std::log(sum) -
                            static_cast<double>(row[token]));
}

}  // namespace kvtrim
