// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <cmath>
#include <cstdint>

namespace kvtrim {

/// Rows that layer `layer` keeps under PyramidKV's budget as kvpress computes it: early layers keep more, deep ones less.
///
/// \param tokens   rows of the prompt
/// \param removed  fraction removed, averaged over the layers
/// \param window   rows of the observation window, kept in every layer
/// \param beta     steepness: the deepest layer has 1/beta of the average, before the correction for short prompts
/// \param layer    0..layers-1
/// \returns rows, the window's included; a fallback of equal budgets where the pyramid does not fit
/// \pre `layers >= 1 && beta > 0`
/// \par Complexity
/// O(1)
/// \par Source
/// Cai et al., 2024, arXiv:2406.02069; differs: kvpress 0.5.5's truncations and fallback, which is why the
///   sum over the layers is not exact
[[nodiscard]] inline std::int32_t kvpress_pyramid_rows(std::int32_t tokens,
                                                       double removed,
                                                       std::int32_t window,
                                                       std::int32_t beta,
                                                       std::int32_t layers,
                                                       std::int32_t layer) noexcept {
  const double n = tokens;
  const double w = window;
  const double capacity = w + n * (1.0 - removed);
  double low = (capacity - w) / beta;
  double high = (capacity - w) * 2 - low;
  if (high >= n - w) {
    high = n - w;
    low = (capacity - w) * 2 - high;
  }
  if (!(n >= high && high >= low && low >= w)) {
    return static_cast<std::int32_t>(std::nearbyint(n * (1.0 - removed)));
  }
  const double step = layers > 1 ? (high - low) / (layers - 1) : 0.0;
  return static_cast<std::int32_t>(std::nearbyint(high - layer * step));
}

}  // namespace kvtrim
