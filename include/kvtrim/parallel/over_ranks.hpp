// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which policies have a meaning over ranks, and why the others have none. README.md of this folder shows the same as a table.

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/agreement.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <string_view>
#include <type_traits>

namespace kvtrim {

namespace detail {

inline constexpr std::string_view float_sums =
    "it adds scores of several ranks in floats, whose sum depends on the order: take sums = exact, "
    "or the maximum over heads";

// Scores of rows that are on several ranks.
template <class S>
[[nodiscard]] constexpr std::string_view why_not_over_rows(const S& scores) noexcept {
  constexpr bool by_itself = std::is_same_v<S, NoScores> || std::is_same_v<S, ExternalParams> ||
                             std::is_same_v<S, KeyNormParams> || std::is_same_v<S, QFilterParams> ||
                             std::is_same_v<S, RandomParams> || std::is_same_v<S, AccumulateParams>;
  if constexpr (by_itself) {
    return {};
  } else if constexpr (std::is_same_v<S, WindowParams> || std::is_same_v<S, TovaParams> ||
                       requires { scores.chunk; }) {
    return sums_of(scores) == Sums::exact ? std::string_view{} : float_sums;
  } else if constexpr (requires {
                         scores.scores;
                       }) {  // changed row by row, or joined over heads of this rank
    return why_not_over_rows(scores.scores);
  } else {
    return "a row's score depends on the keys of rows that are on other ranks, by sums of floats";
  }
}

// Scores of a layer's heads that are on several ranks.
template <class S>
[[nodiscard]] constexpr std::string_view why_not_over_heads(const S& scores) noexcept {
  bool adds = false;
  if constexpr (std::is_same_v<S, RandomParams>) {
    return "its scores are hashes of the number that a KV head has on its rank";
  } else if constexpr (std::is_same_v<S, TovaParams> || requires { scores.chunk; }) {
    adds = true;
  } else if constexpr (requires { scores.heads; }) {
    adds = scores.heads != Reduction::max;
  }
  return adds && sums_of(scores) != Sums::exact ? float_sums : std::string_view{};
}

}  // namespace detail

/// Why `policy` has no meaning where ranks share a model so; empty where it has one: the rows that stay are those of one
/// rank, bit for bit. Ask before the first eviction, and refuse the policy with these words.
///
/// A user's own scores count as depending on other rows (`rows`) and as those of one head (`heads`).
///
/// \par Complexity
/// O(1), constexpr
template <Policy P>
[[nodiscard]] constexpr std::string_view why_not_over_ranks(const P& policy,
                                                            RankSplit split) noexcept {
  const auto scores = policy.scorer();
  if constexpr (PagePolicy<P>) {
    const PageScoreParams params = policy.page_scores();
    const bool adds_heads = params.heads != Reduction::max && split != RankSplit::rows;
    const bool adds_rows = params.norm == HeadNorm::sum && split == RankSplit::rows;
    if ((adds_heads || adds_rows) && params.sums != Sums::exact) { return detail::float_sums; }
  }
  if (split == RankSplit::layers) { return {}; }
  if (split == RankSplit::heads) { return detail::why_not_over_heads(scores); }
  if constexpr (AdaptivePolicy<P>) {
    return "a head's safe rows and its share would each take a selection of their own over ranks";
  } else if constexpr (TwoStagePolicy<P>) {
    return "its second stage would take a second selection over ranks";
  } else {
    return detail::why_not_over_rows(scores);
  }
}

}  // namespace kvtrim
