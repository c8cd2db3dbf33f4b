// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/expected_attention_params.hpp>

#include <string_view>

namespace kvtrim {

/// ExpectedAttention's defaults.
template <>
struct Method<ExpectedAttentionParams> {
  static constexpr std::string_view name = "expected_attention";
  static constexpr std::string_view title = "kvtrim::ExpectedAttention";
  static constexpr int sinks = 4;
  static constexpr int recent = 0;
  static constexpr void check(const ExpectedAttentionParams& p) {
    if (p.sinks < 0 || p.future < 1) {
      detail::throw_invalid_argument(
          "{}: scores.sinks {} must be at least 0, scores.future {} at least 1",
          title,
          p.sinks,
          p.future);
    }
    if (!(p.epsilon >= 0 && p.epsilon <= most) || !(p.scale >= 0 && p.scale <= most)) {
      detail::throw_invalid_argument(
          "{}: scores.epsilon {} and scores.scale {} must be finite and at least 0",
          title,
          p.epsilon,
          p.scale);
    }
    if (p.rope.kind != RopeKind::standard || p.rope.dim < 0 || p.rope.dim % 2 != 0 ||
        p.rope.offset < 0) {
      detail::throw_invalid_argument(
          "{}: scores.rope.kind {} must be 0 (fixed frequencies), scores.rope.dim {} even and at "
          "least 0, scores.rope.offset {} at least 0",
          title,
          p.rope.kind,
          p.rope.dim,
          p.rope.offset);
    }
  }

 private:
  static constexpr float most = std::numeric_limits<float>::max();
};

/// Keeps the rows that queries to come are expected to attend to, weighted by the norm of their values.
///
/// Needs `Observation::statistics`: of this prompt (`QueryMoments`), or of a calibration set, and
/// `Params::scores.rope`, the model's rotation, whose frequencies must outlive the policy. At the end of a prompt, or
/// while generating. The first `sinks` rows always stay; change `scores.sinks` with them.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `ExpectedAttentionScorer`
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636, with kvpress's defaults: sinks 4, 512 positions, epsilon 0, covariance and
/// value norm on. kvpress names the form with given statistics ExpectedAttentionStats
using ExpectedAttention = TopRows<ExpectedAttentionParams>;
static_assert(Policy<ExpectedAttention>);

}  // namespace kvtrim
