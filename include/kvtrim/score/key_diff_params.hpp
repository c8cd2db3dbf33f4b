// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `KeyDiffScorer`: none.
///
/// \par Source
/// Park et al., 2025, arXiv:2504.15364
struct KeyDiffParams {};

}  // namespace kvtrim
