// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/each_value.hpp"

#include <array>
#include <memory>

using namespace kvtrim;
using namespace kvtrim::fault;
using kvtrim::test::for_each_value;

namespace {

template <Policy P>
Outcome evict_engine(const P& policy, EnginePages& engine, const Input& in = {}) {
  const CacheView view = engine.view();
  std::array<PageId, 32> freed{};
  DenseTables sink(view, engine.ids.data(), engine.lengths.data(), nullptr, freed);
  return evict_into(policy, view, sink, in);
}

}  // namespace

TEST_CASE("B051 left padding is never a sink, never counted, never scored", "[batch][fault]") {
  // Page size 4: A's 5 rows of padding (NaN) fill a page and begin the next.
  const auto padded = [] {
    auto engine =
        std::make_unique<EnginePages>(12, 4, 2, 4, std::vector<Rows>{{0, 1, 2, 3}, {4, 5, 6, 7}});
    engine->padding = {5, 0};
    return engine;
  };
  {
    const auto engine = padded();
    engine->fill(0, 3);
    engine->fill(1, 8);
    const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 2});
    CHECK(evict_engine(policy, *engine).report.status == Status::ok);
    CHECK(engine->tags(0) == Rows{0, 1, 2});
    CHECK(engine->lengths[0] == 3);
    for (const std::int32_t h : {0, 1}) { CHECK(engine->tags(1, h) == Rows{0, 1, 6, 7}); }
  }
  for_each_value<SinkForm::exact, SinkForm::pages>([&](auto form) {
    // A has rows enough to lose some: the same ones as alone.
    const auto engine = padded();
    engine->fill(0, 11);
    engine->fill(1, 16);
    const StreamingSink<form> policy({.sinks = 2, .recent = 2});
    CHECK(evict_engine(policy, *engine).report.status == Status::ok);
    if (form == SinkForm::exact) {
      CHECK(engine->tags(0) == Rows{0, 1, 9, 10});
      CHECK(engine->tags(1, 1) == Rows{0, 1, 14, 15});
    } else {  // page borders lie elsewhere with padding: rows 3..6 are the page that holds no kept row
      CHECK(engine->tags(0) == Rows{0, 1, 2, 7, 8, 9, 10});
      CHECK(engine->tags(1, 1) == Rows{0, 1, 2, 3, 12, 13, 14, 15});
    }
  });
  {
    // Scored by queries: the batch of padded and unpadded keeps what each keeps alone, NaN in the padding or not.
    const SnapKVSelector policy({.window = 2, .budget = 5, .sinks = 1});
    const auto run = [&](std::int32_t padding_a, float filler) {
      EnginePages engine(12, 4, 2, 4, {{0, 1, 2, 3}, {4, 5, 6, 7}});
      std::fill(engine.k.begin(), engine.k.end(), filler);
      engine.padding = {padding_a, 0};
      engine.fill(0, 11);
      engine.fill(1, 16);
      const Queries a = make_queries(9, 2, 4, 4);
      const Queries b = make_queries(14, 2, 4, 4);
      std::vector<float> both = a.data;
      both.insert(both.end(), b.data.begin(), b.data.end());
      Input in;
      in.queries.data = both.data();
      in.queries.query_heads = 4;
      in.queries.rows = 2;
      in.queries.sequence_stride = 2 * 4 * 4;
      in.queries.row_stride = 4 * 4;
      in.queries.head_stride = 4;
      const Outcome out = evict_engine(policy, engine, in);
      CHECK(out.report.status == Status::ok);
      CHECK(out.nan_count == 0);
      return std::array{engine.tags(0, 0), engine.tags(0, 1), engine.tags(1, 0), engine.tags(1, 1)};
    };
    const auto alone = run(0, 0.0F);
    CHECK(alone[0].size() == 5);
    CHECK(run(5, std::numeric_limits<float>::quiet_NaN()) == alone);
    CHECK(run(5, 1e30F) == alone);
    CHECK(run(3, 100.0F) == alone);
  }
}

TEST_CASE("B053 each sequence of a batch is ranked by its own scores", "[batch][fault]") {
  TestCache t({.pages = 4,
               .page_size = 2,
               .kv_heads = 1,
               .key_dim = 2,
               .value_dim = 2,
               .max_sequences = 2,
               .scores = true});
  const SequenceId a = t.filled(4);
  const SequenceId b = t.filled(4);
  const CacheView view = t.cache.view();
  const std::array<float, 4> of_a{9, 0, 0, 0};
  const std::array<float, 4> of_b{0, 9, 0, 0};
  accumulate_probabilities({}, {view, a, {}, {}}, {of_a.data(), 1, 0});
  accumulate_probabilities({}, {view, b, {}, {}}, {of_b.data(), 1, 0});
  REQUIRE(evict_all(HeavyHitter({.heavy = 1, .recent = 1}), t).report.status == Status::ok);
  CHECK(t.positions(a) == Rows{0, 3});
  CHECK(t.positions(b) == Rows{1, 3});
}

TEST_CASE("B054 the shift reaches the sequence it is for, whichever it is", "[batch][fault]") {
  TestCache t({.pages = 12,
               .page_size = 4,
               .layers = 2,
               .kv_heads = 2,
               .key_dim = 4,
               .value_dim = 2,
               .max_sequences = 3});
  t.rotation = plain_rotation(4);
  const std::array<SequenceId, 3> s{t.filled(10), t.filled(10), t.filled(10)};
  const auto keys = [&](SequenceId q) {
    std::vector<std::vector<float>> out;
    for (const std::int32_t l : {0, 1}) {
      for (const std::int32_t h : {0, 1}) {
        for (const Row& r : t.rows(q, l, h)) { out.push_back(r.key); }
      }
    }
    return out;
  };
  const auto check = [&](SequenceId q, std::int32_t gone) {
    for (const std::int32_t l : {0, 1}) {
      for (const std::int32_t h : {0, 1}) {
        CHECK(t.positions(q, l, h) == range(gone, 10));
        CHECK(t.ropes(q, l, h) == range(0, 10 - gone));
        CHECK(t.raw_key_error(q, l, h) < 1e-5);
      }
    }
    CHECK(t.cache.next_rope_position(q) == 10 - gone);
  };
  const auto before0 = keys(s[0]);
  const auto before1 = keys(s[1]);
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 100});
  {
    const Rerotator rerotator(t.cache.view(s[2]), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.budgets = {6};  // rows 0..3 go: a shift of -4
    in.options.rerotator = &rerotator;
    REQUIRE(evict(policy, t, s[2], in).report.status == Status::ok);
  }
  CHECK(keys(s[0]) == before0);  // bit for bit
  CHECK(keys(s[1]) == before1);
  check(s[2], 4);

  const Rerotator rerotator(t.cache.view(), t.rotation->rope(), PositionMode::in_cache);
  Input in;
  in.budgets = {9, 7, 4};  // shifts of -1, -3 and, once more, -2 in one plan
  in.options.rerotator = &rerotator;
  REQUIRE(evict_all(policy, t, in).report.status == Status::ok);
  check(s[0], 1);
  check(s[1], 3);
  check(s[2], 6);
}
