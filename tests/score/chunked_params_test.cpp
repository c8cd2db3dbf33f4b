// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/chunked_params.hpp>

#include <kvtrim/score/window_params.hpp>

#include "catch.hpp"

#include <type_traits>

using namespace kvtrim;

TEST_CASE("chunked_params: kvpress's chunk, any token score", "[chunked]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<Chunked<WindowParams>>);
  STATIC_REQUIRE(std::is_aggregate_v<Chunked<WindowParams>>);
  CHECK(Chunked<WindowParams>{}.chunk == 20);
  CHECK(Chunked<WindowParams>{}.scores.window == 32);
}
