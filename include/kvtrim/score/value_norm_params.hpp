// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/detail/check_scores.hpp>

#include <string_view>

namespace kvtrim {

/// Rescales a score by the length of the row's value.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636 (ExpectedAttention's rescale); as a decorator: own
template <class Scores>
struct ValueNorm {
  Scores scores{};  ///< what is rescaled
  float epsilon =
      0;  ///< added to the score first: how much the value counts where the score says nothing

  /// \throws std::invalid_argument if epsilon is negative or not finite, or a parameter of the scores out of range
  constexpr void check(std::string_view title) const {
    detail::check_epsilon(title, epsilon);
    detail::check_scores(title, scores);
  }
};

}  // namespace kvtrim
