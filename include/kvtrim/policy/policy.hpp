// SPDX-License-Identifier: Apache-2.0
#pragma once

// A policy is a value: parameters and rules, no state of a sequence. What is new in a method is its scorer or its
// demand; everything else (ties, protection, shared pages, moves, reports) is common to all. The facts about a score
// stand with its parameters, once, for all policies that can be made from it.

#include <kvtrim/cache/sequence_state.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/select/protection.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace kvtrim {

/// What a policy may look at when it decides how much of one page table must go.
struct DemandInput {
  SequenceState state;         ///< of the table
  std::int32_t live = 0;       ///< live rows
  std::int32_t page_size = 1;  ///< rows per page
  std::int32_t first_row = 0;  ///< rows of left padding, included when counting page borders
  std::int32_t budget = -1;    ///< given at run time (`Observation::budgets`); -1: the policy's own
  LayerId layer{};             ///< layer of the model
  std::int32_t layers = 1;     ///< layers of the model

  /// Rows that stay: the budget given at run time, or else `own`.
  [[nodiscard]] constexpr std::int32_t budget_or(std::int64_t own) const noexcept {
    return budget >= 0 ? budget : static_cast<std::int32_t>(own);
  }
};

/// How many rows stay, and which rows are not candidates.
struct Demand {
  std::int32_t keep = 0;       ///< rows that stay; `live` or more: nothing is evicted
  Protection protection;       ///< sinks and recent rows, in position order
  std::int32_t window = 0;     ///< last rows: the one before them gives its slot to the next append
  Status status = Status::ok;  ///< `chunk_too_long` if the demand cannot be met
};

/// Scorer parameters of policies that keep by position alone.
///
/// \par Source
/// none
struct NoScores {};

/// Parameters of a score, and what every policy made from it must know: which rows are protected by default, and which
/// parameters are out of range.
///
/// | expression     | returns               | meaning                                                                    |
/// |----------------|-----------------------|----------------------------------------------------------------------------|
/// | `S::name`      | to `std::string_view` | short name, unique in the library: "keynorm", "value_norm<keynorm>"        |
/// | `S::title`     | to `std::string_view` | what error messages call `TopRows<S>`: "kvtrim::KeyNorm"                   |
/// | `S::protects`  | to `Protection`       | default number of first and of last rows that always stay                  |
/// | `s.check(who)` | `void`                | throws `std::invalid_argument` in the name of `who` if a parameter is out of range |
/// | `s.unscored()` | to `std::int32_t`     | optional: last rows that have no score, so that a policy must protect them |
/// | `s.needs()`    | `Needs`, `noexcept`   | optional: what must be recorded (`needs`); without it: keys and values alone |
/// | `s.sums`       | `Sums`                | optional, a member or a function: how it adds up probabilities, if it does |
///
/// `check` is constexpr. `ScorerOf<S>`, or `S` itself if it satisfies `Scorer`, makes the scores.
///
/// \par Source
/// own: each score's header names its paper
template <class S>
concept ScoreParams =
    std::is_trivially_copyable_v<S> && requires(const S& s, std::string_view who) {
      { S::name } -> std::convertible_to<std::string_view>;
      { S::title } -> std::convertible_to<std::string_view>;
      { S::protects } -> std::convertible_to<Protection>;
      { s.check(who) } -> std::same_as<void>;
    };

/// A KV cache eviction policy.
///
/// | expression     | returns              | meaning                                                                   |
/// |----------------|----------------------|---------------------------------------------------------------------------|
/// | `P::name`      | to `std::string_view`| the method's word and, in <>, what it is put around: "adakv<snapkv>"      |
/// | `p.demand(in)` | `Demand`, `noexcept` | rows that stay and rows that are protected                                |
/// | `p.removal()`  | `Removal`, `noexcept`| the way rows are removed unless the caller names one                      |
/// | `p.scorer()`   | a `Scorer`, or parameters that `ScorerOf` maps to one | what ranks the candidates                |
/// | `p.needs()`    | `Needs`, `noexcept`  | optional: what its rules need besides its scores (`needs`)                |
///
/// Semantics the compiler cannot check: `demand` is pure, asks for more than `live` rows only if it keeps all, and does
/// not depend on scores. Policies are trivially copyable, so one object serves all sequences and threads.
///
/// \par Source
/// own: each method's header names its paper
template <class P>
concept Policy = std::is_trivially_copyable_v<P> && requires(const P& p, const DemandInput& in) {
  { P::name } -> std::convertible_to<std::string_view>;
  { p.demand(in) } noexcept -> std::same_as<Demand>;
  { p.removal() } noexcept -> std::same_as<Removal>;
  p.scorer();
};

/// A policy that ranks rows by their scores, so that `AdaKV` and `CriticalKV` can wrap it. Policies that keep by position
/// have no scores, and those that choose pages do not rank rows.
template <class P>
concept RowPolicy = Policy<P> && requires(const P& p) {
  requires !std::is_same_v<std::remove_cvref_t<decltype(p.scorer())>, NoScores>;
  requires !requires { p.page_scores(); };
};

namespace detail {

/// Number of last rows that have no score.
template <ScoreParams S>
[[nodiscard]] constexpr std::int32_t unscored_rows(const S& scores) noexcept {
  if constexpr (requires { scores.unscored(); }) {
    return scores.unscored();
  } else {
    return 0;
  }
}

/// How a score adds up probabilities; `floating` if its parameters do not say.
template <class S>
[[nodiscard]] constexpr Sums sums_of([[maybe_unused]] const S& scores) noexcept {
  if constexpr (requires { scores.sums(); }) {
    return scores.sums();
  } else if constexpr (requires { scores.sums; }) {
    return scores.sums;
  } else {
    return Sums::floating;
  }
}

/// Refuses to add up, as probabilities, scores that may be above 1.
///
/// \throws std::invalid_argument if they are exact ones of which `at_most_one()` is not true
template <ScoreParams S>
constexpr void check_exact_addends(std::string_view who, const S& scores) {
  if (sums_of(scores) != Sums::exact) { return; }
  bool fits = false;
  if constexpr (requires { scores.at_most_one(); }) { fits = scores.at_most_one(); }
  if (!fits) {
    throw_invalid_argument(
        "{}: scores of heads are added exactly as probabilities, but those of {} may be above 1; "
        "reduce queries and query heads by mean or max, or heads by max",
        who,
        S::name);
  }
}

struct PolicyArchetype {
  static constexpr std::string_view name = "archetype";
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return {in.live, {}, 0, Status::ok};
  }
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  [[nodiscard]] constexpr NoScores scorer() const noexcept { return {}; }
};
static_assert(Policy<PolicyArchetype>);
}  // namespace detail

}  // namespace kvtrim
