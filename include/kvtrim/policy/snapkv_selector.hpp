// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace kvtrim {

/// Parameters of `SnapKVSelector` by other scores than its own.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
template <class Scores>
struct SnapKVParams {
  std::int64_t budget = 1024;                     ///< rows that stay, protected ones included
  std::int64_t sinks = Scores::protects.sinks;    ///< first rows, always kept
  std::int64_t recent = Scores::protects.recent;  ///< last rows, always kept
  Scores scores{};                                ///< of the prompt's rows
};

/// Parameters of `SnapKVSelector`.
template <>
struct SnapKVParams<WindowParams> {
  std::int64_t window = 32;            ///< last rows: their queries vote, and they always stay
  std::int64_t budget = 1024;          ///< rows that stay, window and sinks included
  std::int64_t kernel = 5;             ///< pooling kernel, odd
  Reduction rows = Reduction::mean;    ///< over the window's queries
  Reduction group = Reduction::mean;   ///< over the query heads of a KV head
  Pooling pooling = Pooling::average;  ///< over neighbouring columns
  PoolColumns columns = PoolColumns::candidates;  ///< what the pooling sees
  std::int64_t sinks = 0;                         ///< first rows, always kept
  Sums sums = Sums::floating;                     ///< `exact` for runs over ranks
};

/// Keeps the rows of the prompt that its last queries attend to, and those last rows. Use it once, at the end of the
/// prompt.
///
/// Nothing goes while there are at most `budget` rows; a prompt shorter than the window is allowed. By other scores, and by
/// decorated ones (`SnapKVSelector<ValueNorm<WindowParams>>`), the prompt is cut in the same way.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Ties
/// the lower position is kept. NaN: lowest, then by position
/// \par Complexity
/// as the scorer (`WindowScorer`); selection O(rows)
/// \par Source
/// Li et al., 2024, arXiv:2404.14469; differs: one set per KV head (the group's mean; the paper caches repeated heads),
/// the mean over the window's rows (as in kvpress and Ada-KV) where the paper's code sums: the same set for one head
template <class Scores = WindowParams>
class SnapKVSelector {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::SnapKVSelector: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static constexpr bool by_window = std::is_same_v<Scores, WindowParams>;

 public:
  /// Parameters.
  using Params = SnapKVParams<Scores>;
  static constexpr std::string_view name =
      detail::name_unless_default<"snapkv", Scores, WindowParams>;

  /// The configuration that found every needle where the paper's found none (bench/README.md): maxima over the window's
  /// rows and over the group, so that one query that knows is enough; max-pooling over 15 columns, so that a phrase stays
  /// whole; 4 sinks.
  [[nodiscard]] static constexpr Params maxima(std::int64_t budget) noexcept
    requires by_window
  {
    Params p;
    p.budget = budget;
    p.kernel = 15;
    p.rows = Reduction::max;
    p.group = Reduction::max;
    p.pooling = Pooling::max;
    p.columns = PoolColumns::all_columns;
    p.sinks = 4;
    return p;
  }

  /// The paper's sizes, a budget of 1,024 rows.
  constexpr SnapKVSelector() : SnapKVSelector(Params{}) {}

  /// \throws std::invalid_argument if the kernel is even or below 1, the window below 1, sinks or `recent` negative, the
  ///   budget below the protected rows, `recent` below the rows that have no score, a parameter of the scores out of range,
  ///   or a size beyond 31 bits
  explicit constexpr SnapKVSelector(Params params) : params_(params) {
    constexpr std::string_view who = "kvtrim::SnapKVSelector";
    const Params& p = params_;
    if constexpr (by_window) {
      detail::check_sizes(
          who,
          detail::Sizes{{"window", p.window, 1},
                        {.name = "kernel", .value = p.kernel, .least = 1, .odd = true},
                        {"sinks", p.sinks}});
      detail::check_budget(who, p.budget, detail::Sizes{{"window", p.window}, {"sinks", p.sinks}});
      if (p.sums == Sums::exact) { check_exact_sum(who, p.window); }
    } else {
      detail::check_sizes(who, detail::Sizes{{"sinks", p.sinks}, {"recent", p.recent}});
      detail::check_budget(who, p.budget, detail::Sizes{{"sinks", p.sinks}, {"recent", p.recent}});
      p.scores.check(who);
      detail::check_unscored(who, detail::Size{"recent", p.recent}, p.scores);
    }
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return {std::min(in.budget_or(params_.budget), in.live),
            {static_cast<std::int32_t>(params_.sinks), recent()},
            recent(),
            Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// Attention of the window, or the scores that were given.
  [[nodiscard]] constexpr Scores scorer() const noexcept {
    if constexpr (by_window) {
      return {.window = static_cast<std::int32_t>(params_.window),
              .kernel = static_cast<std::int32_t>(params_.kernel),
              .rows = params_.rows,
              .group = params_.group,
              .pooling = params_.pooling,
              .columns = params_.columns,
              .sums = params_.sums};
    } else {
      return params_.scores;
    }
  }

 private:
  [[nodiscard]] constexpr std::int32_t recent() const noexcept {
    if constexpr (by_window) {
      return static_cast<std::int32_t>(params_.window);
    } else {
      return static_cast<std::int32_t>(params_.recent);
    }
  }

  Params params_;
};
static_assert(Policy<SnapKVSelector<>>);

}  // namespace kvtrim
