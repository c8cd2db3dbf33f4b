// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/error.hpp>

#include "catch.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace {

enum class Small : std::int8_t { minus_two = -2 };

// A constexpr constructor that refuses, as the library's do.
struct Even {
  int value;
  constexpr explicit Even(int v) : value(v) {
    if (v % 2 != 0) { kvtrim::throw_invalid_argument("Even: {} is odd", v); }
  }
};
static_assert(Even(4).value == 4);

std::string what_of(int v) {
  try {
    return std::to_string(Even(v).value);
  } catch (const std::invalid_argument& e) { return e.what(); }
}

}  // namespace

TEST_CASE("error: a constexpr constructor throws with the number in the text", "[error]") {
  CHECK(what_of(3) == "Even: 3 is odd");
  CHECK(what_of(6) == "6");
}

TEST_CASE("error: each kind of value is written as a person would", "[error]") {
  using kvtrim::detail::message_text;
  CHECK(message_text(Small::minus_two) == "-2");
  CHECK(message_text(true) == "true");
  CHECK(message_text(std::uint64_t{18446744073709551615U}) == "18446744073709551615");
  CHECK(message_text(0.25F) == "0.25");
  CHECK(message_text("literal") == "literal");
  CHECK(message_text(std::string_view("view")) == "view");
}

TEST_CASE("error: braces inside a value are not filled again", "[error][edge]") {
  CHECK(kvtrim::detail::message("a {} b {} c", {"{}", "2"}) == "a {} b 2 c");
  CHECK(kvtrim::detail::message("{}", {}) == "{}");
}

TEST_CASE("error: a length error is one", "[error]") {
  CHECK_THROWS_AS(kvtrim::throw_length_error("no values"), std::length_error);
}
