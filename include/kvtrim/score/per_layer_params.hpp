// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/detail/check_scores.hpp>
#include <kvtrim/score/window_params.hpp>

#include <string_view>

namespace kvtrim {

/// Makes the scores of a layer's KV heads one: all heads then keep the same rows.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104 (TOVA), which averages over all heads; as a decorator: own
template <class Scores>
struct PerLayer {
  Scores scores{};                    ///< of one KV head
  Reduction heads = Reduction::mean;  ///< over the KV heads

  /// \throws std::invalid_argument if a parameter of the scores is out of range
  constexpr void check(std::string_view title) const { detail::check_scores(title, scores); }
};

}  // namespace kvtrim
