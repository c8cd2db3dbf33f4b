// SPDX-License-Identifier: Apache-2.0
// Page planes whose entries belong to several rows: rows stay with their entry, or the plan is refused.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

// int8 keys of one feature with a scale per entry; value and page size as the case has them. Pages {0, 1, 2, 3}.
struct Scaled {
  static constexpr std::int32_t pages = 8;
  std::int32_t page_size;
  std::vector<std::int8_t> keys;
  std::vector<float> scales;
  Rows ids{0, 1, 2, 3}, lengths, counts = Rows(pages, 1);
  Rows positions = range(0, 64);
  SequenceState state;  // with positions, so that rows may lose their order
  PagePlane plane;
  CacheView view;

  Scaled(std::int32_t size, std::int32_t tokens_per_entry, std::int32_t rows)
      : page_size(size), keys(index(pages * size)), scales(index(pages * size)), lengths{rows} {
    view.k = Plane::nhd(keys.data(), {page_size, 1, 1, DType::i8});
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = view.sequences = 1;
    view.table.ids = ids.data();
    view.table.row_stride = view.table.max_pages = 4;
    view.lengths = lengths.data();
    state.live_rows = state.next_position = state.next_rope_position = rows;
    view.states = &state;
    view.positions = SequencePlane::dense(positions.data(), 1, 1, 64);
    view.writable.ref_counts = counts.data();
    const bool whole = tokens_per_entry == 0;
    plane.base = reinterpret_cast<std::byte*>(scales.data());
    plane.page_stride = page_size * 4;
    plane.token_stride = whole ? 0 : 4;
    plane.row_bytes = 4;
    plane.tokens_per_entry = whole ? 1 : tokens_per_entry;
    view.page_planes = &plane;
    view.page_plane_count = 1;
    // Row r is 10 r: times 2 of a number that each entry scales on its own.
    for (std::int32_t r = 0; r < rows; ++r) { set(r); }
  }
  Scaled(const Scaled&) = delete;
  Scaled& operator=(const Scaled&) = delete;

  [[nodiscard]] float& scale(std::int32_t r) {
    std::byte* const at =
        plane.row({}, view.k_page({}, {}, {}, r / page_size), {}, Slot{r % page_size});
    return scales[index((at - plane.base) / 4)];
  }
  void set(std::int32_t r) {
    const std::int32_t of_page =
        plane.token_stride == 0 ? 0 : r % page_size / plane.tokens_per_entry;
    const std::int32_t entry = r / page_size + of_page;
    scale(r) = static_cast<float>(entry % 2 == 0 ? 1 : 2);
    *reinterpret_cast<std::int8_t*>(view.key({}, {}, {}, r)) =
        static_cast<std::int8_t>(10 * r / static_cast<std::int32_t>(scale(r)));
  }
  [[nodiscard]] Rows decoded() {
    Rows out;
    for (std::int32_t r = 0; r < lengths[0]; ++r) {
      out.push_back(static_cast<std::int32_t>(
          scale(r) * static_cast<float>(*reinterpret_cast<std::int8_t*>(view.key({}, {}, {}, r)))));
    }
    return out;
  }
  // Rows that stay score 1.
  Report evict(const Rows& kept,
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
    const External policy({.budget = static_cast<std::int64_t>(kept.size())});
    return evict_into(policy, view, sink, in).report;
  }
};

Rows tens(const Rows& rows) {
  Rows out;
  for (const std::int32_t r : rows) { out.push_back(10 * r); }
  return out;
}

}  // namespace

TEST_CASE("C07 int8 keys with a scale per page do not change page: 10 20 30 40 44 48 52 stay",
          "[layout][fault]") {
  // Pages of 2 rows, scales 1, 1, 2, 4: as the case was found. One row goes from the first page.
  Scaled c(2, 0, 8);
  const std::array<std::int8_t, 8> raw{5, 10, 20, 30, 20, 22, 12, 13};
  const std::array<float, 4> scales{1, 1, 2, 4};
  for (std::int32_t r = 0; r < 8; ++r) {
    *reinterpret_cast<std::int8_t*>(c.view.key({}, {}, {}, r)) = raw[index(r)];
    c.scale(r) = scales[index(r / 2)];
  }
  const Rows before{5, 10, 20, 30, 40, 44, 48, 52};
  REQUIRE(c.decoded() == before);
  const Rows kept{1, 2, 3, 4, 5, 6, 7};
  CHECK(c.evict(kept, Removal::stable_pack).status == Status::planes_disagree);
  CHECK(c.evict(kept, Removal::fill_holes).status == Status::planes_disagree);
  CHECK(c.decoded() == before);
  // Whole pages go, whatever the scales are.
  CHECK(c.evict({2, 3, 4, 5, 6, 7}, Removal::drop_pages).status == Status::ok);
  CHECK(c.decoded() == Rows{20, 30, 40, 44, 48, 52});
}

TEST_CASE("C07 a row moves among the rows of its entry, and to no other", "[layout][fault]") {
  const auto outcome = [](std::int32_t tokens_per_entry, std::int32_t gone, Removal removal) {
    Scaled c(8, tokens_per_entry, 12);
    Rows kept = range(0, 12);
    kept.erase(kept.begin() + gone);
    const Rows before = c.decoded();
    const Status status = c.evict(kept, removal).status;
    Rows after = c.decoded();
    if (status != Status::ok) {
      CHECK(after == before);
    } else {
      std::sort(after.begin(), after.end());
      CHECK(after == tens(kept));
    }
    return status;
  };
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    CAPTURE(static_cast<int>(way));
    // A scale per page: rows 8 to 11 are the second one's.
    CHECK(outcome(0, 8, way) == Status::ok);
    CHECK(outcome(0, 11, way) == Status::ok);
    CHECK(outcome(0, 7, way) == Status::planes_disagree);
    // Per 4 tokens, in pages of 8; and per 2.
    CHECK(outcome(4, 9, way) == Status::ok);
    CHECK(outcome(4, 7, way) == Status::planes_disagree);
    CHECK(outcome(4, 3, way) == Status::planes_disagree);
    CHECK(outcome(2, 10, way) == Status::ok);
    CHECK(outcome(2, 9, way) == Status::planes_disagree);
    // An entry that ends with the page short of rows: 3, 3 and 2.
    CHECK(outcome(3, 8, way) ==
          (way == Removal::fill_holes ? Status::planes_disagree : Status::planes_disagree));
    CHECK(outcome(3, 11, way) == Status::ok);
    // Every row has its own.
    CHECK(outcome(1, 3, way) == Status::ok);
  }
}

TEST_CASE("C07 one entry a page is one a row where pages have one row", "[layout][fault]") {
  Scaled c(1, 0, 4);
  for (std::int32_t r = 0; r < 4; ++r) {
    c.scale(r) = static_cast<float>(r + 1);
    *reinterpret_cast<std::int8_t*>(c.view.key({}, {}, {}, r)) = 1;
  }
  REQUIRE(c.decoded() == Rows{1, 2, 3, 4});
  REQUIRE(c.evict({1, 3}, Removal::stable_pack).status == Status::ok);
  CHECK(c.decoded() == Rows{2, 4});
}

TEST_CASE("C07 one value for all pages follows every move", "[layout][fault]") {
  Scaled c(4, 0, 12);
  c.plane.page_stride = 0;
  for (std::int32_t r = 0; r < 12; ++r) { c.set(r); }
  std::fill(c.scales.begin(), c.scales.end(), 1.0F);
  for (std::int32_t r = 0; r < 12; ++r) {
    *reinterpret_cast<std::int8_t*>(c.view.key({}, {}, {}, r)) = static_cast<std::int8_t>(r);
  }
  REQUIRE_NOTHROW(check_layout(c.view));
  const Report report = c.evict({1, 2, 5, 9, 11}, Removal::stable_pack);
  REQUIRE(report.status == Status::ok);
  CHECK(report.bytes_moved == 5);  // keys alone
  CHECK(c.decoded() == Rows{1, 2, 5, 9, 11});
}

TEST_CASE("C07 a page that is copied leaves its entries behind: refused", "[layout][fault]") {
  for (const std::int32_t tokens_per_entry : {0, 2, 1}) {
    Scaled c(4, tokens_per_entry, 7);
    c.counts[1] = 2;  // the rows of page 1 must not be written
    const std::array<PageId, 2> spares{PageId{6}, PageId{7}};
    const Rows before = c.decoded();
    const Report report =
        c.evict({0, 1, 2, 3, 5, 6}, Removal::stable_pack, SharedPages::copy, spares);
    CHECK(report.status == (tokens_per_entry == 1 ? Status::ok : Status::planes_disagree));
    CHECK(c.decoded() == (tokens_per_entry == 1 ? tens({0, 1, 2, 3, 5, 6}) : before));
  }
}

TEST_CASE("C07 an overwritten slot takes a row of its own entry, or none", "[layout][fault]") {
  const auto outcome = [](std::int32_t tokens_per_entry, std::int32_t victim) {
    // Two heads with different victims: the slot of the next append is the row that left the window.
    std::vector<std::int8_t> keys(32);
    std::vector<float> scales(32, 1.0F);
    Rows ids{0, 1}, lengths{8}, positions(16);
    std::vector<SequenceState> states(1);
    states[0].live_rows = states[0].next_position = states[0].next_rope_position = 8;
    for (std::size_t r = 0; r < 16; ++r) { positions[r] = static_cast<std::int32_t>(r % 8); }
    PagePlane plane;
    plane.base = reinterpret_cast<std::byte*>(scales.data());
    plane.page_stride = 16;
    plane.token_stride = tokens_per_entry == 0 ? 0 : 4;
    plane.tokens_per_entry = std::max(1, tokens_per_entry);
    plane.row_bytes = 4;
    CacheView view;
    view.k = Plane::nhd(keys.data(), {4, 2, 1, DType::i8});
    view.page_size = 4;
    view.pages = 4;
    view.kv_heads = 2;
    view.sequences = 1;
    view.table.ids = ids.data();
    view.table.row_stride = view.table.max_pages = 2;
    view.states = states.data();
    view.lengths = lengths.data();
    view.positions = SequencePlane::dense(positions.data(), 1, 2, 8);
    view.page_planes = &plane;
    view.page_plane_count = 1;
    Input in;
    in.score = [&](std::int32_t, std::int32_t position, std::int32_t, std::int32_t h) {
      return position == (h == 0 ? 5 : victim) ? 0.0F : 1.0F;
    };
    in.options.removal = Removal::overwrite_slot;
    DenseTables sink(view, ids.data(), lengths.data(), nullptr, {});
    return evict_into(External({.budget = 7}), view, sink, in).report.status;
  };
  // Head 0 loses row 5, head 1 row 4 or 1. A plane that is common to the heads ties them, too, where each row has an entry.
  CHECK(outcome(0, 4) == Status::ok);
  CHECK(outcome(2, 4) == Status::planes_disagree);  // the free slot is that of row 7
  CHECK(outcome(0, 1) == Status::planes_disagree);
  CHECK(outcome(1, 4) == Status::planes_disagree);
  CHECK(outcome(2, 5) == Status::ok);
}

TEST_CASE("C07 entries that are no part of a page are refused", "[layout][fault]") {
  const auto refusal = [](auto&& change) {
    Scaled c(8, 4, 12);
    change(c.plane);
    return thrown_by([&] { check_layout(c.view); });
  };
  CHECK(refusal([](PagePlane&) {}) == "nothing thrown");
  CHECK(refusal([](PagePlane& p) { p.tokens_per_entry = 8; }) == "nothing thrown");
  CHECK(refusal([](PagePlane& p) { p.tokens_per_entry = 3; }) == "nothing thrown");
  CHECK_THAT(
      refusal([](PagePlane& p) { p.tokens_per_entry = 0; }),
      ContainsSubstring("page plane 0: 0 tokens an entry") && ContainsSubstring("in pages of 8"));
  CHECK_THAT(refusal([](PagePlane& p) { p.tokens_per_entry = 16; }),
             ContainsSubstring("16 tokens an entry"));
  CHECK_THAT(refusal([](PagePlane& p) { p.token_stride = 0; }),
             ContainsSubstring("4 tokens an entry, at a token stride of 0"));
  CHECK_THAT(refusal([](PagePlane& p) { p.page_stride = 7; }),
             ContainsSubstring("page stride of 7 bytes"));
  CHECK(refusal([](PagePlane& p) { p.page_stride = 8; }) == "nothing thrown");  // two entries
}
