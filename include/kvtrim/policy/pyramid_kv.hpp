// SPDX-License-Identifier: Apache-2.0
#pragma once

// SnapKV's scores with a budget that falls from layer to layer. Layers of different lengths need their own page tables.

#include <kvtrim/budget/pyramid.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// SnapKV with more rows in early layers than in deep ones.
///
/// Which layer of how many it is, the view says: one of all layers (`TableScope::layer` or `head`), or one per layer with
/// `CacheView::layer_offset` and `model_layers`. Both keep the same rows.
///
/// \par Ties
/// the lower position is kept. NaN: lowest, then by position
/// \par Complexity
/// as `SnapKVSelector`, plus O(layers^2) for the budgets
/// \par Source
/// Cai et al., 2024, arXiv:2406.02069; differs: see `Pyramid`
class PyramidKV {
 public:
  /// Parameters.
  struct Params {
    SnapKVSelector<>::Params snapkv{};      ///< scores; its budget is the average over the layers
    std::int64_t beta = 20;                 ///< the deepest layer keeps 1/beta of the average
    PyramidForm form = PyramidForm::exact;  ///< whose arithmetic
  };
  static constexpr std::string_view name = "pyramidkv";

  /// The paper's sizes, 1,024 rows on average.
  constexpr PyramidKV() : PyramidKV(Params{}) {}

  /// \throws std::invalid_argument if beta is below 1 or beyond 31 bits, or as `SnapKVSelector`
  explicit constexpr PyramidKV(const Params& params) : params_(params), snapkv_(params.snapkv) {
    detail::check_sizes("kvtrim::PyramidKV", detail::Sizes{{"beta", params.beta, 1}});
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// The budgets of a model of `layers` layers that keep `budget` rows on average.
  [[nodiscard]] constexpr Pyramid pyramid(std::int32_t budget, std::int32_t layers) const noexcept {
    return {budget,
            static_cast<std::int32_t>(params_.snapkv.window + params_.snapkv.sinks),
            static_cast<std::int32_t>(params_.beta),
            std::max(1, layers),
            params_.form};
  }

  /// Rows that stay in `in.layer`; a budget given at run time is the average over the layers. The pyramid is that of all
  /// tokens seen, so that what a first eviction left is not cut again.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    Demand demand = snapkv_.demand(in);
    const std::int32_t tokens = std::max(in.live, in.state.next_position);
    const Pyramid budgets = pyramid(in.budget_or(params_.snapkv.budget), in.layers);
    demand.keep =
        std::min(in.live, budgets.rows(tokens, std::min(raw(in.layer), budgets.layers - 1)));
    return demand;
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// Attention of the window.
  [[nodiscard]] constexpr WindowParams scorer() const noexcept { return snapkv_.scorer(); }
  /// Besides its scores: tables per layer, and the tokens seen.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.states = true, .scope = TableScope::layer};
  }

 private:
  Params params_;
  SnapKVSelector<> snapkv_;
};
static_assert(Policy<PyramidKV>);

}  // namespace kvtrim
