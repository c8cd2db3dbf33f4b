// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/dtype.hpp>

#include "catch.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string_view>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::array all_types{
    DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::i8, DType::opaque};

// A binary format by its definition, in double.
struct Format {
  int mantissa;  // bits stored
  int low;       // exponent of the smallest normal
  int high;      // exponent of the largest
};
constexpr Format half{10, -14, 15};
constexpr Format brain{7, -126, 127};

double decode(const Format& format, std::uint16_t bits) {
  const int field = (bits & 0x7FFF) >> format.mantissa;
  const double fraction = std::ldexp(bits & ((1 << format.mantissa) - 1), -format.mantissa);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int top = format.high + 1 - format.low + 1;
  if (field == top) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  return sign * (field == 0 ? std::ldexp(fraction, format.low)
                            : std::ldexp(1 + fraction, field + format.low - 1));
}

// Nearest value of the format, ties to even: exact, as dividing by a power of two loses nothing.
double nearest(const Format& format, float f) {
  if (!std::isfinite(f)) { return f; }
  const double magnitude = std::fabs(static_cast<double>(f));
  const int exponent = magnitude == 0 ? format.low : std::max(std::ilogb(magnitude), format.low);
  const double unit = std::ldexp(1.0, exponent - format.mantissa);
  const double rounded = std::nearbyint(magnitude / unit) * unit;  // to even by default
  const bool overflows = rounded >= std::ldexp(1.0, format.high + 1);
  return std::copysign(overflows ? std::numeric_limits<double>::infinity() : rounded, f);
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

// Borders of the format, their neighbours and the halves between: where rounding goes wrong.
std::vector<float> border_values(const Format& format) {
  std::vector<float> out;
  for (std::uint32_t bits = 0; bits < 0x8000U; ++bits) {
    const double low = decode(format, static_cast<std::uint16_t>(bits));
    if (!std::isfinite(low)) { break; }
    const double high = decode(format, static_cast<std::uint16_t>(bits + 1));
    const double middle = std::isfinite(high)
                              ? (low + high) / 2
                              : low + std::ldexp(1.0, format.high - format.mantissa - 1);
    for (const double value : {low, middle}) {
      const auto f = static_cast<float>(value);
      for (const float g : {f,
                            std::nextafter(f, -1.0F),
                            std::nextafter(f, std::numeric_limits<float>::infinity())}) {
        out.push_back(g);
        out.push_back(-g);
      }
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float g : {inf,
                        nan,
                        std::numeric_limits<float>::max(),
                        std::numeric_limits<float>::denorm_min(),
                        std::bit_cast<float>(0x7F80'0001U)}) {
    out.push_back(g);
    out.push_back(-g);
  }
  return out;
}

std::vector<float> random_values(std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<float> out(300'000);
  for (float& f : out) { f = std::bit_cast<float>(static_cast<std::uint32_t>(rng())); }
  return out;
}

template <class Encode>
std::int64_t wrong_roundings(const Format& format,
                             const std::vector<float>& values,
                             Encode encode) {
  std::int64_t wrong = 0;
  for (const float f : values) {
    if (!same(decode(format, encode(f)), nearest(format, f))) { ++wrong; }
  }
  return wrong;
}

}  // namespace

TEST_CASE("dtype: every f16 bit pattern is decoded exactly and survives the way back",
          "[dtype][property][nan]") {
  std::int32_t decoded_wrong = 0;
  std::int32_t changed = 0;
  for (std::uint32_t i = 0; i < 0x1'0000U; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float f = f16_to_float(bits);
    if (!same(static_cast<double>(f), decode(half, bits))) { ++decoded_wrong; }
    const std::uint16_t back = float_to_f16(f);
    // A NaN stays a NaN of its sign; its payload need not survive.
    const bool kept =
        std::isnan(f) ? (back & 0x7FFFU) > 0x7C00U && (back >> 15U) == (bits >> 15U) : back == bits;
    if (!kept) { ++changed; }
  }
  CHECK(decoded_wrong == 0);
  CHECK(changed == 0);
}

TEST_CASE("dtype: every bf16 bit pattern is decoded exactly and survives the way back",
          "[dtype][property][nan]") {
  std::int32_t decoded_wrong = 0;
  std::int32_t changed = 0;
  for (std::uint32_t i = 0; i < 0x1'0000U; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float f = bf16_to_float(bits);
    if (!same(static_cast<double>(f), decode(brain, bits))) { ++decoded_wrong; }
    const std::uint16_t back = float_to_bf16(f);
    const bool kept =
        std::isnan(f) ? (back & 0x7FFFU) > 0x7F80U && (back >> 15U) == (bits >> 15U) : back == bits;
    if (!kept) { ++changed; }
  }
  CHECK(decoded_wrong == 0);
  CHECK(changed == 0);
}

TEST_CASE("dtype: f16 rounds to nearest even at every border, subnormals and overflow included",
          "[dtype][edge]") {
  CHECK(wrong_roundings(half, border_values(half), float_to_f16) == 0);
  CHECK(float_to_f16(65519.99F) == 0x7BFF);  // the last value below infinity
  CHECK(float_to_f16(65520.0F) == 0x7C00);   // the tie goes to the even neighbour, which is inf
  CHECK(float_to_f16(std::ldexp(1.0F, -25)) == 0);  // half of the smallest subnormal: to even
  CHECK(float_to_f16(std::nextafter(std::ldexp(1.0F, -25), 1.0F)) == 1);
}

TEST_CASE("dtype: bf16 rounds to nearest even at every border, overflow included",
          "[dtype][edge]") {
  CHECK(wrong_roundings(brain, border_values(brain), float_to_bf16) == 0);
  CHECK(float_to_bf16(std::numeric_limits<float>::max()) == 0x7F80);
  CHECK(float_to_bf16(1.00390625F) == 0x3F80);  // 1 + 2^-8, a tie, to the even 1
  CHECK(float_to_bf16(1.01171875F) == 0x3F82);  // 1 + 3 * 2^-8, a tie, to the even 1 + 2^-6
}

TEST_CASE("dtype: f16 and bf16 round random floats to nearest even", "[dtype][property]") {
  CHECK(wrong_roundings(half, random_values(3), float_to_f16) == 0);
  CHECK(wrong_roundings(brain, random_values(4), float_to_bf16) == 0);
  std::mt19937 rng(5);  // within the range of f16, where random bits seldom fall
  std::uniform_real_distribution<float> exponent(-27.0F, 17.0F);
  std::vector<float> values(200'000);
  for (float& f : values) { f = std::exp2(exponent(rng)) * ((rng() & 1U) != 0U ? 1.0F : -1.0F); }
  CHECK(wrong_roundings(half, values, float_to_f16) == 0);
}

TEST_CASE("dtype: f16 and bf16 agree with Eigen's", "[dtype][parity]") {
  std::int64_t wrong = 0;
  for (const std::vector<float>& values : {border_values(half), random_values(6)}) {
    for (const float f : values) {
      if (std::isnan(f)) { continue; }  // Eigen keeps another payload
      if (float_to_f16(f) != std::bit_cast<std::uint16_t>(Eigen::half(f))) { ++wrong; }
      if (float_to_bf16(f) != std::bit_cast<std::uint16_t>(Eigen::bfloat16(f))) { ++wrong; }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("dtype: an element is stored rounded, at any address, and touches no neighbour",
          "[dtype][edge]") {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> memory(16, std::byte{0xA5});
    const float value = 1.0F + std::ldexp(1.0F, -8) + std::ldexp(1.0F, -11);
    store_element(memory.data() + 3, type, value);
    const double expected = type == DType::f32 ? static_cast<double>(value)
                                               : nearest(type == DType::f16 ? half : brain, value);
    CHECK(static_cast<double>(load_element(memory.data() + 3, type)) == expected);
    CHECK(memory[2] == std::byte{0xA5});
    CHECK(memory[3 + static_cast<std::size_t>(element_bytes(type))] == std::byte{0xA5});
  }
}

TEST_CASE("dtype: sizes, readability and names belong to each type", "[dtype]") {
  std::set<std::string_view> names;
  for (const DType type : all_types) {
    CHECK(names.insert(to_string(type)).second);
    const bool has_floats = type == DType::f32 || type == DType::f16 || type == DType::bf16;
    CHECK(readable(type) == has_floats);
  }
  CHECK(names.count("unknown") == 0);
  CHECK(to_string(static_cast<DType>(all_types.size())) == "unknown");
  CHECK(element_bytes(DType::f32) == 4);
  CHECK(element_bytes(DType::f16) == 2);
  CHECK(element_bytes(DType::bf16) == 2);
  CHECK(element_bytes(DType::f8e4m3) == 1);
  CHECK(element_bytes(DType::f8e5m2) == 1);
  CHECK(element_bytes(DType::i8) == 1);
  CHECK(element_bytes(DType::opaque) == 0);
}
