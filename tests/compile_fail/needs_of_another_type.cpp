// expect: kvtrim::needs: a member needs\(\) must be written
// SPDX-License-Identifier: Apache-2.0
// A score that says what it needs in a type of its own.
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/top_rows.hpp>

#include <string_view>

struct MyScores {
  static constexpr std::string_view name = "mine";
  static constexpr std::string_view title = "Mine";
  static constexpr kvtrim::Protection protects{0, 0};
  constexpr void check(std::string_view) const noexcept {}
#if defined(KVTRIM_TEST_VALID)
  [[nodiscard]] constexpr kvtrim::Needs needs() const noexcept { return {.window = 4}; }
#else
  [[nodiscard]] constexpr int needs() const noexcept { return 4; }
#endif
};

const kvtrim::Needs found = kvtrim::needs(kvtrim::TopRows<MyScores>());
