// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an engine must show a policy is known before the step, from the policy alone. Parameters say it of their score, a
// policy adds what its rules take; nothing here names a method, so that a user's own takes part like the library's.

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace kvtrim {

/// Which queries count for `Needs::moments`.
struct MomentParams {
  std::int32_t sinks = 4;  ///< first queries of a sequence, left out

  friend constexpr bool operator==(const MomentParams&, const MomentParams&) = default;
};

/// What a policy must be shown besides keys and values. `Recorder` gathers it.
///
/// Un-rotated keys are not among it: position modes need them, not policies (`Rerotator`).
struct Needs {
  std::int32_t window = 0;                       ///< last queries of a sequence; 0: none
  std::optional<AccumulateParams> accumulate{};  ///< attention, summed up over all queries
  std::optional<MomentParams> moments{};         ///< mean and covariance of queries before RoPE
  bool filters = false;                          ///< calibrated directions (`Observation::filters`)
  bool output = false;        ///< the attention's output projection (`Observation::output`)
  bool token_scores = false;  ///< the caller's scores (`Observation::scores`)
  bool positions = false;     ///< `CacheView::positions`, once rows have been evicted
  bool states = false;        ///< `CacheView::states`, once rows have been evicted
  bool score_planes = false;  ///< `CacheView::score_sums` and `score_compensations`
  TableScope scope = TableScope::group;  ///< the coarsest tables with which all it chooses can stay

  friend constexpr bool operator==(const Needs&, const Needs&) = default;
};

/// What accumulated attention needs.
constexpr Needs AccumulateParams::needs() const noexcept {
  Needs n;
  n.accumulate = *this;
  n.score_planes = true;
  n.positions = n.states = age_normalised;
  return n;
}

/// What serves two policies on one cache: of each need the larger.
///
/// \throws std::invalid_argument if they accumulate differently (`decay`, `squared`, `sums`), or leave out different numbers of sinks:
///   a cache has one accumulated score, a sequence one set of moments
[[nodiscard]] constexpr Needs merge(const Needs& a, const Needs& b) {
  if (a.accumulate && b.accumulate && !a.accumulate->adds_as(*b.accumulate)) {
    const auto exact = [](const Needs& n) { return n.accumulate->sums == Sums::exact; };
    throw_invalid_argument(
        "kvtrim::merge: policies on one cache share one accumulated score, but one has decay {}, "
        "squared {}, exact sums {}, the other decay {}, squared {}, exact sums {}",
        a.accumulate->decay,
        a.accumulate->squared,
        exact(a),
        b.accumulate->decay,
        b.accumulate->squared,
        exact(b));
  }
  if (a.moments && b.moments && *a.moments != *b.moments) {
    throw_invalid_argument(
        "kvtrim::merge: policies on one cache share their queries' moments, but one leaves out {} "
        "sinks, the other {}",
        a.moments->sinks,
        b.moments->sinks);
  }
  Needs n = a;
  n.window = std::max(a.window, b.window);
  if (!n.accumulate) { n.accumulate = b.accumulate; }
  if (a.accumulate && b.accumulate) {  // how the sums are ranked does not change them
    n.accumulate->age_normalised = a.accumulate->age_normalised || b.accumulate->age_normalised;
  }
  if (!n.moments) { n.moments = b.moments; }
  n.filters = a.filters || b.filters;
  n.output = a.output || b.output;
  n.token_scores = a.token_scores || b.token_scores;
  n.positions = a.positions || b.positions;
  n.states = a.states || b.states;
  n.score_planes = a.score_planes || b.score_planes;
  n.scope = std::max(a.scope, b.scope);
  return n;
}

namespace detail {
/// What `x.needs()` says; nothing without such a member.
template <class T>
[[nodiscard]] constexpr Needs own_needs([[maybe_unused]] const T& x) noexcept {
  if constexpr (requires { x.needs(); }) {
    static_assert(
        std::is_same_v<decltype(x.needs()), Needs> && noexcept(x.needs()),
        "kvtrim::needs: a member needs() must be written `constexpr kvtrim::Needs needs() "
        "const noexcept`");
    return x.needs();
  } else {
    return {};
  }
}
}  // namespace detail

/// What `policy` needs: what its scores need, what the policy itself says, and what follows from its kind: tables per head
/// where heads share a budget, the parameters of a second stage, positions and states where rows leave their order.
///
/// \throws std::invalid_argument as `merge`, if parts of the policy do not go together
/// \par Complexity
/// O(1), constexpr; no allocation
template <Policy P>
[[nodiscard]] constexpr Needs needs(const P& policy) {
  Needs all = merge(detail::own_needs(policy.scorer()), detail::own_needs(policy));
  if constexpr (requires { policy.second_stage(); }) {
    all = merge(all, detail::own_needs(policy.second_stage()));
  }
  if constexpr (requires { policy.adaptive(); }) { all.scope = TableScope::head; }
  const Removal removal = policy.removal();
  if (removal == Removal::overwrite_slot || removal == Removal::fill_holes) {
    all.positions = all.states = true;
  }
  return all;
}

}  // namespace kvtrim
