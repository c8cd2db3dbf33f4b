// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tensor types of a GGUF file that this engine reads, and how their bytes become f32. A quantised type stores blocks:
// 32 (or 256 for the K types) neighbouring elements of a row share their scales. All numbers are little-endian.

#include <kvtrim/core/block_format.hpp>
#include <kvtrim/core/dtype.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace engine {

static_assert(std::endian::native == std::endian::little, "a GGUF file is read in place");

/// What the elements of a tensor are; the values are those of the file.
enum class TensorType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30,
};

/// Name and block size of one tensor type.
struct TensorTypeTraits {
  TensorType type;
  std::string_view name;
  std::uint64_t block_elements;
  std::uint64_t block_bytes;
};

inline constexpr std::array<TensorTypeTraits, 8> tensor_types{{
    {TensorType::f32, "F32", 1, 4},
    {TensorType::f16, "F16", 1, 2},
    {TensorType::bf16, "BF16", 1, 2},
    {TensorType::q4_0, "Q4_0", 32, 18},
    {TensorType::q4_1, "Q4_1", 32, 20},
    {TensorType::q8_0, "Q8_0", 32, 34},
    {TensorType::q4_k, "Q4_K", 256, 144},
    {TensorType::q6_k, "Q6_K", 256, 210},
}};

/// Looks up a type as the file numbers it. \returns null for a type that this engine does not read
[[nodiscard]] constexpr const TensorTypeTraits* find_tensor_type(std::uint32_t type) noexcept {
  for (const TensorTypeTraits& traits : tensor_types) {
    if (static_cast<std::uint32_t>(traits.type) == type) return &traits;
  }
  return nullptr;
}

/// The names of all types that this engine reads, for error messages.
[[nodiscard]] inline std::string known_tensor_types() {
  std::string names;
  for (const TensorTypeTraits& traits : tensor_types) {
    names += (names.empty() ? "" : ", ") + std::string(traits.name);
  }
  return names;
}

namespace detail {

[[nodiscard]] inline unsigned byte_at(const std::byte* p, int i) noexcept {
  return std::to_integer<unsigned>(p[i]);
}

[[nodiscard]] inline float signed_byte_at(const std::byte* p, int i) noexcept {
  return static_cast<float>(static_cast<std::int8_t>(byte_at(p, i)));
}

[[nodiscard]] inline float load_f32(const std::byte* p) noexcept {
  float value = 0;
  std::memcpy(&value, p, sizeof value);
  return value;
}

[[nodiscard]] inline float load_f16(const std::byte* p) noexcept {
  std::uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof bits);
  return kvtrim::f16_to_float(bits);
}

[[nodiscard]] inline float load_bf16(const std::byte* p) noexcept {
  std::uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof bits);
  return kvtrim::bf16_to_float(bits);
}

/// 8 groups of 32 with a 6-bit scale and a 6-bit minimum each. Bytes 0-3 and 4-7 of the 12 hold scales and minima of groups
/// 0-3; groups 4-7 have their low 4 bits in bytes 8-11 and their high 2 bits on top of the bytes of groups 0-3.
inline void dequantise_q4_k(const std::byte* block, float* out) noexcept {
  const float scale = load_f16(block);
  const float minimum = load_f16(block + 2);
  const std::byte* packed = block + 4;
  const std::byte* nibbles = block + 16;
  for (int group = 0; group < 8; ++group) {
    unsigned group_scale = 0;
    unsigned group_minimum = 0;
    if (group < 4) {
      group_scale = byte_at(packed, group) & 63U;
      group_minimum = byte_at(packed, group + 4) & 63U;
    } else {
      const unsigned low = byte_at(packed, group + 4);
      group_scale = (low & 15U) + ((byte_at(packed, group - 4) >> 6U) << 4U);
      group_minimum = (low >> 4U) + ((byte_at(packed, group) >> 6U) << 4U);
    }
    // Groups come in pairs that share 32 bytes: the even one in the low nibbles, the odd one in the high nibbles.
    const std::byte* pair = nibbles + (group / 2) * 32;
    const unsigned shift = group % 2 == 0 ? 0U : 4U;
    const float factor = scale * static_cast<float>(group_scale);
    const float offset = minimum * static_cast<float>(group_minimum);
    for (int i = 0; i < 32; ++i) {
      out[group * 32 + i] = factor * static_cast<float>((byte_at(pair, i) >> shift) & 15U) - offset;
    }
  }
}

/// 6 bits per element: 128 bytes of low nibbles, 64 bytes of high bit pairs, a signed scale for every 16 elements, one f16.
/// Each half of the block is 4 rows of 32 elements: rows 0, 1 are low nibbles, rows 2, 3 the high nibbles of the same bytes.
inline void dequantise_q6_k(const std::byte* block, float* out) noexcept {
  const std::byte* scales = block + 192;
  const float scale = load_f16(block + 208);
  for (int half = 0; half < 2; ++half) {
    const std::byte* low = block + half * 64;
    const std::byte* high = block + 128 + half * 32;
    for (int row = 0; row < 4; ++row) {
      for (int i = 0; i < 32; ++i) {
        const unsigned nibble = (byte_at(low, (row % 2) * 32 + i) >> (row < 2 ? 0U : 4U)) & 15U;
        const unsigned top = (byte_at(high, i) >> static_cast<unsigned>(2 * row)) & 3U;
        const int level = static_cast<int>(nibble + (top << 4U)) - 32;
        const int element = half * 128 + row * 32 + i;
        out[element] = scale * signed_byte_at(scales, element / 16) * static_cast<float>(level);
      }
    }
  }
}

template <kvtrim::BlockFormat Format>
void widen(const std::byte* block, float* out) noexcept {
  kvtrim::widen_blocks(Format, block, kvtrim::block_features, out);
}

}  // namespace detail

/// Converts whole blocks of one type to f32.
///
/// \param type   what `bytes` hold
/// \param bytes  whole blocks
/// \param[out] out  one float per element
/// \pre `bytes.size() / block_bytes * block_elements == out.size()`, no remainder
/// \par Complexity
/// O(elements); no allocation
inline void dequantise(TensorType type,
                       std::span<const std::byte> bytes,
                       std::span<float> out) noexcept {
  const auto each = [&](std::size_t block_elements, std::size_t block_bytes, auto&& convert) {
    for (std::size_t block = 0; (block + 1) * block_bytes <= bytes.size(); ++block) {
      convert(bytes.data() + block * block_bytes, out.data() + block * block_elements);
    }
  };
  switch (type) {
    case TensorType::f32:
      return each(1, 4, [](const std::byte* p, float* o) { *o = detail::load_f32(p); });
    case TensorType::f16:
      return each(1, 2, [](const std::byte* p, float* o) { *o = detail::load_f16(p); });
    case TensorType::bf16:
      return each(1, 2, [](const std::byte* p, float* o) { *o = detail::load_bf16(p); });
    case TensorType::q4_0:
      return each(32, 18, detail::widen<kvtrim::BlockFormat::q4_0>);
    case TensorType::q4_1:
      return each(32, 20, detail::widen<kvtrim::BlockFormat::q4_1>);
    case TensorType::q8_0:
      return each(32, 34, detail::widen<kvtrim::BlockFormat::q8_0>);
    case TensorType::q4_k:
      return each(256, 144, detail::dequantise_q4_k);
    case TensorType::q6_k:
      return each(256, 210, detail::dequantise_q6_k);
  }
}

}  // namespace engine
