// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// How the probabilities of several rows, or of the query heads of a group, become one number.
enum class Reduction : std::uint8_t { mean, sum, max };

/// Which columns a pooling window may see.
enum class PoolColumns : std::uint8_t {
  candidates,   ///< the columns before the observation window, as the SnapKV paper's code does
  all_columns,  ///< the observation window's columns too
};

/// Parameters of `WindowScorer`: SnapKV's scores. Decorated ones fit in its place: SnapKVSelector<ValueNorm<WindowParams>>.
///
/// \par Source
/// Li et al., 2024, arXiv:2404.14469
struct WindowParams {
  static constexpr std::string_view name = "window";
  static constexpr std::string_view title = "kvtrim::Window";
  static constexpr Protection protects{0, 32};

  std::int32_t window = 32;          ///< last rows, whose queries vote; never candidates themselves
  std::int32_t kernel = 5;           ///< pooling kernel, odd
  Reduction rows = Reduction::mean;  ///< over the window's queries
  Reduction group = Reduction::mean;              ///< over the query heads of a KV head
  Pooling pooling = Pooling::average;             ///< over neighbouring columns
  PoolColumns columns = PoolColumns::candidates;  ///< what the pooling sees
  bool own_columns = false;    ///< score the window's own columns too, instead of cutting them
  Sums sums = Sums::floating;  ///< of softmax, queries and heads: `exact` for runs over ranks

  /// \throws std::invalid_argument if the window is below 1 or the kernel not odd, or if the window's probabilities are
  ///   more than an exact sum holds
  constexpr void check(std::string_view who) const {
    detail::check_sizes(
        who,
        detail::Sizes{{"scores.window", window, 1},
                      {.name = "scores.kernel", .value = kernel, .least = 1, .odd = true}});
    if (sums == Sums::exact) { check_exact_sum(who, window); }
  }
  /// The window's own rows, unless they are scored too.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept {
    return own_columns ? 0 : window;
  }
  /// Whether no score is above 1, as none is that averages probabilities.
  [[nodiscard]] constexpr bool at_most_one() const noexcept {
    return rows != Reduction::sum && group != Reduction::sum;
  }
  /// The window's queries, which see the rows up to their own position.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.window = window, .positions = true};
  }
};
static_assert(ScoreParams<WindowParams>);

}  // namespace kvtrim
