// expect: compile without -ffast-math
// SPDX-License-Identifier: Apache-2.0
// What a compiler defines under -ffast-math or -ffinite-math-only. Sums and the order of scores would not be what they say.
#if !defined(KVTRIM_TEST_VALID)
#  undef __FINITE_MATH_ONLY__
#  define __FINITE_MATH_ONLY__ 1
#endif
#include <kvtrim/core/order_key.hpp>

std::uint32_t use(float score) {
  return kvtrim::order_key(score);
}
