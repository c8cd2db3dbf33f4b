// SPDX-License-Identifier: Apache-2.0
// Hostile views over buffers of exactly these sizes are tests/fuzz/view_fuzz.cpp.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/cache/required_bytes.hpp>

#include "cache/engine_view.hpp"
#include "catch.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using kvtrim::test::Engine;

namespace {

constexpr std::int64_t far = std::int64_t{1} << 61;

// The last byte of any row, found by looking at all of them.
std::int64_t end_of(const CacheView& view, const Plane& plane) {
  std::int64_t end = 0;
  for (std::int32_t l = 0; l < view.layers; ++l) {
    for (std::int32_t h = 0; h < view.kv_heads; ++h) {
      for (std::int32_t page = 0; page < view.pages; ++page) {
        for (std::int32_t slot = 0; slot < view.page_size; ++slot) {
          const std::byte* const row = plane.row(LayerId{l}, PageId{page}, HeadId{h}, Slot{slot});
          for (std::int32_t d = 0; d < plane.head_dim; ++d) {
            end = std::max(end,
                           row - plane.base + plane.feature_offset(d) + element_bytes(plane.dtype));
          }
        }
      }
    }
  }
  return end;
}

std::string refusal(const CacheView& view, std::int32_t max_rows) {
  try {
    static_cast<void>(required_bytes(view, max_rows));
  } catch (const std::invalid_argument& error) { return error.what(); }
  return "";
}

}  // namespace

TEST_CASE("required_bytes: planes end with the last byte of the last row, in every layout",
          "[required_bytes]") {
  Engine e;
  const PlaneShape shape{4, 3, 16, DType::f16};
  for (const Plane& plane : {Plane::nhd(e.memory.data(), shape),
                             Plane::hnd(e.memory.data(), shape),
                             Plane::transposed(e.memory.data(), shape),
                             Plane::vllm_packed_keys(e.memory.data(), shape)}) {
    for (const std::int32_t layers : {1, 2, 5}) {
      CacheView view = e.view;
      view.layers = layers;
      view.v = {};
      view.k = plane;
      view.k.layer_stride = test::pages * plane.page_stride + 64;
      CHECK(required_bytes(view, 1).keys == ByteRange{0, end_of(view, view.k)});
      CHECK(required_bytes(view, 1).values == ByteRange{});
      view.pages = 0;
      CHECK(required_bytes(view, 1).keys == ByteRange{});
    }
  }
}

TEST_CASE("required_bytes: tables, lengths and states by their own maps", "[required_bytes]") {
  Engine e;
  CacheView& view = e.view;
  view.states = e.states.data();
  view.writable.bits = e.bits.data();
  RequiredBytes all = required_bytes(view, 9);
  CHECK(all.ids == ByteRange{0, 4 * 8});
  CHECK(all.lengths == ByteRange{0, 4 * 2});
  CHECK(all.states == ByteRange{0, 2 * static_cast<std::int64_t>(sizeof(SequenceState))});
  CHECK(all.ref_counts == ByteRange{0, 4 * 10});
  CHECK(all.writable_bits == ByteRange{0, 8});
  CHECK(all.indptr == ByteRange{});
  CHECK(all.positions == ByteRange{});
  CHECK(all.key_scales == ByteRange{});
  view.v.scales = {.base = reinterpret_cast<const std::byte*>(e.memory.data()),
                   .layer_stride = 80,
                   .page_stride = -8,
                   .head_stride = 4};
  CHECK(required_bytes(view, 9).value_scales ==
        ByteRange{-8 * (test::pages - 1), 80 + 4 * (view.kv_heads - 1) + 4});
  view.v.scales = {};

  view.scope = TableScope::layer;
  view.table.rows = view.length_rows = {2, 1, 0};
  view.table.v_offset = 4 * 4;  // values behind all keys' tables
  view.writable.layer_stride = 100;
  all = required_bytes(view, 9);
  CHECK(all.ids == ByteRange{0, 4 * (3 * 4 + 16 + 4)});
  CHECK(all.lengths == ByteRange{0, 4 * 4});
  CHECK(all.states == ByteRange{0, 4 * static_cast<std::int64_t>(sizeof(SequenceState))});
  CHECK(all.ref_counts == ByteRange{0, 4 * (100 + 10)});
  CHECK(all.writable_bits == ByteRange{0, 2 * 8});

  // A batch that was filled from the back.
  view.table.rows.sequence = view.length_rows.sequence = -2;
  all = required_bytes(view, 9);
  CHECK(all.ids == ByteRange{-4 * 2 * 4, 4 * (4 + 16 + 4)});
  CHECK(all.lengths == ByteRange{-4 * 2, 4 * 2});
  view.sequences = 0;
  all = required_bytes(view, 9);
  CHECK(all.ids == ByteRange{});
  CHECK(all.lengths == ByteRange{});
  CHECK(all.ref_counts == ByteRange{0, 4 * (100 + 10)});
}

TEST_CASE("required_bytes: CSR ids end where the last row does, whatever the order of rows",
          "[required_bytes]") {
  Engine e;
  CacheView& view = e.view;
  std::vector<std::int32_t> indptr{3, 7, 7};
  view.table.indptr = indptr.data();
  CHECK(required_bytes(view, 9).ids == ByteRange{0, 4 * 7});
  CHECK(required_bytes(view, 9).indptr == ByteRange{0, 4 * 3});
  indptr = {5, 5, 5};
  CHECK(required_bytes(view, 9).ids == ByteRange{});
  indptr = {-2, -1, 4};  // ids before the pointer: as far as the numbers say
  CHECK(required_bytes(view, 9).ids == ByteRange{-4 * 2, 4 * 4});
}

TEST_CASE("required_bytes: sequence planes for the rows that are asked for, side planes for all",
          "[required_bytes]") {
  PagedCache cache({.pages = 9,
                    .page_size = 4,
                    .layers = 2,
                    .kv_heads = 3,
                    .key_dim = 2,
                    .max_sequences = 2,
                    .max_rows = 11,
                    .scores = true});
  const CacheView view = cache.view();
  const RequiredBytes all = required_bytes(view, 11);
  const ByteRange rows{0, 4 * 2 * 2 * 3 * 11};
  for (const ByteRange& range :
       {all.positions, all.rope_positions, all.score_sums, all.score_compensations}) {
    CHECK(range == rows);
  }
  CHECK(required_bytes(view, 3).positions == ByteRange{0, 4 * (2 * 2 * 3 * 11 - 8)});
  CHECK(all.keys == ByteRange{0, std::int64_t{9} * 4 * 2 * 3 * 2 * 4});
  CHECK(required_bytes(view, view.positions, 11) == rows);
  std::byte scales{};
  const PagePlane plane{.base = &scales, .page_stride = 40, .token_stride = 10, .row_bytes = 3};
  CHECK(required_bytes(view, plane) == ByteRange{0, 8 * 40 + 3 * 10 + 3});
}

TEST_CASE("required_bytes: what is beyond 64 bits, or below the first bit, is refused by name",
          "[required_bytes][edge]") {
  Engine e;
  std::vector<std::int32_t> positions(100);
  const auto words = [&](auto change) {
    CacheView view = e.view;
    view.positions = SequencePlane::dense(positions.data(), 2, 3, 16);
    change(view);
    const std::string text = refusal(view, 16);
    // check_layout refuses the same.
    CHECK_THROWS_AS(check_layout(view), std::invalid_argument);
    return text;
  };
  CHECK_THAT(words([](CacheView& v) { v.k.layer_stride = too_large; }), ContainsSubstring("keys"));
  const float scale = 1;
  CHECK_THAT(words([&](CacheView& v) {
               v.k.dtype = v.v.dtype = DType::i8;
               v.v.scales = {.base = reinterpret_cast<const std::byte*>(&scale),
                             .head_stride = too_large};
             }),
             ContainsSubstring("scales of v"));
  CHECK_THAT(words([](CacheView& v) { v.positions.row_stride = far; }),
             ContainsSubstring("positions reach beyond 64 bits"));
  CHECK_THAT(words([](CacheView& v) {
               v.positions.row_stride = std::numeric_limits<std::int64_t>::min();
             }),
             ContainsSubstring("positions reach"));
  CHECK_THAT(words([](CacheView& v) { v.table.row_stride = far; }), ContainsSubstring("page ids"));
  CHECK_THAT(words([](CacheView& v) { v.length_rows.sequence = far; }),
             ContainsSubstring("lengths"));
  CHECK_THAT(words([](CacheView& v) {
               v.scope = TableScope::layer;
               v.table.rows = v.length_rows = {2, 1, 0};
               v.writable.layer_stride = -far;
             }),
             ContainsSubstring("ref_counts"));
  const std::uint64_t bits = ~std::uint64_t{0};
  CHECK_THAT(words([&](CacheView& v) {
               v.scope = TableScope::layer;
               v.table.rows = v.length_rows = {2, 1, 0};
               v.writable = {.bits = &bits, .layer_stride = -1};
             }),
             ContainsSubstring("below 0: layer_stride -1"));
}
