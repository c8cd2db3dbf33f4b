// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/sequence_state.hpp>

#include "catch.hpp"

#include <cstdint>
#include <type_traits>

using namespace kvtrim;

static_assert(std::is_trivially_copyable_v<SequenceState>);
static_assert(std::is_same_v<decltype(SequenceState::generation), std::uint64_t>);

TEST_CASE("sequence_state: a fresh sequence is empty, in order, at position 0, without a hole",
          "[sequence_state]") {
  constexpr SequenceState state;
  STATIC_REQUIRE(state.live_rows == 0);
  STATIC_REQUIRE(state.next_position == 0);
  STATIC_REQUIRE(state.next_rope_position == 0);
  STATIC_REQUIRE(state.append_row < 0);
  STATIC_REQUIRE(state.steps == 0);
  STATIC_REQUIRE(state.rows_at_eviction == 0);
  STATIC_REQUIRE(state.ordered);
  STATIC_REQUIRE(state.extent() == 0);
}

TEST_CASE("sequence_state: a hole counts in the extent, row 0 as well, and no other number does",
          "[sequence_state][edge]") {
  SequenceState state;
  state.live_rows = 5;
  state.next_position = 100;
  state.next_rope_position = 50;
  CHECK(state.extent() == 5);
  state.append_row = 0;
  CHECK(state.extent() == 6);
  state.append_row = 3;
  CHECK(state.extent() == 6);
}
