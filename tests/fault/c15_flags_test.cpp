// SPDX-License-Identifier: Apache-2.0
// Bits of a table's entries that are not the page's id belong to the engine: entries that stay keep them.
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

constexpr std::int32_t flag = INT32_MIN;  // 0x80000000
constexpr std::int32_t mask = INT32_MAX;

// Pages of 2 rows; `entries` may carry flags; K's and V's ids side by side where they are separate.
struct Flagged {
  std::vector<float> memory = std::vector<float>(2 * 16 * 2);
  Rows ids, lengths, counts = Rows(16, 1), padding{0};
  Rows positions = range(0, 32);
  SequenceState state;  // with positions, where rows may lose their order
  CacheView view;

  Flagged(const Rows& entries, std::int32_t rows, bool separate = false)
      : ids(entries), lengths{rows} {
    view.k = Plane::nhd(memory.data(), {2, 1, 1, DType::f32});
    view.v = Plane::nhd(memory.data() + 32, {2, 1, 1, DType::f32});
    view.page_size = 2;
    view.pages = 16;
    view.kv_heads = view.sequences = 1;
    view.table.ids = ids.data();
    view.table.max_pages = static_cast<std::int32_t>(entries.size()) / (separate ? 2 : 1);
    view.table.row_stride = static_cast<std::int64_t>(entries.size());
    view.table.v_offset = separate ? view.table.max_pages : 0;
    view.table.id_mask = mask;
    view.lengths = lengths.data();
    view.first_rows = padding.data();
    view.writable.ref_counts = counts.data();
    if (rows > 0) { write(); }
  }
  Flagged(const Flagged&) = delete;
  Flagged& operator=(const Flagged&) = delete;
  void record_order() {
    state.live_rows = state.next_position = state.next_rope_position = lengths[0];
    view.states = &state;
    view.positions = SequencePlane::dense(positions.data(), 1, 1, 32);
  }
  void write() {
    for (std::int32_t r = 0; r < lengths[0]; ++r) {
      const float tag = static_cast<float>(r);
      store_row(view.k, view.key({}, {}, {}, r), &tag);
      store_row(view.v, view.value({}, {}, {}, r), &tag);
    }
  }
  [[nodiscard]] Rows tags() const {
    Rows out;
    for (std::int32_t r = 0; r < lengths[0]; ++r) {
      float k = 0, v = 0;
      load_row(view.k, view.key({}, {}, {}, r), &k);
      load_row(view.v, view.value({}, {}, {}, r), &v);
      out.push_back(k == v ? static_cast<std::int32_t>(k) : -1);
    }
    return out;
  }
  Outcome evict(const Rows& kept,
                Removal removal,
                SharedPages shared = SharedPages::leave,
                std::span<const PageId> spares = {}) {
    std::vector<float> list(index(lengths[0]), 0.0F);
    for (const std::int32_t r : kept) { list[index(r)] = 1; }
    Input in;
    in.score = scores_of(std::move(list));
    in.options.removal = removal;
    in.options.shared = shared;
    in.options.spare_pages = spares;
    DenseTables sink(view, ids.data(), lengths.data(), counts.data(), {});
    return evict_into(External({.budget = static_cast<std::int64_t>(kept.size())}), view, sink, in);
  }
};

}  // namespace

TEST_CASE("C15 entries 0x80000000 and 0x80000001 that stay are not 0 and 1 afterwards",
          "[layout][fault]") {
  Flagged t({flag | 0, flag | 1, 2, 3}, 8);
  REQUIRE(t.evict({0, 1, 2, 3}, Removal::stable_pack).report.status == Status::ok);
  CHECK(t.ids == Rows{flag | 0, flag | 1, -1, -1});
  CHECK(t.tags() == Rows{0, 1, 2, 3});
}

TEST_CASE("C15 a page drop closes up entries with their bits, each its own", "[layout][fault]") {
  Flagged t({flag | 5, 3, flag | 0, 1, flag | 9, 2}, 12);
  REQUIRE(t.evict({4, 5, 6, 7, 8, 9}, Removal::drop_pages).report.status == Status::ok);
  CHECK(t.ids == Rows{flag | 0, 1, flag | 9, -1, -1, -1});
  CHECK(t.tags() == Rows{4, 5, 6, 7, 8, 9});
  Flagged s({4, flag | 3, 2, flag | 1}, 8);
  REQUIRE(s.evict({0, 1, 6, 7}, Removal::drop_pages).report.status == Status::ok);
  CHECK(s.ids == Rows{4, flag | 1, -1, -1});
}

TEST_CASE("C15 K's and V's entries keep their own bits", "[layout][fault]") {
  Flagged t({4, flag | 5, 6, 7, flag | 8, 9, flag | 10, 11}, 8, true);
  REQUIRE(t.evict({2, 3, 4, 5}, Removal::drop_pages).report.status == Status::ok);
  CHECK(t.ids == Rows{flag | 5, 6, -1, -1, 9, flag | 10, -1, -1});
  CHECK(t.tags() == Rows{2, 3, 4, 5});
}

TEST_CASE("C15 moved rows leave the pages' bits where they are, spare pages have none",
          "[layout][fault]") {
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    Flagged t({flag | 4, 3, flag | 2, 1}, 8);
    t.record_order();
    REQUIRE(t.evict({1, 3, 5, 7}, way).report.status == Status::ok);
    CHECK(t.ids == Rows{flag | 4, 3, -1, -1});
  }
  Flagged t({flag | 4, flag | 3, flag | 2, 1}, 8);
  t.counts[4] = 2;
  const std::array<PageId, 1> spares{PageId{7}};
  REQUIRE(t.evict({1, 3, 5, 7}, Removal::stable_pack, SharedPages::copy, spares).report.status ==
          Status::ok);
  CHECK(t.ids == Rows{7, flag | 3, -1, -1});
  CHECK(t.tags() == Rows{1, 3, 5, 7});
}

TEST_CASE("C15 shared pages that stay, and those of padding, keep their bits", "[layout][fault]") {
  Flagged t({flag | 4, 3, flag | 2, flag | 1}, 8);
  t.counts[4] = t.counts[3] = 2;  // the second one goes as a whole
  REQUIRE(usable(t.evict({0, 4, 5}, Removal::stable_pack).report.status));
  CHECK(t.ids == Rows{flag | 4, flag | 2, -1, -1});
  CHECK(t.tags() == Rows{0, 1, 4});

  Flagged padded({-1, flag | 6, 3, flag | 2},
                 0);  // two rows of padding: the first entry is no page
  padded.padding[0] = 2;
  padded.lengths[0] = 6;
  padded.write();
  REQUIRE(padded.evict({0, 2, 5}, Removal::stable_pack).report.status == Status::ok);
  CHECK(padded.ids == Rows{-1, flag | 6, 3, -1});
  CHECK(padded.tags() == Rows{0, 2, 5});
}

TEST_CASE("C15 what was written once is kept by the next eviction", "[layout][fault]") {
  Flagged t({flag | 5, 3, flag | 0, 1, flag | 9, 2}, 12);
  REQUIRE(t.evict({2, 3, 4, 5, 8, 9, 10, 11}, Removal::drop_pages).report.status == Status::ok);
  CHECK(t.ids == Rows{3, flag | 0, flag | 9, 2, -1, -1});
  REQUIRE(t.evict({2, 3, 4, 5}, Removal::drop_pages).report.status == Status::ok);
  CHECK(t.ids == Rows{flag | 0, flag | 9, -1, -1, -1, -1});
  CHECK(t.tags() == Rows{4, 5, 8, 9});
}

TEST_CASE("C15 a sink is told the entry that each page had", "[layout][fault]") {
  struct Sink {
    Rows sources;
    void update(const TableUpdate& u) noexcept {
      sources.assign(u.sources.begin(), u.sources.end());
    }
    bool release(PageId) noexcept { return true; }
  };
  Flagged t({5, 3, 0, 1}, 8);
  Input in;
  in.score = scores_of({0, 0, 9, 9, 0, 0, 9, 9});
  in.options.removal = Removal::drop_pages;
  Sink sink;
  REQUIRE(evict_into(External({.budget = 4}), t.view, sink, in).report.status == Status::ok);
  CHECK(sink.sources == Rows{1, 3});
}
