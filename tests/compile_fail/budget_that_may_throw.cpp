// expect: constraints not satisfied
// SPDX-License-Identifier: Apache-2.0
// A budget is called inside a plan, which is noexcept.
#include <kvtrim/budget/rows.hpp>

#if defined(KVTRIM_TEST_VALID)
#  define MARKED noexcept
#else
#  define MARKED
#endif

struct Half {
  std::int32_t rows(std::int32_t live) const MARKED { return live / 2; }
};

template <kvtrim::Budget B>
std::int32_t rows_of(const B& budget) {
  return budget.rows(10);
}

std::int32_t use() {
  return rows_of(Half{});
}
