// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvtrim::test {

/// A small generator whose numbers are the same on every platform (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E37'79B9'7F4A'7C15U);
    z = (z ^ (z >> 30U)) * 0xBF58'476D'1CE4'E5B9U;
    z = (z ^ (z >> 27U)) * 0x94D0'49BB'1331'11EBU;
    return z ^ (z >> 31U);
  }
  /// 0 .. n-1.
  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(bits() % static_cast<std::uint64_t>(n));
  }
  /// -1 .. 1.
  float uniform() {
    return static_cast<float>(static_cast<double>(bits() >> 11U) / 4503599627370496.0 - 1.0);
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvtrim::test
