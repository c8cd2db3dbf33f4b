// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

namespace kvtrim::test {

/// Calls `f` with each value as an `std::integral_constant`: what may be a template argument in a loop's place.
template <auto... Values, class F>
void for_each_value(F f) {
  (f(std::integral_constant<std::remove_cv_t<decltype(Values)>, Values>{}), ...);
}

}  // namespace kvtrim::test
