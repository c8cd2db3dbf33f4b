// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers of bytes as people write and read them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace program {

/// Bytes of a text: "140e9", "80GiB", "8x80GiB".
/// \throws std::runtime_error if it is none of these or not within 0 and 2^62 bytes; the text begins with the option
[[nodiscard]] inline std::int64_t parse_bytes(const std::string& option, const std::string& text) {
  const auto fail = [&](const std::string& why) {
    throw std::runtime_error(option + " '" + text + "' " + why +
                             "; write it as 140e9, 80GiB or 8x80GiB");
  };
  static constexpr std::pair<std::string_view, double> units[]{{"", 1},
                                                               {"B", 1},
                                                               {"kB", 1e3},
                                                               {"MB", 1e6},
                                                               {"GB", 1e9},
                                                               {"TB", 1e12},
                                                               {"KiB", 0x1p10},
                                                               {"MiB", 0x1p20},
                                                               {"GiB", 0x1p30},
                                                               {"TiB", 0x1p40}};
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  bool number = end != text.c_str();
  if (number && *end == 'x') {
    const char* const second = end + 1;
    value *= std::strtod(second, &end);
    number = end != second;
  }
  if (!number) fail("is no size");
  const auto* const unit =
      std::ranges::find(units, std::string_view(end), [](const auto& u) { return u.first; });
  if (unit == std::end(units)) fail("has the unknown unit '" + std::string(end) + "'");
  value *= unit->second;
  if (!(value >= 0 && value < 0x1p62)) fail("is not within 0 and 2^62 bytes");
  return std::llround(value);
}

/// "343,597,383,680"
[[nodiscard]] inline std::string grouped(std::int64_t value) {
  const std::string digits = std::to_string(value);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0 && digits[i - 1] != '-') text += ',';
    text += digits[i];
  }
  return text;
}

/// "320.00"
[[nodiscard]] inline std::string in_gib(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(bytes) / 0x1p30);
  return text;
}

}  // namespace program
