// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/planner.hpp>

#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"
#include "support/threads.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::best;
using test::ByScore;
using test::TaggedCache;

namespace {

constexpr std::int32_t heads = 2;
constexpr std::int32_t page_size = 4;
constexpr SequenceId parent{0};
constexpr SequenceId child{1};

// A parent, and a child that was forked from it and then went on alone.
struct Family {
  TaggedCache c;
  std::vector<float> scores;  // of the child, [heads, 64]
  std::int32_t rows = 0;      // of the child

  Family(std::int32_t prefix, std::int32_t own, std::uint64_t seed)
      : c({.page_size = page_size, .pages = 60, .kv_heads = heads, .sequences = 2, .max_rows = 64}),
        scores(heads * 64),
        rows(prefix + own) {
    c.tags_checked = false;
    REQUIRE(c.append(0, prefix) == Status::ok);
    c.cache.destroy(child);
    REQUIRE(c.cache.try_fork(parent) == child);
    if (own > 0) { REQUIRE(c.append(1, own) == Status::ok); }
    test::Random random(seed);
    for (float& x : scores) { x = static_cast<float>(random.below(50)); }
  }
  Observation observation() {
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 1, heads, 64);
    return obs;
  }
  std::vector<float> scores_of(std::int32_t h) const {
    const auto begin = scores.begin() + h * 64;
    return {begin, begin + rows};
  }
  std::vector<std::int32_t> entries() const {
    const auto table = c.cache.page_table(child);
    return {table.begin(), table.begin() + (rows + page_size - 1) / page_size};
  }
  bool shared(std::int32_t entry) const {
    return c.cache.pool().ref_count(PageId{entries()[static_cast<std::size_t>(entry)]}) > 1;
  }
  // Everything of the parent that could be damaged.
  std::vector<std::int32_t> parent_state() {
    std::vector<std::int32_t> state;
    for (const std::int32_t p : c.cache.page_table(parent)) { state.push_back(p); }
    for (std::int32_t h = 0; h < heads; ++h) {
      for (const std::int32_t p : c.kept(0, 0, h)) { state.push_back(p); }
    }
    return state;
  }
};

}  // namespace

TEST_CASE(
    "planner: leave keeps the rows of shared pages, drops wholly unwanted ones, and lets own "
    "rows compete for the rest",
    "[planner][shared][property]") {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    test::Random random(seed + 1000);
    const std::int32_t prefix = random.below(22) + 1;
    const std::int32_t own = seed % 3 == 0 ? 0 : random.below(12);
    Family f(prefix, own, seed);
    const std::int32_t keep = random.below(f.rows) + 1;
    const std::int32_t recent = std::min(keep, random.below(4));
    // Some pages are wholly unwanted.
    if (seed % 2 == 0) {
      for (std::int32_t h = 0; h < heads; ++h) {
        for (std::int32_t r = 4; r < 12; ++r) {
          f.scores[static_cast<std::size_t>(h * 64 + r)] = -1;
        }
      }
    }

    // The rule, over plain lists.
    const auto wanted_by = [&](std::int32_t h) {
      auto list = f.scores_of(h);
      for (std::int32_t r = f.rows - recent; r < f.rows; ++r) {
        list[static_cast<std::size_t>(r)] = 1e6F;
      }
      return best(list, keep);
    };
    std::set<std::int32_t> locked;
    std::set<std::int32_t> dropped;
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(f.entries().size()); ++e) {
      if (!f.shared(e)) { continue; }
      bool wanted = false;
      for (std::int32_t h = 0; h < heads; ++h) {
        for (const std::int32_t r : wanted_by(h)) { wanted = wanted || r / page_size == e; }
      }
      (wanted ? locked : dropped).insert(e);
    }
    std::vector<std::vector<std::int32_t>> expected;
    for (std::int32_t h = 0; h < heads; ++h) {
      std::vector<float> list = f.scores_of(h);
      std::int32_t fixed = 0;
      for (std::int32_t r = 0; r < f.rows; ++r) {
        float& x = list[static_cast<std::size_t>(r)];
        if (locked.contains(r / page_size)) {
          x = 2e6F;
          ++fixed;
        } else if (dropped.contains(r / page_size)) {
          x = -1e6F;
        } else if (r >= f.rows - recent) {
          x = 1e6F;
          ++fixed;
        }
      }
      std::vector<std::int32_t> kept = best(list, std::max(keep, fixed));
      std::erase_if(kept, [&](std::int32_t r) { return dropped.contains(r / page_size); });
      expected.push_back(kept);
    }

    const auto parent_before = f.parent_state();
    const auto entries_before = f.entries();
    const auto before = f.c.bytes();
    const ByScore policy{.keep = keep, .recent = recent};
    const Report report = f.c.evict(policy, f.c.cache.view(child), f.observation());
    INFO("seed " << seed << " prefix " << prefix << " own " << own << " keep " << keep);
    const auto kept_rows = static_cast<std::int32_t>(expected[0].size());
    REQUIRE(report.status == (kept_rows > keep ? Status::over_budget : Status::ok));
    for (std::int32_t h = 0; h < heads; ++h) {
      REQUIRE(f.c.kept(1, 0, h) == expected[static_cast<std::size_t>(h)]);
    }
    REQUIRE(f.parent_state() == parent_before);
    REQUIRE(f.c.fault() == "");
    // Locked pages are where they were, in the same order; dropped ones belong to the parent alone.
    std::size_t i = 0;
    for (std::int32_t e = 0; e < static_cast<std::int32_t>(entries_before.size()); ++e) {
      const PageId page{entries_before[static_cast<std::size_t>(e)]};
      if (locked.contains(e)) {
        REQUIRE(f.c.cache.page_table(child)[i++] == raw(page));
        REQUIRE(f.c.cache.pool().ref_count(page) == 2);
      }
      if (dropped.contains(e)) { REQUIRE(f.c.cache.pool().ref_count(page) == 1); }
    }
    if (report.evicted_rows == 0) { REQUIRE(f.c.bytes() == before); }
  }
}

TEST_CASE("planner: copy keeps exactly the rows wanted, on the fewest spare pages",
          "[planner][shared][property]") {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    test::Random random(seed + 5000);
    const std::int32_t prefix = random.below(22) + 1;
    const std::int32_t own = seed % 3 == 0 ? 0 : random.below(12);
    Family f(prefix, own, seed);
    const std::int32_t keep = random.below(f.rows) + 1;
    const Removal way = seed % 2 == 0 ? Removal::stable_pack : Removal::fill_holes;
    INFO("seed " << seed << " prefix " << prefix << " own " << own << " keep " << keep << " "
                 << to_string(way));
    std::vector<std::vector<std::int32_t>> expected;
    std::set<std::int32_t>
        written;  // shared entries of the new table with a row that was elsewhere
    for (std::int32_t h = 0; h < heads; ++h) {
      const auto rows = best(f.scores_of(h), keep);
      expected.push_back(rows);
      for (std::int32_t to = 0; to < keep; ++to) {
        const bool stays = way == Removal::stable_pack
                               ? rows[static_cast<std::size_t>(to)] == to
                               : std::find(rows.begin(), rows.end(), to) != rows.end();
        if (!stays && f.shared(to / page_size)) { written.insert(to / page_size); }
      }
    }
    std::vector<PageId> spares;
    for (std::int32_t i = 0; i < 10; ++i) { spares.push_back(*f.c.cache.pool().try_acquire()); }
    const auto needed = written.size();
    const auto parent_before = f.parent_state();
    const auto before = f.c.bytes();
    const ByScore policy{.keep = keep, .way = way};
    const CacheView view = f.c.cache.view(child);
    const Observation obs = f.observation();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    for (std::size_t given = 0; given < needed; ++given) {
      const PlanRef made =
          plan(policy,
               view,
               obs,
               workspace,
               {.shared = SharedPages::copy, .spare_pages = std::span(spares).first(given)});
      REQUIRE(made.status() == Status::out_of_pages);
      REQUIRE(made.spares_needed() == static_cast<std::int32_t>(needed));
      REQUIRE(made.empty());
      REQUIRE_FALSE(made.table(SequenceId{0}, 0).evicts);  // nothing half made is shown
      REQUIRE(made.k_pages(SequenceId{0}, 0).empty());
      REQUIRE(made.released(SequenceId{0}, 0).empty());
      REQUIRE(made.evicted(SequenceId{0}, LayerId{0}, HeadId{1}).empty());
      REQUIRE(apply(made, view) == Status::out_of_pages);
      REQUIRE(f.c.bytes() == before);
    }
    const Report report =
        f.c.evict(policy,
                  view,
                  obs,
                  {.shared = SharedPages::copy, .spare_pages = std::span(spares).first(needed)});
    REQUIRE(report.status == Status::ok);
    for (std::int32_t h = 0; h < heads; ++h) {
      REQUIRE(f.c.kept(1, 0, h) == expected[static_cast<std::size_t>(h)]);
    }
    REQUIRE(f.parent_state() == parent_before);
    for (std::size_t i = needed; i < spares.size(); ++i) { f.c.cache.pool().release(spares[i]); }
    REQUIRE(f.c.fault() == "");
    // Nothing of the child may now be written through a shared page.
    for (const std::int32_t e : written) {
      CHECK(f.c.cache.pool().ref_count(
                PageId{f.c.cache.page_table(child)[static_cast<std::size_t>(e)]}) == 1);
    }
  }
}

TEST_CASE("planner: an overwrite in a shared page is a copy, or leaves the row",
          "[planner][shared]") {
  for (const SharedPages shared : {SharedPages::leave, SharedPages::copy}) {
    Family f(8, 5, 1);  // pages 0 and 1 shared, then 4 + 1 own rows
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t r = 0; r < 13; ++r) {
        f.scores[static_cast<std::size_t>(h * 64 + r)] = static_cast<float>(r == 2   ? 0
                                                                            : r == 9 ? 1
                                                                                     : 5);
      }
    }
    std::vector<PageId> spares{*f.c.cache.pool().try_acquire(), *f.c.cache.pool().try_acquire()};
    const auto parent_before = f.parent_state();
    const Report report = f.c.evict(ByScore{.keep = 12, .way = Removal::overwrite_slot},
                                    f.c.cache.view(child),
                                    f.observation(),
                                    {.shared = shared, .spare_pages = spares});
    REQUIRE(report.status == Status::ok);
    CHECK(f.parent_state() == parent_before);
    std::vector<std::int32_t> expected;
    for (std::int32_t r = 0; r < 13; ++r) {
      if (r != (shared == SharedPages::leave ? 9 : 2)) { expected.push_back(r); }
    }
    for (std::int32_t h = 0; h < heads; ++h) { CHECK(f.c.kept(1, 0, h) == expected); }
    if (shared == SharedPages::leave) {
      for (const PageId p : spares) { f.c.cache.pool().release(p); }
    }
    CHECK(f.c.fault() == "");
  }
}

TEST_CASE("planner: whole shared pages may be dropped, none is written", "[planner][shared]") {
  Family f(16, 6, 1);
  const auto parent_before = f.parent_state();
  const StreamingSink policy({.sinks = 2, .recent = 7});
  const Report report = f.c.evict(policy, f.c.cache.view(child));
  REQUIRE(report.status == Status::ok);
  CHECK(f.c.kept(1) ==
        std::vector<std::int32_t>{0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21});
  CHECK(report.dropped_pages == 2);
  CHECK(report.released_pages == 0);  // the parent has them
  CHECK(f.parent_state() == parent_before);
  CHECK(f.c.fault() == "");
}

TEST_CASE("planner: rotating a key in a shared page is refused under leave, copied under copy",
          "[planner][shared]") {
  const std::array frequencies{1.0};
  const Rope rope{.inverse_frequencies = frequencies, .dim = 2, .same_for_all_layers = true};
  for (const bool drops : {false, true}) {
    Family f(8, 4, 1);
    f.scores.assign(f.scores.size(), 5.0F);
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t r = 0; r < 4; ++r) { f.scores[static_cast<std::size_t>(h * 64 + r)] = 0; }
    }
    const CacheView view = f.c.cache.view(child);
    const Rerotator rerotator(view, rope, PositionMode::in_cache);
    const ByScore policy{.keep = 8, .way = drops ? Removal::drop_pages : Removal::stable_pack};
    const auto before = f.c.bytes();
    // Page 0 goes, page 1 is shared and would have to turn by 4 positions.
    CHECK(f.c.evict(policy, view, f.observation(), {.rerotator = &rerotator}).status ==
          Status::shared_page);
    CHECK(f.c.bytes() == before);
    if (drops) { continue; }
    std::vector<PageId> spares;
    for (std::int32_t i = 0; i < 3; ++i) { spares.push_back(*f.c.cache.pool().try_acquire()); }
    const auto parent_before = f.parent_state();
    REQUIRE(f.c.evict(policy,
                      view,
                      f.observation(),
                      {.shared = SharedPages::copy, .spare_pages = spares, .rerotator = &rerotator})
                .status == Status::ok);
    CHECK(f.parent_state() == parent_before);
    CHECK(f.c.cache.next_rope_position(child) == 8);
  }
}

TEST_CASE("planner: budgets of heads differ only where heads have tables", "[planner][edge]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    TaggedCache c({.pages = 80, .layers = 2, .kv_heads = 3, .scope = scope, .max_rows = 32});
    REQUIRE(c.append(0, 20) == Status::ok);
    std::vector<float> scores(2 * 3 * 32);
    test::Random random(2);
    for (float& x : scores) { x = random.uniform(); }
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 2, 3, 32);
    const std::array<std::int32_t, 6> by_head{3, 9, 14, 20, 1, 5};
    const std::array<std::int32_t, 2> by_layer{6, 11};
    const auto before = c.bytes();
    const auto sizes = [&](const std::int32_t* budgets, RowMap map) {
      obs.budgets = budgets;
      obs.budget_rows = map;
      return c.evict(ByScore{.keep = 20}, obs).status;
    };
    if (scope == TableScope::group) {
      CHECK(sizes(by_layer.data(), {0, 1, 0}) == Status::unequal_budget);
      CHECK(sizes(by_head.data(), {0, 3, 1}) == Status::unequal_budget);
      const std::array<std::int32_t, 6> one_less{20, 20, 20, 20, 19, 20};
      for (const Removal way :
           {Removal::overwrite_slot, Removal::drop_pages, Removal::fill_holes}) {
        obs.budgets = one_less.data();
        CHECK(c.evict(ByScore{.keep = 20, .way = way}, obs).status == Status::unequal_budget);
      }
      CHECK(c.bytes() == before);
      continue;
    }
    if (scope == TableScope::layer) {
      CHECK(sizes(by_head.data(), {0, 3, 1}) == Status::unequal_budget);
      CHECK(c.bytes() == before);
      CHECK(sizes(by_layer.data(), {0, 1, 0}) == Status::ok);
    } else {
      CHECK(sizes(by_head.data(), {0, 3, 1}) == Status::ok);
    }
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 3; ++h) {
        const auto begin = scores.begin() + (l * 3 + h) * 32;
        const std::int32_t keep = scope == TableScope::layer
                                      ? by_layer[static_cast<std::size_t>(l)]
                                      : by_head[static_cast<std::size_t>(l * 3 + h)];
        CHECK(c.kept(0, l, h) == best({begin, begin + 20}, keep));
      }
    }
    CHECK(c.fault() == "");
  }
}

TEST_CASE("planner: budgets that differ above the rows there are, are equal", "[planner][edge]") {
  TaggedCache c({.pages = 80, .kv_heads = 2, .max_rows = 32});
  REQUIRE(c.append(0, 10) == Status::ok);
  std::vector<float> scores(2 * 32);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 2, 32);
  const std::array<std::int32_t, 2> budgets{10, 700};
  obs.budgets = budgets.data();
  obs.budget_rows = {0, 0, 1};
  CHECK(c.evict(ByScore{.keep = 20}, obs).status == Status::ok);
  CHECK(c.kept(0).size() == 10);
}

TEST_CASE("planner: pages of rows out of order are not dropped", "[planner][edge]") {
  TaggedCache c({.max_rows = 40});
  REQUIRE(c.append(0, 20) == Status::ok);
  std::vector<float> scores(40);
  for (std::size_t i = 0; i < 40; ++i) { scores[i] = static_cast<float>(i); }
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 40);
  REQUIRE(c.evict(ByScore{.keep = 9, .way = Removal::fill_holes}, obs).status == Status::ok);
  REQUIRE_FALSE(c.cache.state(SequenceId{0}).ordered);
  const auto before = c.bytes();
  CHECK(c.evict(StreamingSink({.sinks = 1, .recent = 2})).status == Status::rows_unordered);
  CHECK(c.bytes() == before);
  CHECK(c.evict(StreamingSink({.sinks = 1, .recent = 2}), {}, {.removal = Removal::stable_pack})
            .status == Status::ok);
  CHECK(c.kept(0) == std::vector<std::int32_t>{11, 18, 19});
  CHECK(c.cache.state(SequenceId{0}).live_rows == 3);
}

TEST_CASE("planner: every workspace below the size it asks for is refused, and none is overrun",
          "[planner][edge]") {
  TaggedCache c(
      {.pages = 30, .layers = 2, .kv_heads = 2, .scope = TableScope::head, .max_rows = 24});
  REQUIRE(c.append(0, 11) == Status::ok);
  std::vector<float> scores(4 * 24, 1.0F);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 2, 2, 24);
  const ByScore policy{.keep = 5};
  const CacheView view = c.view();
  const auto before = c.bytes();
  for (const std::size_t misaligned : {0U, 1U, 63U}) {
    const std::size_t needed = plan_workspace_bytes(policy, plan_shape(view, obs));
    std::vector<std::byte> memory(needed + 256, std::byte{0xA5});
    std::size_t smallest = needed;
    for (std::size_t size = 0; size <= needed; ++size) {
      const PlanRef made =
          plan(policy, view, obs, std::span(memory).subspan(64 + misaligned, size));
      for (std::size_t i = 64 + misaligned + size; i < memory.size(); ++i) {
        if (memory[i] != std::byte{0xA5}) {
          FAIL("byte " << i << " beyond a workspace of " << size);
        }
      }
      if (made.status() == Status::ok) {
        smallest = std::min(smallest, size);
      } else {
        REQUIRE(made.status() == Status::workspace_too_small);
        REQUIRE(made.empty());
        REQUIRE(smallest == needed);  // none that is smaller was enough
      }
    }
    CHECK(smallest + 64 >= needed);  // only the alignment may be to spare
    for (std::size_t i = 0; i < 64 + misaligned; ++i) { REQUIRE(memory[i] == std::byte{0xA5}); }
  }
  CHECK(c.bytes() == before);
  CHECK(plan(policy, view, obs, {}).status() == Status::workspace_too_small);
}

TEST_CASE("planner: the workspace grows with every field of its shape", "[planner][property]") {
  const ByScore policy{.keep = 5};
  const PlanShape small{.sequences = 2,
                        .layers = 2,
                        .kv_heads = 2,
                        .scope = TableScope::head,
                        .page_size = 4,
                        .pages = 64,
                        .max_rows = 64,
                        .workers = 2};
  const std::size_t bytes = plan_workspace_bytes(policy, small);
  for (const auto field : {&PlanShape::sequences,
                           &PlanShape::layers,
                           &PlanShape::kv_heads,
                           &PlanShape::pages,
                           &PlanShape::max_rows,
                           &PlanShape::workers}) {
    std::size_t last = bytes;
    for (std::int32_t i = 0; i < 40; ++i) {
      PlanShape larger = small;
      larger.*field += 16 * i;
      const std::size_t more = plan_workspace_bytes(policy, larger);
      CHECK(more >= last);
      last = more;
    }
    CHECK(last > bytes);
  }
}

TEST_CASE("planner: planning changes no byte of the cache, and the same plan comes twice",
          "[planner][property]") {
  for (const Removal way :
       {Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack, Removal::drop_pages}) {
    TaggedCache c({.pages = 90,
                   .layers = 2,
                   .kv_heads = 3,
                   .scope = TableScope::layer,
                   .sequences = 3,
                   .max_rows = 32});
    for (std::int32_t s = 0; s < 3; ++s) { REQUIRE(c.append(s, 13 - s * 6) == Status::ok); }
    std::vector<float> scores(3 * 6 * 32);
    test::Random random(2);
    for (float& x : scores) { x = static_cast<float>(random.below(5)); }
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 2, 3, 32);
    const ByScore policy{.keep = way == Removal::overwrite_slot ? 12 : 6, .way = way};
    const auto before = c.bytes();
    const auto scores_before = scores;
    const CacheView view = c.view();
    // Garbage in the workspace, and threads, make no difference.
    std::vector<std::byte> one(plan_workspace_bytes(policy, plan_shape(view, obs)),
                               std::byte{0xFF});
    std::vector<std::byte> two(plan_workspace_bytes(policy, plan_shape(view, obs, 3)),
                               std::byte{0x11});
    const PlanRef a = plan(policy, view, obs, one);
    const PlanRef b = plan(policy, view, obs, two, {}, test::Threads{});
    CHECK(usable(a.status()));
    CHECK(a == b);
    CHECK(a.bytes_moved() == b.bytes_moved());
    CHECK(a.kept_rows() == b.kept_rows());
    CHECK(to_string(a) == to_string(b));
    CHECK(c.bytes() == before);
    CHECK(scores == scores_before);
  }
}

TEST_CASE("planner: sinks_follow needs a policy that keeps those sinks", "[planner][edge]") {
  TaggedCache c({.max_rows = 32});
  REQUIRE(c.append(0, 20) == Status::ok);
  std::vector<float> scores(32);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 32);
  const std::array frequencies{1.0};
  const std::array<float, 6> pristine{};
  const CacheView view = c.view();
  const Rerotator rerotator(view,
                            {.inverse_frequencies = frequencies, .dim = 2},
                            PositionMode::sinks_follow,
                            {.keys = pristine.data(), .sinks = 3});
  const auto before = c.bytes();
  CHECK(c.evict(ByScore{.keep = 9, .sinks = 2}, view, obs, {.rerotator = &rerotator}).status ==
        Status::bad_options);
  CHECK(c.bytes() == before);
  CHECK(c.evict(ByScore{.keep = 9, .sinks = 3}, view, obs, {.rerotator = &rerotator}).status ==
        Status::ok);
}

TEST_CASE("planner: in_cache numbers every row, also after a cut that kept positions",
          "[planner][edge]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = 6});
  TaggedCache c({.max_rows = 32});
  REQUIRE(c.append(0, 20) == Status::ok);
  REQUIRE(c.evict(policy).status == Status::ok);  // positions kept: 0, 14..19
  REQUIRE(c.append(0, 1) == Status::ok);
  const CacheView view = c.view();
  const Rerotator rerotator = Rerotator::unrotated_cache(view);
  for (std::int32_t step = 0; step < 20; ++step) {
    REQUIRE(c.evict(policy, view, {}, {.rerotator = &rerotator}).status == Status::ok);
    std::map<std::int32_t, std::int32_t> rope;
    c.for_each_row(0, 0, 0, [&](std::int32_t r, std::int32_t position) {
      rope[position] = view.rope_position(SequenceId{0}, LayerId{0}, HeadId{0}, r);
    });
    std::int32_t rank = 0;
    for (const auto& [position, at] : rope) { CHECK(at == rank++); }
    CHECK(c.cache.next_rope_position(SequenceId{0}) == 7);
    REQUIRE(c.append(0, 1) == Status::ok);
  }
}

TEST_CASE("planner: a fault in the tables is reported before anything is planned",
          "[planner][fault]") {
  TaggedCache c({.pages = 30, .sequences = 2, .max_rows = 32});
  REQUIRE(c.append(0, 12) == Status::ok);
  REQUIRE(c.append(1, 9) == Status::ok);
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = 3});
  const CacheView good = c.cache.view();
  std::vector<std::int32_t> ids;
  for (std::int32_t s = 0; s < 2; ++s) {
    const auto table = c.cache.page_table(SequenceId{s});
    ids.insert(ids.end(), table.begin(), table.end());
  }
  CacheView view = good;
  view.table.ids = ids.data();
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  const auto status = [&] {
    const PlanRef made = plan(policy, view, {}, workspace);
    CHECK(made.empty());
    CHECK(made.kept_rows() == 0);
    CHECK(to_string(made).find(to_string(made.status())) != std::string::npos);
    CHECK(made == made);
    return made.status();
  };
  const auto fresh = ids;
  ids[1] = 30;
  CHECK(status() == Status::page_out_of_range);
  ids = fresh;
  ids[1] = -1;
  CHECK(status() == Status::page_out_of_range);
  ids = fresh;
  ids[1] = ids[0];
  CHECK(status() == Status::page_twice);
  ids = fresh;
  ids[1] = ids[8];  // of the other sequence
  CHECK(status() == Status::page_twice);
  ids = fresh;
  CHECK(plan(policy, view, {}, workspace).status() == Status::ok);
}

TEST_CASE("planner: scores of another width are refused", "[planner][fault]") {
  TaggedCache c({.max_rows = 32});
  REQUIRE(c.append(0, 20) == Status::ok);
  std::vector<double> scores(32);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 32);
  CHECK(c.evict(ByScore{.keep = 9}, obs).status == Status::bad_observation);
  CHECK(c.evict(ByScore{.keep = 9}).status == Status::bad_observation);
}

TEST_CASE("planner: NaN of protected rows and of heads with nothing to choose are not counted",
          "[planner][nan]") {
  TaggedCache c({.kv_heads = 2, .max_rows = 32});
  REQUIRE(c.append(0, 20) == Status::ok);
  std::vector<float> scores(2 * 32, std::numeric_limits<float>::quiet_NaN());
  for (std::size_t i = 0; i < 10; ++i) { scores[i] = 1; }
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 2, 32);
  const Report report = c.evict(ByScore{.keep = 9, .sinks = 2, .recent = 4}, obs);
  REQUIRE(report.status == Status::ok);
  CHECK(report.nan_count == 6 + 14);  // candidates 2..15
  CHECK(c.kept(0, 0, 0) == std::vector<std::int32_t>{0, 1, 2, 3, 4, 16, 17, 18, 19});
  CHECK(c.kept(0, 0, 1) == std::vector<std::int32_t>{0, 1, 2, 3, 4, 16, 17, 18, 19});
}

TEST_CASE("planner: empty sequences and an empty batch are not errors", "[planner][edge]") {
  TaggedCache c({.sequences = 3, .max_rows = 32});
  const StreamingSink policy({.sinks = 1, .recent = 3});
  const Report nothing = c.evict(policy);
  CHECK(nothing.status == Status::ok);
  CHECK(nothing.kept_rows == 0);
  REQUIRE(c.append(1, 20) == Status::ok);
  CHECK(c.evict(policy).status == Status::ok);
  CHECK(c.kept(1) == std::vector<std::int32_t>{0, 1, 2, 3, 16, 17, 18, 19});
  CacheView none = c.cache.view();
  none.sequences = 0;
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(none)));
  CHECK(plan(policy, none, {}, workspace).status() == Status::ok);
}

// --- scores that are common to a layer --------------------------------------------------------

namespace {

// Scores a row by its position, the same for all heads of a layer, and counts its calls.
struct LayerCounter {
  static constexpr bool common_to_layer = true;
  std::int32_t* calls = nullptr;

  std::size_t scratch_bytes(const PlanShape&) const noexcept { return 0; }
  Status check(const CacheView&, const Observation&) const noexcept { return Status::ok; }
  void score(const HeadRef& head,
             const Observation&,
             std::span<std::byte>,
             std::span<float> out) const noexcept {
    ++*calls;
    for (std::size_t r = 0; r < out.size(); ++r) {
      const std::int32_t p = raw(head.position(static_cast<std::int32_t>(r)));
      out[r] = static_cast<float>((p * 37 + raw(head.layer) * 11) % 101);
    }
  }
};
static_assert(LayerScorer<LayerCounter>);

// The same, asked for head by head.
struct HeadCounter : LayerCounter {
  static constexpr bool common_to_layer = false;
};
static_assert(!LayerScorer<HeadCounter>);

template <class S>
struct ByCounter {
  static constexpr std::string_view name = "by_counter";
  std::int32_t keep = 0;
  std::int32_t* calls = nullptr;

  Demand demand(const DemandInput& in) const noexcept {
    return {std::min(keep, in.live), {}, 0, Status::ok};
  }
  Removal removal() const noexcept { return Removal::stable_pack; }
  S scorer() const noexcept {
    S s;
    s.calls = calls;
    return s;
  }
};

}  // namespace

TEST_CASE("planner: scores that are common to a layer are computed once for it",
          "[planner][property]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    PagedCache cache({.pages = 200,
                      .page_size = 4,
                      .layers = 2,
                      .kv_heads = 3,
                      .key_dim = 2,
                      .scope = scope,
                      .max_sequences = 2,
                      .max_rows = 40});
    const std::vector<float> zeros(30 * 3 * 2);
    for (const std::int32_t tokens : {30, 8}) {
      const auto s = cache.try_create();
      REQUIRE(s);
      REQUIRE(cache.try_extend(*s, tokens) == Status::ok);
      for (std::int32_t l = 0; l < 2; ++l) {
        REQUIRE(cache.write(*s, LayerId{l}, {.data = zeros.data()}, {.data = zeros.data()}) ==
                kvtrim::Status::ok);
      }
    }
    std::int32_t by_layer = 0;
    std::int32_t by_head = 0;
    const ByCounter<LayerCounter> layers{10, &by_layer};
    const ByCounter<HeadCounter> one_by_one{10, &by_head};
    const PlanShape shape = plan_shape(cache.view());
    std::vector<std::byte> first(plan_workspace_bytes(layers, shape));
    std::vector<std::byte> second(plan_workspace_bytes(one_by_one, shape));
    const PlanRef a = plan(layers, cache.view(), {}, first);
    const PlanRef b = plan(one_by_one, cache.view(), {}, second);
    REQUIRE(a.status() == Status::ok);
    CHECK(by_layer == 2);  // the second sequence is within its budget
    CHECK(by_head == 2 * 3);
    for (std::int32_t l = 0; l < 2; ++l) {
      for (std::int32_t h = 0; h < 3; ++h) {
        std::vector<std::int32_t> kept[2];
        a.for_each_kept(
            SequenceId{0}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { kept[0].push_back(r); });
        b.for_each_kept(
            SequenceId{0}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { kept[1].push_back(r); });
        CHECK(kept[0].size() == 10);
        CHECK(kept[0] == kept[1]);
      }
    }
  }
}
