// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/removal.hpp>

#include "catch.hpp"

#include <set>
#include <string_view>

using namespace kvtrim;

TEST_CASE("removal: every way and mode has its own name", "[removal]") {
  std::set<std::string_view> names;
  for (const Removal r : {Removal::automatic,
                          Removal::drop_pages,
                          Removal::overwrite_slot,
                          Removal::fill_holes,
                          Removal::stable_pack}) {
    CHECK(to_string(r) != "unknown");
    names.insert(to_string(r));
  }
  for (const PositionMode m :
       {PositionMode::keep, PositionMode::in_cache, PositionMode::sinks_follow}) {
    CHECK(to_string(m) != "unknown");
    names.insert(to_string(m));
  }
  CHECK(names.size() == 8);
  CHECK(to_string(static_cast<Removal>(99)) == "unknown");
  CHECK(to_string(static_cast<PositionMode>(99)) == "unknown");
}
