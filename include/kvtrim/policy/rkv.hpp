// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/rkv_params.hpp>

#include <string_view>

namespace kvtrim {

/// R-KV's defaults.
template <>
struct Method<RKVParams> {
  static constexpr std::string_view name = "rkv";
  static constexpr std::string_view title = "kvtrim::RKV";
  static constexpr int sinks = 0;
  static constexpr int recent = RKVParams{}.window;
  static constexpr void check(const RKVParams& p) {
    if (p.window < 1 || p.kernel < 1 || p.kernel % 2 == 0) {
      detail::throw_invalid_argument(
          "{}: scores.window {} must be at least 1, scores.kernel {} odd and at least 1",
          title,
          p.window,
          p.kernel);
    }
    if (!(p.lambda >= 0 && p.lambda <= 1) || !(p.threshold >= 0 && p.threshold <= 1)) {
      detail::throw_invalid_argument(
          "{}: scores.lambda {} and scores.threshold {} must be between 0 and 1",
          title,
          p.lambda,
          p.threshold);
    }
    if (p.group > RKVGroup::logits) {
      detail::throw_invalid_argument("{}: scores.group {} is none of RKVGroup", title, p.group);
    }
  }
};

/// Keeps the rows that the last queries attend to and that no other row repeats. The last `recent` rows always stay.
///
/// Made for long reasoning: call it every so many steps while generating (the authors: 128), with the last
/// `scores.window` queries (`QueryRing`). Change `recent` with `scores.window`.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `RKVScorer`
/// \par Source
/// Cai et al., 2025, arXiv:2505.24133, with the paper's lambda; `RKVParams::authors_code` has what the authors' code
/// does else; differs: see `RKVScorer`
using RKV = TopRows<RKVParams>;
static_assert(Policy<RKV>);

}  // namespace kvtrim
