// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtrim {

/// Parameters of `ChunkedScorer`: a token score, and how many tokens share it.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a Scorer
/// \par Source
/// Liu et al., 2025, arXiv:2502.00299; the size as kvpress
template <class Scores>
struct Chunked {
  Scores scores{};  ///< of a token
  std::int32_t chunk =
      20;  ///< tokens of a chunk; chunk c is positions c * chunk .. c * chunk + chunk - 1
};

}  // namespace kvtrim
