// SPDX-License-Identifier: Apache-2.0
#pragma once

// Logits to the next token. The random numbers are std::mt19937_64 and one conversion of our own, because the standard's
// distributions differ between libraries: the same seed gives the same text everywhere.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace engine {

/// The most likely token.
///
/// \throws std::invalid_argument if there is no logit
/// \throws std::runtime_error if a logit is NaN
/// \par Ties
/// the lower id
/// \par Complexity
/// O(logits); no allocation
[[nodiscard]] inline std::int32_t greedy_token(std::span<const float> logits) {
  if (logits.empty()) throw std::invalid_argument("engine::greedy_token: no logits");
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      throw std::runtime_error("engine: the logit of token " + std::to_string(i) + " is NaN");
    }
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<std::int32_t>(best);
}

/// Natural log of the sum of exponentials, so that `logits[i] - log_sum_exp(logits)` is a log-probability. In double.
[[nodiscard]] inline double log_sum_exp(std::span<const float> logits) {
  const double top = logits[static_cast<std::size_t>(greedy_token(logits))];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - top);
  return top + std::log(sum);
}

/// Draws from the smallest set of most likely tokens whose probabilities reach `top_p`.
///
/// \par Thread-safety
/// one thread
class TopPSampler {
 public:
  struct Params {
    float temperature = 1.0F;  ///< divides the logits; 0 is greedy
    float top_p = 0.95F;       ///< 1 = all tokens
    std::uint64_t seed = 0;
  };

  /// \throws std::invalid_argument if temperature is negative or not finite, or top_p is not in (0, 1]
  explicit TopPSampler(const Params& params) : params_(params), random_(params.seed) {
    if (!(params.temperature >= 0.0F) || !std::isfinite(params.temperature)) {
      throw std::invalid_argument("engine::TopPSampler: temperature is " +
                                  std::to_string(params.temperature) + ", expected 0 or more");
    }
    if (!(params.top_p > 0.0F && params.top_p <= 1.0F)) {
      throw std::invalid_argument("engine::TopPSampler: top_p is " + std::to_string(params.top_p) +
                                  ", expected above 0 and at most 1");
    }
  }

  /// Draws a token.
  ///
  /// \throws std::invalid_argument if there is no logit
  /// \throws std::runtime_error if a logit is NaN, or the highest is infinite
  /// \par Ties
  /// equally likely tokens enter the set in the order of their ids
  [[nodiscard]] std::int32_t operator()(std::span<const float> logits) {
    const std::int32_t top = greedy_token(logits);
    if (params_.temperature == 0.0F) return top;
    const double highest = logits[static_cast<std::size_t>(top)];
    if (!std::isfinite(highest)) {
      throw std::runtime_error("engine: the highest logit, of token " + std::to_string(top) +
                               ", is infinite");
    }
    probabilities_.resize(logits.size());
    double sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      probabilities_[i] = std::exp((double{logits[i]} - highest) / double{params_.temperature});
      sum += probabilities_[i];
    }
    order_.resize(logits.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
      return probability(a) != probability(b) ? probability(a) > probability(b) : a < b;
    });
    double mass = 0;
    std::size_t size = 0;
    while (size < order_.size() && (size == 0 || mass < double{params_.top_p} * sum)) {
      mass += probability(order_[size++]);
    }
    // 53 random bits: a multiple of 2^-53 in [0, 1).
    double left = static_cast<double>(random_() >> 11U) * 0x1p-53 * mass;
    for (std::size_t i = 0; i + 1 < size; ++i) {
      left -= probability(order_[i]);
      if (left < 0) return order_[i];
    }
    return order_[size - 1];
  }

 private:
  [[nodiscard]] double probability(std::int32_t token) const {
    return probabilities_[static_cast<std::size_t>(token)];
  }

  Params params_;
  std::mt19937_64 random_;
  std::vector<double> probabilities_;
  std::vector<std::int32_t> order_;
};

}  // namespace engine
