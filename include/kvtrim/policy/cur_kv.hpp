// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <cstdint>
#include <string_view>

namespace kvtrim {

/// What counts about a row in CurKV.
enum class CurForm : std::uint8_t {
  product,  ///< share of the keys times share of the values
  average,  ///< mean of both shares
  keys,     ///< share of the keys alone
  values,   ///< share of the values alone
};

/// Parameters of `CurScorer`.
///
/// \par Source
/// Sengupta et al., 2025, arXiv:2509.15038; values as kvpress
struct CurParams {
  static constexpr std::string_view name = "curkv";
  static constexpr std::string_view title = "kvtrim::CurKV";
  static constexpr Protection protects{4, 0};

  std::int32_t window = 16;         ///< rows over which squared norms become shares; 0: all rows
  CurForm form = CurForm::product;  ///< which shares

  /// \throws std::invalid_argument if the window is negative or the form is not one of `CurForm`
  constexpr void check(std::string_view who) const {
    detail::check_sizes(who, detail::Sizes{{"scores.window", window}});
    if (form > CurForm::values) {
      throw_invalid_argument("{}: scores.form {} is none of CurForm", who, form);
    }
  }
};
static_assert(ScoreParams<CurParams>);

/// Keeps the rows whose keys and values weigh most among their neighbours. The first `sinks` rows always stay.
///
/// Needs keys and values only, so the question may come after the eviction. Use it at the end of a prompt.
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
