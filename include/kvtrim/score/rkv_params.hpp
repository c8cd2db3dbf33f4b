// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtrim {

/// Where the maximum over the query heads of a KV head is taken.
enum class RKVGroup : std::uint8_t {
  probabilities,  ///< of each head's own softmax
  logits,         ///< before one softmax, which a head with large logits decides alone
};

/// Parameters of `RKVScorer`.
///
/// \par Source
/// Cai et al., 2025, arXiv:2505.24133
struct RKVParams {
  std::int32_t window = 8;  ///< last rows, whose queries vote and which have no attention score
  std::int32_t kernel = 7;  ///< max-pooling over neighbouring columns, odd
  float lambda = 0.1F;      ///< weight of attention; 1 - lambda is that of redundancy
  float threshold = 0.5F;   ///< cosine above which two keys are alike
  RKVGroup group = RKVGroup::probabilities;  ///< where query heads meet

  /// What the authors' code does where it differs from their paper: lambda 0.07, maximum over logits.
  [[nodiscard]] static constexpr RKVParams authors_code() noexcept {
    return {.lambda = 0.07F, .group = RKVGroup::logits};
  }
};

}  // namespace kvtrim
