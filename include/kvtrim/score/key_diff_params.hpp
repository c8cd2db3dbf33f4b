// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `KeyDiffScorer`: none.
struct KeyDiffParams {};

}  // namespace kvtrim
