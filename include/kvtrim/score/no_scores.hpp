// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Scorer parameters of policies that keep by position alone.
///
/// \par Source
/// none
struct NoScores {};

}  // namespace kvtrim
