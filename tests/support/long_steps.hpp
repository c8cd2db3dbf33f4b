// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>

namespace kvtrim::test {

/// Decode steps of a test with the tag [slow]: KVTRIM_LONG_STEPS (a million in the preset `long`), otherwise a tenth of that.
inline std::int32_t long_steps() {
  const char* const text = std::getenv("KVTRIM_LONG_STEPS");
  return text == nullptr ? 100'000 : static_cast<std::int32_t>(std::atoll(text));
}

}  // namespace kvtrim::test
