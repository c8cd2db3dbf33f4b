// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/move.hpp>

#include "catch.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvtrim;

namespace {

constexpr std::int32_t pages = 6;
constexpr std::int32_t page_size = 4;
constexpr std::int32_t heads = 3;
constexpr std::int32_t layers = 2;
constexpr std::int32_t rows = 12;

// A cache with one of everything that a row can own; every byte differs from its neighbours.
struct Cache {
  std::vector<std::byte> k, v, unrotated, scales, shared_scale, page_flag, value_scale;
  std::vector<std::int32_t> ids{4, 2, 5, 0, 1, 3};  // K: 4 2 5; V: 0 1 3
  std::vector<std::int32_t> lengths{10};
  std::vector<Position> positions;
  std::vector<std::int32_t> rope;
  std::vector<float> sums, compensations, more;
  std::array<PagePlane, 4> page_planes;
  std::array<SequencePlane, 1> more_planes;
  CacheView view;

  Cache() {
    std::uint32_t seed = 1;
    const auto fill = [&](std::vector<std::byte>& memory, std::int64_t bytes) {
      memory.resize(static_cast<std::size_t>(bytes));
      for (std::byte& b : memory) {
        b = static_cast<std::byte>((seed = seed * 1664525U + 1013904223U) >> 24U);
      }
      return memory.data();
    };
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.layers = layers;
    view.sequences = 1;
    const auto plane = [&](std::vector<std::byte>& memory, std::int32_t dim, DType type) {
      Plane p = Plane::hnd(nullptr, {page_size, heads, dim, type});
      p.layer_stride = pages * p.page_stride;
      p.base = fill(memory, layers * p.layer_stride);
      return p;
    };
    view.k = plane(k, 8, DType::f16);
    view.v = plane(v, 6, DType::f32);
    view.unrotated_keys = plane(unrotated, 8, DType::f32);
    view.table.ids = ids.data();
    view.table.row_stride = 6;
    view.table.max_pages = 3;
    view.table.v_offset = 3;
    view.lengths = lengths.data();

    const auto page_plane = [&](std::vector<std::byte>& memory,
                                std::int64_t row,
                                std::int64_t token,
                                std::int64_t head,
                                bool of_values) {
      PagePlane p;
      p.head_stride = head;
      p.token_stride = token;
      p.page_stride = 64;
      p.layer_stride = 64 * pages;
      p.row_bytes = row;
      p.of_values = of_values;
      p.base = fill(memory, layers * p.layer_stride);
      return p;
    };
    page_planes = {page_plane(scales, 2, 2, 8, false),        // per row and head
                   page_plane(shared_scale, 4, 4, 0, false),  // per row, common to the heads
                   page_plane(page_flag, 8, 0, 8, false),     // per page: stays in place
                   page_plane(value_scale, 3, 3, 12, true)};  // per row and head, with the V page
    view.page_planes = page_planes.data();
    view.page_plane_count = 4;

    const auto elements = static_cast<std::size_t>(layers * heads * rows);
    const auto sequence_plane = [&](auto& memory) {
      memory.resize(elements);
      std::int32_t next = 0;
      for (auto& x : memory) { x = static_cast<std::remove_reference_t<decltype(x)>>(++next); }
      return SequencePlane::dense(memory.data(), layers, heads, rows);
    };
    view.positions = sequence_plane(positions);
    view.rope_positions = sequence_plane(rope);
    view.score_sums = sequence_plane(sums);
    view.score_compensations = sequence_plane(compensations);
    more_planes[0] = sequence_plane(more);
    view.more_planes = more_planes.data();
    view.more_plane_count = 1;
  }
};

std::vector<std::byte> bytes_at(const std::byte* p, std::int64_t n) {
  return {p, p + n};
}

std::int64_t differing(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  std::int64_t n = 0;
  for (std::size_t i = 0; i < a.size(); ++i) { n += a[i] != b[i] ? 1 : 0; }
  return n;
}

}  // namespace

TEST_CASE("move: a row's place follows K and V ids and the left padding", "[move]") {
  Cache c;
  const SequenceId s{0};
  CHECK(place_of({c.view, s, LayerId{1}, HeadId{2}}, 0) == RowPlace{PageId{4}, PageId{0}, Slot{0}});
  CHECK(place_of({c.view, s, LayerId{0}, HeadId{0}}, 3) == RowPlace{PageId{4}, PageId{0}, Slot{3}});
  CHECK(place_of({c.view, s, LayerId{0}, HeadId{0}}, 4) == RowPlace{PageId{2}, PageId{1}, Slot{0}});
  CHECK(place_of({c.view, s, LayerId{0}, HeadId{0}}, 9) == RowPlace{PageId{5}, PageId{3}, Slot{1}});
  const std::int32_t padding = 3;
  c.view.first_rows = &padding;
  CHECK(place_of({c.view, s, LayerId{0}, HeadId{0}}, 0) == RowPlace{PageId{4}, PageId{0}, Slot{3}});
  CHECK(place_of({c.view, s, LayerId{0}, HeadId{0}}, 1) == RowPlace{PageId{2}, PageId{1}, Slot{0}});
}

TEST_CASE("move: everything in pages that belongs to the row moves, and no other byte changes",
          "[move][property]") {
  for (const HeadId h : {HeadId{0}, HeadId{2}}) {
    Cache c;
    const Cache before;  // the same bytes
    const LayerId l{1};
    const HeadRef head{c.view, SequenceId{0}, l, h};
    const RowPlace from = place_of(head, 9);
    const RowPlace to = place_of(head, 2);
    move_page_data(head, from, to);

    CHECK(bytes_at(c.view.k.row(l, to.k_page, h, to.slot), 16) ==
          bytes_at(before.view.k.row(l, from.k_page, h, from.slot), 16));
    CHECK(bytes_at(c.view.v.row(l, to.v_page, h, to.slot), 24) ==
          bytes_at(before.view.v.row(l, from.v_page, h, from.slot), 24));
    CHECK(bytes_at(c.view.unrotated_keys.row(l, to.k_page, h, to.slot), 32) ==
          bytes_at(before.view.unrotated_keys.row(l, from.k_page, h, from.slot), 32));
    CHECK(bytes_at(c.page_planes[0].row(l, to.k_page, h, to.slot), 2) ==
          bytes_at(before.page_planes[0].row(l, from.k_page, h, from.slot), 2));
    CHECK(bytes_at(c.page_planes[3].row(l, to.v_page, h, to.slot), 3) ==
          bytes_at(before.page_planes[3].row(l, from.v_page, h, from.slot), 3));
    const bool with_common = h == HeadId{0};  // what the heads have in common moves once
    const PageId source = with_common ? from.k_page : to.k_page;
    const Slot slot = with_common ? from.slot : to.slot;
    CHECK(bytes_at(c.page_planes[1].row(l, to.k_page, h, to.slot), 4) ==
          bytes_at(before.page_planes[1].row(l, source, h, slot), 4));

    CHECK(differing(c.k, before.k) <= 16);
    CHECK(differing(c.v, before.v) <= 24);
    CHECK(differing(c.unrotated, before.unrotated) <= 32);
    CHECK(differing(c.scales, before.scales) <= 2);
    CHECK(differing(c.shared_scale, before.shared_scale) <= (with_common ? 4 : 0));
    CHECK(differing(c.page_flag, before.page_flag) == 0);
    CHECK(differing(c.value_scale, before.value_scale) <= 3);
  }
}

TEST_CASE("move: the sequence planes move one element of one head of one layer each", "[move]") {
  Cache c;
  const Cache before;
  const auto element = [](std::int32_t l, std::int32_t h, std::int32_t r) {
    return static_cast<std::size_t>((l * heads + h) * rows + r);
  };
  move_sequence_data({c.view, SequenceId{0}, LayerId{1}, HeadId{2}}, 9, 2);
  const auto moved = [&](const auto& now, auto then) {
    then[element(1, 2, 2)] = then[element(1, 2, 9)];
    return now == then;
  };
  CHECK(moved(c.positions, before.positions));
  CHECK(moved(c.rope, before.rope));
  CHECK(moved(c.sums, before.sums));
  CHECK(moved(c.compensations, before.compensations));
  CHECK(moved(c.more, before.more));
}

TEST_CASE("move: what heads or layers have in common moves once, however many of them are moved",
          "[move][edge]") {
  // Two moves of a stable pack: repeated on the same elements they would give 7, not 5.
  const auto pack = [](const CacheView& view) {
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (const auto& [from, to] : {std::pair{5, 3}, std::pair{7, 5}}) {
          const SequenceId s{0};
          const HeadRef head{view, s, LayerId{l}, HeadId{h}};
          move_page_data(head, place_of(head, from), place_of(head, to));
          move_sequence_data(head, from, to);
        }
      }
    }
  };
  for (const bool also_layers : {false, true}) {
    Cache c;
    c.view.positions.head_stride = 0;
    if (also_layers) {
      c.view.positions.layer_stride = 0;
      c.page_planes[1].layer_stride = 0;
    }
    const Cache before;
    pack(c.view);
    for (std::int32_t l = 0; l < (also_layers ? 1 : layers); ++l) {
      const auto at = [&](std::int32_t r) {
        return static_cast<std::size_t>(l * heads * rows + r);
      };
      CHECK(c.positions[at(3)] == before.positions[at(5)]);
      CHECK(c.positions[at(5)] == before.positions[at(7)]);
      CHECK(c.positions[at(4)] == before.positions[at(4)]);
      const RowPlace three = place_of({c.view, SequenceId{0}, LayerId{l}, HeadId{0}}, 3);
      const RowPlace five = place_of({c.view, SequenceId{0}, LayerId{l}, HeadId{0}}, 5);
      CHECK(bytes_at(c.page_planes[1].row(LayerId{l}, three.k_page, HeadId{0}, three.slot), 4) ==
            bytes_at(before.page_planes[1].row(LayerId{l}, five.k_page, HeadId{0}, five.slot), 4));
    }
  }
}

TEST_CASE("move: absent planes are not an error", "[move][edge]") {
  Cache c;
  c.view.positions = {};
  c.view.rope_positions = {};
  c.view.score_sums = {};
  c.view.score_compensations = {};
  c.view.more_plane_count = 0;
  c.view.page_plane_count = 0;
  c.view.unrotated_keys = {};
  const auto scales = c.scales;
  const HeadRef head{c.view, SequenceId{0}, LayerId{0}, HeadId{0}};
  move_sequence_data(head, 9, 2);
  move_page_data(head, place_of(head, 9), place_of(head, 2));
  CHECK(c.scales == scales);
  CHECK_FALSE(has_common_planes(c.view));
  CHECK(moved_row_bytes(c.view, LayerId{0}, HeadId{0}) == 16 + 24);
}

TEST_CASE(
    "move: the bytes of a moved row are those of key, value and the page planes that move with it",
    "[move]") {
  Cache c;
  // Key 16, value 24, unrotated key 32, scale 2, value's scale 3; never the page's.
  const std::int64_t own = 16 + 24 + 32 + 2 + 3;
  CHECK(moved_row_bytes(c.view, LayerId{0}, HeadId{1}) == own);
  CHECK(moved_row_bytes(c.view, LayerId{1}, HeadId{2}) == own);
  CHECK(moved_row_bytes(c.view, LayerId{1}, HeadId{0}) == own + 4);  // what is common to the heads
  c.page_planes[1].layer_stride = 0;
  CHECK(moved_row_bytes(c.view, LayerId{1}, HeadId{0}) == own);
  CHECK(moved_row_bytes(c.view, LayerId{0}, HeadId{0}) == own + 4);
  // Where each head has pages of its own, no head stride does not mean common.
  c.view.scope = TableScope::head;
  CHECK(moved_row_bytes(c.view, LayerId{1}, HeadId{2}) == own + 4);
}

TEST_CASE("move: a plane is common where heads or layers of the view have no stride in it",
          "[move][edge]") {
  Cache c;
  CHECK(has_common_planes(c.view));  // shared_scale
  c.view.scope = TableScope::head;
  CHECK_FALSE(has_common_planes(c.view));  // every head has pages of its own
  c.view.scope = TableScope::layer;
  CHECK(has_common_planes(c.view));
  c.view.kv_heads = 1;
  CHECK_FALSE(has_common_planes(c.view));
  c.view.kv_heads = heads;
  c.view.page_plane_count = 1;  // without shared_scale
  CHECK_FALSE(has_common_planes(c.view));
  c.page_planes[0].layer_stride = 0;
  CHECK_FALSE(has_common_planes(c.view));  // layers with tables, and so pages, of their own
  c.view.scope = TableScope::group;
  CHECK(has_common_planes(c.view));
  c.page_planes[0].layer_stride = 64;
  for (SequencePlane CacheView::* plane : {&CacheView::positions,
                                           &CacheView::rope_positions,
                                           &CacheView::score_sums,
                                           &CacheView::score_compensations}) {
    for (std::int64_t SequencePlane::* stride :
         {&SequencePlane::head_stride, &SequencePlane::layer_stride}) {
      CacheView view = c.view;
      (view.*plane).*stride = 0;
      CHECK(has_common_planes(view));
      (view.*plane).base = nullptr;
      CHECK_FALSE(has_common_planes(view));
    }
  }
  c.more_planes[0].head_stride = 0;
  CHECK(has_common_planes(c.view));
}

TEST_CASE("move: targets are a permutation in which no row is overwritten before it is read",
          "[move][property]") {
  for (std::uint32_t pattern = 0; pattern < 4096; ++pattern) {
    std::vector<std::int32_t> kept;
    for (std::int32_t r = 0; r < 12; ++r) {
      if ((pattern >> r & 1U) != 0U) { kept.push_back(r); }
    }
    for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
      std::vector<std::int32_t> content(12);
      for (std::int32_t r = 0; r < 12; ++r) { content[static_cast<std::size_t>(r)] = r; }
      std::set<std::int32_t> indices;
      detail::for_each_target(kept, way, [&](std::int32_t from, std::int32_t to, std::int32_t i) {
        CHECK(kept[static_cast<std::size_t>(i)] == from);
        CHECK(content[static_cast<std::size_t>(from)] == from);
        content[static_cast<std::size_t>(to)] = from;
        indices.insert(i);
      });
      REQUIRE(indices.size() == kept.size());
      std::vector<std::int32_t> left(content.begin(),
                                     content.begin() + static_cast<std::ptrdiff_t>(kept.size()));
      if (way == Removal::fill_holes) { std::sort(left.begin(), left.end()); }
      REQUIRE(left == kept);
    }
  }
}
