// SPDX-License-Identifier: Apache-2.0
// What cannot be done is refused before anything is done, and says so where it is asked for.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"
#include "support/tagged_cache.hpp"

#include <array>
#include <type_traits>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;
using test::ByScore;
using test::TaggedCache;

TEST_CASE("B138 whatever is too little at any point, nothing has changed and the reason is given",
          "[errors][fault]") {
  // A copy or a rotation cannot fail, and nothing allocates: these are promises that the compiler checks.
  static_assert(noexcept(apply(std::declval<const PlanRef&>(),
                               std::declval<const CacheView&>(),
                               std::declval<const Rerotator&>(),
                               std::declval<const Serial&>())));
  static_assert(noexcept(commit(std::declval<const PlanRef&>(),
                                std::declval<const CacheView&>(),
                                std::declval<PagedCache::Sink&>())));
  static_assert(noexcept(std::declval<PagedCache&>().try_extend({}, 1)));
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    const std::int32_t tables = tables_of(scope, 2, 2);
    // Memory of the plan: every size below what it needs.
    {
      TaggedCache t({.layers = 2, .kv_heads = 2, .scope = scope});
      REQUIRE(t.append(0, 14) == Status::ok);
      const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 5});
      // Some of it is for memory that does not begin at a multiple of the alignment.
      const std::size_t needed =
          plan_workspace_bytes(policy, plan_shape(t.view())) - Arena::alignment;
      const auto before = t.bytes();
      for (std::size_t bytes = 0; bytes < needed; bytes += bytes < 64 ? 1 : 61) {
        std::vector<std::byte> workspace(bytes);
        CHECK(kvtrim::evict(policy, t.cache, t.view(), {}, workspace).status ==
              Status::workspace_too_small);
      }
      CHECK((t.bytes() == before));
    }
    // Free pages for copies of shared ones: every number below what is needed.
    for (std::int32_t given = 0; given <= 2 * tables; ++given) {
      TaggedCache t({.layers = 2, .kv_heads = 2, .scope = scope, .sequences = 3});
      t.cache.destroy(SequenceId{2});
      t.cache.destroy(SequenceId{1});
      t.tags_checked = false;
      REQUIRE(t.append(0, 14) == Status::ok);
      REQUIRE(t.cache.try_fork(SequenceId{0}).has_value());
      std::vector<PageId> spares;
      while (static_cast<std::int32_t>(spares.size()) < given) {
        spares.push_back(t.cache.pool().try_acquire().value());
      }
      const auto before = t.bytes();
      const PlanOptions options{
          .removal = Removal::stable_pack, .shared = SharedPages::copy, .spare_pages = spares};
      const Report report = t.evict(
          StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 5}), t.view(0), {}, options);
      if (given < 2 * tables) {  // rows 0..6 lie in two pages of each table, both shared
        CHECK(report.status == Status::out_of_pages);
        CHECK((t.bytes() == before));
      } else {
        CHECK(report.status == Status::ok);
        CHECK(t.kept(0, 1, 1) == Rows{0, 1, 9, 10, 11, 12, 13});
        CHECK(t.kept(1, 1, 1) == range(0, 14));
      }
    }
    // Pages for rows to come: a pool that ends after each of them.
    for (std::int32_t pages = 2 * tables; pages <= 4 * tables; ++pages) {
      TaggedCache t({.pages = pages, .layers = 2, .kv_heads = 2, .scope = scope, .max_rows = 16});
      REQUIRE(t.append(0, 7) == Status::ok);
      const auto before = t.bytes();
      const Status status = t.append(0, 9);
      CHECK(status == (pages < 4 * tables ? Status::out_of_pages : Status::ok));
      if (status != Status::ok) { CHECK((t.bytes() == before)); }
      CHECK(t.fault() == "");
    }
  }
}

TEST_CASE("B140 of latent keys only the rotary part turns, and values in them never do",
          "[errors][fault]") {
  // MLA: 8 latent features, which are the value as well, and 4 that are rotated.
  std::vector<float> rows(8 * 4 * 12);
  Rows ids{5, 2, 7, 0, -1, -1}, lengths{13};
  std::vector<std::int32_t> rope_positions = range(0, 24);
  CacheView view;
  view.k = Plane::nhd(rows.data(), {4, 1, 12, DType::f32});
  view.v = view.k;
  view.v.head_dim = 8;
  view.page_size = 4;
  view.pages = 8;
  view.kv_heads = view.sequences = 1;
  view.table = {.ids = ids.data(), .row_stride = 6, .max_pages = 6};
  view.lengths = lengths.data();
  view.rope_positions = SequencePlane::dense(rope_positions.data(), 1, 1, 24);
  check_layout(view);
  const auto latent = [](std::int32_t token) {
    std::vector<double> key;
    for (std::int32_t d = 0; d < 12; ++d) { key.push_back(static_cast<double>(noise(token, d))); }
    return key;
  };
  Rotation rotation = plain_rotation(4);
  rotation.offset = 8;
  for (std::int32_t r = 0; r < 13; ++r) {
    const auto key = rotation.turn(latent(r), r);
    const std::vector<float> stored(key.begin(), key.end());
    store_row(view.k, view.key({}, {}, {}, r), stored.data());
  }
  for (const std::int32_t offset : {0, 4, 6, 7}) {  // any range that reaches into the values
    Rotation wrong = rotation;
    wrong.offset = offset;
    CHECK_THAT(
        thrown_by([&] { Rerotator(view, wrong.rope(), PositionMode::in_cache); }),
        ContainsSubstring("[" + std::to_string(offset) + ", " + std::to_string(offset + 4)) &&
            ContainsSubstring("holds values"));
  }
  Rotation beyond = rotation;
  beyond.offset = 9;
  CHECK_THAT(thrown_by([&] { Rerotator(view, beyond.rope(), PositionMode::in_cache); }),
             ContainsSubstring("[9, 13)") && ContainsSubstring("head_dim 12"));

  const Rerotator rerotator(view, rotation.rope(), PositionMode::in_cache);
  Input in;
  in.options.removal = Removal::stable_pack;
  in.options.rerotator = &rerotator;
  std::vector<PageId> freed(8);
  DenseTables sink(view, ids.data(), lengths.data(), nullptr, freed);
  REQUIRE(evict_into(StreamingSink<SinkForm::exact>({.sinks = 2, .recent = 4}), view, sink, in)
              .report.status == Status::ok);
  const Rows kept{0, 1, 9, 10, 11, 12};
  REQUIRE(lengths == Rows{6});
  for (std::int32_t r = 0; r < 6; ++r) {
    std::vector<float> key(12);
    load_row(view.k, view.key({}, {}, {}, r), key.data());
    const auto raw_key = latent(kept[index(r)]);
    for (std::size_t d = 0; d < 8; ++d) { CHECK(key[d] == static_cast<float>(raw_key[d])); }
    CHECK(distance(key, rotation.turn(raw_key, r)) < 1e-5);
  }
}

TEST_CASE("B141 with sinks that leave one row, each plan frees that row, and 10,000 steps end",
          "[errors][fault]") {
  constexpr std::int32_t capacity = 64;
  CHECK_THROWS_AS(StreamingSink({.sinks = capacity, .recent = 1, .capacity = capacity}),
                  std::invalid_argument);
  const StreamingSink<SinkForm::exact> policy(
      {.sinks = capacity - 1, .recent = 4092, .capacity = capacity});
  CHECK(policy.params().recent == 1);
  PagedCache cache({.pages = capacity / 4, .page_size = 4, .kv_heads = 1, .key_dim = 1});
  const SequenceId s = cache.try_create().value();
  const auto step = [&](std::int32_t n) {
    const Status status = cache.try_extend(s, n);
    return status == Status::ok ? cache.written(s, {}) : status;
  };
  REQUIRE(step(capacity) == Status::ok);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.view(s))));
  std::int32_t wrong = 0;
  for (std::int32_t token = 0; token < 10'000; ++token) {
    const Report room = kvtrim::evict(policy.make_room(1), cache, cache.view(s), {}, workspace);
    wrong += room.status == Status::ok && room.evicted_rows == 1 ? 0 : 1;
    wrong += step(1) == Status::ok && cache.live_rows(s) == capacity ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(raw(cache.next_position(s)) == capacity + 10'000);
  // A chunk for which there can be no room is an error each time, not a loop.
  const Report none = kvtrim::evict(policy.make_room(2), cache, cache.view(s), {}, workspace);
  CHECK(none.status == Status::chunk_too_long);
  CHECK(none.evicted_rows == 0);
  CHECK(cache.live_rows(s) == capacity);
}

TEST_CASE("B144 a plan that was moved from is empty, and applying it does nothing",
          "[errors][fault]") {
  TestCache t({.pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
  const SequenceId s = t.filled(14);
  const CacheView view = t.cache.view(s);
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 4});
  Prepared prepared(view, {});
  Plan first(prepared.plan(policy, view));
  REQUIRE_FALSE(first.empty());
  Plan second = std::move(first);
  // NOLINTBEGIN(bugprone-use-after-move): what may be done with it is the question. .clang-tidy has that check on.
  CHECK(first.empty());
  CHECK(apply(first.ref(), view) == Status::ok);
  auto sink = t.cache.sink_for(view);
  CHECK(commit(first.ref(), view, sink).evicted_rows == 0);
  CHECK(first.view().bytes().empty());
  CHECK(t.positions(s, 0, 1) == range(0, 14));
  Plan third(second.view());
  first = std::move(third);  // and it can be used again
  // NOLINTEND(bugprone-use-after-move)
  CHECK_FALSE(first.empty());
  CHECK(apply(first.ref(), view) == Status::ok);
  CHECK(apply(second.ref(), view) == Status::stale_plan);
  CHECK(commit(first.ref(), view, sink).status == Status::ok);
  CHECK(t.positions(s, 0, 1) == Rows{0, 1, 10, 11, 12, 13});
}

TEST_CASE("B145 what is not supported is an error where it is asked for, and nothing else is done",
          "[errors][fault]") {
  TestCache t({.pages = 6, .page_size = 4, .kv_heads = 2, .key_dim = 4, .value_dim = 2});
  const SequenceId s = t.filled(14);
  const CacheView view = t.cache.view(s);
  const Rotation rotation = plain_rotation(4);
  const std::array<std::pair<RopeKind, const char*>, 3> kinds{
      {{RopeKind::dynamic_ntk, "dynamic NTK"},
       {RopeKind::mrope, "M-RoPE"},
       {RopeKind::alibi, "ALiBi"}}};
  for (const auto& [kind, words] : kinds) {
    Rope rope = rotation.rope();
    rope.kind = kind;
    for (const PositionMode mode : {PositionMode::in_cache, PositionMode::sinks_follow}) {
      CHECK_THAT(thrown_by([&, k = &rope] { Rerotator(view, *k, mode); }),
                 ContainsSubstring(words));
    }
  }
  // A way of removal that this view cannot serve is refused where it is named; where it is the policy's own, the report says
  // that rows were packed in its place.
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 11});
  CacheView bare = view;
  Rows lengths{14};
  bare.states = nullptr;
  bare.positions = {};
  bare.lengths = lengths.data();
  Prepared prepared(bare, {});
  for (const Removal removal : {Removal::overwrite_slot, Removal::fill_holes}) {
    const PlanRef plan = prepared.plan(policy, bare, {.removal = removal});
    CHECK(plan.status() == Status::bad_options);
    CHECK(plan.empty());
    CHECK(apply(plan, bare) == Status::bad_options);
  }
  const PlanRef packed = prepared.plan(policy, bare);
  CHECK(packed.status() == Status::ok);
  CHECK(packed.table({}, 0).removal == Removal::stable_pack);
  CHECK(packed.table({}, 0).replaced);
  // A rerotator is bound to the plan: apply does not go on without it.
  const Rerotator rerotator(view, rotation.rope(), PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  Prepared renumbering(view, in);
  const PlanRef plan = renumbering.plan(policy, view, in.options);
  REQUIRE(plan.status() == Status::ok);
  CHECK(apply(plan, view) == Status::bad_plan);
  CHECK(t.positions(s, 0, 1) == range(0, 14));
  CHECK(t.ropes(s, 0, 1) == range(0, 14));
}
