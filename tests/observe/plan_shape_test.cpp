// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/full.hpp>

#include <array>
#include <cstdint>

#include "catch.hpp"

using kvtrim::SequenceId;

TEST_CASE("plan_shape: the longest table counts, a hole and left padding included", "[evict]") {
  kvtrim::PagedCache cache({.pages = 64,
                            .page_size = 4,
                            .layers = 2,
                            .kv_heads = 3,
                            .key_dim = 8,
                            .max_sequences = 3,
                            .max_rows = 60});
  const auto a = cache.try_create();
  const auto b = cache.try_create();
  REQUIRE(a);
  REQUIRE(b);
  REQUIRE(cache.try_extend(*a, 9) == kvtrim::Status::ok);
  REQUIRE(cache.try_extend(*b, 21) == kvtrim::Status::ok);
  kvtrim::CacheView view = cache.view();
  kvtrim::PlanShape shape = kvtrim::plan_shape(view, {}, 5);
  CHECK(shape.sequences == 3);
  CHECK(shape.layers == 2);
  CHECK(shape.kv_heads == 3);
  CHECK(shape.page_size == 4);
  CHECK(shape.pages == 64);
  CHECK(shape.max_rows == 21);
  CHECK(shape.head_dim == 8);
  CHECK(shape.workers == 5);
  CHECK(shape.query_rows == 0);

  view.states[0 * view.tables_per_sequence()].append_row = 3;  // sequence a: 9 live rows and a hole
  CHECK(kvtrim::plan_shape(cache.view(*a)).max_rows == 10);

  const std::array<std::int32_t, 3> padding{15, 0, 0};
  view.first_rows = padding.data();
  CHECK(kvtrim::plan_shape(view).max_rows == 25);
}

TEST_CASE("plan_shape: ragged queries count by the longest sequence", "[evict]") {
  kvtrim::PagedCache cache({.pages = 8, .page_size = 4, .key_dim = 4, .max_sequences = 2});
  kvtrim::Observation seen;
  const std::array<std::int32_t, 2> counts{3, 17};
  seen.queries.query_heads = 6;
  seen.queries.row_counts = counts.data();
  const kvtrim::PlanShape shape = kvtrim::plan_shape(cache.view(), seen);
  CHECK(shape.query_heads == 6);
  CHECK(shape.query_rows == 17);
}
