// SPDX-License-Identifier: Apache-2.0
// The one claim everything else serves: after any eviction, attention over the paged cache is dense attention over the
// rows that the policy's rule keeps, at the rope positions that the position mode says.
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/full.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"
#include "support/instances.hpp"
#include "support/shadow_cache.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::at;
using test::KeepRule;
using test::ShadowCache;

namespace {

constexpr std::int32_t sinks = 2;

enum class Way : std::uint8_t { kept, rotated_f32, bf16_source, f16_source, unrotated, follow };

const char* name_of(Way way) {
  constexpr std::array names{"keep",
                             "in_cache f32",
                             "in_cache bf16",
                             "in_cache f16",
                             "in_cache un-rotated",
                             "sinks_follow"};
  return names[static_cast<std::size_t>(way)];
}

// What varies besides policy, removal and position mode; every value meets every other in some run.
ShadowCache::Setup setup_of(std::uint64_t variant, Way way) {
  const auto pick = [&](std::uint64_t stride, std::uint64_t n) { return variant / stride % n; };
  ShadowCache::Setup s;
  s.cache.page_size = std::array{4, 1, 16}[pick(1, 3)];
  s.cache.scope = std::array{TableScope::group, TableScope::layer, TableScope::head}[pick(3, 3)];
  s.group = std::array{1, 3, 8}[(pick(1, 3) + pick(9, 3)) % 3];
  s.rope.pairs = pick(1, 2) == 0 ? RopePairs::half_split : RopePairs::interleaved;
  if (pick(2, 2) == 1) { s.rope = {.dim = 4, .offset = 2, .pairs = s.rope.pairs}; }
  s.cache.layers = 2;
  s.cache.kv_heads = 2;
  s.cache.key_dim = 8;
  s.cache.value_dim = 6;
  s.cache.max_sequences = 3;
  s.cache.max_rows = 96;
  s.cache.pages = 3 * 4 * 96 / s.cache.page_size + 12;
  s.cache.scores = true;
  s.sequences = 3;
  s.seed = variant + 1;
  s.mode = way == Way::kept     ? PositionMode::keep
           : way == Way::follow ? PositionMode::sinks_follow
                                : PositionMode::in_cache;
  s.unrotated_cache = way == Way::unrotated;
  s.following_sinks = way == Way::follow ? sinks : 0;
  s.cache.unrotated_keys = way == Way::bf16_source || way == Way::f16_source;
  s.cache.dtype = way == Way::bf16_source  ? DType::bf16
                  : way == Way::f16_source ? DType::f16
                  : way == Way::kept || way == Way::follow || way == Way::unrotated
                      ? std::array{DType::f32, DType::bf16, DType::f16}[pick(5, 3)]
                      : DType::f32;
  return s;
}

// Binds the position mode to `view`, whose first sequence is `first`.
Rerotator rerotator_of(const ShadowCache& c, const CacheView& view, std::int32_t first) {
  const auto& s = c.setup();
  if (s.unrotated_cache) { return Rerotator::unrotated_cache(view); }
  const auto frequencies = s.rope.frequencies(s.cache.layers);
  PristineSinks pristine = c.pristine();
  pristine.keys += static_cast<std::int64_t>(first) * s.cache.layers * s.cache.kv_heads *
                   s.following_sinks * s.cache.key_dim;
  return {view,
          Rope{.inverse_frequencies = frequencies,
               .dim = s.rope.dim,
               .offset = s.rope.offset,
               .pairs = s.rope.pairs},
          s.mode,
          pristine};
}

// One eviction of the whole batch, or of one sequence, checked against `rule`.
template <class P>
void evict_and_check(
    ShadowCache& c, const P& policy, const KeepRule& rule, Removal removal, std::int32_t only) {
  Observation obs;
  if (rule.external) { obs.scores = c.external_scores(); }
  if (only >= 0 && rule.external) { obs.scores.base += only * obs.scores.sequence_stride; }
  const bool drops =
      (removal == Removal::automatic ? policy.removal() : removal) == Removal::drop_pages;

  // The expected result.
  std::int64_t before = 0;
  std::int64_t after = 0;
  std::vector<std::vector<std::vector<bool>>> kept(3);
  c.for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
    if (only >= 0 && s != only) { return; }
    kept[at(s)].push_back(c.kept_by(rule, s, l, h));
  });
  for (auto& heads : kept) {
    if (drops && !heads.empty()) { c.widen_to_pages(heads); }
    for (const auto& head : heads) {
      before += static_cast<std::int64_t>(head.size());
      after += std::count(head.begin(), head.end(), true);
    }
  }
  std::vector<std::map<std::int32_t, std::pair<std::int32_t, std::int32_t>>> places;
  c.for_each(
      [&](std::int32_t s, std::int32_t l, std::int32_t h) { places.push_back(c.places(s, l, h)); });
  const std::int32_t pages_before = c.cache().pool().in_use();

  const CacheView view = only >= 0 ? c.cache().view(SequenceId{only}) : c.cache().view();
  const Rerotator rerotator = rerotator_of(c, view, std::max(only, 0));
  const PlanOptions options{
      .removal = removal, .shared = SharedPages::leave, .spare_pages = {}, .rerotator = &rerotator};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const Report report = evict(policy, c.cache(), view, obs, workspace, options);
  INFO("report: " << to_string(report.status));
  REQUIRE(usable(report.status));

  std::size_t i = 0;
  std::array<std::size_t, 3> head_index{};
  std::int64_t moved = 0;
  c.for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
    const auto& places_before = places[i++];
    if (only >= 0 && s != only) { return; }
    const auto& stay = kept[at(s)][head_index[at(s)]++];
    if (std::find(stay.begin(), stay.end(), false) != stay.end()) { c.evict(s, l, h, stay); }
    for (const auto& [position, place] : c.places(s, l, h)) {
      if (places_before.at(position) != place) { ++moved; }
    }
  });
  const auto& p = c.cache().params();
  const std::int64_t row_bytes =
      (p.key_dim + p.value_dim + (p.unrotated_keys ? p.key_dim : 0)) * element_bytes(p.dtype);
  CHECK(report.kept_rows == after);
  CHECK(report.evicted_rows == before - after);
  CHECK(report.bytes_moved == moved * row_bytes);
  CHECK(report.dropped_pages == report.released_pages);
  CHECK(report.released_pages == pages_before - c.cache().pool().in_use());
  if (drops) { CHECK(moved == 0); }
  REQUIRE(c.fault() == "");
}

// Every removal with every position mode; the variants take turns, so that each of the 90 meets every policy.
template <class P>
void run(const P& policy, const KeepRule& rule, std::uint64_t variants = 3) {
  std::uint64_t turn = 0;
  for (const Removal removal : {Removal::automatic,
                                Removal::drop_pages,
                                Removal::overwrite_slot,
                                Removal::fill_holes,
                                Removal::stable_pack}) {
    const Removal way_out = removal == Removal::automatic ? policy.removal() : removal;
    for (const Way way : {Way::kept,
                          Way::rotated_f32,
                          Way::bf16_source,
                          Way::f16_source,
                          Way::unrotated,
                          Way::follow}) {
      if (way == Way::follow && rule.sinks < sinks) { continue; }  // refused: plan_test
      for (std::uint64_t i = 0; i < variants; ++i) {
        const std::uint64_t variant = turn++;
        const auto setup = setup_of(variant, way);
        INFO(std::string(P::name) << " " << to_string(removal) << " " << name_of(way) << " variant "
                                  << variant);
        ShadowCache c(setup);
        for (std::int32_t s = 0; s < 3; ++s) {
          REQUIRE(c.append(s, std::array{23, 7, 30}[at(s)]) == Status::ok);
        }
        for (std::int32_t step = 0; step < 7; ++step) {
          INFO("step " << step);
          c.accumulate();
          evict_and_check(c, policy, rule, removal, step % 3 == 2 ? step / 3 % 3 : -1);
          // Decode, a chunk now and then; one sequence rests.
          for (std::int32_t s = 0; s < 3; ++s) {
            if (s != step % 4) { REQUIRE(c.append(s, step % 5 == 4 ? 5 : 1) == Status::ok); }
          }
        }
        REQUIRE(c.fault() == "");
        if (way_out == Removal::drop_pages) { continue; }
        std::int32_t most = 0;
        c.for_each([&](std::int32_t s, std::int32_t l, std::int32_t h) {
          most = std::max(most, static_cast<std::int32_t>(c.head(s, l, h).rows.size()));
        });
        CHECK(most <= rule.budget + 12);
      }
    }
  }
}

}  // namespace

TEST_CASE("dense: streaming exact attends to its kept rows alone", "[dense][streaming][property]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = sinks, .recent = 11});
  run(policy, {.budget = sinks + 11, .sinks = sinks, .recent = 11});
}

TEST_CASE("dense: streaming pages attends to whole kept pages", "[dense][streaming][property]") {
  const StreamingSink policy({.sinks = sinks, .recent = 9});
  run(policy, {.budget = sinks + 9, .sinks = sinks, .recent = 9});
}

TEST_CASE("dense: h2o real_drop attends to its kept rows alone", "[dense][h2o][property]") {
  const HeavyHitter policy({.heavy = 6, .recent = 5, .sinks = sinks});
  run(policy, {.budget = 11 + sinks, .sinks = sinks, .recent = 5});
}

TEST_CASE("dense: h2o real_drop in intervals, with grace", "[dense][h2o][property]") {
  const HeavyHitter policy({.heavy = 9, .recent = 3, .interval = 3, .grace = 4});
  run(policy, {.budget = 12, .sinks = 0, .recent = 4, .interval = 3});
}

TEST_CASE("dense: h2o greedy attends to its kept rows alone", "[dense][h2o][property]") {
  const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy({.heavy = 12, .recent = 0});
  run(policy, {.budget = 12});
}

TEST_CASE("dense: h2o promote attends to its kept rows alone", "[dense][h2o][property]") {
  const HeavyHitter<AccumulateParams, HeavyMode::promote> policy({.heavy = 7, .recent = 4});
  run(policy, {.budget = 11, .recent = 4, .promote = true});
}

TEST_CASE("dense: snapkv attends to its kept rows alone", "[dense][snapkv][property]") {
  const SnapKVSelector policy({.window = 4, .budget = 13, .sinks = sinks});
  run(policy, {.budget = 13, .sinks = sinks, .recent = 4, .external = true});
}

TEST_CASE("dense: full keeps everything in any mode", "[dense][full][property]") {
  run(Full{}, {.budget = 1000, .sinks = sinks}, 1);
}
