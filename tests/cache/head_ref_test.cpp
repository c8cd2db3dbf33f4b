// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/head_ref.hpp>

#include <kvtrim/cache/paged_cache.hpp>

#include "catch.hpp"

using namespace kvtrim;

TEST_CASE("head_ref: it says what the view says of its sequence, layer and KV head", "[head_ref]") {
  PagedCache cache({.pages = 60,
                    .page_size = 4,
                    .layers = 2,
                    .kv_heads = 3,
                    .key_dim = 2,
                    .scope = TableScope::head,
                    .max_sequences = 2});
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_extend(SequenceId{1}, 9) == Status::ok);
  const CacheView view = cache.view();
  const HeadRef head{view, SequenceId{1}, LayerId{1}, HeadId{2}};
  CHECK(head.live_rows() == 9);
  CHECK(HeadRef{view, SequenceId{0}, LayerId{1}, HeadId{2}}.live_rows() == 0);
  CHECK(head.table() == 5);
  CHECK(head.state().next_position == 9);
  view.positions.at<Position>(SequenceId{1}, LayerId{1}, HeadId{2}, 6) = Position{77};
  CHECK(head.position(6) == Position{77});
  CHECK(head.key(6) == view.key(SequenceId{1}, LayerId{1}, HeadId{2}, 6));
  CHECK(head.value(6) == view.value(SequenceId{1}, LayerId{1}, HeadId{2}, 6));
}
