// SPDX-License-Identifier: Apache-2.0
#pragma once

// Heads of different lengths free memory only where each head has its own page table; with any other table, a plan with
// unequal counts is refused (`unequal_budget`), never silently evened out.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>

#include <concepts>
#include <string_view>

namespace kvtrim {

/// Any policy that ranks rows, with one budget that the KV heads of a layer (or all heads of the sequence) share.
///
/// A head's protected rows always stay. Together the heads keep exactly as many rows as if each kept `Inner`'s budget;
/// while they have no more than that, nothing goes; if they have more, all of them must be written and none applied to
/// (`step_open`, `eviction_open`). Needs `TableScope::head`.
///
/// \tparam Inner  the policy whose scores, protection and average budget are used
/// \par Ties
/// the lower position, then the lower head
/// \par Complexity
/// as `Inner`, plus O(rows of the heads that share); 32 more bytes of workspace per row
/// \par Source
/// Feng et al., 2024, arXiv:2407.11550; `AdaptiveForm` says how kvpress (default) and the authors' code differ
template <class Inner>
class AdaKV {
  static_assert(
      RowPolicy<Inner>,
      "kvtrim::AdaKV: heads compete by the scores of their rows, so Inner must be a policy "
      "that ranks rows: not one that keeps by position (Full, StreamingSink) or by page");

 public:
  /// Parameters.
  struct Params {
    typename Inner::Params inner{};  ///< of the inner policy; its budget is the average per head
    double safeguard = 0.2;          ///< share of its budget that a head always keeps
    AdaptiveForm form = AdaptiveForm::safeguard;       ///< whose arithmetic
    AdaptiveOver over = AdaptiveOver::heads_of_layer;  ///< which heads share
  };
  static constexpr std::string_view name = detail::name_around<"adakv", Inner>;

  /// `Inner`'s defaults, a safeguard of 0.2.
  constexpr AdaKV() : AdaKV(Params{}) {}

  /// \throws std::invalid_argument if the safeguard is not within 0 and 1, or as `Inner` does
  explicit constexpr AdaKV(const Params& params) : params_(params), inner_(params.inner) {
    detail::check_share("kvtrim::AdaKV", "safeguard", params.safeguard);
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }
  /// The policy whose scores are used.
  [[nodiscard]] constexpr const Inner& inner() const noexcept { return inner_; }

  /// `Inner`'s demand: rows that a head keeps on average, and what is protected.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return inner_.demand(in);
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// `Inner`'s scorer.
  [[nodiscard]] constexpr decltype(auto) scorer() const noexcept { return inner_.scorer(); }
  /// `Inner`'s own.
  [[nodiscard]] constexpr Needs needs() const noexcept { return detail::own_needs(inner_); }
  /// How the heads share.
  [[nodiscard]] constexpr AdaptiveParams adaptive() const noexcept {
    return {params_.safeguard, params_.form, params_.over};
  }

 private:
  Params params_;
  Inner inner_;
};

/// A policy whose heads share one budget.
///
/// | expression     | returns          | meaning            |
/// |----------------|------------------|--------------------|
/// | `p.adaptive()` | `AdaptiveParams` | how the heads share |
template <class P>
concept AdaptivePolicy = Policy<P> && requires(const P& p) {
  { p.adaptive() } noexcept -> std::same_as<AdaptiveParams>;
};

}  // namespace kvtrim
