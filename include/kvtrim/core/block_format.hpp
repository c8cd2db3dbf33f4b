// SPDX-License-Identifier: Apache-2.0
#pragma once

// llama.cpp's formats for rows of a cache: 32 neighbouring features share a scale, and some a minimum. The values are those of
// its own dequantisation, bit for bit.

#include <kvtrim/core/dtype.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvtrim {

/// How rows of `DType::opaque` are quantised.
enum class BlockFormat : std::uint8_t {
  none,  ///< not known: rows are moved, never read
  q8_0,  ///< f16 scale, 32 signed bytes
  q4_0,  ///< f16 scale, 32 nibbles less 8
  q4_1,  ///< f16 scale, f16 minimum, 32 nibbles
  q5_1,  ///< f16 scale, f16 minimum, 32 fifth bits, 32 nibbles
};

/// Features of a block.
inline constexpr std::int32_t block_features = 32;

/// Bytes of a block; 0 for `none`.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t block_bytes(BlockFormat f) noexcept {
  switch (f) {
    case BlockFormat::none:
      return 0;
    case BlockFormat::q8_0:
      return 34;
    case BlockFormat::q4_0:
      return 18;
    case BlockFormat::q4_1:
      return 20;
    case BlockFormat::q5_1:
      return 24;
  }
  return 0;
}

/// Name of `f`, spelled as in the enumeration.
[[nodiscard]] constexpr std::string_view to_string(BlockFormat f) noexcept {
  return detail::enumerator_name(f, {"none", "q8_0", "q4_0", "q4_1", "q5_1"});
}

namespace detail {
[[nodiscard]] inline float load_f16(const std::byte* p) noexcept {
  std::uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof bits);
  return f16_to_float(bits);
}
}  // namespace detail

/// Reads `features` quantised features as floats.
///
/// \param from      the row's first block
/// \param features  a multiple of 32
/// \param[out] out  [features]
/// \pre `f` is not `none`
inline void widen_blocks(BlockFormat f,
                         const std::byte* from,
                         std::int32_t features,
                         float* out) noexcept {
  static_assert(std::endian::native == std::endian::little, "blocks are read in place");
  KVTRIM_ASSERT(f != BlockFormat::none && features % block_features == 0);
  for (; features > 0; features -= block_features, from += block_bytes(f), out += block_features) {
    const float scale = detail::load_f16(from);
    if (f == BlockFormat::q8_0) {
      std::int8_t x[block_features];
      std::memcpy(x, from + 2, sizeof x);
      for (std::int32_t i = 0; i < block_features; ++i) {
        out[i] = static_cast<float>(x[i]) * scale;
      }
      continue;
    }
    const bool has_minimum = f != BlockFormat::q4_0;
    const float minimum = has_minimum ? detail::load_f16(from + 2) : 0.0F;
    std::uint32_t fifth = 0;
    if (f == BlockFormat::q5_1) { std::memcpy(&fifth, from + 4, sizeof fifth); }
    // Low nibbles are the first half of the features, high nibbles the second.
    std::uint8_t pairs[block_features / 2];
    std::memcpy(pairs, from + block_bytes(f) - sizeof pairs, sizeof pairs);
    constexpr std::int32_t half = block_features / 2;
    for (std::int32_t i = 0; i < half; ++i) {
      const auto bit = [&](std::int32_t n) {
        return static_cast<std::int32_t>((fifth >> static_cast<unsigned>(n) & 1U) << 4U);
      };
      const std::int32_t low = (pairs[i] & 15) | bit(i);
      const std::int32_t high = (pairs[i] >> 4) | bit(i + half);
      if (has_minimum) {
        out[i] = static_cast<float>(low) * scale + minimum;
        out[i + half] = static_cast<float>(high) * scale + minimum;
      } else {
        out[i] = static_cast<float>(low - 8) * scale;
        out[i + half] = static_cast<float>(high - 8) * scale;
      }
    }
  }
}

}  // namespace kvtrim
