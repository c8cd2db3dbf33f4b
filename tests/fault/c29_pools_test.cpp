// SPDX-License-Identifier: Apache-2.0
// Layers and heads with pools of their own: page 3 of one is not page 3 of another, neither its count nor where it goes back.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"
#include "support/by_score.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

// Two layers, or two KV heads of one layer, with 8 pages of 4 rows each. Page 3 is in both tables; another sequence holds the
// first one, too.
struct Pools {
  bool heads;
  std::vector<float> keys, values;
  Rows ids{3, 1, 2, -1, 3, 5, 2, -1};
  Rows lengths{12, 12};
  Rows counts;

  explicit Pools(bool of_heads) : heads(of_heads), keys(2 * 8 * 4 * 2), values(2 * 8 * 4) {
    for (std::size_t i = 0; i < keys.size(); ++i) { keys[i] = static_cast<float>(i); }
    counts = {0, 1, 1, 2, 0, 0, 0, 0};
    counts.insert(counts.end(), {0, 0, 1, 1, 0, 1, 0, 0});
  }
  CacheView view() {
    CacheView v;
    v.k = Plane::nhd(keys.data(), {4, 1, 2, DType::f32});
    v.v = Plane::nhd(values.data(), {4, 1, 1, DType::f32});
    for (Plane* plane : {&v.k, &v.v}) {
      (heads ? plane->head_stride : plane->layer_stride) = 8 * plane->page_stride;
    }
    v.page_size = 4, v.pages = 8, v.sequences = 1;
    v.layers = heads ? 1 : 2, v.kv_heads = heads ? 2 : 1;
    v.scope = heads ? TableScope::head : TableScope::layer;
    v.table.ids = ids.data();
    v.table.rows = {2, heads ? 0 : 1, heads ? 1 : 0};
    v.table.row_stride = v.table.max_pages = 4;
    v.lengths = lengths.data(), v.length_rows = v.table.rows;
    v.writable.ref_counts = counts.data();
    (heads ? v.writable.head_stride : v.writable.layer_stride) = 8;
    return v;
  }
  Rows page(std::int32_t pool, std::int32_t p) const {
    Rows out;
    for (std::int32_t i = 0; i < 8; ++i) {
      out.push_back(static_cast<std::int32_t>(keys[index((pool * 8 + p) * 8 + i)]));
    }
    return out;
  }
};

}  // namespace

TEST_CASE("C29 pages go back to the pool that they came from", "[fault][pools]") {
  for (const bool heads : {false, true}) {
    Pools pools(heads);
    const CacheView view = pools.view();
    check_layout(view);
    std::array<PageId, 8> freed{};
    std::array<std::int64_t, 8> tables{};
    DenseTables sink(
        view, pools.ids.data(), pools.lengths.data(), pools.counts.data(), freed, tables);
    const Outcome out = evict_into(StreamingSink({.sinks = 0, .recent = 4}), view, sink, {});
    REQUIRE(out.report.status == Status::ok);
    CHECK(out.report.dropped_pages == 4);
    CHECK(out.report.released_pages ==
          3);  // the other sequence goes on with page 3 of the first pool
    REQUIRE(sink.freed().size() == 3);
    REQUIRE(sink.freed_tables().size() == 3);
    const std::vector<PageId> pages(sink.freed().begin(), sink.freed().end());
    CHECK(pages == std::vector<PageId>{PageId{1}, PageId{5}, PageId{3}});
    const std::vector<std::int64_t> from(sink.freed_tables().begin(), sink.freed_tables().end());
    CHECK(from == std::vector<std::int64_t>{0, 1, 1});
    CHECK(pools.counts == Rows{0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0});
    CHECK(pools.ids == Rows{2, -1, -1, -1, 2, -1, -1, -1});
  }
}

TEST_CASE("C29 a page is shared in the pool where others hold it, and only there",
          "[fault][pools]") {
  for (const bool heads : {false, true}) {
    for (const bool copies : {false, true}) {
      Pools pools(heads);
      const CacheView view = pools.view();
      const Rows first = pools.page(0, 3);
      const Rows second = pools.page(1, 3);
      std::array<PageId, 8> freed{};
      DenseTables sink(view, pools.ids.data(), pools.lengths.data(), pools.counts.data(), freed);
      const std::array<PageId, 2> spares{PageId{6}, PageId{7}};
      Input in;
      in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) {
        return p % 2 == 0 ? 1.0F : 0.0F;
      };
      if (copies) { in.options = {.shared = SharedPages::copy, .spare_pages = spares}; }
      const Outcome out = evict_into(test::ByScore{.keep = 6}, view, sink, in);
      INFO("heads " << heads << ", copies " << copies);
      CHECK(usable(out.report.status));
      CHECK(pools.page(0, 3) == first);   // not written: another sequence reads it
      CHECK(pools.page(1, 3) != second);  // packed
      CHECK(pools.lengths[1] == 6);
      CHECK(pools.ids[4] == 3);
      if (copies) { CHECK(pools.ids[0] == 6); }
    }
  }
}
