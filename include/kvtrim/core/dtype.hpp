// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/types.hpp>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvtrim {

/// Element type of a plane. Scores are fp32 whatever the cache holds.
enum class DType : std::uint8_t {
  f32,
  f16,
  bf16,
  f8e4m3,  ///< OCP E4M3 (fn): no infinities; scored, never rotated in place
  f8e5m2,  ///< OCP E5M2; scored, never rotated in place
  i8,      ///< times a scale; scored, never rotated in place
  opaque,  ///< block-quantised rows: moved whole, scored if their format is known (`BlockFormat`), never rotated
};

/// Bytes of one element; 0 for `opaque`, whose planes state the size of a row.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::int32_t element_bytes(DType t) noexcept {
  switch (t) {
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
      return 1;
    case DType::opaque:
      return 0;
  }
  return 0;
}

/// Whether values of `t` are floats that can be read and written one by one. Quantised rows are read as well (`readable` of a
/// `Plane`), never written.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr bool readable(DType t) noexcept {
  return t == DType::f32 || t == DType::f16 || t == DType::bf16;
}

/// Name of `t`, spelled as in the enumeration.
[[nodiscard]] constexpr std::string_view to_string(DType t) noexcept {
  return detail::enumerator_name(t, {"f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8", "opaque"});
}

/// Value of IEEE binary16 bits; exact, subnormals and NaN included.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float f16_to_float(std::uint16_t h) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16U;
  const std::uint32_t body = h & 0x7FFFU;
  if (body >= 0x7C00U) {
    return std::bit_cast<float>(sign | 0x7F80'0000U | ((body & 0x3FFU) << 13U));
  }
  // Rebias by a multiplication with 2^112: it also normalises subnormals.
  const float magnitude = std::bit_cast<float>(body << 13U) * std::bit_cast<float>(0x7780'0000U);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// IEEE binary16 bits nearest to `f`, ties to even; overflow gives infinity, NaN stays NaN.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint16_t float_to_f16(float f) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFF'FFFFU;
  if (magnitude > 0x7F80'0000U) { return static_cast<std::uint16_t>(sign | 0x7E00U); }
  if (magnitude >= 0x477F'F000U) { return static_cast<std::uint16_t>(sign | 0x7C00U); }
  if (magnitude <
      0x3880'0000U) {  // subnormal result: adding 0.5 leaves the rounded value in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign |
                                      (std::bit_cast<std::uint32_t>(shifted) - 0x3F00'0000U));
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13U) & 1U) - 0x3800'0000U;
  return static_cast<std::uint16_t>(sign | (rounded >> 13U));
}

/// Value of bfloat16 bits; exact.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float bf16_to_float(std::uint16_t b) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16U);
}

/// Value of OCP E4M3 (fn) bits; exact. S.1111.111 is NaN, there is no infinity.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float f8e4m3_to_float(std::uint8_t x) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x80U) << 24U;
  const std::uint32_t body = x & 0x7FU;
  if (body == 0x7FU) { return std::bit_cast<float>(sign | 0x7FC0'0000U); }
  // Rebias by a multiplication with 2^120: it also normalises subnormals.
  const float magnitude = std::bit_cast<float>(body << 20U) * std::bit_cast<float>(0x7B80'0000U);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// Value of OCP E5M2 bits: the upper half of binary16; exact.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr float f8e5m2_to_float(std::uint8_t x) noexcept {
  return f16_to_float(static_cast<std::uint16_t>(x << 8U));
}

/// bfloat16 bits nearest to `f`, ties to even; NaN stays NaN.
[[nodiscard]] KVTRIM_HOST_DEVICE constexpr std::uint16_t float_to_bf16(float f) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7FFF'FFFFU) > 0x7F80'0000U) {
    return static_cast<std::uint16_t>((bits >> 16U) | 0x40U);
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16U) & 1U)) >> 16U);
}

/// Reads element `i` of contiguous values of type `t`.
/// \pre `readable(t)`
[[nodiscard]] inline float load_element(const std::byte* p, DType t) noexcept {
  KVTRIM_ASSERT(readable(t));
  if (t == DType::f32) {
    float f = 0;
    std::memcpy(&f, p, sizeof f);
    return f;
  }
  std::uint16_t u = 0;
  std::memcpy(&u, p, sizeof u);
  return t == DType::f16 ? f16_to_float(u) : bf16_to_float(u);
}

/// Writes `value` as type `t`, rounded to nearest even.
/// \pre `readable(t)`
inline void store_element(std::byte* p, DType t, float value) noexcept {
  KVTRIM_ASSERT(readable(t));
  if (t == DType::f32) {
    std::memcpy(p, &value, sizeof value);
    return;
  }
  const std::uint16_t u = t == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
  std::memcpy(p, &u, sizeof u);
}

}  // namespace kvtrim
