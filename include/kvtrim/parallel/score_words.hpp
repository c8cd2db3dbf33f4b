// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores that heads (or layers) of several ranks have in common, as words whose maximum is that of the scores.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// A score as a word that sorts like it; NaN above all others, so that a maximum passes it on, as heads of one layer do on
/// one rank (`PerLayerScorer`).
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint64_t word_of_score(float score) noexcept {
  return is_nan(score) ? std::uint64_t{1} << 32U : std::uint64_t{order_key(score)};
}

/// The score back.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float score_of_word(std::uint64_t word) noexcept {
  return word >> 32U != 0 ? std::numeric_limits<float>::quiet_NaN()
                          : score_of_key(static_cast<std::uint32_t>(word));
}

/// Writes scores as words for a round of maxima (`OneRound`).
///
/// \param[out] words  as many
inline void score_words(std::span<const float> scores, std::span<std::uint64_t> words) noexcept {
  KVTRIM_ASSERT(scores.size() == words.size());
  for (std::size_t i = 0; i < scores.size(); ++i) { words[i] = word_of_score(scores[i]); }
}

/// Reads the scores back: the maxima of all ranks' scores, so that a plan by them (`Observation::scores`, `page_scores`)
/// chooses the same on every rank.
///
/// \param[out] scores  as many
inline void scores_of_words(std::span<const std::uint64_t> words,
                            std::span<float> scores) noexcept {
  KVTRIM_ASSERT(scores.size() == words.size());
  for (std::size_t i = 0; i < words.size(); ++i) { scores[i] = score_of_word(words[i]); }
}

}  // namespace kvtrim
