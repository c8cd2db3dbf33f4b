// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/full.hpp>

#include "catch.hpp"
#include "support/tagged_cache.hpp"

#include <cstdint>

using namespace kvtrim;
using test::TaggedCache;

TEST_CASE("full: nothing goes, by any way of removal and at any budget", "[full]") {
  for (const Removal removal : {Removal::automatic,
                                Removal::drop_pages,
                                Removal::overwrite_slot,
                                Removal::fill_holes,
                                Removal::stable_pack}) {
    TaggedCache c(
        {.pages = 40, .layers = 2, .kv_heads = 3, .scope = TableScope::layer, .max_rows = 40});
    for (std::int32_t step = 0; step < 12; ++step) {
      REQUIRE(c.append(0, 3) == Status::ok);
      const auto before = c.bytes();
      Observation obs;
      const std::int32_t budget = 2;
      obs.budgets = &budget;
      obs.budget_rows = {0, 0, 0};
      const Report report = c.evict(Full{}, obs, {.removal = removal});
      CHECK(report.status == Status::ok);
      CHECK(report.evicted_rows == 0);
      CHECK(report.kept_rows == 6 * 3 * (step + 1));
      REQUIRE(c.bytes() == before);
    }
  }
}
