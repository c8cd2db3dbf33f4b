// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtrim {

/// What of a row counts for CurKV.
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
  std::int32_t window = 16;         ///< rows among which squared norms are shares; 0: all rows
  CurForm form = CurForm::product;  ///< which shares
};

}  // namespace kvtrim
