// SPDX-License-Identifier: Apache-2.0
// The headers' own assertions are as the build says; here the macro is defined again, without them.
#ifndef NDEBUG
#  define NDEBUG
#endif
#include <kvtrim/core/config.hpp>

#include "catch.hpp"

namespace {
int evaluated = 0;
bool fails() {
  ++evaluated;
  return false;
}
}  // namespace

TEST_CASE("config: without assertions a condition is compiled and never evaluated", "[config]") {
  KVTRIM_ASSERT(fails());
  KVTRIM_COUNT(rows_read, fails() ? 1 : 2);
  CHECK(evaluated == 0);
  CHECK_FALSE(fails());
}
