// SPDX-License-Identifier: Apache-2.0
#pragma once

// A decorator changes the scores of a method and nothing else, and is itself the parameters of a score: whatever takes
// scores takes decorated ones too, such as SnapKVSelector<ValueNorm<WindowParams>>.

#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/window_params.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Merges the scores of a layer's KV heads into one set: all heads then keep the same rows.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104 (TOVA), which averages over all heads; as a decorator: own
template <class Scores>
struct PerLayer {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::PerLayer: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static constexpr std::string_view name = detail::name_around<"per_layer", Scores>;
  static constexpr std::string_view title = detail::title_around<"kvtrim::PerLayer", Scores>;
  static constexpr Protection protects = Scores::protects;

  Scores scores{};                    ///< of one KV head
  Reduction heads = Reduction::mean;  ///< over the KV heads

  /// \throws std::invalid_argument if a parameter of the scores is out of range, or if scores that may be above 1 would be
  ///   added up exactly
  constexpr void check(std::string_view who) const {
    scores.check(who);
    if (heads != Reduction::max) { detail::check_exact_addends(who, scores); }
  }
  /// As for the scores: exact ones are also added up exactly over the heads.
  [[nodiscard]] constexpr Sums sums() const noexcept { return detail::sums_of(scores); }
  /// As for the scores, unless they are added up.
  [[nodiscard]] constexpr bool at_most_one() const noexcept
    requires requires(const Scores& s) { s.at_most_one(); }
  {
    return heads != Reduction::sum && scores.at_most_one();
  }
  /// As for the scores.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept {
    return detail::unscored_rows(scores);
  }
  /// As for the scores.
  [[nodiscard]] constexpr Needs needs() const noexcept { return detail::own_needs(scores); }
};

/// Rescales a score by the length of the row's value.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636 (ExpectedAttention's rescale); as a decorator: own
template <class Scores>
struct ValueNorm {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::ValueNorm: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static constexpr std::string_view name = detail::name_around<"value_norm", Scores>;
  static constexpr std::string_view title = detail::title_around<"kvtrim::ValueNorm", Scores>;
  static constexpr Protection protects = Scores::protects;

  Scores scores{};    ///< what is rescaled
  float epsilon = 0;  ///< added to the score first: how much the value counts where the score is 0

  /// \throws std::invalid_argument if epsilon is negative or not finite, or a parameter of the scores out of range
  constexpr void check(std::string_view who) const {
    detail::check_finite(who, "epsilon", epsilon);
    scores.check(who);
  }
  /// As for the scores.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept {
    return detail::unscored_rows(scores);
  }
  /// As for the scores.
  [[nodiscard]] constexpr Needs needs() const noexcept { return detail::own_needs(scores); }
};

/// Rescales a score by the norm of the row's value after the attention's output projection.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805 (CriticalKV), its second stage
template <class Scores>
struct OutputNorm {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::OutputNorm: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static constexpr std::string_view name = detail::name_around<"output_norm", Scores>;
  static constexpr std::string_view title = detail::title_around<"kvtrim::OutputNorm", Scores>;
  static constexpr Protection protects = Scores::protects;

  Scores scores{};        ///< what is rescaled
  float epsilon = 1e-4F;  ///< added to the score first

  /// \throws std::invalid_argument if epsilon is negative or not finite, or a parameter of the scores out of range
  constexpr void check(std::string_view who) const {
    detail::check_finite(who, "epsilon", epsilon);
    scores.check(who);
  }
  /// As for the scores.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept {
    return detail::unscored_rows(scores);
  }
  /// As for the scores, and the output projection.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    Needs n = detail::own_needs(scores);
    n.output = true;
    return n;
  }
};

/// Parameters of `OutputNormFactor`: none.
///
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805
struct OutputNormFactorParams {
  /// The output projection.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.output = true}; }
};

}  // namespace kvtrim
