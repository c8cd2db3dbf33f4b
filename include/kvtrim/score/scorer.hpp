// SPDX-License-Identifier: Apache-2.0
#pragma once

// A scorer knows nothing of budgets and protection: it says how much each row matters, and nothing else.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/score/no_scores.hpp>
#include <kvtrim/score/observation.hpp>

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>

namespace kvtrim {

/// What the size of a workspace depends on. Every field is an upper bound, but `kv_heads`: fewer of them mean larger
/// groups of query heads.
struct PlanShape {
  std::int32_t sequences = 1;            ///< sequences of the view
  std::int32_t layers = 1;               ///< layers of the view
  std::int32_t kv_heads = 1;             ///< KV heads
  TableScope scope = TableScope::group;  ///< of the view
  std::int32_t page_size = 1;            ///< rows a page
  std::int32_t pages = 0;                ///< pages of the pool
  std::int32_t max_rows = 0;             ///< rows of the longest table, padding and a hole included
  std::int32_t query_heads = 0;          ///< query heads; 0: no queries
  std::int32_t query_rows = 0;           ///< query rows of a sequence
  std::int32_t head_dim = 0;             ///< of the keys
  std::int32_t value_dim = 0;            ///< head dim of the values
  std::int32_t hidden = 0;               ///< width of `Observation::output`; 0: none
  std::int32_t workers = 1;              ///< of the executor
};

/// Scores the rows of one KV head; the lowest scores go first.
///
/// | expression                                     | returns           | meaning                                       |
/// |------------------------------------------------|-------------------|-----------------------------------------------|
/// | `s.scratch_bytes(shape)`                       | to `std::size_t`  | working space of one call, pure               |
/// | `s.check(view, observation)`                   | `Status`          | whether what it needs is there                |
/// | `s.score(view, seq, l, h, obs, scratch, out)`  | `void`            | `out[r]` for each live row `r`                |
///
/// All are `noexcept`. Semantics the compiler cannot check: `score` allocates nothing and depends on nothing but its
/// arguments (same input, same bits, whatever the page size, the batch and the thread); NaN is allowed and means "lowest".
template <class S>
concept Scorer = std::is_trivially_copyable_v<S> && requires(const S& s,
                                                             const PlanShape& shape,
                                                             const CacheView& view,
                                                             SequenceId seq,
                                                             LayerId l,
                                                             HeadId h,
                                                             const Observation& obs,
                                                             std::span<std::byte> scratch,
                                                             std::span<float> out) {
  { s.scratch_bytes(shape) } noexcept -> std::convertible_to<std::size_t>;
  { s.check(view, obs) } noexcept -> std::same_as<Status>;
  { s.score(view, seq, l, h, obs, scratch, out) } noexcept -> std::same_as<void>;
};

/// A scorer whose scores are common to the KV heads of a layer: they are computed once a layer, for KV head 0.
template <class S>
concept LayerScorer = Scorer<S> && requires { requires S::common_to_layer; };

/// Whether a scorer looks at `Observation::scores` itself, as a decorator of `ExternalParams` does. Where it does not,
/// ready-made scores take the place of the scorer's own.
template <class S>
inline constexpr bool reads_given_scores = requires { requires S::reads_given_scores; };

namespace detail {
struct ScorerArchetype {
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  [[nodiscard]] Status check(const CacheView&, const Observation&) const noexcept {
    return Status::ok;
  }
  void score(const CacheView&,
             SequenceId,
             LayerId,
             HeadId,
             const Observation&,
             std::span<std::byte>,
             std::span<float>) const noexcept {}
};
static_assert(Scorer<ScorerArchetype>);
}  // namespace detail

/// The scorer made from a parameter struct: specialised beside each scorer, so that policies need not include Eigen.
template <class Params>
struct ScorerOf {
  static_assert(Scorer<Params>,
                "this policy's scorer is not defined here: include its header from <kvtrim/score/> "
                "(or <kvtrim/kvtrim.hpp>), "
                "or return a type that satisfies kvtrim::Scorer from scorer()");
  using type = Params;
};

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
  void score(const CacheView&,
             SequenceId,
             LayerId,
             HeadId,
             const Observation&,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    for (float& x : out) { x = 0; }
  }
};
static_assert(Scorer<NoScorer>);

/// Policies without scores.
template <>
struct ScorerOf<NoScores> {
  using type = NoScorer;
};

}  // namespace kvtrim
