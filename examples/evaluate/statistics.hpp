// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a figure from a few prompts can say. Comparisons are paired: two policies answered the same prompts, and only prompts on
// which they differ speak for one of them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

namespace evaluate {

struct Interval {
  double low = 0, high = 1;
};

/// Interval of a share, `right` of `of`; or of a mean of `of` values within [0, 1] whose sum is `right`, for which it is at
/// least as wide as needed: no values within [0, 1] vary more than those that are 0 or 1.
///
/// \param z  quantile of the normal distribution; 1.96 for 95 %
/// \returns within [0, 1]; [0, 1] if `of` is 0
/// \throws std::invalid_argument if not 0 <= right <= of (NaN included)
/// \par Complexity
/// O(1); no allocation
/// \par Source
/// Wilson 1927, "Probable inference, the law of succession, and statistical inference"; as written, without continuity correction
[[nodiscard]] inline Interval wilson(double right, std::int64_t of, double z = 1.959963985) {
  const auto n = static_cast<double>(of);
  if (!(right >= 0 && right <= n))
    throw std::invalid_argument("evaluate::wilson: right is not within 0 and of");
  if (of == 0) return {};
  const double share = right / n;
  const double scale = 1 / (1 + z * z / n);
  const double centre = scale * (share + z * z / (2 * n));
  const double half = scale * z * std::sqrt(share * (1 - share) / n + z * z / (4 * n * n));
  // At the ends the bound is exact; rounding would put it beside.
  return {right == 0 ? 0 : std::max(0.0, centre - half),
          right == n ? 1 : std::min(1.0, centre + half)};
}

/// Two-sided p-value that two policies are equally good.
///
/// \param only_first   prompts that only the first answers
/// \param only_second  prompts that only the second answers
/// \returns probability of a split at least as uneven if each side were equally likely; 1 if they never differ
/// \throws std::invalid_argument if a count is negative
/// \par Complexity
/// O(only_first + only_second); no allocation
/// \par Source
/// McNemar 1947, in its exact (binomial) form
[[nodiscard]] inline double mcnemar(std::int64_t only_first, std::int64_t only_second) {
  if (only_first < 0 || only_second < 0)
    throw std::invalid_argument("evaluate::mcnemar: a count is negative");
  const std::int64_t n = only_first + only_second;
  const std::int64_t least = std::min(only_first, only_second);
  double sum = 0;
  // In logarithms: 2^-n alone is 0 from n = 1075 on.
  for (std::int64_t i = 0; i <= least; ++i) {
    const auto k = static_cast<double>(i), all = static_cast<double>(n);
    sum += std::exp(std::lgamma(all + 1) - std::lgamma(k + 1) - std::lgamma(all - k + 1) -
                    all * std::log(2.0));
  }
  return std::min(1.0, 2 * sum);
}

/// p-values of a family of comparisons, each corrected for the others.
///
/// \param p  within [0, 1]
/// \returns in the order of `p`, each at least as large
/// \throws std::invalid_argument if a value is NaN or outside [0, 1]
/// \par Ties
/// equal values stay equal
/// \par Complexity
/// O(n log n) time, O(n) space
/// \par Source
/// Holm 1979, "A simple sequentially rejective multiple test procedure", as adjusted p-values
[[nodiscard]] inline std::vector<double> holm(std::span<const double> p) {
  if (!std::ranges::all_of(p, [](double x) { return x >= 0 && x <= 1; }))
    throw std::invalid_argument("evaluate::holm: a p-value is not within 0 and 1");
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return p[i]; });
  std::vector<double> adjusted(p.size());
  double most = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    most = std::max(most, std::min(1.0, static_cast<double>(p.size() - i) * p[order[i]]));
    adjusted[order[i]] = most;
  }
  return adjusted;
}

/// A number of a prompt: it counts `weight` times. A share of tokens has the tokens as its weight.
struct Weighted {
  double value = 0;
  double weight = 1;
};

/// The mean over prompts; NaN if the weights sum to 0.
[[nodiscard]] inline double mean(std::span<const Weighted> prompts) {
  double sum = 0, weight = 0;
  for (const Weighted& p : prompts) sum += p.value * p.weight, weight += p.weight;
  return sum / weight;
}

/// Interval of the mean: whole prompts are drawn again, with replacement.
///
/// \param prompts  one value a prompt; not NaN, weights not negative
/// \param share    of the resampled means that lie inside
/// \returns percentiles; the only value twice, if there is one prompt: that interval says nothing
/// \throws std::invalid_argument if there is no prompt, no draw, or share is not within 0 and 1
/// \par Complexity
/// O(draws * n) time, O(draws) space; the same arguments give the same interval
/// \par Source
/// Efron 1979, "Bootstrap methods: another look at the jackknife", percentile intervals
[[nodiscard]] inline Interval bootstrap(std::span<const Weighted> prompts,
                                        std::size_t draws = 2000,
                                        double share = 0.95,
                                        std::uint64_t seed = 1) {
  if (prompts.empty() || draws == 0 || !(share > 0 && share < 1))
    throw std::invalid_argument(
        "evaluate::bootstrap: no prompt, no draw, or share is not within 0 and 1");
  std::mt19937_64 random(seed);
  std::vector<double> means;
  for (std::size_t d = 0; d < draws; ++d) {
    double sum = 0, weight = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      // Not a standard distribution: those differ between libraries.
      const Weighted& p = prompts[random() % prompts.size()];
      sum += p.value * p.weight, weight += p.weight;
    }
    if (weight > 0) means.push_back(sum / weight);
  }
  if (means.empty()) throw std::invalid_argument("evaluate::bootstrap: all weights are 0");
  std::ranges::sort(means);
  const auto at = [&](double q) {
    return means[static_cast<std::size_t>(std::llround(q * static_cast<double>(means.size() - 1)))];
  };
  return {at((1 - share) / 2), at((1 + share) / 2)};
}

}  // namespace evaluate
