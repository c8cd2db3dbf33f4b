// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every throw of the library is in this file, so that -fno-exceptions changes only this one place: the process then
// ends in std::terminate instead.
//
//   throw_invalid_argument("kvtrim::PagePool: page size {} is below 1", page_size);

#include <kvtrim/core/config.hpp>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace kvtrim {

namespace detail {

// Not constexpr: reaching it stops the compilation, and the compiler's message names it.
inline void message_needs_one_value_for_each_pair_of_braces() {}

// The text of a message with as many pairs of braces as there are `Values`.
template <std::size_t Values>
struct MessageFormat {
  std::string_view text;

  // Implicit, because callers write a literal.
  consteval MessageFormat(const char* literal) : text(literal) {
    std::size_t pairs = 0;
    for (std::size_t i = 0; i + 1 < text.size(); ++i) {
      if (text[i] == '{' && text[i + 1] == '}') { ++pairs; }
    }
    if (pairs != Values) { message_needs_one_value_for_each_pair_of_braces(); }
  }
};

template <class T>
[[nodiscard]] std::string message_text(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(+static_cast<std::underlying_type_t<T>>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(value));
    return digits;
  } else {
    static_assert(std::is_convertible_v<const T&, std::string_view>,
                  "a value in an error message is a number, an enum, a bool or text");
    return std::string(std::string_view(value));
  }
}

[[nodiscard]] inline std::string message(std::string_view format,
                                         std::initializer_list<std::string> values) {
  std::string out;
  const std::string* next = values.begin();
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (next != values.end() && format.substr(i, 2) == "{}") {
      out += *next++;
      ++i;
    } else {
      out += format[i];
    }
  }
  return out;
}

}  // namespace detail

/// Throws `std::invalid_argument` with the values written into the text. Your own policies and scorers can refuse their
/// parameters with it. Under -fno-exceptions it ends the process.
///
/// A constexpr function may call it on a path that no constant expression takes.
///
/// \param format  a literal; each `{}` takes the next value. It compiles only if there are as many values as `{}`
/// \param values  integers, enums (their number), floating-point values, bools or text
template <class... Values>
[[noreturn]] KVTRIM_COLD void throw_invalid_argument(
    [[maybe_unused]] std::type_identity_t<detail::MessageFormat<sizeof...(Values)>> format,
    [[maybe_unused]] const Values&... values) {
#if defined(__cpp_exceptions)
  throw std::invalid_argument(detail::message(format.text, {detail::message_text(values)...}));
#else
  std::terminate();
#endif
}

/// The same with `std::length_error`.
template <class... Values>
[[noreturn]] KVTRIM_COLD void throw_length_error(
    [[maybe_unused]] std::type_identity_t<detail::MessageFormat<sizeof...(Values)>> format,
    [[maybe_unused]] const Values&... values) {
#if defined(__cpp_exceptions)
  throw std::length_error(detail::message(format.text, {detail::message_text(values)...}));
#else
  std::terminate();
#endif
}

}  // namespace kvtrim
