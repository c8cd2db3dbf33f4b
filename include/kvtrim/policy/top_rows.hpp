// SPDX-License-Identifier: Apache-2.0
#pragma once

// Most published methods are a score and nothing else: the best rows stay, and a few at either end always stay. They are
// aliases of the one policy below; a method adds its scorer and the facts that stand with its parameters.

#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Keeps the `budget` rows of each KV head that score highest. The first `sinks` and the last `recent` rows always stay.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Ties
/// the lower position is kept. NaN: lowest, then by position
/// \par Complexity
/// as the scorer; selection O(rows)
/// \par Source
/// see the method's header
template <class Scores>
class TopRows {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::TopRows: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");

 public:
  /// Parameters.
  struct Params {
    std::int64_t budget = 1024;                     ///< rows that stay, protected ones included
    std::int64_t sinks = Scores::protects.sinks;    ///< first rows, always kept
    std::int64_t recent = Scores::protects.recent;  ///< last rows, always kept
    Scores scores{};                                ///< of the scorer
  };
  static constexpr std::string_view name = Scores::name;

  /// The method's defaults, a budget of 1,024 rows.
  constexpr TopRows() : TopRows(Params{}) {}

  /// \throws std::invalid_argument if the budget is below 1 or below sinks + recent, a size is negative or beyond 31 bits,
  ///   or a parameter of the scores is out of range
  explicit constexpr TopRows(const Params& params) : params_(params) {
    const Params& p = params_;
    detail::check_sizes(Scores::title, detail::Sizes{{"sinks", p.sinks}, {"recent", p.recent}});
    detail::check_budget(
        Scores::title, p.budget, detail::Sizes{{"sinks", p.sinks}, {"recent", p.recent}});
    p.scores.check(Scores::title);
    detail::check_unscored(Scores::title, detail::Size{"recent", p.recent}, p.scores);
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const auto recent = static_cast<std::int32_t>(params_.recent);
    return {std::min(in.budget_or(params_.budget), in.live),
            {static_cast<std::int32_t>(params_.sinks), recent},
            recent,
            Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// The method's scores.
  [[nodiscard]] constexpr const Scores& scorer() const noexcept { return params_.scores; }

 private:
  Params params_;
};

}  // namespace kvtrim
