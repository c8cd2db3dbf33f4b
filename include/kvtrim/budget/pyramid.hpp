// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early layers keep more, deep ones less, in equal steps. The published implementations round each layer on its own, so
// that the layers together keep too much (up to 27 % at small budgets); the exact form hands out what rounding leaves.

#include <kvtrim/core/config.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kvtrim {

/// Whose arithmetic a pyramid follows.
enum class PyramidForm : std::uint8_t {
  exact,    ///< the layers' sum is layers * budget: floors, then largest remainders
  kvpress,  ///< kvpress 0.5.5: rounded by layer; equal budgets where the pyramid does not fit
  kvcache_factory,  ///< KVCache-Factory: steps truncated, so the sum is above layers * budget
};

/// Budgets that fall from the first layer to the last.
struct Pyramid {
  std::int32_t budget = 1024;  ///< rows that a layer keeps on average, the window's included
  std::int32_t window = 32;    ///< rows that every layer keeps
  std::int32_t beta = 20;      ///< the last layer keeps 1/beta of the average
  std::int32_t layers = 1;     ///< layers of the model
  PyramidForm form = PyramidForm::exact;  ///< whose arithmetic

  /// Rows of `live` that layer `layer` keeps, the window's included.
  ///
  /// \returns between 0 and `live`. The exact form never rises from one layer to the next, and its sum over the layers is
  ///   layers * min(budget, live)
  /// \pre `layers >= 1`, `beta >= 1`, `0 <= layer < layers`, `window >= 0`
  /// \par Complexity
  /// O(layers) for the exact form, O(1) otherwise
  /// \par Source
  /// Cai et al., 2024, arXiv:2406.02069 (PyramidKV); differs: in the paper the window is part of the pyramid; here, as in
  /// the published implementations, it comes on top of it
  [[nodiscard]] constexpr std::int32_t rows(std::int32_t live, std::int32_t layer) const noexcept;
};

namespace detail {

// kvpress's budget of a layer, from the rows that a layer keeps on average.
template <class = void>  // for kernels too
[[nodiscard]] KVTRIM_HOST_DEVICE std::int32_t kvpress_pyramid(double n,
                                                              double mean,
                                                              double w,
                                                              std::int32_t beta,
                                                              std::int32_t layers,
                                                              std::int32_t layer) noexcept {
  const double capacity = w + mean;
  double low = (capacity - w) / beta;
  double high = (capacity - w) * 2 - low;
  if (high >= n - w) {
    high = n - w;
    low = (capacity - w) * 2 - high;
  }
  if (!(n >= high && high >= low && low >= w)) {
    return static_cast<std::int32_t>(std::nearbyint(mean));
  }
  const double step = layers > 1 ? (high - low) / (layers - 1) : 0.0;
  return static_cast<std::int32_t>(std::nearbyint(high - layer * step));
}

// KVCache-Factory's budget, in integers throughout.
[[nodiscard]] constexpr std::int32_t kvcache_factory_pyramid(const Pyramid& p,
                                                             std::int32_t live,
                                                             std::int32_t layer) noexcept {
  const std::int32_t share = p.budget - p.window;
  if (live < 2 * share || p.layers == 1) { return p.budget; }
  std::int32_t low = share / p.beta;
  std::int32_t high = 2 * share - low;
  if (high >= live - p.window) {
    high = live - p.window;
    low = 2 * share - high;
  }
  return high - layer * ((high - low) / (p.layers - 1)) + p.window;
}

// A sequence of equal steps with mean `share` and no value above `most`; in units of 1 / (beta * (layers - 1)).
[[nodiscard]] constexpr std::int32_t exact_pyramid(const Pyramid& p,
                                                   std::int32_t share,
                                                   std::int32_t most,
                                                   std::int32_t layer) noexcept {
  if (p.layers == 1) { return share; }
  const std::int64_t steps = p.layers - 1;
  const std::int64_t unit = std::int64_t{p.beta} * steps;
  // High and low end in units of 1 / beta.
  const std::int64_t high = std::min<std::int64_t>(
      std::int64_t{share} * (2 * std::int64_t{p.beta} - 1), std::int64_t{most} * p.beta);
  const std::int64_t low = 2 * std::int64_t{share} * p.beta - high;
  const auto units_of = [&](std::int64_t l) { return high * steps - l * (high - low); };
  std::int64_t left = std::int64_t{p.layers} * share;
  std::int32_t ahead = 0;  // layers that come before this one when the remainder is handed out
  const std::int64_t own = units_of(layer) % unit;
  for (std::int32_t l = 0; l < p.layers; ++l) {
    left -= units_of(l) / unit;
    const std::int64_t rest = units_of(l) % unit;
    ahead += rest > own || (rest == own && l < layer) ? 1 : 0;
  }
  return static_cast<std::int32_t>(units_of(layer) / unit + (ahead < left ? 1 : 0));
}

}  // namespace detail

constexpr std::int32_t Pyramid::rows(std::int32_t live, std::int32_t layer) const noexcept {
  if (live <= budget) { return live; }
  const std::int32_t share = std::max(0, budget - window);
  std::int32_t kept = budget;
  switch (form) {
    case PyramidForm::exact:
      kept = budget < window ? budget
                             : window + detail::exact_pyramid(*this, share, live - window, layer);
      break;
    case PyramidForm::kvpress:
      kept = detail::kvpress_pyramid(live, budget, window, beta, layers, layer);
      break;
    case PyramidForm::kvcache_factory:
      kept = detail::kvcache_factory_pyramid(*this, live, layer);
      break;
  }
  return std::clamp(kept, 0, live);
}

/// Rows that layer `layer` keeps under PyramidKV's budget as kvpress computes it from a fraction. For comparisons only. What
/// is not described here is as in `Pyramid`.
///
/// \param tokens   rows of the prompt
/// \param removed  fraction removed, averaged over the layers
/// \param beta     the deepest layer keeps 1/beta of the average, before the correction for short prompts
/// \returns rows, the window's included; equal budgets where the pyramid does not fit
/// \pre `layers >= 1 && beta > 0`
/// \par Complexity
/// O(1)
/// \par Source
/// kvpress 0.5.5, as written: the sum over the layers is not exact
[[nodiscard]] inline std::int32_t kvpress_pyramid_rows(std::int32_t tokens,
                                                       double removed,
                                                       std::int32_t window,
                                                       std::int32_t beta,
                                                       std::int32_t layers,
                                                       std::int32_t layer) noexcept {
  const double n = tokens;
  return detail::kvpress_pyramid(n, n * (1.0 - removed), window, beta, layers, layer);
}

}  // namespace kvtrim
