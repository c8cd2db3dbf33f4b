// SPDX-License-Identifier: Apache-2.0
#pragma once

// A scorer knows nothing about budgets and protection: it says how much each row matters, and nothing else.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/policy.hpp>

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

namespace kvtrim {

/// Scores the rows of one KV head; the lowest scores go first.
///
/// | expression                         | returns          | meaning                            |
/// |------------------------------------|------------------|------------------------------------|
/// | `s.scratch_bytes(shape)`           | to `std::size_t` | working space of one call, pure    |
/// | `s.check(view, obs)`               | `Status`         | whether what it needs is there     |
/// | `s.score(head, obs, scratch, out)` | `void`           | `out[r]` for each live row `r`     |
/// | `s.needs()`                        | `Needs`          | optional: what must be recorded; without it: keys and values alone |
///
/// All are `noexcept`; `scratch` has `scratch_bytes(shape)` bytes, `out` the rows of the table in use. Semantics the compiler
/// cannot check: `score` allocates nothing and depends on nothing but its arguments (same input, same bits, whatever the
/// page size, the placement of pages, the batch and the thread); NaN is allowed and means "lowest".
template <class S>
concept Scorer = std::is_trivially_copyable_v<S> && requires(const S& s,
                                                             const PlanShape& shape,
                                                             const CacheView& view,
                                                             const HeadRef& head,
                                                             const Observation& obs,
                                                             std::span<std::byte> scratch,
                                                             std::span<float> out) {
  { s.scratch_bytes(shape) } noexcept -> std::convertible_to<std::size_t>;
  { s.check(view, obs) } noexcept -> std::same_as<Status>;
  { s.score(head, obs, scratch, out) } noexcept -> std::same_as<void>;
};

/// A scorer whose scores are common to the KV heads of a layer: they are computed once per layer, for KV head 0.
template <class S>
concept LayerScorer = Scorer<S> && requires { requires S::common_to_layer; };

/// Whether a scorer reads `Observation::scores` itself, as a decorator of `ExternalParams` does. If not, ready-made scores
/// replace the scorer's own.
template <class S>
inline constexpr bool reads_given_scores = requires { requires S::reads_given_scores; };

namespace detail {
struct ScorerArchetype {
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  [[nodiscard]] Status check(const CacheView&, const Observation&) const noexcept {
    return Status::ok;
  }
  void score(const HeadRef&,
             const Observation&,
             std::span<std::byte>,
             std::span<float>) const noexcept {}
};
static_assert(Scorer<ScorerArchetype>);
}  // namespace detail

/// Names the parameters of a score where none are at hand.
template <class Params>
struct ScoreTag {};

/// The scorer made from a parameter struct: what `scorer_of(ScoreTag<Params>)` returns, a function that each
/// scorer's header declares and nobody defines, so that policies need not include Eigen; without one, `Params` itself.
template <class Params>
struct ScorerOf {
  static_assert(Scorer<Params>,
                "this policy's scorer is not defined here: include its header from <kvtrim/score/> "
                "(or <kvtrim/kvtrim.hpp>), "
                "or return a type that satisfies kvtrim::Scorer from scorer()");
  using type = Params;
};
template <class Params>
  requires requires { scorer_of(ScoreTag<Params>{}); }
struct ScorerOf<Params> {
  using type = decltype(scorer_of(ScoreTag<Params>{}));
};

namespace detail {
template <class Params>
using ScorerFor = typename ScorerOf<Params>::type;
}  // namespace detail

/// For policies that keep by position alone: every score is 0.
///
/// \par Source
/// none
struct NoScorer {
  explicit constexpr NoScorer(NoScores) noexcept {}

  /// None.
  [[nodiscard]] constexpr std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  /// Always ok.
  [[nodiscard]] constexpr Status check(const CacheView&, const Observation&) const noexcept {
    return Status::ok;
  }
  /// Writes zeros.
  void score(const HeadRef&,
             const Observation&,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    for (float& x : out) { x = 0; }
  }
};
static_assert(Scorer<NoScorer>);

/// Policies without scores.
NoScorer scorer_of(ScoreTag<NoScores>);

}  // namespace kvtrim
