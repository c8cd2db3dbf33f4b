// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvtrim {

/// Parameters of `ExternalScorer`: none.
struct ExternalParams {};

}  // namespace kvtrim
