// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/apply.hpp>

#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"
#include "support/threads.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::best;
using test::ByScore;
using test::TaggedCache;

namespace {

// Scores by row for two layers of three heads at most; one sequence.
struct Scores {
  std::vector<float> data;
  std::int32_t heads;
  std::int32_t rows;
  Scores(std::int32_t layers, std::int32_t kv_heads, std::int32_t n)
      : data(static_cast<std::size_t>(layers * kv_heads * n), 0.0F), heads(kv_heads), rows(n) {}
  float& at(std::int32_t l, std::int32_t h, std::int32_t r) {
    return data[static_cast<std::size_t>((l * heads + h) * rows + r)];
  }
  Observation observation() {
    Observation obs;
    obs.scores = SequencePlane::dense(
        data.data(), static_cast<std::int32_t>(data.size()) / (heads * rows), heads, rows);
    return obs;
  }
};

// The page and slot of each live row, by position.
using Places = std::map<std::int32_t, std::pair<std::int32_t, std::int32_t>>;
Places places(TaggedCache& c, std::int32_t s, std::int32_t l, std::int32_t h) {
  Places result;
  const std::int32_t size = c.cache.params().page_size;
  c.for_each_row(s, l, h, [&](std::int32_t r, std::int32_t position) {
    result[position] = {
        c.cache.page_table(
            SequenceId{s}, LayerId{l}, HeadId{h})[static_cast<std::size_t>(r / size)],
        r % size};
  });
  return result;
}
std::int64_t moved_rows(const Places& before, const Places& after) {
  return std::count_if(after.begin(), after.end(), [&](const auto& row) {
    return before.at(row.first) != row.second;
  });
}

std::uint32_t rotated12(std::uint32_t pattern, int by) {
  return ((pattern << by) | (pattern >> (12 - by))) & 0xFFFU;
}

}  // namespace

TEST_CASE("apply: all 4,096 keep patterns over 12 rows keep exactly their rows, by each way",
          "[apply][property]") {
  constexpr std::int32_t rows = 12;
  constexpr std::int64_t row_bytes = 3 * 4;  // two features of the key, one of the value
  for (std::uint32_t pattern = 0; pattern < 4096; ++pattern) {
    // The second head keeps as many, but others.
    const std::array<std::uint32_t, 2> patterns{pattern, rotated12(pattern, 5)};
    const std::int32_t keep = std::popcount(pattern);
    Scores scores(1, 2, rows);
    for (std::int32_t h = 0; h < 2; ++h) {
      for (std::int32_t r = 0; r < rows; ++r) {
        scores.at(0, h, r) = (patterns[static_cast<std::size_t>(h)] >> r & 1U) != 0U ? 1.0F : 0.0F;
      }
    }
    for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::drop_pages}) {
      INFO("pattern " << pattern << " " << to_string(way));
      TaggedCache c({.pages = 4, .kv_heads = 2, .max_rows = rows});
      REQUIRE(c.append(0, rows) == Status::ok);
      const std::array before{places(c, 0, 0, 0), places(c, 0, 0, 1)};
      const Report report = c.evict(ByScore{.keep = keep, .way = way}, scores.observation());
      std::int32_t live = keep;
      std::int64_t moved = 0;
      for (std::int32_t h = 0; h < 2; ++h) {
        std::vector<std::int32_t> expected;
        for (std::int32_t r = 0; r < rows; ++r) {
          const std::uint32_t page_mask = 0xFU << (r / 4 * 4);
          const bool stays = way == Removal::drop_pages
                                 ? ((patterns[0] | patterns[1]) & page_mask) != 0U
                                 : (patterns[static_cast<std::size_t>(h)] >> r & 1U) != 0U;
          if (stays) { expected.push_back(r); }
        }
        live = static_cast<std::int32_t>(expected.size());
        REQUIRE(c.kept(0, 0, h) == expected);
        moved += moved_rows(before[static_cast<std::size_t>(h)], places(c, 0, 0, h));
        std::int32_t last = -1;
        bool ascending = true;
        std::int64_t displaced = 0;
        c.for_each_row(0, 0, h, [&](std::int32_t r, std::int32_t position) {
          ascending = ascending && position > last;
          last = position;
          if (position != r) { ++displaced; }
          if (way == Removal::fill_holes) { CHECK((position == r || position >= keep)); }
        });
        if (way != Removal::fill_holes) { REQUIRE(ascending); }
        if (way == Removal::fill_holes) {
          // Fewest moves: only rows beyond the new end.
          REQUIRE(displaced == std::count_if(expected.begin(), expected.end(), [&](std::int32_t p) {
                    return p >= keep;
                  }));
        }
      }
      REQUIRE(report.status == (live > keep ? Status::over_budget : Status::ok));
      REQUIRE(c.cache.live_rows(SequenceId{0}) == live);
      REQUIRE(report.evicted_rows == 2 * (rows - live));
      REQUIRE(report.kept_rows == 2 * live);
      REQUIRE(report.bytes_moved == moved * row_bytes);
      REQUIRE(report.released_pages == 3 - (live + 3) / 4);
      REQUIRE((c.cache.state(SequenceId{0}).ordered || way == Removal::fill_holes));
      REQUIRE(c.fault() == "");
    }
  }
}

TEST_CASE("apply: any chain of appends and cuts by any way keeps the best rows of every head",
          "[apply][property]") {
  constexpr std::int32_t layers = 2;
  constexpr std::int32_t heads = 3;
  constexpr std::int32_t max_rows = 48;
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    test::Random random(static_cast<std::uint64_t>(scope) + 40);
    TaggedCache c({.page_size = 4,
                   .pages = 160,
                   .layers = layers,
                   .kv_heads = heads,
                   .scope = scope,
                   .max_rows = max_rows});
    std::vector<std::vector<std::int32_t>> model(layers * heads);
    std::int32_t next = 0;
    for (std::int32_t step = 0; step < 1500; ++step) {
      const std::int32_t n = random.below(8) == 0 ? random.below(7) : 1;
      REQUIRE(c.append(0, n) == Status::ok);
      for (auto& m : model) {
        for (std::int32_t i = 0; i < n; ++i) { m.push_back(next + i); }
      }
      next += n;
      // Often one too many; sometimes many; sometimes twice without an append, so that a hole is there.
      for (std::int32_t again = 0; again < (random.below(5) == 0 ? 2 : 1); ++again) {
        const auto live = static_cast<std::int32_t>(model[0].size());
        const std::int32_t keep =
            random.below(4) == 0 ? random.below(25) + 2 : std::max(1, std::min(live - 1, 24));
        const std::int32_t sinks = random.below(2);
        const std::int32_t recent = std::min(keep - sinks, random.below(4));
        const Removal way =
            std::array{Removal::overwrite_slot,
                       Removal::overwrite_slot,
                       Removal::overwrite_slot,
                       Removal::fill_holes,
                       Removal::stable_pack}[static_cast<std::size_t>(random.below(5))];
        Scores scores(layers, heads, max_rows);
        for (std::int32_t l = 0; l < layers; ++l) {
          for (std::int32_t h = 0; h < heads; ++h) {
            auto& m = model[static_cast<std::size_t>(l * heads + h)];
            std::map<std::int32_t, float> score_of;
            c.for_each_row(0, l, h, [&](std::int32_t r, std::int32_t position) {
              score_of[position] = scores.at(l, h, r) = static_cast<float>(random.below(30));
            });
            std::vector<float> list;
            for (std::size_t i = 0; i < m.size(); ++i) {
              const auto rank = static_cast<std::int32_t>(i);
              const bool guarded = rank < sinks || rank >= live - recent;
              list.push_back(guarded ? 1000.0F : score_of.at(m[i]));
            }
            std::vector<std::int32_t> left;
            for (const std::int32_t i : best(list, keep)) {
              left.push_back(m[static_cast<std::size_t>(i)]);
            }
            m = left;
          }
        }
        const Report report =
            c.evict(ByScore{.keep = keep, .sinks = sinks, .recent = recent, .way = way},
                    scores.observation());
        INFO("step " << step << " " << to_string(way) << " keep " << keep << " of " << live);
        REQUIRE(report.status == Status::ok);
        for (std::int32_t l = 0; l < layers; ++l) {
          for (std::int32_t h = 0; h < heads; ++h) {
            REQUIRE(c.kept(0, l, h) == model[static_cast<std::size_t>(l * heads + h)]);
          }
        }
        if (step % 10 == 0) { REQUIRE(c.fault() == ""); }
      }
    }
    REQUIRE(c.fault() == "");
  }
}

TEST_CASE("apply: overwriting moves at most one row per head, the next append takes the hole",
          "[apply][property]") {
  constexpr std::int32_t heads = 4;
  test::Random random(3);
  TaggedCache c({.page_size = 4, .pages = 20, .kv_heads = heads, .max_rows = 40});
  REQUIRE(c.append(0, 22) == Status::ok);
  for (std::int32_t step = 0; step < 3000; ++step) {
    REQUIRE(c.append(0, 1) == Status::ok);
    std::vector<Places> before;
    for (std::int32_t h = 0; h < heads; ++h) { before.push_back(places(c, 0, 0, h)); }
    Scores scores(1, heads, 40);
    for (float& x : scores.data) { x = random.uniform(); }
    const Report report = c.evict(ByScore{.keep = 22, .recent = 6, .way = Removal::overwrite_slot},
                                  scores.observation());
    REQUIRE(report.status == Status::ok);
    REQUIRE(report.evicted_rows == heads);
    std::int64_t moved = 0;
    for (std::int32_t h = 0; h < heads; ++h) {
      const std::int64_t n = moved_rows(before[static_cast<std::size_t>(h)], places(c, 0, 0, h));
      REQUIRE(n <= 1);
      moved += n;
    }
    REQUIRE(report.bytes_moved == moved * 12);
    REQUIRE(c.cache.state(SequenceId{0}).extent() <= 23);
    if (step % 50 == 0) { REQUIRE(c.fault() == ""); }
  }
  REQUIRE(c.fault() == "");
}

TEST_CASE("apply: a second apply, and one after any change of the cache, is stale",
          "[apply][fault]") {
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 5});
  TaggedCache c({.pages = 32, .sequences = 3, .max_rows = 40});
  c.tags_checked = false;
  REQUIRE(c.append(0, 16) == Status::ok);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.cache.view())));
  const auto made = [&] { return plan(policy, c.cache.view(SequenceId{0}), {}, workspace); };
  const auto stale = [&](const PlanRef& p) {
    const auto before = c.bytes();
    CHECK(apply(p, c.cache.view(SequenceId{0})) == Status::stale_plan);
    CHECK(c.bytes() == before);
  };

  SECTION("applied twice") {
    const PlanRef p = made();
    REQUIRE(apply(p, c.cache.view(SequenceId{0})) == Status::ok);
    stale(p);
  }
  SECTION("a copy, after the original was applied") {
    const PlanRef p = made();
    Plan copy(p);
    Plan second = copy;
    REQUIRE(apply(p, c.cache.view(SequenceId{0})) == Status::ok);
    stale(copy.ref());
    auto sink = c.cache.sink_for(c.cache.view(SequenceId{0}));
    const CacheView view = c.cache.view(SequenceId{0});
    REQUIRE(commit(p, view, sink).status == Status::ok);
    stale(second.ref());
  }
  SECTION("a copy may be applied in place of the original") {
    Plan copy(made());
    CHECK(apply(copy.ref(), c.cache.view(SequenceId{0})) == Status::ok);
  }
  SECTION("after an append") {
    const PlanRef p = made();
    REQUIRE(c.append(0, 1) == Status::ok);
    stale(p);
  }
  SECTION("after an append and its truncation") {
    const PlanRef p = made();
    REQUIRE(c.append(0, 1) == Status::ok);
    REQUIRE(c.cache.try_remove_last(SequenceId{0}, 1) == Status::ok);
    stale(p);
  }
  SECTION("after a page became shared, and after a shared page became private") {
    const PlanRef p = made();
    const auto child = c.cache.try_fork(SequenceId{0});
    REQUIRE_FALSE(child);  // three are alive
    c.cache.destroy(SequenceId{2});
    REQUIRE(c.cache.try_fork(SequenceId{0}));
    stale(p);
    const PlanRef shared = made();
    c.cache.destroy(SequenceId{2});
    stale(shared);
  }
  SECTION("another position mode, or another shape, is refused") {
    const PlanRef p = made();
    const auto before = c.bytes();
    CHECK(apply(p, c.cache.view()) == Status::bad_plan);
    const CacheView view = c.cache.view(SequenceId{0});
    CHECK(apply(p, view, Rerotator::unrotated_cache(view)) == Status::bad_plan);
    CHECK(c.bytes() == before);
  }
  SECTION("an unusable plan says why") {
    const auto before = c.bytes();
    CHECK(apply(PlanRef(Status::out_of_pages), c.cache.view()) == Status::out_of_pages);
    CHECK(apply(PlanRef(), c.cache.view()) == Status::ok);
    CHECK(c.bytes() == before);
  }
}

TEST_CASE("apply: threads leave the same bytes as one thread", "[apply][property]") {
  for (const Removal way : {Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    std::vector<std::vector<std::byte>> results;
    for (const bool threads : {false, true}) {
      test::Random random(17);
      TaggedCache c({.page_size = 4,
                     .pages = 200,
                     .layers = 2,
                     .kv_heads = 3,
                     .scope = TableScope::layer,
                     .sequences = 4,
                     .max_rows = 40});
      std::vector<float> scores(4 * 2 * 3 * 40);
      Observation obs;
      obs.scores = SequencePlane::dense(scores.data(), 2, 3, 40);
      for (std::int32_t s = 0; s < 4; ++s) { REQUIRE(c.append(s, 20 + s) == Status::ok); }
      for (std::int32_t step = 0; step < 15; ++step) {
        for (float& x : scores) { x = random.uniform(); }
        const ByScore policy{.keep = 17, .recent = 3, .way = way};
        const CacheView view = c.view();
        std::vector<std::byte> workspace(
            plan_workspace_bytes(policy, plan_shape(view, obs, test::Threads{}.count)));
        const Report report =
            threads ? evict(policy, c.cache, view, obs, workspace, {}, test::Threads{})
                    : evict(policy, c.cache, view, obs, workspace);
        REQUIRE(report.status == Status::ok);
        for (std::int32_t s = 0; s < 4; ++s) { REQUIRE(c.append(s, 1) == Status::ok); }
      }
      REQUIRE(c.fault() == "");
      results.push_back(c.bytes());
    }
    CHECK(results[0] == results[1]);
  }
}

namespace {

// A cache of block-quantised rows (34 bytes, as GGUF's Q8_0) with scales in page planes.
struct Quantised {
  static constexpr std::int32_t pages = 6, page_size = 4, heads = 2, row = 34;
  std::vector<std::byte> k, v, scales, common;
  std::vector<std::int32_t> ids{4, 1, 5, 0}, lengths{13};
  std::vector<std::int32_t> positions = std::vector<std::int32_t>(heads * 16);
  SequenceState state;  // with positions, so that rows may lose their order
  std::array<PagePlane, 2> planes;
  CacheView view;

  explicit Quantised(std::int32_t plane_count) {
    test::Random random(8);
    const auto fill = [&](std::vector<std::byte>& m, std::int32_t n) {
      m.resize(static_cast<std::size_t>(n));
      for (std::byte& b : m) { b = static_cast<std::byte>(random.bits()); }
      return m.data();
    };
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.sequences = 1;
    const auto plane = [&](std::vector<std::byte>& m) {
      Plane p;
      p.base = fill(m, pages * page_size * heads * row);
      p.dtype = DType::opaque;
      p.opaque_row_bytes = row;
      p.token_stride = row;
      p.head_stride = page_size * row;
      p.page_stride = heads * p.head_stride;
      return p;
    };
    view.k = plane(k);
    view.v = plane(v);
    view.table.ids = ids.data();
    view.table.row_stride = view.table.max_pages = 4;
    view.lengths = lengths.data();
    state.live_rows = state.next_position = state.next_rope_position = lengths[0];
    view.states = &state;
    for (std::int32_t i = 0; i < heads * 16; ++i) {
      positions[static_cast<std::size_t>(i)] = i % 16;
    }
    view.positions = SequencePlane::dense(positions.data(), 1, heads, 16);
    planes[0] = {.base = fill(scales, pages * page_size * heads * 2),
                 .page_stride = page_size * heads * 2,
                 .token_stride = heads * 2,
                 .head_stride = 2,
                 .row_bytes = 2};
    planes[1] = {.base = fill(common, pages * page_size * 3),
                 .page_stride = page_size * 3,
                 .token_stride = 3,
                 .head_stride = 0,
                 .row_bytes = 3};
    view.page_planes = planes.data();
    view.page_plane_count = plane_count;
    check_layout(view);
  }
  std::vector<std::byte> row_of(std::int32_t h, std::int32_t page, std::int32_t slot) const {
    std::vector<std::byte> all;
    const auto add = [&](const std::vector<std::byte>& m, std::int32_t at, std::int32_t n) {
      all.insert(all.end(), m.begin() + at, m.begin() + at + n);
    };
    add(k, ((page * heads + h) * page_size + slot) * row, row);
    add(v, ((page * heads + h) * page_size + slot) * row, row);
    add(scales, ((page * page_size + slot) * heads + h) * 2, 2);
    if (view.page_plane_count > 1) { add(common, (page * page_size + slot) * 3, 3); }
    return all;
  }
};

}  // namespace

TEST_CASE("apply: opaque rows and page planes move byte for byte", "[apply]") {
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
    for (const std::int32_t plane_count : {1, 2}) {
      Quantised q(plane_count);
      Scores scores(1, 2, 13);
      for (std::int32_t r = 0; r < 13; ++r) {
        scores.at(0, 0, r) = static_cast<float>(r * 5 % 13);
        // Heads differ, unless a plane is common to them.
        scores.at(0, 1, r) = static_cast<float>(plane_count == 2 ? r * 5 % 13 : r * 7 % 13);
      }
      std::array<std::vector<std::vector<std::byte>>, 2> before;
      for (std::int32_t h = 0; h < 2; ++h) {
        for (std::int32_t r = 0; r < 13; ++r) {
          before[static_cast<std::size_t>(h)].push_back(
              q.row_of(h, q.ids[static_cast<std::size_t>(r / 4)], r % 4));
        }
      }
      const ByScore policy{.keep = 6, .way = way};
      Observation obs = scores.observation();
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(q.view, obs)));
      const PlanRef made = plan(policy, q.view, obs, workspace);
      REQUIRE(made.status() == Status::ok);
      REQUIRE(apply(made, q.view) == Status::ok);
      std::int64_t bytes = 0;
      for (std::int32_t h = 0; h < 2; ++h) {
        std::vector<float> list;
        for (std::int32_t r = 0; r < 13; ++r) { list.push_back(scores.at(0, h, r)); }
        auto rows = best(list, 6);
        if (way == Removal::fill_holes) {
          // The rows below the new end stay; the others take the holes in turn.
          std::vector<std::int32_t> low, high, filled;
          for (const std::int32_t r : rows) { (r < 6 ? low : high).push_back(r); }
          for (std::int32_t to = 0; to < 6; ++to) {
            if (std::find(low.begin(), low.end(), to) != low.end()) {
              filled.push_back(to);
            } else {
              filled.push_back(high.front());
              high.erase(high.begin());
            }
          }
          rows = filled;
        }
        for (std::int32_t to = 0; to < 6; ++to) {
          const std::int32_t from = rows[static_cast<std::size_t>(to)];
          CHECK(q.row_of(h, q.ids[static_cast<std::size_t>(to / 4)], to % 4) ==
                before[static_cast<std::size_t>(h)][static_cast<std::size_t>(from)]);
          if (from != to) { bytes += 2 * 34 + 2 + (plane_count == 2 && h == 0 ? 3 : 0); }
        }
      }
      CHECK(made.bytes_moved() == bytes);
    }
  }
}

TEST_CASE("apply: a page plane common to heads is refused unless all heads keep the same rows",
          "[apply][fault]") {
  Quantised q(2);
  Scores scores(1, 2, 13);
  for (std::int32_t r = 0; r < 13; ++r) {
    scores.at(0, 0, r) = static_cast<float>(r * 5 % 13);
    scores.at(0, 1, r) = static_cast<float>(r * 7 % 13);
  }
  for (const Removal way : {Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot}) {
    const ByScore policy{.keep = 12, .way = way};
    Observation obs = scores.observation();
    const auto before = std::pair{q.k, q.common};
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(q.view, obs)));
    scores.at(0, 1, 0) = 5.5F;  // so that the heads' victims differ
    const PlanRef made = plan(policy, q.view, obs, workspace);
    CHECK(made.status() == Status::planes_disagree);
    CHECK(made.empty());
    CHECK(made.bytes_moved() == 0);
    CHECK(apply(made, q.view) == Status::planes_disagree);
    CHECK(std::pair{q.k, q.common} == before);
  }
  // Whole pages may go whatever the heads prefer.
  Observation obs = scores.observation();
  const ByScore policy{.keep = 2, .way = Removal::drop_pages};
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(q.view, obs)));
  CHECK(usable(plan(policy, q.view, obs, workspace).status()));
}

TEST_CASE(
    "apply: a sequence plane common to heads, or to layers, with tables of their own is refused "
    "unless they keep the same rows",
    "[apply][fault]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const bool common_heads : {true, false}) {
      for (const Removal way : {Removal::stable_pack,
                                Removal::fill_holes,
                                Removal::overwrite_slot,
                                Removal::drop_pages}) {
        for (const bool same : {true, false}) {
          TaggedCache c({.pages = 64, .layers = 2, .kv_heads = 2, .scope = scope, .max_rows = 13});
          REQUIRE(c.append(0, 13) == Status::ok);
          std::vector<std::int32_t> shared_tags(2 * 13);
          SequencePlane plane = SequencePlane::dense(shared_tags.data(), 1, 2, 13);
          plane.layer_stride = 0;
          if (common_heads) {
            plane = SequencePlane::dense(shared_tags.data(), 2, 1, 13);
            plane.head_stride = 0;
          }
          for (std::size_t i = 0; i < 26; ++i) {
            shared_tags[i] = static_cast<std::int32_t>(i % 13);
          }
          CacheView view = c.view();
          view.more_planes = &plane;
          Scores scores(2, 2, 13);
          for (std::int32_t l = 0; l < 2; ++l) {
            for (std::int32_t h = 0; h < 2; ++h) {
              for (std::int32_t r = 0; r < 13; ++r) {
                const std::int32_t differs = common_heads ? h : l;
                scores.at(l, h, r) =
                    static_cast<float>(same || differs == 0 ? r * 5 % 13 : 12 - r * 5 % 13);
              }
            }
          }
          INFO("scope " << static_cast<int>(scope) << (common_heads ? " heads " : " layers ")
                        << to_string(way) << (same ? " same" : " different"));
          const ByScore policy{.keep = way == Removal::overwrite_slot ? 12 : 3, .way = way};
          const auto before = shared_tags;
          const Report report = c.evict(policy, view, scores.observation());
          // Inside one table whole pages leave for all heads alike.
          const bool one_table =
              scope == TableScope::group || (scope == TableScope::layer && common_heads);
          if (!same && !(way == Removal::drop_pages && one_table)) {
            CHECK(report.status == Status::planes_disagree);
            CHECK(shared_tags == before);
            continue;
          }
          REQUIRE(usable(report.status));
          for (std::int32_t l = 0; l < 2; ++l) {
            for (std::int32_t h = 0; h < 2; ++h) {
              c.for_each_row(0, l, h, [&](std::int32_t r, std::int32_t position) {
                CHECK(plane.at<std::int32_t>(SequenceId{0}, LayerId{l}, HeadId{h}, r) == position);
              });
            }
          }
        }
      }
    }
  }
}
