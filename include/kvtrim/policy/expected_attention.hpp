// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/rope.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Parameters of `ExpectedAttentionScorer`.
///
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636; sizes and epsilon as kvpress's press (its benchmark adds epsilon 0.01)
struct ExpectedAttentionParams {
  static constexpr std::string_view name = "expected";
  static constexpr std::string_view title = "kvtrim::ExpectedAttention";
  static constexpr Protection protects{4, 0};

  std::int32_t sinks = 4;     ///< first rows, left out of the softmax; protect them
  std::int32_t future = 512;  ///< number of future positions, counted from the next one
  float epsilon = 0;          ///< added to the expected attention, before the value's norm
  bool covariance = true;     ///< use the queries' covariance, not their mean alone
  bool value_norm = true;     ///< multiply by the Euclidean norm of the value
  float scale = 0;            ///< factor of the logits; 0: 1 / sqrt(head_dim)
  Rope rope{};  ///< of the model; its frequencies must outlive everything made from this.
                ///< All frequencies 0: a model without rotation

  /// \throws std::invalid_argument if a size, epsilon or scale is out of range or not finite, or the rotation does not have
  ///   fixed frequencies
  constexpr void check(std::string_view who) const {
    detail::check_sizes(who, detail::Sizes{{"scores.sinks", sinks}, {"scores.future", future, 1}});
    detail::check_finite(who, "scores.epsilon", epsilon);
    detail::check_finite(who, "scores.scale", scale);
    if (rope.kind != RopeKind::standard || rope.dim < 0 || rope.dim % 2 != 0 || rope.offset < 0) {
      throw_invalid_argument(
          "{}: scores.rope.kind {} must be 0 (fixed frequencies), scores.rope.dim {} even and at "
          "least 0, scores.rope.offset {} at least 0",
          who,
          rope.kind,
          rope.dim,
          rope.offset);
    }
  }
  /// Moments of all queries but those of the sinks; the future begins at the next rope position.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.moments = MomentParams{.sinks = sinks}, .states = true};
  }
};
static_assert(ScoreParams<ExpectedAttentionParams>);

/// Keeps the rows that future queries are expected to attend to, weighted by the norm of their values.
///
/// Needs `Observation::statistics` (of this prompt, from `QueryMoments`, or of a calibration set) and
/// `Params::scores.rope`, the model's rotation, whose frequencies must outlive the policy. Use it at the end of a prompt,
/// or while generating. The first `sinks` rows always stay; change `scores.sinks` along with `sinks`.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `ExpectedAttentionScorer`
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636, with kvpress's defaults: sinks 4, 512 positions, epsilon 0, covariance and
/// value norm on. kvpress calls the form with given statistics ExpectedAttentionStats
using ExpectedAttention = TopRows<ExpectedAttentionParams>;
static_assert(Policy<ExpectedAttention>);

}  // namespace kvtrim
