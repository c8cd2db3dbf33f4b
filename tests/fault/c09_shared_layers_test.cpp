// SPDX-License-Identifier: Apache-2.0
// Layers, heads and planes that share a buffer: what would be moved twice is refused where the view is created.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <functional>
#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::int32_t pages = 6, page_size = 4, heads = 2, layers = 3, dim = 4;

// Three layers in buffers of their own, planes of every kind beside them; nothing wrong with it.
struct Engine {
  std::vector<float> memory = std::vector<float>(index(1) << 16);
  std::array<std::byte*, layers> keys{}, values{}, unrotated{};
  std::array<PagePlane, 2> page_planes{};
  std::array<SequencePlane, 1> more{};
  Rows ids{5, 3, 1, 0, 2, 4};
  Rows lengths = Rows(12, 4);
  CacheView view;
  std::size_t used = 0;

  Engine() {
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.layers = layers;
    view.sequences = 2;
    view.table.ids = ids.data();
    view.table.row_stride = view.table.max_pages = 3;
    view.lengths = lengths.data();
    const PlaneShape shape{page_size, heads, dim, DType::f32};
    view.k = view.v = view.unrotated_keys = Plane::nhd(nullptr, shape);
    for (std::size_t l = 0; l < layers; ++l) {
      keys[l] = take(plane_bytes);
      values[l] = take(plane_bytes);
      unrotated[l] = take(plane_bytes);
    }
    view.k.layer_bases = keys.data();
    view.v.layer_bases = values.data();
    view.unrotated_keys.layer_bases = unrotated.data();
    page_planes[0] = {.base = take(layers * pages * page_size * heads * 4),
                      .layer_stride = pages * page_size * heads * 4,
                      .page_stride = page_size * heads * 4,
                      .token_stride = heads * 4,
                      .head_stride = 4,
                      .row_bytes = 4};
    page_planes[1] = {.base = take(pages * page_size * 2),  // common to layers and heads
                      .page_stride = page_size * 2,
                      .token_stride = 2,
                      .row_bytes = 2};
    view.page_planes = page_planes.data();
    view.page_plane_count = 2;
    view.positions = sequence_plane();
    view.rope_positions = sequence_plane();
    view.score_sums = sequence_plane();
    view.score_compensations = sequence_plane();
    more[0] = sequence_plane();
    view.more_planes = more.data();
    view.more_plane_count = 1;
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  static constexpr std::int64_t plane_bytes = pages * page_size * heads * dim * 4;

  std::byte* take(std::int64_t bytes) {
    std::byte* const at = reinterpret_cast<std::byte*>(memory.data()) + used;
    used += index(bytes);
    return at;
  }
  SequencePlane sequence_plane() {
    constexpr std::int32_t rows = 12;
    return SequencePlane::dense(
        reinterpret_cast<std::int32_t*>(take(2 * layers * heads * rows * 4)), layers, heads, rows);
  }
  // Layers by stride instead of by bases.
  void use_strides() {
    for (Plane* p : {&view.k, &view.v, &view.unrotated_keys}) {
      p->base = p->layer_bases[0];
      p->layer_bases = nullptr;
      p->layer_stride = 3 * plane_bytes;  // keys, values, un-rotated keys of a layer, then the next
    }
  }
};

std::string refusal(const std::function<void(Engine&)>& change) {
  Engine e;
  change(e);
  return thrown_by([&] { check_layout(e.view); });
}
const std::string none = "nothing thrown";

}  // namespace

TEST_CASE("C09 layers whose bases are equal or overlap are refused, both are named",
          "[layout][fault]") {
  CHECK(refusal([](Engine&) {}) == none);
  CHECK(refusal([](Engine& e) { e.use_strides(); }) == none);
  CHECK_THAT(refusal([](Engine& e) { e.keys[2] = e.keys[0]; }),
             ContainsSubstring("keys of layers 0 and 2 overlap") &&
                 ContainsSubstring("0 bytes apart") && ContainsSubstring("reaches over 768"));
  CHECK_THAT(refusal([](Engine& e) { e.values[1] = e.values[0] + Engine::plane_bytes - 1; }),
             ContainsSubstring("values of layers 0 and 1 overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.unrotated[2] = e.unrotated[1]; }),
             ContainsSubstring("unrotated keys of layers 1 and 2 overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.values[2] = e.keys[1]; }),
             ContainsSubstring("keys of layer 1 and values of layer 2 overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.unrotated[0] = e.values[1] + 4; }),
             ContainsSubstring("values of layer 1 and unrotated keys of layer 0 overlap"));
  CHECK_THAT(refusal([](Engine& e) {  // one buffer for keys and values, of two layers
               e.values = e.keys;
               e.values[1] = e.keys[0];
             }),
             ContainsSubstring("values of layers 0 and 1 overlap") ||
                 ContainsSubstring("keys of layer 0 and values of layer 1 overlap"));
  CHECK(refusal([](Engine& e) { e.values = e.keys; }) == none);  // values are the keys (C08)
}

TEST_CASE("C09 layers that are interleaved page by page share nothing", "[layout][fault]") {
  const auto interleave = [](Engine& e, std::int64_t between) {
    const std::int64_t page = e.view.k.page_stride;
    std::byte* const first = e.take(6 * Engine::plane_bytes);
    e.view.k.page_stride = e.view.v.page_stride = 2 * layers * page;
    for (std::size_t l = 0; l < layers; ++l) {
      e.keys[l] = first + static_cast<std::int64_t>(2 * l) * between;
      e.values[l] = e.keys[l] + between;
    }
  };
  const std::int64_t page = page_size * heads * dim * 4;
  CHECK(refusal([&](Engine& e) { interleave(e, page); }) == none);
  CHECK_THAT(refusal([&](Engine& e) { interleave(e, page - 4); }), ContainsSubstring("overlap"));
}

TEST_CASE("C09 layers that share a table need strides of their own, in all planes",
          "[layout][fault]") {
  CHECK_THAT(
      refusal([](Engine& e) { e.use_strides(), e.view.unrotated_keys.layer_stride = 0; }),
      ContainsSubstring("3 layers share a table") && ContainsSubstring("unrotated keys have none"));
  CHECK_THAT(refusal([](Engine& e) { e.use_strides(), e.view.unrotated_keys.head_stride = 0; }),
             ContainsSubstring("2 KV heads share a table") &&
                 ContainsSubstring("unrotated keys have none"));
  // Layer tables: pages 0..5 of each layer are other memory for the keys, so they are for all planes.
  const auto by_layer = [](const std::function<void(Engine&)>& change) {
    return refusal([&](Engine& e) {
      e.view.scope = TableScope::layer;
      e.view.table.rows = e.view.length_rows = {layers, 1, 0};
      e.view.page_plane_count = 1;
      e.use_strides();
      change(e);
    });
  };
  CHECK(by_layer([](Engine&) {}) == none);
  CHECK_THAT(
      by_layer([](Engine& e) { e.view.v.layer_stride = 0; }),
      ContainsSubstring("values have a layer stride of 0") && ContainsSubstring("the keys 2304"));
  CHECK_THAT(by_layer([](Engine& e) { e.view.unrotated_keys.layer_stride = 0; }),
             ContainsSubstring("unrotated keys have a layer stride of 0"));
  CHECK_THAT(by_layer([](Engine& e) { e.view.page_plane_count = 2; }),
             ContainsSubstring("page plane 1 have a layer stride of 0"));
  // One pool for the tables of all layers: no plane needs a stride.
  CHECK(by_layer([](Engine& e) {
          e.view.k.layer_stride = e.view.v.layer_stride = e.view.unrotated_keys.layer_stride = 0;
          e.view.page_plane_count = 2;
        }) == none);
}

TEST_CASE("C09 heads with pages of their own need a layer stride, and all planes a head stride",
          "[layout][fault]") {
  const auto by_head = [](const std::function<void(Engine&)>& change) {
    return refusal([&](Engine& e) {
      e.view.scope = TableScope::head;
      e.view.table.rows = e.view.length_rows = {layers * heads, heads, 1};
      e.view.page_plane_count = 1;
      e.use_strides();
      change(e);
    });
  };
  CHECK(by_head([](Engine&) {}) == none);
  CHECK_THAT(by_head([](Engine& e) {
               e.view.k.layer_stride = e.view.v.layer_stride = e.view.unrotated_keys.layer_stride =
                   0;
             }),
             ContainsSubstring("head stride of 16 bytes") && ContainsSubstring("3 layers"));
  CHECK_THAT(by_head([](Engine& e) { e.view.v.head_stride = 0; }),
             ContainsSubstring("values") && ContainsSubstring("head stride of 0"));
  CHECK_THAT(by_head([](Engine& e) { e.view.unrotated_keys.head_stride = 0; }),
             ContainsSubstring("unrotated keys") && ContainsSubstring("head stride of 0"));
  CHECK_THAT(by_head([](Engine& e) { e.page_planes[0].head_stride = 0; }),
             ContainsSubstring("page plane 0") && ContainsSubstring("head stride of 0"));
}

TEST_CASE("C09 page planes are checked like the others", "[layout][fault]") {
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[1].base = nullptr; }),
             ContainsSubstring("page plane 1") && ContainsSubstring("null"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[0].row_bytes = 0; }),
             ContainsSubstring("page plane 0 of 0 bytes"));
  CHECK_THAT(
      refusal([](Engine& e) { e.page_planes[0].row_bytes = 5; }),
      ContainsSubstring("page plane 0 overlap: head stride of 4") && ContainsSubstring("5 bytes"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[0].page_stride = 31; }),
             ContainsSubstring("page stride of 31"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[1].page_stride = 0; }),
             ContainsSubstring("page stride of 0"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[0].layer_stride = 100; }),
             ContainsSubstring("layer stride of 100"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[1].base = e.page_planes[0].base + 4; }),
             ContainsSubstring("page plane 0 and page plane 1 overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[1] = e.page_planes[0]; }),
             ContainsSubstring("page plane 0 and page plane 1 overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.page_planes[0].base = e.values[1]; }),
             ContainsSubstring("values of layer 1 and page plane 0 overlap"));
  CHECK(refusal([](Engine& e) {  // one value for all rows there are
          e.page_planes[1].page_stride = e.page_planes[1].token_stride = 0;
        }) == none);
}

TEST_CASE("C09 sequence planes are checked like the others", "[layout][fault]") {
  CHECK_THAT(refusal([](Engine& e) { e.view.positions.row_stride = 0; }),
             ContainsSubstring("positions overlap: row stride of 0"));
  CHECK_THAT(refusal([](Engine& e) { e.view.rope_positions.row_stride = 3; }),
             ContainsSubstring("rope positions overlap: row stride of 3"));
  CHECK_THAT(refusal([](Engine& e) { e.view.score_sums.sequence_stride = 0; }),
             ContainsSubstring("score sums overlap: sequence stride of 0"));
  CHECK_THAT(refusal([](Engine& e) { e.view.score_sums.element_bytes = 8; }),
             ContainsSubstring("score sums have elements of 8 bytes"));
  CHECK_THAT(refusal([](Engine& e) { e.more[0].element_bytes = 0; }),
             ContainsSubstring("sequence plane 0 have elements of 0 bytes"));
  CHECK_THAT(refusal([](Engine& e) { e.view.rope_positions = e.view.positions; }),
             ContainsSubstring("positions and rope positions overlap"));
  CHECK_THAT(refusal([](Engine& e) { e.more[0] = e.view.score_compensations; }),
             ContainsSubstring("score compensations and sequence plane 0 overlap"));
  CHECK(refusal([](Engine& e) {  // common to layers and heads
          e.view.positions.layer_stride = e.view.positions.head_stride = 0;
        }) == none);
  CHECK(refusal([](Engine& e) {  // both in one record
          e.view.positions.sequence_stride *= 2, e.view.positions.layer_stride *= 2;
          e.view.positions.head_stride *= 2, e.view.positions.row_stride *= 2;
          e.view.positions.base = e.take(2 * 4 * 2 * layers * heads * 12);
          e.view.rope_positions = e.view.positions;
          e.view.rope_positions.base += 4;
        }) == none);
}

TEST_CASE("C09 Gemma 3n: users of a layer's rows are recorded under it, and own none",
          "[layout][fault]") {
  // 35 layers: the last 15 use the rows of layer 18, or, every fifth one, of layer 19.
  constexpr std::int32_t model_layers = 35, owners = 20, rows = 6;
  const auto owner = [](std::int32_t l) { return l < owners ? l : l % 5 == 4 ? 19 : 18; };
  TestCache t({.pages = 4 * owners,
               .page_size = 4,
               .layers = owners,
               .key_dim = 2,
               .value_dim = 2,
               .scope = TableScope::layer,
               .scores = true});
  const SequenceId s = t.filled(rows);
  const CacheView view = t.cache.view(s);

  // A view with a layer for each of the model's is refused; one with the owners' is not.
  const Plane plane = Plane::nhd(nullptr, {4, 1, 2, DType::f32});
  std::vector<float> memory(2 * owners * 16 * 4 * 2);
  std::vector<std::byte*> keys, values;
  for (std::int32_t l = 0; l < model_layers; ++l) {
    keys.push_back(reinterpret_cast<std::byte*>(memory.data()) +
                   2 * owner(l) * 16 * plane.page_stride);
    values.push_back(keys.back() + 16 * plane.page_stride);
  }
  const Rows ids{3, 1}, lengths{rows};
  CacheView all;
  all.k = all.v = plane;
  all.k.layer_bases = keys.data();
  all.v.layer_bases = values.data();
  all.page_size = 4;
  all.pages = 16;
  all.kv_heads = all.sequences = 1;
  all.table.ids = ids.data();
  all.table.max_pages = 2;
  all.lengths = lengths.data();
  all.layers = model_layers;
  CHECK_THAT(thrown_by([&] { check_layout(all); }),
             ContainsSubstring("keys of layers 18 and 20 overlap"));
  all.layers = owners;
  CHECK_NOTHROW(check_layout(all));

  // Layer l attends to row l % 3 alone, then the last two rows are recent.
  for (std::int32_t l = 0; l < model_layers; ++l) {
    std::array<float, rows> p{};
    p[index(l % 3)] = 1;
    accumulate_probabilities({}, {view, {}, LayerId{owner(l)}, HeadId{0}}, {p.data(), 1, rows});
  }
  REQUIRE(evict(HeavyHitter({.heavy = 1, .recent = 2}), t, s).report.status == Status::ok);
  for (std::int32_t l = 0; l < owners; ++l) {
    CAPTURE(l);
    // Layer 18 attends to row 0, its users 20, 21, 22, 23, 25, ... 33 to 2, 0, 1, 2, 1, 2, 0, 1, 0, 1, 2, 0: row 0 five
    // times, the others four times. Layer 19 and its users 24, 29 and 34: 1, 0, 2, 1.
    CHECK(t.positions(s, l) == Rows{l == 18 ? 0 : l == 19 ? 1 : l % 3, 4, 5});
  }
}
