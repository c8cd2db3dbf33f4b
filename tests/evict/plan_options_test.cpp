// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/plan_options.hpp>

#include "catch.hpp"

using namespace kvtrim;

TEST_CASE("plan_options: the policy's own way, shared pages left alone, positions kept",
          "[evict]") {
  constexpr PlanOptions options;
  STATIC_REQUIRE(options.removal == Removal::automatic);
  STATIC_REQUIRE(options.shared == SharedPages::leave);
  STATIC_REQUIRE(options.spare_pages.empty());
  STATIC_REQUIRE(options.rerotator == nullptr);
}
