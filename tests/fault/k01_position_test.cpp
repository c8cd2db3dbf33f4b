// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <array>
#include <random>
#include <type_traits>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::array ways{
    Removal::automatic, Removal::overwrite_slot, Removal::stable_pack, Removal::fill_holes};

PagedCache::Params small(std::int32_t layers = 1, std::int32_t kv_heads = 2) {
  return {.pages = 40,
          .page_size = 4,
          .layers = layers,
          .kv_heads = kv_heads,
          .key_dim = 8,
          .value_dim = 2,
          .max_sequences = 2};
}

}  // namespace

TEST_CASE("B001 the newest key is renumbered in the step that evicts, with all others",
          "[position][fault]") {
  for (const Removal way : ways) {
    INFO("removal " << to_string(way));
    TestCache t(small());
    t.rotation = plain_rotation(8);
    const SequenceId s = t.create();
    const StreamingSink<SinkForm::exact> policy({.sinks = 4, .recent = 4});
    const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.options.removal = way;
    in.options.rerotator = &rerotator;
    for (std::int32_t token = 0; token < 20; ++token) {
      REQUIRE(t.append(s, 1) == Status::ok);
      REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
      const std::int32_t n = std::min(token + 1, 8);
      for (std::int32_t h = 0; h < 2; ++h) {
        INFO("token " << token << ", head " << h);
        CHECK(t.ropes(s, 0, h) == range(0, n));
        CHECK(t.cache.next_rope_position(s, {}, HeadId{h}) == n);
        CHECK(t.raw_key_error(s, 0, h) < 1e-5);
      }
    }
    CHECK(t.ropes(s) == Rows{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(t.cache.next_rope_position(s) == 8);
    CHECK(t.positions(s) == Rows{0, 1, 2, 3, 16, 17, 18, 19});
    CHECK(raw(t.cache.next_position(s)) == 20);
  }
}

TEST_CASE("B003 an interior eviction renumbers and rotates every later key", "[position][fault]") {
  for (const Removal way : ways) {
    INFO("removal " << to_string(way));
    TestCache t(small());
    t.rotation = plain_rotation(8);
    const SequenceId s = t.filled(12);
    std::vector<std::vector<Row>> before{t.rows(s, 0, 0), t.rows(s, 0, 1)};
    const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
    Input in;
    in.score = scores_of({9, 1, 8, 1, 1, 7, 1, 1, 1, 1, 1, 1});
    in.options.removal = way;
    in.options.rerotator = &rerotator;
    REQUIRE(evict(HeavyHitter({.heavy = 3, .recent = 4}), t, s, in).report.status == Status::ok);
    const Rows kept{0, 2, 5, 8, 9, 10, 11};
    const Rows deltas{0, -1, -3, -5, -5, -5, -5};
    for (std::int32_t h = 0; h < 2; ++h) {
      const std::vector<Row> after = t.ordered_rows(s, 0, h);
      REQUIRE(t.positions(s, 0, h) == kept);
      CHECK(t.ropes(s, 0, h) == Rows{0, 1, 2, 3, 4, 5, 6});
      for (std::size_t i = 0; i < kept.size(); ++i) {
        const Row& old = before[index(h)][index(kept[i])];
        CHECK(after[i].rope - old.rope == deltas[i]);
        CHECK(distance(after[i].key, t.rotation->turn(to_double(old.key), deltas[i])) < 1e-6);
        const auto raw_key = to_double(t.raw_key(kept[i], 0, h));
        CHECK(distance(after[i].key, t.rotation->turn(raw_key, static_cast<std::int32_t>(i))) <
              1e-5);
      }
    }
    CHECK(t.cache.next_rope_position(s) == 7);
  }
}

TEST_CASE("B004 with positions kept the next token goes on at 20, whatever the 8 live rows",
          "[position][fault]") {
  TestCache t(small());
  t.rotation = plain_rotation(8);
  const SequenceId other = t.filled(3);
  const SequenceId s = t.create();
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 6});
  for (std::int32_t token = 0; token < 20; ++token) {
    REQUIRE(t.append(s, 1) == Status::ok);
    REQUIRE(evict(policy, t, s).report.status == Status::ok);
  }
  CHECK(t.cache.live_rows(s) == 8);
  CHECK(t.positions(s) == Rows{0, 1, 14, 15, 16, 17, 18, 19});
  CHECK(t.ropes(s) == Rows{0, 1, 14, 15, 16, 17, 18, 19});
  CHECK(raw(t.cache.next_position(s)) == 20);
  CHECK(t.cache.next_rope_position(s) == 20);
  CHECK(t.raw_key_error(s) < 1e-6);
  CHECK(raw(t.cache.next_position(other)) == 3);
}

TEST_CASE("B007 components beyond the rotary dimension stay bit-identical", "[position][fault]") {
  // Frequencies theta^(-2 j / 4): with the head's size, 8, the second pair would turn by 0.3, not by 0.03.
  const double theta = 10'000;
  Rotation partial;
  partial.frequencies = {1.0, 1.0 / std::sqrt(theta)};
  partial.dim = 4;
  CHECK(distance(rope_frequencies(theta, 4), partial.frequencies) < 1e-15);
  for (const RopePairs pairs : {RopePairs::half_split, RopePairs::interleaved}) {
    for (const std::int32_t offset : {0, 4}) {
      partial.pairs = pairs;
      partial.offset = offset;
      TestCache t(small());
      t.rotation = partial;
      const SequenceId s = t.filled(11);
      const std::vector<Row> before = t.rows(s, 0, 1);
      const Rerotator rerotator(t.cache.view(s), partial.rope(), PositionMode::in_cache);
      Input in;
      in.options.rerotator = &rerotator;
      const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 8});
      REQUIRE(evict(policy, t, s, in).report.status == Status::ok);  // delta -3
      const std::vector<Row> after = t.ordered_rows(s, 0, 1);
      REQUIRE(t.ropes(s, 0, 1) == range(0, 8));
      for (std::size_t i = 0; i < 8; ++i) {
        const std::vector<float>& old = before[i + 3].key;
        CHECK(distance(after[i].key, partial.turn(to_double(old), -3)) < 1e-6);
        for (std::size_t d = 0; d < 4; ++d) {
          CHECK(after[i].key[index(4 - offset) + d] == old[index(4 - offset) + d]);
        }
      }
    }
  }
}

TEST_CASE("B008 layers with different RoPE bases are each rotated with their own",
          "[position][fault]") {
  Rotation bases;
  bases.frequencies = {1.0, 0.01, 1.0, 0.0014142135623730951};  // theta 1e4, theta 5e5
  bases.dim = 4;
  bases.same_for_all_layers = false;
  TestCache t(
      {.pages = 251, .page_size = 4, .layers = 2, .kv_heads = 1, .key_dim = 4, .value_dim = 2});
  const SequenceId s = t.filled(1002);
  const CacheView view = t.cache.view(s);
  const std::array<float, 4> pair{0, 1, 0, 0};  // (x1, x3) = (1, 0)
  for (const LayerId l : {LayerId{0}, LayerId{1}}) {
    store_row(view.k, view.key({}, l, {}, 1000), pair.data());
  }
  const Rerotator rerotator(view, bases.rope(), PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 2});
  REQUIRE(evict(policy, t, s, in).report.status == Status::ok);  // delta -1000
  const Row a = t.ordered_rows(s, 0)[0];
  const Row b = t.ordered_rows(s, 1)[0];
  CHECK(a.rope == 0);
  CHECK(distance(a.key, std::vector{0.0, -0.83907, 0.0, 0.54402}) < 1e-5);
  CHECK(distance(b.key, std::vector{0.0, 0.15594, 0.0, -0.98777}) < 1e-5);

  // One layer's frequencies for two layers are refused, unless the caller says that they are the same.
  Rotation one = bases;
  one.frequencies.resize(2);
  CHECK_THAT(thrown_by([&] { Rerotator(view, one.rope(), PositionMode::in_cache); }),
             ContainsSubstring("2 frequencies for 2 layers of 2 pairs") &&
                 ContainsSubstring("same_for_all_layers"));
  one.same_for_all_layers = true;
  CHECK_NOTHROW(Rerotator(view, one.rope(), PositionMode::in_cache));
}

TEST_CASE("B009 half-split and interleaved pairs give different keys of the same norm",
          "[position][fault]") {
  static_assert(std::is_enum_v<RopePairs> && !std::is_convertible_v<bool, RopePairs>);
  Rope rope;
  rope.dim = 4;
  const std::vector<double> frequencies = rope_frequencies(10'000, 4);
  const auto norm = [](const std::vector<float>& x) {
    double sum = 0;
    for (const float f : x) { sum += static_cast<double>(f) * f; }
    return std::sqrt(sum);
  };
  std::vector<float> x{1, 2, 3, 4};
  rope.pairs = RopePairs::half_split;
  rotate_key(rope, frequencies, -3, x.data());
  CHECK(distance(x, std::vector{-0.56663, 2.11908, -3.11110, 3.93821}) < 1e-5);
  CHECK(std::abs(norm(x) - 5.47723) < 1e-5);
  x = {1, 2, 3, 4};
  rope.pairs = RopePairs::interleaved;
  rotate_key(rope, frequencies, -3, x.data());
  CHECK(distance(x, std::vector{-0.70775, -2.12111, 3.11863, 3.90821}) < 1e-5);
  CHECK(std::abs(norm(x) - 5.47723) < 1e-5);
}

TEST_CASE("B010 after any eviction the next query stands one behind the newest key",
          "[position][fault][property]") {
  TestCache t(small());
  t.rotation = plain_rotation(8);
  const SequenceId s = t.create();
  const Rerotator rerotator(t.cache.view(s), t.rotation->rope(), PositionMode::in_cache);
  std::mt19937 rng(10);
  const auto below = [&](std::int32_t n) {
    return static_cast<std::int32_t>(rng() % static_cast<std::uint32_t>(n));
  };
  std::int32_t wrong = 0, moved_keys = 0, done = 0;
  std::array<std::int32_t, 6> taken{};
  while (done < 1000) {
    REQUIRE(t.append(s, 1 + below(4)) == Status::ok);
    const std::int32_t live = t.cache.live_rows(s);
    if (live < 3) { continue; }
    Input in;
    const std::int32_t salt = done;
    in.score = [salt](std::int32_t, std::int32_t position, std::int32_t, std::int32_t h) {
      return noise(position, h, salt);
    };
    const std::int32_t keep = below(2) == 0 && live < 30 ? live - 1 : 1 + below(live - 1);
    in.budgets = {keep};
    in.options.removal = ways[index(below(4))];
    in.options.rerotator = &rerotator;
    const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy({.heavy = 1, .recent = 0});
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    ++done;
    ++taken[index(static_cast<std::int32_t>(in.options.removal))];
    for (std::int32_t h = 0; h < 2; ++h) {
      const Rows ropes = t.ropes(s, 0, h);
      const std::int32_t next = t.cache.next_rope_position(s, {}, HeadId{h});
      wrong += next - ropes.back() == 1 && ropes == range(0, keep) ? 0 : 1;
      moved_keys += t.raw_key_error(s, 0, h) < 1e-4 ? 0 : 1;
    }
    INFO("eviction " << done << " by " << to_string(in.options.removal) << " of " << live << " to "
                     << keep);
    REQUIRE(wrong == 0);
    REQUIRE(moved_keys == 0);
  }
  CHECK(taken[index(static_cast<std::int32_t>(Removal::fill_holes))] > 100);
  CHECK(taken[index(static_cast<std::int32_t>(Removal::overwrite_slot))] > 100);
}

TEST_CASE("B011 the model's own RoPE base reaches the keys: there is none by default",
          "[position][fault]") {
  static_assert(!std::is_constructible_v<Rerotator, const CacheView&, PositionMode>);
  TestCache t({.pages = 251, .page_size = 4, .kv_heads = 1, .key_dim = 4, .value_dim = 2});
  const SequenceId s = t.filled(1002);
  const CacheView view = t.cache.view(s);
  Rope none;
  none.dim = 4;
  CHECK_THAT(thrown_by([&] { Rerotator(view, none, PositionMode::in_cache); }),
             ContainsSubstring("0 frequencies for 1 layers of 2 pairs"));

  const std::array<float, 4> second_pair{0, 1, 0, 0};
  store_row(view.k, view.key({}, {}, {}, 1000), second_pair.data());
  const std::vector<double> frequencies = rope_frequencies(500'000, 4);
  Rope rope;
  rope.dim = 4;
  rope.inverse_frequencies = frequencies;
  const Rerotator rerotator(view, rope, PositionMode::in_cache);
  Input in;
  in.options.rerotator = &rerotator;
  const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 2});
  REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
  const Row row = t.ordered_rows(s)[0];
  CHECK(std::abs(row.key[1] - 0.15594F) < 1e-5F);   // 10,000 would give -0.83907
  CHECK(std::abs(row.key[3] - -0.98777F) < 1e-5F);  // and 0.54402
}
