// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `TovaScorer`: none.
///
/// \par Source
/// Oren et al., 2024, arXiv:2401.06104
struct TovaParams {};

}  // namespace kvtrim
