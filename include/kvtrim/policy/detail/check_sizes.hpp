// SPDX-License-Identifier: Apache-2.0
#pragma once

// What policies and scores say of numbers out of range: which one, its limit, and the others that were given with it.
//
//   check_sizes("kvtrim::LagKV", Sizes{{"sinks", p.sinks}, {"lag", p.lag, 1}});
//   kvtrim::LagKV: lag 0 must be at least 1 (sinks 4, lag 0)

#include <kvtrim/core/config.hpp>
#include <kvtrim/core/error.hpp>
#include <kvtrim/core/saturating.hpp>
#include <kvtrim/policy/policy.hpp>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

namespace kvtrim::detail {

/// A whole number that was given, and its limits: those of a number of rows, unless it has others.
struct Size {
  std::string_view name;
  std::int64_t value = 0;
  std::int64_t least = 0;
  std::int64_t most = std::numeric_limits<std::int32_t>::max();
  bool odd = false;

  [[nodiscard]] constexpr bool fits() const noexcept {
    return value >= least && value <= most && !(odd && value % 2 == 0);
  }
};

/// The sizes of a call. Named by the caller, too: in a template nvcc 13 puts a bare list in parentheses.
using Sizes = std::initializer_list<Size>;

// "sinks 3 + recent 5"
[[nodiscard]] inline std::string listed(Sizes sizes, const char* between) {
  std::string text;
  for (const Size& s : sizes) {
    text += (text.empty() ? "" : between) + std::string(s.name) + " " + std::to_string(s.value);
  }
  return text;
}

[[noreturn]] KVTRIM_COLD inline void throw_size(std::string_view who,
                                                const Size& wrong,
                                                Sizes sizes) {
  const std::string limit = wrong.value < wrong.least  ? "at least " + std::to_string(wrong.least)
                            : wrong.value > wrong.most ? "at most " + std::to_string(wrong.most)
                                                       : "odd";
  const std::string given = sizes.size() < 2 ? "" : " (" + listed(sizes, ", ") + ")";
  throw_invalid_argument("{}: {} {} must be {}{}", who, wrong.name, wrong.value, limit, given);
}

/// \throws std::invalid_argument naming the first size that is out of its limits
constexpr void check_sizes(std::string_view who, Sizes sizes) {
  for (const Size& s : sizes) {
    if (!s.fits()) { throw_size(who, s, sizes); }
  }
}

/// \throws std::length_error if an object of these sizes would take more bytes than can be counted
inline void check_bytes(std::string_view who, std::int64_t bytes, Sizes sizes) {
  if (bytes > too_large / 2) {
    throw_length_error("{}: more bytes than 63 bits can count ({})", who, listed(sizes, ", "));
  }
}

[[noreturn]] KVTRIM_COLD inline void throw_budget(std::string_view who,
                                                  std::int64_t budget,
                                                  Sizes parts) {
  throw_invalid_argument("{}: budget {} must be at least {}", who, budget, listed(parts, " + "));
}

/// \throws std::invalid_argument if the budget is below 1, beyond 31 bits, or below the sum of what is protected
constexpr void check_budget(std::string_view who, std::int64_t budget, Sizes parts) {
  check_sizes(who, Sizes{{"budget", budget, 1}});
  std::int64_t sum = 0;
  for (const Size& part : parts) { sum += part.value; }
  if (budget < sum) { throw_budget(who, budget, parts); }
}

/// \throws std::invalid_argument if a policy protects fewer of the last rows than the scores leave without one
template <ScoreParams S>
constexpr void check_unscored(std::string_view who, const Size& protects, const S& scores) {
  if (const std::int32_t unscored = unscored_rows(scores); protects.value < unscored) {
    throw_invalid_argument(
        "{}: {} {} must be at least {}: the scores leave so many of the last rows without one",
        who,
        protects.name,
        protects.value,
        unscored);
  }
}

/// \throws std::invalid_argument if a share is not within 0 and 1, or NaN
constexpr void check_share(std::string_view who, std::string_view name, double value) {
  if (!(value >= 0 && value <= 1)) {
    throw_invalid_argument("{}: {} {} must be within 0 and 1", who, name, value);
  }
}

/// \throws std::invalid_argument if a number is negative, infinite or NaN
constexpr void check_finite(std::string_view who, std::string_view name, float value) {
  if (!(value >= 0 && value <= std::numeric_limits<float>::max())) {
    throw_invalid_argument("{}: {} {} must be at least 0 and finite", who, name, value);
  }
}

}  // namespace kvtrim::detail
