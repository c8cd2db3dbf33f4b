// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cache/check_layout.hpp>

#include "cache/engine_view.hpp"
#include "catch.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using kvtrim::test::Engine;
using kvtrim::test::pages;

namespace {

// What check_layout says about the engine after `change`; empty: nothing.
std::string refusal(const std::function<void(CacheView&)>& change) {
  Engine e;
  change(e.view);
  try {
    check_layout(e.view);
  } catch (const std::invalid_argument& error) { return error.what(); }
  return "";
}

}  // namespace

TEST_CASE("check_layout: a sound view passes in every scope", "[check_layout]") {
  CHECK(refusal([](CacheView&) {}) == "");
  CHECK(refusal([](CacheView& v) {
          v.scope = TableScope::layer;
          v.table.rows = v.length_rows = {2, 1, 0};
          v.k.layer_stride = v.v.layer_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) {
          v.scope = TableScope::head;
          v.table.rows = v.length_rows = {6, 3, 1};
          v.k = Plane::hnd(v.k.base, {4, 1, 8, DType::f16});
          v.v = Plane::hnd(v.v.base, {4, 1, 6, DType::f16});
          v.k.head_stride = v.v.head_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) { v.sequences = 0; }) == "");
}

TEST_CASE("check_layout: page size 0, and every other extent below 1, is refused with its number",
          "[check_layout][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.page_size = 0; }), ContainsSubstring("page_size 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.page_size = -16; }), ContainsSubstring("page_size -16"));
  CHECK_THAT(refusal([](CacheView& v) { v.kv_heads = 0; }), ContainsSubstring("kv_heads 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.layers = 0; }), ContainsSubstring("layers 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.sequences = -1; }), ContainsSubstring("sequences -1"));
  CHECK_THAT(refusal([](CacheView& v) { v.pages = -2; }), ContainsSubstring("pages -2"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_dim = 0; }),
             ContainsSubstring("keys: head_dim 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.pack = 0; }),
             ContainsSubstring("values: head_dim 6, pack 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.dtype = DType::opaque; }),
             ContainsSubstring("opaque_row_bytes 0"));
}

TEST_CASE("check_layout: missing keys, values, ids or lengths are refused",
          "[check_layout][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.k.base = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.base = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.table.ids = nullptr; }), ContainsSubstring("null"));
  CHECK_THAT(refusal([](CacheView& v) { v.lengths = nullptr; }), ContainsSubstring("no lengths"));
}

TEST_CASE("check_layout: strides that overlap are refused with the axis and the bytes",
          "[check_layout][edge]") {
  // Keys are [pages, 4, 3, 8] of 2 bytes: 16, 48, 192.
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = 47; }),
             ContainsSubstring("keys overlap") && ContainsSubstring("token stride of 47") &&
                 ContainsSubstring("48 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_stride = 8; }), ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.page_stride = 191; }),
             ContainsSubstring("page stride of 191") && ContainsSubstring("192 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.layer_stride -= 1; }),
             ContainsSubstring("values overlap") && ContainsSubstring("layer stride of 1439"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.feature_stride = 1; }),
             ContainsSubstring("feature stride of 1") && ContainsSubstring("2 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = 0; }),
             ContainsSubstring("token stride of 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.page_stride = 0; }),
             ContainsSubstring("page stride of 0"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = -48; }), ContainsSubstring("-48"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.token_stride = v.k.head_stride; }),
             ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.unrotated_keys = v.k;
               v.unrotated_keys.page_stride = 64;
             }),
             ContainsSubstring("unrotated keys overlap"));
}

TEST_CASE("check_layout: gaps, and strides of axes with one element, do not overlap",
          "[check_layout]") {
  CHECK(refusal([](CacheView& v) { v.k.page_stride += 64, v.k.layer_stride += 640; }) == "");
  CHECK(refusal([](CacheView& v) {
          v.page_size = 1;
          v.k.token_stride = v.v.token_stride = 0;
        }) == "");
  CHECK(refusal([](CacheView& v) {
          v.layers = 1;
          v.k.layer_stride = v.v.layer_stride = 0;
        }) == "");
}

TEST_CASE("check_layout: packs are an axis, the last one as well where it is partly filled",
          "[check_layout][edge]") {
  const auto packed = [](std::int32_t dim, std::int64_t pack_stride) {
    return refusal([=](CacheView& v) {
      v.layers = 1;
      v.k = Plane::vllm_packed_keys(v.k.base, {4, 3, 16, DType::f16});
      v.k.head_dim = dim;
      v.k.pack_stride = pack_stride;
    });
  };
  CHECK(packed(16, 64) == "");
  CHECK_THAT(packed(16, 63), ContainsSubstring("pack stride of 63"));
  CHECK(packed(12, 64) == "");
  CHECK_THAT(packed(12, 0), ContainsSubstring("pack stride of 0"));
}

TEST_CASE("check_layout: heads and layers that share a table need strides of their own, K and V",
          "[check_layout][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_stride = 0; }), ContainsSubstring("3 KV heads"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.head_stride = 0; }), ContainsSubstring("3 KV heads"));
  CHECK_THAT(refusal([](CacheView& v) { v.k.layer_stride = 0; }), ContainsSubstring("2 layers"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.layer_stride = 0; }), ContainsSubstring("2 layers"));
}

TEST_CASE("check_layout: layers and heads that one table serves have one row of ids, one length",
          "[check_layout]") {
  // Only the first one's are checked in a step: another one's would be believed.
  for (const bool lengths : {false, true}) {
    const auto map = [&](CacheView& v) -> RowMap& {
      return lengths ? v.length_rows : v.table.rows;
    };
    const std::string name = lengths ? "lengths differ by " : "rows of the page tables differ by ";
    CHECK_THAT(refusal([&](CacheView& v) { map(v) = {3, 0, 1}; }),
               ContainsSubstring(name + "KV head: 1"));
    CHECK_THAT(refusal([&](CacheView& v) { map(v) = {2, 1, 0}; }),
               ContainsSubstring(name + "layer: 1"));
    CHECK_THAT(refusal([&](CacheView& v) {
                 v.scope = TableScope::layer;
                 v.table.rows = v.length_rows = {2, 1, 0};
                 map(v) = {6, 3, 1};
               }),
               ContainsSubstring(name + "KV head: 1"));
    CHECK(refusal([&](CacheView& v) { v.layers = 1, map(v).layer = 7; }) == "");
  }
}

TEST_CASE("check_layout: tables, and lengths, of two sequences are not the same memory",
          "[check_layout]") {
  CHECK_THAT(
      refusal([](CacheView& v) { v.table.rows.sequence = 0; }),
      ContainsSubstring("ids of two tables overlap: 0 from one sequence to the next, but they "
                        "take 4"));
  CHECK_THAT(refusal([](CacheView& v) { v.table.row_stride = 3; }),
             ContainsSubstring("3 from one sequence"));
  CHECK_THAT(refusal([](CacheView& v) { v.length_rows.sequence = 0; }),
             ContainsSubstring("lengths of two tables overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.scope = TableScope::layer;
               v.length_rows = {2, 1, 0};
               v.table.rows = {1, 1, 0};
             }),
             ContainsSubstring("ids of two tables overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.table.v_offset = 2; }),
             ContainsSubstring("ids of keys and of values overlap: the latter begin 2 behind"));
  CHECK(refusal([](CacheView& v) { v.table.rows.sequence = -1; }) == "");
  CHECK(refusal([](CacheView& v) { v.table.v_offset = 8; }) == "");
  CHECK(refusal([](CacheView& v) { v.table.v_offset = 4, v.table.row_stride = 8; }) == "");
  CHECK(refusal([](CacheView& v) { v.table.rows.sequence = 0, v.sequences = 1; }) == "");
}

TEST_CASE("check_layout: numbers of any sign and size are refused, never computed with",
          "[check_layout][edge]") {
  CHECK_THAT(refusal([](CacheView& v) { v.k.head_dim = 0x4000'0000; }),
             ContainsSubstring("overlap: head stride of 16 bytes, but its elements reach over "
                               "2147483648"));
  CHECK(refusal([](CacheView& v) { v.k.page_stride = -too_large; }) != "");
  CHECK(refusal([](CacheView& v) { v.k.page_stride = -too_large - 1; }) != "");
  CHECK(refusal([](CacheView& v) {
          v.k.pack = 0x7FFF'FFFF, v.k.head_dim = 0x7FFF'FFFF, v.k.pack_stride = too_large;
        }) != "");
}

TEST_CASE("check_layout: a page stride that wraps around by the step of the ids is refused",
          "[check_layout][edge]") {
  for (const std::int32_t step : {2, 3, 4}) {
    INFO("step " << step);
    CHECK(refusal([&](CacheView& v) { v.table.id_step = step; }) == "");
    for (const std::int64_t more : {too_large / step + 1, std::int64_t{1} << 62, too_large / 2}) {
      CHECK_THAT(refusal([&](CacheView& v) {
                   v.table.id_step = step;
                   v.k.page_stride += more / v.k.token_stride * v.k.token_stride;
                 }),
                 ContainsSubstring("keys reach beyond 64 bits"));
      CHECK(refusal([&](CacheView& v) {
              v.table.id_step = step;
              v.k.page_stride -= more;
            }) != "");
    }
  }
}

TEST_CASE("check_layout: positions and scores are numbers, so they are aligned",
          "[check_layout][edge]") {
  std::vector<float> memory(4096);
  using Member = SequencePlane CacheView::*;
  for (const Member plane : {&CacheView::positions,
                             &CacheView::rope_positions,
                             &CacheView::score_sums,
                             &CacheView::score_compensations}) {
    const auto refused = [&](std::ptrdiff_t base, std::int64_t SequencePlane::* stride) {
      return refusal([&](CacheView& v) {
        SequencePlane p = SequencePlane::dense(memory.data(), 2, 3, 20);
        for (std::int64_t* x :
             {&p.row_stride, &p.head_stride, &p.layer_stride, &p.sequence_stride}) {
          *x *= 2;  // gaps, so that nothing overlaps
        }
        p.base += base;
        if (stride != nullptr) { p.*stride += 2; }
        v.*plane = p;
      });
    };
    CHECK(refused(0, nullptr) == "");
    CHECK(refused(4, nullptr) == "");
    CHECK_THAT(refused(2, nullptr), ContainsSubstring("multiples of 4"));
    CHECK_THAT(refused(0, &SequencePlane::head_stride), ContainsSubstring("multiples of 4"));
    CHECK_THAT(refused(0, &SequencePlane::layer_stride), ContainsSubstring("multiples of 4"));
    CHECK_THAT(refused(0, &SequencePlane::sequence_stride), ContainsSubstring("multiples of 4"));
  }
  // Whatever else an engine registers is moved as bytes.
  SequencePlane bytes = SequencePlane::dense(memory.data(), 2, 3, 20);
  bytes.base += 1;
  CHECK(refusal([&](CacheView& v) { v.more_planes = &bytes, v.more_plane_count = 1; }) == "");
}
