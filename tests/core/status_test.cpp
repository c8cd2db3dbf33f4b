// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/status.hpp>

#include "catch.hpp"

#include <set>
#include <string_view>

using namespace kvtrim;

TEST_CASE("status: every value has its own name", "[status]") {
  // The last enumerator is named here on purpose: adding one breaks this test.
  constexpr int last = static_cast<int>(Status::rank_missing);
  std::set<std::string_view> names;
  for (int i = 0; i <= last; ++i) {
    const std::string_view name = to_string(static_cast<Status>(i));
    CHECK(name != "unknown");
    CHECK(names.insert(name).second);
  }
  CHECK(to_string(static_cast<Status>(last + 1)) == "unknown");
  CHECK(to_string(Status::ok) == "ok");
  CHECK(to_string(Status::over_budget) == "over_budget");
  CHECK(to_string(Status::page_twice) == "page_twice");
}

TEST_CASE("status: only ok and over_budget come with a plan that may be applied", "[status]") {
  for (int i = 0; i < 256; ++i) {
    const auto status = static_cast<Status>(i);
    CHECK(usable(status) == (status == Status::ok || status == Status::over_budget));
  }
}
