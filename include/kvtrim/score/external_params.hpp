// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `ExternalScorer`: none.
///
/// \par Source
/// none: the scores are the caller's
struct ExternalParams {};

}  // namespace kvtrim
