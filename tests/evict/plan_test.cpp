// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/plan.hpp>

#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;
using test::ByScore;
using test::TaggedCache;

namespace {

// A cache of two layers, two heads and two sequences, and plans over it.
struct Planned {
  TaggedCache c;
  std::vector<float> scores;
  std::vector<std::byte> workspace;

  explicit Planned(std::int32_t rows = 18, TableScope scope = TableScope::layer)
      : c({.pages = 80,
           .layers = 2,
           .kv_heads = 2,
           .scope = scope,
           .sequences = 2,
           .max_rows = 24}),
        scores(2 * 4 * 24) {
    REQUIRE(c.append(0, rows) == Status::ok);
    REQUIRE(c.append(1, 5) == Status::ok);
    test::Random random(6);
    for (float& x : scores) { x = random.uniform(); }
  }
  template <class P>
  PlanView make(const P& policy, Removal removal = Removal::automatic) {
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 2, 2, 24);
    workspace.assign(plan_workspace_bytes(policy, plan_shape(c.view(), obs)), std::byte{0});
    return plan(policy, c.view(), obs, workspace, {.removal = removal});
  }
};

// Calls everything that reads a plan.
std::int64_t walk(const PlanView& p) {
  std::int64_t sum = static_cast<std::int64_t>(to_string(p).size());
  const auto add = [&](const auto& list) {
    for (const auto x : list) { sum += static_cast<std::int64_t>(x); }
  };
  for (std::int32_t s = 0; s < p.sequences(); ++s) {
    for (std::int32_t t = 0; t < p.tables(); ++t) {
      add(p.k_pages(SequenceId{s}, t));
      add(p.v_pages(SequenceId{s}, t));
      add(p.sources(SequenceId{s}, t));
      add(p.released(SequenceId{s}, t));
    }
    for (std::int32_t l = 0; l < p.layers(); ++l) {
      for (std::int32_t h = 0; h < p.kv_heads(); ++h) {
        const SequenceId q{s};
        add(p.kept_list(q, LayerId{l}, HeadId{h}));
        add(p.ranks(q, LayerId{l}, HeadId{h}));
        add(p.evicted(q, LayerId{l}, HeadId{h}));
        p.for_each_kept(q, LayerId{l}, HeadId{h}, [&](std::int32_t r) { sum += r; });
        const TablePlan& table = p.table(q, p.table_of(LayerId{l}, HeadId{h}));
        detail::for_each_target(
            p.kept_list(q, LayerId{l}, HeadId{h}),
            table.removal,
            [&](std::int32_t from, std::int32_t to, std::int32_t i) { sum += from + to + i; });
      }
    }
  }
  return sum + (p == p ? 1 : 0);
}

}  // namespace

TEST_CASE("plan: targets are a permutation in which no row is overwritten before it is read",
          "[plan][property]") {
  for (std::uint32_t pattern = 0; pattern < 4096; ++pattern) {
    std::vector<std::int32_t> kept;
    for (std::int32_t r = 0; r < 12; ++r) {
      if ((pattern >> r & 1U) != 0U) { kept.push_back(r); }
    }
    for (const Removal way : {Removal::stable_pack, Removal::fill_holes}) {
      std::vector<std::int32_t> content(12);
      for (std::int32_t r = 0; r < 12; ++r) { content[static_cast<std::size_t>(r)] = r; }
      std::set<std::int32_t> indices;
      detail::for_each_target(kept, way, [&](std::int32_t from, std::int32_t to, std::int32_t i) {
        CHECK(kept[static_cast<std::size_t>(i)] == from);
        CHECK(content[static_cast<std::size_t>(from)] == from);
        content[static_cast<std::size_t>(to)] = from;
        indices.insert(i);
      });
      REQUIRE(indices.size() == kept.size());
      std::vector<std::int32_t> left(content.begin(),
                                     content.begin() + static_cast<std::ptrdiff_t>(kept.size()));
      if (way == Removal::fill_holes) { std::sort(left.begin(), left.end()); }
      REQUIRE(left == kept);
    }
  }
}

TEST_CASE("plan: it lists what stays and what goes, for every way of removal", "[plan]") {
  for (const Removal way :
       {Removal::drop_pages, Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    Planned planned;
    const PlanView p =
        planned.make(ByScore{.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way});
    REQUIRE(usable(p.status()));
    std::int64_t kept = 0;
    std::int64_t evicted = 0;
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t l = 0; l < 2; ++l) {
        for (std::int32_t h = 0; h < 2; ++h) {
          std::set<std::int32_t> rows;
          p.for_each_kept(
              SequenceId{s}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { rows.insert(r); });
          kept += static_cast<std::int64_t>(rows.size());
          const auto gone = p.evicted(SequenceId{s}, LayerId{l}, HeadId{h});
          evicted += static_cast<std::int64_t>(gone.size());
          for (const Position q : gone) {
            CHECK(rows.insert(raw(q)).second);
          }  // fresh: position = row
          CHECK(rows.size() == (s == 0 ? 18U : 5U));
          CHECK(static_cast<std::int32_t>(18 - gone.size()) ==
                (s == 0 ? p.table(SequenceId{0}, l).live_after : 18));
        }
      }
    }
    CHECK(kept == p.kept_rows());
    CHECK(evicted == p.evicted_rows());
    CHECK_FALSE(p.empty());
  }
}

TEST_CASE("plan: a hole is not a kept row of a table that nothing leaves", "[plan][edge]") {
  const StreamingSink policy({.sinks = 2, .recent = 5, .form = SinkForm::exact});
  TaggedCache c({.max_rows = 24});
  REQUIRE(c.append(0, 8) == Status::ok);
  REQUIRE(c.evict(policy).status == Status::ok);
  const std::int32_t hole = c.cache.state(SequenceId{0}).append_row;
  REQUIRE(hole == 2);
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(c.view())));
  const PlanView p = plan(policy, c.view(), {}, workspace);
  REQUIRE(p.empty());
  std::vector<std::int32_t> rows;
  p.for_each_kept(SequenceId{0}, LayerId{0}, HeadId{0}, [&](std::int32_t r) { rows.push_back(r); });
  CHECK(rows == std::vector<std::int32_t>{0, 1, 3, 4, 5, 6, 7});
  CHECK(p.kept_rows() == 7);
}

TEST_CASE("plan: plans that do the same are equal", "[plan]") {
  Planned planned;
  Plan a(planned.make(ByScore{.keep = 6}));
  Plan b(planned.make(ByScore{.keep = 6}));
  CHECK(a.view() == b.view());
  Plan fewer(planned.make(ByScore{.keep = 5}));
  CHECK_FALSE(a.view() == fewer.view());
  Plan filled(planned.make(ByScore{.keep = 6}, Removal::fill_holes));
  CHECK_FALSE(a.view() == filled.view());
  planned.scores[0] += 10;
  planned.scores[1] += 10;
  Plan other(planned.make(ByScore{.keep = 6}));
  CHECK_FALSE(a.view() == other.view());
  CHECK(PlanView() == PlanView());
  CHECK_FALSE(PlanView() == PlanView(Status::out_of_pages));
  CHECK_FALSE(PlanView() == a.view());
}

TEST_CASE("plan: a plan that owns its memory outlives the workspace, and is copied and moved",
          "[plan]") {
  Planned planned;
  Plan plan_of_six(planned.make(ByScore{.keep = 6}));
  Plan reference(plan_of_six);
  std::fill(planned.workspace.begin(), planned.workspace.end(), std::byte{0xEE});
  CHECK(plan_of_six.view() == reference.view());
  CHECK(plan_of_six.view().kept_rows() == 4 * (6 + 5));
  Plan moved(std::move(plan_of_six));
  CHECK(moved.view() == reference.view());
  CHECK_FALSE(moved.empty());
  // A moved-from plan is empty: safe to look at and to apply.
  CHECK(plan_of_six.empty());  // NOLINT(bugprone-use-after-move)
  const auto before = planned.c.bytes();
  CHECK(apply(plan_of_six.view(), planned.c.view()) == Status::ok);
  CHECK(planned.c.bytes() == before);
  plan_of_six = std::move(moved);
  CHECK(plan_of_six.view() == reference.view());
  CHECK(Plan().empty());
  CHECK(Plan(PlanView(Status::shared_page)).view().status() == Status::shared_page);
}

TEST_CASE("plan: in words, one line per table", "[plan]") {
  Planned planned;
  const std::string text = to_string(planned.make(ByScore{.keep = 6}));
  CHECK_THAT(text, ContainsSubstring("plan: ok, evicts 48 rows, keeps 44"));
  CHECK_THAT(text,
             ContainsSubstring("sequence 0 table 1: 18 -> 6 rows, 5 -> 2 pages, stable_pack"));
  CHECK_THAT(text,
             ContainsSubstring("sequence 1 table 0: 5 -> 5 rows, 2 -> 2 pages, nothing to do"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 5);
  CHECK_THAT(to_string(PlanView(Status::out_of_pages)), ContainsSubstring("out_of_pages"));
}

TEST_CASE("plan: bytes written are the plan read back, and it can be applied", "[plan]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const Removal way : {Removal::drop_pages,
                              Removal::overwrite_slot,
                              Removal::fill_holes,
                              Removal::stable_pack}) {
      Planned planned(18, scope);
      const PlanView p =
          planned.make(ByScore{.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way});
      REQUIRE(usable(p.status()));
      Plan back = Plan::from_bytes(p.bytes());
      REQUIRE(usable(back.view().status()));
      CHECK(back.view() == p);
      CHECK(to_string(back.view()) == to_string(p));
      CHECK(back.view().bytes_moved() == p.bytes_moved());
      REQUIRE(apply(back.view(), planned.c.view()) == Status::ok);
      auto sink = planned.c.cache.sink_for(planned.c.view());
      CHECK(usable(commit(back.view(), planned.c.view(), sink).status));
      CHECK(planned.c.fault() == "");
      Plan applied = Plan::from_bytes(back.view().bytes());
      CHECK(usable(applied.view().status()));
    }
  }
  Planned planned;
  Plan none(planned.make(ByScore{.keep = 100}));  // nothing to do is a plan, too
  CHECK(Plan::from_bytes(none.view().bytes()).view() == none.view());
}

TEST_CASE("plan: bytes that are not a plan are refused, and never crash", "[plan][fault]") {
  for (const Removal way :
       {Removal::drop_pages, Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    Planned planned(18, way == Removal::fill_holes ? TableScope::head : TableScope::group);
    const PlanView p =
        planned.make(ByScore{.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way});
    const std::vector<std::byte> good(p.bytes().begin(), p.bytes().end());
    for (std::size_t n = 0; n < good.size(); n += n < 400 ? 1 : 37) {
      Plan cut = Plan::from_bytes(std::span(good).first(n));
      REQUIRE(cut.view().status() == Status::bad_observation);
      REQUIRE(cut.empty());
    }
    std::vector<std::byte> longer = good;
    longer.resize(good.size() + 64);
    CHECK(Plan::from_bytes(longer).view().status() == Status::bad_observation);

    // Each four bytes of header, table plans and head plans in turn, by values that hurt.
    std::int64_t accepted = 0;
    const std::size_t heads_end = static_cast<std::size_t>(p.header()->rows);
    for (std::size_t i = 0; i + 4 <= heads_end; i += 4) {
      for (const std::uint32_t x :
           {0U, 1U, 2U, 3U, 0xFFU, 0x101U, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFFFU}) {
        std::vector<std::byte> bad = good;
        std::memcpy(bad.data() + i, &x, 4);
        Plan read = Plan::from_bytes(bad);
        if (!read.view().bytes().empty()) { accepted += walk(read.view()) != 0 ? 1 : 0; }
      }
    }
    test::Random random(12);
    for (std::int32_t round = 0; round < 4000; ++round) {
      std::vector<std::byte> bad = good;
      const std::int32_t hits = 1 + random.below(4);
      for (std::int32_t i = 0; i < hits; ++i) {
        const bool early = random.below(2) == 0;
        const auto at = static_cast<std::size_t>(
            random.below(static_cast<std::int32_t>(early ? heads_end : good.size())));
        bad[at] = static_cast<std::byte>(random.bits());
      }
      Plan read = Plan::from_bytes(bad);
      if (!read.view().bytes().empty()) { accepted += walk(read.view()) != 0 ? 1 : 0; }
    }
    CHECK(accepted > 0);  // fields that say nothing about memory may be anything

    // Pure noise behind a good start.
    for (std::int32_t round = 0; round < 500; ++round) {
      std::vector<std::byte> noise = good;
      for (std::size_t i = 4; i < noise.size(); ++i) {
        noise[i] = static_cast<std::byte>(random.bits());
      }
      REQUIRE(Plan::from_bytes(noise).view().status() == Status::bad_observation);
    }
  }
}

TEST_CASE("plan: rows out of order or out of range are not a plan", "[plan][fault]") {
  Planned planned;
  const PlanView p = planned.make(ByScore{.keep = 6});
  const auto kept = p.kept_list(SequenceId{0}, LayerId{1}, HeadId{0});
  for (const std::int32_t bad : {-1, 18, 1'000'000'000}) {
    Plan copy(p);
    copy.view().kept_list(SequenceId{0}, LayerId{1}, HeadId{0})[5] = bad;
    CHECK(Plan::from_bytes(copy.view().bytes()).view().status() == Status::bad_observation);
  }
  Plan doubled(p);
  doubled.view().kept_list(SequenceId{0}, LayerId{1}, HeadId{0})[1] = kept[0];
  CHECK(Plan::from_bytes(doubled.view().bytes()).view().status() == Status::bad_observation);
  Plan source(p);
  source.view().sources(SequenceId{0}, 1)[0] = 5;
  CHECK(Plan::from_bytes(source.view().bytes()).view().status() == Status::bad_observation);
  for (const std::int32_t page :
       {-1, 80, 1'000'000'000}) {  // only the view knows how many pages there are
    for (const bool released : {false, true}) {
      Plan lost(p);
      if (released) {
        const_cast<PageId&>(lost.view().released(SequenceId{0}, 1)[0]) = PageId{page};
      } else {
        lost.view().k_pages(SequenceId{0}, 1)[1] = PageId{page};
      }
      Plan back = Plan::from_bytes(lost.view().bytes());
      const auto before = planned.c.bytes();
      CHECK(apply(back.view(), planned.c.view()) == Status::bad_observation);
      CHECK(planned.c.bytes() == before);
    }
  }
  Plan counted(p);
  ++counted.view().header()->evicted_rows;
  CHECK(Plan::from_bytes(counted.view().bytes()).view().status() == Status::bad_observation);
}
