// SPDX-License-Identifier: Apache-2.0
// Values that are part of the keys, no values, and no keys.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <initializer_list>
#include <numeric>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

// Rows whose values are features of the keys: feature d of row r is 10 r + d, in head h and layer l 100 h and 1000 l more.
// All tables: one sequence, group scope, pages {2, 0, 1}.
struct Latent {
  std::int32_t page_size, key_dim, value_dim, heads, layers;
  std::vector<float> memory;
  Rows ids{2, 0, 1}, lengths, positions;
  SequenceState state;
  std::vector<float> scores;
  CacheView view;

  Latent(std::int32_t page,
         std::int32_t k_dim,
         std::int32_t v_dim,
         std::int32_t first_value,
         std::int32_t rows,
         std::int32_t kv_heads = 1,
         std::int32_t layer_count = 1)
      : page_size(page),
        key_dim(k_dim),
        value_dim(v_dim),
        heads(kv_heads),
        layers(layer_count),
        memory(index(3) * index(page) * index(k_dim) * index(kv_heads) * index(layer_count)),
        lengths{rows} {
    view.k = Plane::nhd(memory.data(), {page, heads, k_dim, DType::f32});
    view.k.layer_stride = 3 * view.k.page_stride;
    view.v = view.k;
    view.v.base += first_value * 4;
    view.v.head_dim = v_dim;
    view.page_size = page;
    view.pages = 3;
    view.kv_heads = heads;
    view.layers = layers;
    view.sequences = 1;
    view.table.ids = ids.data();
    view.table.max_pages = 3;
    view.table.row_stride = 3;
    view.lengths = lengths.data();
    each_row([&](std::int32_t l, std::int32_t h, std::int32_t r) {
      std::vector<float> row(index(key_dim));
      std::iota(row.begin(), row.end(), wanted(l, h, r));
      store_row(view.k, view.key({}, LayerId{l}, HeadId{h}, r), row.data());
    });
  }
  Latent(const Latent&) = delete;
  Latent& operator=(const Latent&) = delete;

  static float wanted(std::int32_t l, std::int32_t h, std::int32_t r) {
    return static_cast<float>(1000 * l + 100 * h + 10 * r);
  }
  template <class F>
  void each_row(F&& f) const {
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t r = 0; r < lengths[0]; ++r) { f(l, h, r); }
      }
    }
  }
  // The rows of a head, as the first feature of each says; -1: its features are not those of one row.
  Rows rows(std::int32_t l = 0, std::int32_t h = 0) const {
    Rows out;
    for (std::int32_t r = 0; r < lengths[0]; ++r) {
      std::vector<float> row(index(key_dim));
      load_row(view.k, view.key({}, LayerId{l}, HeadId{h}, r), row.data());
      const auto tag = static_cast<std::int32_t>(row[0] - wanted(l, h, 0)) / 10;
      bool whole = row[0] == wanted(l, h, tag);
      for (std::int32_t d = 0; d < key_dim; ++d) {
        whole = whole && row[index(d)] == row[0] + static_cast<float>(d);
      }
      out.push_back(whole ? tag : -1);
    }
    return out;
  }
  // From now on the engine keeps a state and positions: rows may lose their order.
  void record_order() {
    state.live_rows = state.next_position = state.next_rope_position = lengths[0];
    view.states = &state;
    const std::int32_t most = 3 * page_size;
    for (std::int32_t i = 0; i < layers * heads; ++i) { positions = positions + range(0, most); }
    view.positions = SequencePlane::dense(positions.data(), layers, heads, most);
  }
  Report evict(std::vector<float> by_row, std::int64_t budget, Removal removal) {
    Input in;
    in.score = scores_of(std::move(by_row));
    in.options.removal = removal;
    DenseTables sink(view, ids.data(), lengths.data(), nullptr, {});
    return evict_into(External({.budget = budget}), view, sink, in).report;
  }
};

}  // namespace

TEST_CASE("C08 values that are part of the keys move once, with them", "[layout][fault]") {
  Latent c(4, 3, 2, 0, 3);
  REQUIRE_NOTHROW(check_layout(c.view));
  REQUIRE(c.evict({0, 1, 1}, 2, Removal::stable_pack).status == Status::ok);
  CHECK(c.rows() == Rows{1, 2});
  std::vector<float> first(3);
  load_row(c.view.k, c.view.key({}, {}, {}, 0), first.data());
  CHECK(first == std::vector<float>{10, 11, 12});
  load_row(c.view.k, c.view.key({}, {}, {}, 1), first.data());
  CHECK(first == std::vector<float>{20, 21, 22});
  std::vector<float> value(2);
  load_row(c.view.v, c.view.value({}, {}, {}, 0), value.data());
  CHECK(value == std::vector<float>{10, 11});
}

TEST_CASE("C08 the same with heads, layers, later features and every way of removal",
          "[layout][fault]") {
  const Removal removal = GENERATE(Removal::stable_pack, Removal::fill_holes);
  const std::int32_t first_value = GENERATE(0, 1, 3);
  const bool own_bases = GENERATE(false, true);
  Latent c(2, 5, 2, first_value, 6, 2, 2);
  const std::array<std::byte*, 2> keys{c.view.k.base, c.view.k.base + c.view.k.layer_stride};
  const std::array<std::byte*, 2> values{keys[0] + 4 * first_value, keys[1] + 4 * first_value};
  if (own_bases) {
    c.view.k.layer_bases = keys.data();
    c.view.v.layer_bases = first_value == 0 ? keys.data() : values.data();
  }
  c.record_order();
  CAPTURE(static_cast<int>(removal), first_value, own_bases);
  REQUIRE_NOTHROW(check_layout(c.view));
  const Report report = c.evict({0, 9, 0, 9, 9, 9}, 4, removal);
  REQUIRE(report.status == Status::ok);
  const Rows wanted = removal == Removal::stable_pack ? Rows{1, 3, 4, 5} : Rows{4, 1, 5, 3};
  for (const std::int32_t l : {0, 1}) {
    for (const std::int32_t h : {0, 1}) { CHECK(c.rows(l, h) == wanted); }
  }
  // The bytes of a key, not of key and value.
  CHECK(report.bytes_moved == (removal == Removal::stable_pack ? 4 : 2) * 2 * 2 * 5 * 4);
}

TEST_CASE("C08 an overwritten slot takes a row once", "[layout][fault]") {
  Latent c(4, 3, 2, 1, 6);
  std::vector<SequenceState> states(1);
  states[0].live_rows = states[0].next_position = states[0].next_rope_position = 6;
  std::vector<float> unused(8);
  c.view.states = states.data();
  std::vector<std::int32_t> positions(12);
  std::iota(positions.begin(), positions.end(), 0);
  c.view.positions = SequencePlane::dense(positions.data(), 1, 1, 12);
  REQUIRE(c.evict({9, 9, 0, 9, 9, 9}, 5, Removal::overwrite_slot).status == Status::ok);
  const LiveRows live({c.view, {}, {}, {}});
  Rows rows = c.rows();
  if (live.hole() >= 0) {  // the next append goes there
    std::vector<float> row(3);
    load_row(c.view.k, c.view.key({}, {}, {}, 5), row.data());
    rows[index(live.hole())] = static_cast<std::int32_t>(row[0]) / 10;
  }
  std::sort(rows.begin(), rows.end());
  CHECK(rows == Rows{0, 1, 3, 4, 5});
}

TEST_CASE("C08 any other overlap of keys and values is refused with the bytes", "[layout][fault]") {
  const auto refusal = [](auto&& change) {
    Latent c(4, 6, 2, 0, 3, 2, 2);
    change(c.view);
    return thrown_by([&] { check_layout(c.view); });
  };
  CHECK(refusal([](CacheView&) {}) == "nothing thrown");
  CHECK_THAT(refusal([](CacheView& v) { v.v.base += 20; }),  // one feature is beyond the row
             ContainsSubstring("keys and values overlap") && ContainsSubstring("20 bytes"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.base -= 4; }), ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.v.token_stride = v.v.head_stride;
               v.v.head_stride *= 4;
             }),
             ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.layer_stride *= 2; }), ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.v.page_stride = v.v.layer_stride;
               v.v.layer_stride *= 3;
             }),
             ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.v.feature_stride = 8; }), ContainsSubstring("overlap"));
  CHECK_THAT(refusal([](CacheView& v) { v.unrotated_keys = v.k; }),
             ContainsSubstring("keys and unrotated keys overlap"));
  CHECK_THAT(refusal([](CacheView& v) {
               v.v = {};
               v.unrotated_keys = v.k;
               v.unrotated_keys.base += 4;
             }),
             ContainsSubstring("keys and unrotated keys overlap"));
}

TEST_CASE("C08 planes that are interleaved without sharing a byte pass", "[layout][fault]") {
  // All of [2 layers, 3 pages, 2 heads, 4 tokens, 6 features], 4 bytes each, in one buffer.
  Latent c(4, 6, 6, 0, 3, 2, 2);
  std::vector<float> both(2 * c.memory.size());
  CacheView v = c.view;
  v.k.base = v.v.base = reinterpret_cast<std::byte*>(both.data());
  const std::int64_t row = 24, token = v.k.token_stride, page = v.k.page_stride;
  const auto passes = [&] { return thrown_by([&] { check_layout(v); }) == "nothing thrown"; };
  const auto strides =
      [&](std::int64_t layer, std::int64_t pages, std::int64_t tokens, std::int64_t head) {
        for (Plane* p : {&v.k, &v.v}) {
          p->layer_stride = layer, p->page_stride = pages, p->token_stride = tokens,
          p->head_stride = head;
        }
      };
  strides(6 * page, 2 * page, 2 * token, 2 * row);  // key and value side by side
  v.v.base = v.k.base + row;
  CHECK(passes());
  strides(6 * page, 2 * page, 2 * token, row);  // heads of a token's keys, then of its values
  v.v.base = v.k.base + token;
  CHECK(passes());
  strides(6 * page, 2 * page, token, row);  // half a page each
  v.v.base = v.k.base + page;
  CHECK(passes());
  strides(6 * page, page, token, row);  // half a layer each
  v.v.base = v.k.base + 3 * page;
  CHECK(passes());
  strides(2 * page, 4 * page, token, row);  // page by page, then layers
  v.v.base = v.k.base + page;
  CHECK(passes());
  v.v.base -= 4;
  CHECK_FALSE(passes());
  strides(3 * page, page, token, row);  // one after the other, in both orders
  v.v.base = v.k.base + 6 * page;
  CHECK(passes());
  std::swap(v.k.base, v.v.base);
  CHECK(passes());
  v.k.base -= 4;
  CHECK_FALSE(passes());
  v.k.base = v.v.base;  // a value is its key
  CHECK(passes());
  v.v.token_stride = 2 * token;
  CHECK_FALSE(passes());
  v.table.v_offset = 3;  // separate ids: both are pages of one pool
  v.v.token_stride = token;
  CHECK(passes());
}

TEST_CASE("C08 a cache without values is one", "[layout][fault]") {
  Latent c(4, 3, 2, 0, 9, 2);
  c.view.v = {};
  REQUIRE_NOTHROW(check_layout(c.view));
  const Report report = c.evict({0, 9, 9, 0, 9, 9, 0, 0, 9}, 5, Removal::automatic);
  REQUIRE(report.status == Status::ok);
  CHECK(report.bytes_moved == 2 * 5 * 3 * 4);
  for (const std::int32_t h : {0, 1}) { CHECK(c.rows(0, h) == Rows{1, 2, 4, 5, 8}); }
  c.view.v.head_dim = 2;
  CHECK_THAT(thrown_by([&] { check_layout(c.view); }),
             ContainsSubstring("values are null") && ContainsSubstring("head_dim 2"));
}

TEST_CASE("C08 scores that need values, or keys, are refused where there are none",
          "[layout][fault]") {
  Latent c(4, 3, 2, 0, 9);
  std::vector<float> filter(9, 1.0F);
  Observation obs;
  obs.queries.data = filter.data();
  obs.queries.query_heads = obs.queries.rows = 1;
  obs.filters = {filter.data(), 3, 0, 0};
  obs.statistics.mean = filter.data();
  obs.statistics.query_heads = obs.statistics.layers = 1;
  obs.statistics.dim = 3;
  obs.output = {filter.data(), 1, 2, 2, 0};
  const std::array<double, 1> frequency{1.0};
  ExpectedAttentionParams expected;
  expected.rope = {.inverse_frequencies = frequency, .dim = 2, .same_for_all_layers = true};
  ExpectedAttentionParams by_value = expected;
  expected.value_norm = false;
  by_value.value_norm = true;
  const auto statuses = [&] {
    const auto of = [&](const auto& scorer) { return scorer.check(c.view, obs); };
    const std::vector<Status> values{
        of(ValueNormScorer(ValueNorm<KeyNormParams>{})),
        of(OutputNormScorer<KeyNormParams>(OutputNorm<KeyNormParams>{})),
        of(LagKVScorer(LagKVParams{})),
        of(CurScorer(CurParams{})),
        of(ExpectedAttentionScorer(by_value))};
    const std::vector<Status> keys{of(KeyNormScorer(KeyNormParams{})),
                                   of(KeyDiffScorer(KeyDiffParams{})),
                                   of(QFilterScorer(QFilterParams{})),
                                   of(WindowScorer(WindowParams{})),
                                   of(RKVScorer(RKVParams{})),
                                   of(ExpectedAttentionScorer(expected))};
    return std::pair(values, keys);
  };
  CHECK(statuses() == std::pair(std::vector(5, Status::ok), std::vector(6, Status::ok)));
  c.view.v = {};
  CHECK(statuses() ==
        std::pair(std::vector(5, Status::bad_observation), std::vector(6, Status::ok)));
  c.view.k = {};
  CHECK(statuses() == std::pair(std::vector(5, Status::bad_observation),
                                std::vector(6, Status::bad_observation)));
}

TEST_CASE("C08 a view without keys and values drops pages by given scores, and moves nothing",
          "[layout][fault]") {
  // One row a page, as a cell of an engine whose tensors are not ours to see.
  Rows ids{4, 1, 7, 3, 0, 6}, lengths{6};
  CacheView view;
  view.page_size = 1;
  view.pages = 8;
  view.kv_heads = view.sequences = 1;
  view.table.ids = ids.data();
  view.table.max_pages = 6;
  view.table.row_stride = 6;
  view.lengths = lengths.data();
  REQUIRE_NOTHROW(check_layout(view));
  std::array<PageId, 8> freed{};
  DenseTables sink(view, ids.data(), lengths.data(), nullptr, freed);
  Input in;
  in.score = scores_of({9, 0, 9, 0, 0, 9});
  for (const Removal moves : {Removal::stable_pack, Removal::fill_holes, Removal::automatic}) {
    in.options.removal = moves;
    CHECK(evict_into(External({.budget = 3}), view, sink, in).plan_status == Status::bad_options);
  }
  CHECK(ids == Rows{4, 1, 7, 3, 0, 6});
  in.options.removal = Removal::drop_pages;
  const Outcome out = evict_into(External({.budget = 3}), view, sink, in);
  REQUIRE(out.report.status == Status::ok);
  CHECK(out.report.bytes_moved == 0);
  CHECK(out.evicted[0] == Rows{1, 3, 4});
  CHECK(out.released[0] == Rows{0, 3, 1});
  CHECK(ids == Rows{4, 7, 6, -1, -1, -1});
  CHECK(lengths == Rows{3});
  // Rows that go from the end leave nothing to move.
  in.score = scores_of({9, 9, 0});
  in.options.removal = Removal::stable_pack;
  CHECK(evict_into(External({.budget = 2}), view, sink, in).report.status == Status::ok);
  CHECK(ids == Rows{4, 7, -1, -1, -1, -1});

  view.k.head_dim = 64;
  CHECK_THAT(thrown_by([&] { check_layout(view); }), ContainsSubstring("keys are null"));
  view.k.head_dim = 0;
  std::array<float, 64> memory{};
  view.v = Plane::nhd(memory.data(), {1, 1, 4, DType::f32});
  CHECK_THAT(thrown_by([&] { check_layout(view); }), ContainsSubstring("values, but no keys"));
}

TEST_CASE("C08 keys are not rotated where values are part of what turns", "[layout][fault]") {
  Latent c(4, 6, 4, 0, 3);
  std::array<std::int32_t, 12> ropes{};
  c.view.rope_positions = SequencePlane::dense(ropes.data(), 1, 1, 12);
  const std::array<double, 1> frequency{1.0};
  Rope rope{.inverse_frequencies = frequency, .dim = 2, .offset = 4, .same_for_all_layers = true};
  CHECK_NOTHROW(Rerotator(c.view, rope, PositionMode::in_cache));
  rope.offset = 3;
  CHECK_THAT(thrown_by([&] { Rerotator(c.view, rope, PositionMode::in_cache); }),
             ContainsSubstring("[3, 5)") && ContainsSubstring("bytes 0 to 16"));
  c.view.v.base += 8;  // values are features 2 to 5
  CHECK_THAT(thrown_by([&] { Rerotator(c.view, rope, PositionMode::in_cache); }),
             ContainsSubstring("bytes 8 to 24"));
  rope.offset = 0;
  CHECK_NOTHROW(Rerotator(c.view, rope, PositionMode::in_cache));
}
