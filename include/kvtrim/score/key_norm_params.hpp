// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `KeyNormScorer`: none.
///
/// \par Source
/// Devoto et al., 2024, arXiv:2406.11430
struct KeyNormParams {};

}  // namespace kvtrim
