// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `QFilterScorer`: none; the filters come with the observation.
///
/// \par Source
/// Godey et al., 2025, arXiv:2503.02812
struct QFilterParams {};

}  // namespace kvtrim
