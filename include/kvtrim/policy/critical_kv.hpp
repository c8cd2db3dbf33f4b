// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row matters by what its value adds to the output, not by its attention alone. The first half of the budget still goes
// by attention: the bound on the error needs the large probabilities to be kept.

#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Any policy that ranks rows, in two stages: a share `first_stage` of the rows that stay are `Inner`'s best; the others
/// are those with the highest (score + epsilon) * norm of the projected value.
///
/// Around `AdaKV`, the heads' budgets come from `Inner`'s scores and the two stages run in each head (CriticalAdaKV).
/// Needs `Observation::output`.
///
/// \tparam Inner  the policy whose scores, budgets and protection are used; protected rows count towards the first stage
/// \par Ties
/// the lower position is kept, in both stages
/// \par Complexity
/// as `Inner`, plus O(rows * query heads per KV head * value_dim * hidden) for the norms
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805; differs: as kvpress 0.5.5 computes it (the 1-norm, mean over the group), but
/// protected rows beyond the first stage stay protected
template <class Inner>
class CriticalKV {
  static_assert(
      RowPolicy<Inner>,
      "kvtrim::CriticalKV: scores are rescaled row by row, so Inner must be a policy that "
      "ranks rows: not one that keeps by position (Full, StreamingSink) or by page");

 public:
  /// Parameters.
  struct Params {
    typename Inner::Params inner{};  ///< of the inner policy
    double first_stage = 0.5;        ///< share of the rows that is chosen by `Inner`'s scores
    float epsilon = 1e-4F;           ///< added to a score before it is scaled
  };
  static constexpr std::string_view name = detail::name_around<"criticalkv", Inner>;

  /// `Inner`'s defaults, half of the rows in the first stage.
  constexpr CriticalKV() : CriticalKV(Params{}) {}

  /// \throws std::invalid_argument if first_stage is not within 0 and 1, epsilon is negative or not finite, or as `Inner`
  ///   does
  explicit constexpr CriticalKV(const Params& params) : params_(params), inner_(params.inner) {
    detail::check_share("kvtrim::CriticalKV", "first_stage", params.first_stage);
    detail::check_finite("kvtrim::CriticalKV", "epsilon", params.epsilon);
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }
  /// The policy whose scores are used.
  [[nodiscard]] constexpr const Inner& inner() const noexcept { return inner_; }

  /// `Inner`'s.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return inner_.demand(in);
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// `Inner`'s.
  [[nodiscard]] constexpr decltype(auto) scorer() const noexcept { return inner_.scorer(); }
  /// `Inner`'s.
  [[nodiscard]] constexpr AdaptiveParams adaptive() const noexcept
    requires AdaptivePolicy<Inner>
  {
    return inner_.adaptive();
  }

  /// `Inner`'s own.
  [[nodiscard]] constexpr Needs needs() const noexcept { return detail::own_needs(inner_); }

  /// Rows of `keep` that the first stage chooses, protected ones included.
  [[nodiscard]] constexpr std::int32_t first_stage(std::int32_t keep) const noexcept {
    return static_cast<std::int32_t>(keep * params_.first_stage);
  }
  /// The factor of the scores in the second stage.
  [[nodiscard]] constexpr OutputNormFactorParams second_stage() const noexcept { return {}; }
  /// A score of the second stage.
  [[nodiscard]] constexpr float rescaled(float score, float factor) const noexcept {
    return (score + params_.epsilon) * factor;
  }

 private:
  Params params_;
  Inner inner_;
};

/// A policy that chooses rows in two stages.
///
/// | expression                  | returns        | meaning                                                |
/// |-----------------------------|----------------|--------------------------------------------------------|
/// | `p.first_stage(keep)`       | `std::int32_t` | rows of `keep` that the plain scores choose            |
/// | `p.second_stage()`          | parameters that `ScorerOf` maps to a scorer | each row's factor         |
/// | `p.rescaled(score, factor)` | `float`        | score in the second stage                              |
template <class P>
concept TwoStagePolicy = Policy<P> && requires(const P& p, std::int32_t keep, float x) {
  { p.first_stage(keep) } noexcept -> std::same_as<std::int32_t>;
  p.second_stage();
  { p.rescaled(x, x) } noexcept -> std::same_as<float>;
};

}  // namespace kvtrim
