// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/arena.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

using namespace kvtrim;

namespace {

// A workspace, laid out as the library does it: one function for both the size and the memory.
struct Parts {
  std::span<float> scores;
  std::span<std::uint64_t> keys;
  std::span<std::byte> none;
  std::span<std::int32_t> rows;
};

Parts lay_out(Arena& arena, std::int64_t tokens) {
  Parts parts;
  parts.scores = arena.take<float>(tokens);
  parts.keys = arena.take<std::uint64_t>(2 * tokens);
  parts.none = arena.take<std::byte>(0);
  parts.rows = arena.take<std::int32_t>(1);
  return parts;
}

bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % Arena::alignment == 0;
}

}  // namespace

TEST_CASE("arena: what a layout counts suffices for the same layout at every misalignment",
          "[arena][property]") {
  for (const std::int64_t tokens : {0, 1, 15, 16, 17, 1000}) {
    Arena counter;
    const Parts counted = lay_out(counter, tokens);
    CHECK(counted.scores.empty());
    CHECK_FALSE(counter.ok());
    const std::size_t bytes = counter.bytes();
    for (std::size_t shift = 0; shift < 2 * Arena::alignment; ++shift) {
      // Exactly the bytes that were requested, at the very end of an allocation: ASan catches one more.
      std::vector<std::byte> memory(shift + bytes);
      Arena arena(std::span<std::byte>(memory).subspan(shift));
      const Parts parts = lay_out(arena, tokens);
      REQUIRE(arena.ok());
      CHECK(parts.scores.size() == static_cast<std::size_t>(tokens));
      CHECK(parts.keys.size() == static_cast<std::size_t>(2 * tokens));
      CHECK(parts.rows.size() == 1);
      CHECK((aligned(parts.scores.data()) && aligned(parts.keys.data()) &&
             aligned(parts.rows.data())));
      for (float& x : parts.scores) { x = 1; }
      for (std::uint64_t& x : parts.keys) { x = 2; }
      for (std::int32_t& x : parts.rows) { x = 3; }
      bool intact = parts.rows[0] == 3;
      for (const float x : parts.scores) { intact = intact && x == 1.0F; }
      for (const std::uint64_t x : parts.keys) { intact = intact && x == 2; }
      CHECK(intact);
    }
  }
}

TEST_CASE("arena: too small a buffer is reported, and no array reaches beyond it",
          "[arena][edge]") {
  Arena counter;
  static_cast<void>(lay_out(counter, 100));
  std::vector<std::byte> memory(counter.bytes());
  std::int32_t fits = 0;
  for (std::size_t size = 0; size <= memory.size(); ++size) {
    const auto buffer = std::span<std::byte>(memory).first(size);
    Arena arena(buffer);
    const Parts parts = lay_out(arena, 100);
    const auto inside = [&](const auto& part) {
      return part.empty() || std::as_bytes(part).data() + part.size_bytes() <= memory.data() + size;
    };
    CHECK((inside(parts.scores) && inside(parts.keys) && inside(parts.rows)));
    CHECK(arena.ok() == !parts.rows.empty());  // the last array is the first that does not fit
    fits += arena.ok() ? 1 : 0;
  }
  CHECK(fits >= 1);                                                // the full size
  CHECK(fits <= static_cast<std::int32_t>(Arena::alignment) + 1);  // the slack is one alignment
}

TEST_CASE("arena: once too small it stays so, though a later array would fit", "[arena][edge]") {
  std::vector<std::byte> memory(1000);
  Arena arena(memory);
  CHECK(arena.take<float>(10'000).empty());
  CHECK(arena.take<float>(1).empty());
  CHECK_FALSE(arena.ok());
}

TEST_CASE("arena: no buffer, and a negative count, give nothing", "[arena][edge]") {
  Arena empty{std::span<std::byte>()};
  CHECK(empty.take<float>(4).empty());
  CHECK_FALSE(empty.ok());
  std::vector<std::byte> memory(256);
  Arena arena(memory);
  CHECK(arena.take<float>(-3).empty());
  CHECK(arena.ok());
  CHECK(arena.bytes() <= 2 * Arena::alignment);
}

TEST_CASE("arena: the rest of a buffer of any size and alignment is taken and fits",
          "[arena][edge]") {
  std::vector<std::byte> memory(4 * Arena::alignment);
  for (std::size_t begin = 0; begin < Arena::alignment; ++begin) {
    for (std::size_t size = 2 * Arena::alignment; size <= 3 * Arena::alignment; ++size) {
      const auto buffer = std::span(memory).subspan(begin, size);
      Arena arena(buffer);
      const auto first = arena.take<float>(1);
      const auto rest = arena.rest();
      REQUIRE(arena.ok());
      REQUIRE(rest.data() == reinterpret_cast<std::byte*>(first.data()) + Arena::alignment);
      REQUIRE(rest.data() + rest.size() == buffer.data() + buffer.size());
    }
  }
  Arena small{std::span(memory).first(1)};
  static_cast<void>(small.take<float>(32));
  CHECK(small.rest().empty());
  CHECK_FALSE(small.ok());
}
