// SPDX-License-Identifier: Apache-2.0
#pragma once

// Most published methods are a score and nothing else: the best rows stay, a few at either end always. They are aliases
// of the one policy below; what a method adds are its scorer, its name and its defaults.

#include <kvtrim/detail/error.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string_view>

namespace kvtrim {

/// What a method adds to `TopRows`, specialised by the type of its scores' parameters in the method's header.
///
/// | expression                       | meaning                                                                     |
/// |----------------------------------|-----------------------------------------------------------------------------|
/// | `Method<Scores>::name`           | short name, unique in the library                                           |
/// | `Method<Scores>::title`          | name of the class, for error messages: "kvtrim::KeyNorm"                    |
/// | `Method<Scores>::sinks`          | default of the first rows that always stay                                  |
/// | `Method<Scores>::recent`         | default of the last rows that always stay                                   |
/// | `Method<Scores>::check(scores)`  | constexpr, throws `std::invalid_argument` where a parameter is out of range |
/// | `Method<Scores>::window(scores)` | optional: last rows that have no score, so `recent` may not be below it     |
template <class Scores>
struct Method;

/// Keeps the `budget` rows of each KV head that score highest. The first `sinks` and the last `recent` rows always stay.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, with a `Method`
/// \par Ties
/// the lower position is kept. NaN: lowest, then by position
/// \par Complexity
/// as the scorer; selection O(rows)
/// \par Source
/// the method's header says it
template <class Scores>
class TopRows {
 public:
  /// Parameters.
  struct Params {
    std::int64_t budget = 1024;                    ///< rows that stay, protected ones included
    std::int64_t sinks = Method<Scores>::sinks;    ///< first rows, always kept
    std::int64_t recent = Method<Scores>::recent;  ///< last rows, always kept
    Scores scores{};                               ///< of the scorer
  };
  static constexpr std::string_view name = Method<Scores>::name;

  /// The method's defaults, a budget of 1,024 rows.
  constexpr TopRows() : TopRows(Params{}) {}

  /// \throws std::invalid_argument if the budget is below 1 or below sinks + recent, a size is negative or beyond 31 bits,
  ///   or a parameter of the scores is out of range
  explicit constexpr TopRows(const Params& params) : params_(params) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    const Params& p = params_;
    if (p.sinks < 0 || p.recent < 0 || p.sinks > most || p.recent > most || p.budget > most) {
      detail::throw_invalid_argument(
          "{}: sinks {} and recent {} must be at least 0, budget {} within 31 bits",
          Method<Scores>::title,
          p.sinks,
          p.recent,
          p.budget);
    }
    if (p.budget < 1 || p.budget < p.sinks + p.recent) {
      detail::throw_invalid_argument(
          "{}: budget {} must be at least 1, and at least sinks {} + recent {}",
          Method<Scores>::title,
          p.budget,
          p.sinks,
          p.recent);
    }
    Method<Scores>::check(p.scores);
    if constexpr (requires { Method<Scores>::window(p.scores); }) {
      if (p.recent < Method<Scores>::window(p.scores)) {
        detail::throw_invalid_argument(
            "{}: recent {} must be at least the window {} of the scores, whose rows have none",
            Method<Scores>::title,
            p.recent,
            Method<Scores>::window(p.scores));
      }
    }
  }

  /// What it was made of.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const std::int32_t budget =
        in.budget >= 0 ? in.budget : static_cast<std::int32_t>(params_.budget);
    const auto recent = static_cast<std::int32_t>(params_.recent);
    return {std::min(budget, in.live),
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
