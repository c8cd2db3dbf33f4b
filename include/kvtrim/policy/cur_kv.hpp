// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/cur_params.hpp>

#include <string_view>

namespace kvtrim {

/// CurKV's defaults.
template <>
struct Method<CurParams> {
  static constexpr std::string_view name = "curkv";
  static constexpr std::string_view title = "kvtrim::CurKV";
  static constexpr int sinks = 4;
  static constexpr int recent = 0;
  static constexpr void check(const CurParams& p) {
    if (p.window < 0) {
      detail::throw_invalid_argument("{}: scores.window {} must be at least 0", title, p.window);
    }
    if (p.form > CurForm::values) {
      detail::throw_invalid_argument("{}: scores.form {} is none of CurForm", title, p.form);
    }
  }
};

/// Keeps the rows whose keys and values weigh most among their neighbours. The first `sinks` rows always stay.
///
/// Needs keys and values only, so the question may come after the eviction. At the end of a prompt.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `CurScorer`
/// \par Source
/// Sengupta et al., 2025, arXiv:2509.15038, with kvpress's defaults: windows of 16 rows, product of both shares, 4
/// sinks, no recent rows; differs: no random projection
using CurKV = TopRows<CurParams>;
static_assert(Policy<CurKV>);

}  // namespace kvtrim
