// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/detail/check_scores.hpp>

#include <string_view>

namespace kvtrim {

/// Rescales a score by what the row's value is worth after the attention's output projection.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805 (CriticalKV), its second stage
template <class Scores>
struct OutputNorm {
  Scores scores{};        ///< what is rescaled
  float epsilon = 1e-4F;  ///< added to the score first

  /// \throws std::invalid_argument if epsilon is negative or not finite, or a parameter of the scores out of range
  constexpr void check(std::string_view title) const {
    detail::check_epsilon(title, epsilon);
    detail::check_scores(title, scores);
  }
};

/// Parameters of `OutputNormFactor`: none.
///
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805
struct OutputNormFactorParams {};

}  // namespace kvtrim
