// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Where the maximum over the query heads of a KV head is taken.
enum class RKVGroup : std::uint8_t {
  probabilities,  ///< of each head's own softmax
  logits,         ///< before a common softmax, which a head with large logits dominates
};

/// Parameters of `RKVScorer`.
///
/// \par Source
/// Cai et al., 2025, arXiv:2505.24133
struct RKVParams {
  static constexpr std::string_view name = "rkv";
  static constexpr std::string_view title = "kvtrim::RKV";
  static constexpr Protection protects{0, 8};

  std::int32_t window = 8;  ///< last rows: their queries vote, and they have no attention score
  std::int32_t kernel = 7;  ///< max-pooling over neighbouring columns, odd
  float lambda = 0.1F;      ///< weight of attention; that of redundancy is 1 - lambda
  float threshold = 0.5F;   ///< cosine above which two keys are alike
  RKVGroup group = RKVGroup::probabilities;  ///< where query heads are reduced

  /// What the authors' code does where it differs from their paper: lambda 0.07, maximum over logits.
  [[nodiscard]] static constexpr RKVParams authors_code() noexcept {
    return {.lambda = 0.07F, .group = RKVGroup::logits};
  }

  /// \throws std::invalid_argument if the window is below 1, the kernel not odd, lambda or threshold not within 0 and 1, or
  ///   the group not one of `RKVGroup`
  constexpr void check(std::string_view who) const {
    detail::check_sizes(
        who,
        detail::Sizes{{"scores.window", window, 1},
                      {.name = "scores.kernel", .value = kernel, .least = 1, .odd = true}});
    detail::check_share(who, "scores.lambda", lambda);
    detail::check_share(who, "scores.threshold", threshold);
    if (group > RKVGroup::logits) {
      throw_invalid_argument("{}: scores.group {} is none of RKVGroup", who, group);
    }
  }
  /// The window's queries, and positions: of rows that are alike, the newest counts.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.window = window, .positions = true};
  }
};
static_assert(ScoreParams<RKVParams>);

/// Keeps the rows that the last queries attend to and that no other row repeats. The last `recent` rows always stay.
///
/// Made for long reasoning: call it at regular intervals while generating (the authors: every 128 steps), with the last
/// `scores.window` queries (`QueryRing`). Change `recent` along with `scores.window`.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `RKVScorer`
/// \par Source
/// Cai et al., 2025, arXiv:2505.24133, with the paper's lambda; `RKVParams::authors_code` has what the authors' code does
/// instead; differs: see `RKVScorer`
using RKV = TopRows<RKVParams>;
static_assert(Policy<RKV>);

}  // namespace kvtrim
