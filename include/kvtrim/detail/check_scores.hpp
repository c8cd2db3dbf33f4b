// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parameters of scores that can be out of range have a member `check(title)`, so that whatever holds them, decorated or
// not, can refuse them in its own name.

#include <kvtrim/detail/error.hpp>

#include <limits>
#include <string_view>

namespace kvtrim::detail {

/// Checks parameters that have a check.
template <class Scores>
constexpr void check_scores(std::string_view title, const Scores& scores) {
  if constexpr (requires { scores.check(title); }) { scores.check(title); }
}

constexpr void check_epsilon(std::string_view title, float epsilon) {
  if (!(epsilon >= 0 && epsilon <= std::numeric_limits<float>::max())) {
    throw_invalid_argument("{}: epsilon {} must be at least 0 and finite", title, epsilon);
  }
}

}  // namespace kvtrim::detail
