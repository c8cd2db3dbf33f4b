// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/memory.hpp>
#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"

#include <cstdint>
#include <limits>
#include <stdexcept>

using Catch::Matchers::ContainsSubstring;
using namespace kvtrim;

namespace {
constexpr LayerShape llama_70b{.layers = 80, .kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr LayerShape latent{.layers = 61, .key_dim = 576};
}  // namespace

static_assert(token_bytes(llama_70b, DType::f16) == 327'680);
static_assert(8 * cache_bytes(llama_70b, DType::f16, 131'072) == 343'597'383'680);
static_assert(token_bytes(latent, DType::bf16) == 61 * 576 * 2);
static_assert(window_rows({.window = 1024}, 4096) == 1024 && window_rows({}, 4096) == 4096);

TEST_CASE("memory: pages are those of a PagedCache, in every scope and dtype", "[memory]") {
  const LayerShape shape{.layers = 3, .kv_heads = 2, .key_dim = 8, .value_dim = 6};
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      PagedCache cache({.pages = 40,
                        .page_size = 5,
                        .layers = 3,
                        .kv_heads = 2,
                        .key_dim = 8,
                        .value_dim = 6,
                        .dtype = dtype,
                        .scope = scope});
      const std::int64_t page = page_bytes(shape, dtype, 5, scope);
      CHECK(page == cache.page_bytes());
      REQUIRE(cache.try_create());
      REQUIRE(cache.try_extend(SequenceId{0}, 10) == Status::ok);
      CHECK(cache.live_bytes(SequenceId{0}) == cache_bytes(shape, dtype, 10));
      CHECK(cache.pool().in_use() == sequence_pages(shape, scope, 2));
      CHECK(sequence_pages(shape, scope, 2) * page == cache_bytes(shape, dtype, 10));
    }
  }
}

TEST_CASE("memory: eight GPUs of 80 GiB beside 140e9 bytes of weights", "[memory][paper]") {
  const std::int64_t memory = 8 * (std::int64_t{80} << 30) - 140'000'000'000;
  const std::int64_t full = cache_bytes(llama_70b, DType::f16, 131'072);
  const std::int64_t tenth = cache_bytes(llama_70b, DType::f16, 13'107);
  CHECK(streams_that_fit(memory, full, full) == 12);
  CHECK(streams_that_fit(memory, tenth, tenth) == 127);
  CHECK(streams_that_fit(memory, tenth, full) == 118);
}

TEST_CASE("memory: streams fit up to the last byte", "[memory][edge]") {
  for (std::int64_t capacity = 0; capacity < 40; ++capacity) {
    std::int64_t streams = 0;  // added one by one
    for (std::int64_t used = 7; used <= capacity; used += 3) { ++streams; }
    CHECK(streams_that_fit(capacity, 3, 7) == streams);
  }
}

TEST_CASE("memory: what cannot be is refused with its numbers", "[memory][fault]") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  CHECK_THROWS_WITH(token_bytes({.layers = 0, .key_dim = 4}, DType::f16),
                    ContainsSubstring("layers 0, kv_heads 1 and key_dim 4 must be at least 1"));
  CHECK_THROWS_AS(token_bytes({.key_dim = 4, .value_dim = -1}, DType::f16), std::invalid_argument);
  CHECK_THROWS_WITH(token_bytes(llama_70b, DType::opaque), ContainsSubstring("dtype opaque"));
  CHECK_THROWS_WITH(token_bytes({.layers = most, .kv_heads = most, .key_dim = most}, DType::f32),
                    ContainsSubstring("4611686014132420609 times 2147483647 does not fit 63 bits"));
  CHECK_THROWS_AS(cache_bytes(llama_70b, DType::f16, -1), std::length_error);
  CHECK_THROWS_AS(cache_bytes(llama_70b, DType::f16, std::int64_t{1} << 62), std::length_error);
  CHECK_THROWS_WITH(page_bytes(llama_70b, DType::f16, 0, TableScope::head),
                    ContainsSubstring("page_size 0 must be at least 1"));
  CHECK_THROWS_AS(sequence_pages(llama_70b, TableScope::head, std::int64_t{1} << 60),
                  std::length_error);
  CHECK_THROWS_WITH(streams_that_fit(-1, 0, 1), ContainsSubstring("capacity -1"));
}
