// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtrim {

/// Parameters of `RandomScorer`.
///
/// \par Source
/// none: a baseline
struct RandomParams {
  std::uint64_t seed = 0;  ///< another seed, another choice
};

}  // namespace kvtrim
