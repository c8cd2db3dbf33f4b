// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/plan_bytes.hpp>

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>

#include "catch.hpp"
#include "support/planned.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

using namespace kvtrim;
using test::ByScore;
using test::Planned;

namespace {

// Plans are read only: a test that forges one writes to the memory below.
template <class T>
void set(const T& place, T value) {
  const_cast<T&>(place) = value;
}

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

TEST_CASE("plan_bytes: a plan that owns its memory outlives the workspace, and is copied and moved",
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
  CHECK(apply(plan_of_six.ref(), planned.c.view()) == Status::ok);
  CHECK(planned.c.bytes() == before);
  plan_of_six = std::move(moved);
  CHECK(plan_of_six.view() == reference.view());
  CHECK(Plan().empty());
  CHECK(Plan(PlanView(Status::shared_page)).view().status() == Status::shared_page);
}

TEST_CASE("plan_bytes: bytes written are the plan read back, and it can be applied", "[plan]") {
  for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
    for (const Removal way : {Removal::drop_pages,
                              Removal::overwrite_slot,
                              Removal::fill_holes,
                              Removal::stable_pack}) {
      Planned planned(18, scope);
      const PlanRef p =
          planned.make(ByScore{.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way});
      REQUIRE(usable(p.status()));
      // Without the view it can be read, and only read.
      Plan looked_at = Plan::from_bytes(p.bytes());
      CHECK(looked_at.view() == p);
      CHECK(apply(looked_at.ref(), planned.c.view()) == Status::bad_plan);
      auto none = planned.c.cache.sink_for(planned.c.view());
      CHECK(commit(looked_at.ref(), planned.c.view(), none).status == Status::not_applied);
      // Sent on by a reader it is the same plan.
      Plan back = Plan::from_bytes(looked_at.view().bytes(), planned.c.view());
      REQUIRE(usable(back.view().status()));
      CHECK(back.view() == p);
      CHECK(to_string(back.view()) == to_string(p));
      CHECK(back.view().bytes_moved() == p.bytes_moved());
      REQUIRE(apply(back.ref(), planned.c.view()) == Status::ok);
      auto sink = planned.c.cache.sink_for(planned.c.view());
      CHECK(usable(commit(back.ref(), planned.c.view(), sink).status));
      CHECK(planned.c.fault() == "");
      Plan done = Plan::from_bytes(back.view().bytes());
      CHECK(usable(done.view().status()));
      if (done.empty()) { continue; }  // may be repeated
      CHECK(apply(done.ref(), planned.c.view()) == Status::stale_plan);
      CHECK(commit(done.ref(), planned.c.view(), sink).status == Status::stale_plan);
      const Plan again = Plan::from_bytes(back.view().bytes(), planned.c.view());
      CHECK(again.view().status() == Status::stale_plan);
    }
  }
  Planned planned;
  Plan none(planned.make(ByScore{.keep = 100}));  // nothing to do is a plan, too
  CHECK(Plan::from_bytes(none.view().bytes()).view() == none.view());
}

TEST_CASE("plan_bytes: bytes that are not a plan are refused, and never crash", "[plan][fault]") {
  for (const Removal way :
       {Removal::drop_pages, Removal::overwrite_slot, Removal::fill_holes, Removal::stable_pack}) {
    Planned planned(18, way == Removal::fill_holes ? TableScope::head : TableScope::group);
    const PlanRef p =
        planned.make(ByScore{.keep = way == Removal::overwrite_slot ? 17 : 6, .way = way});
    const std::vector<std::byte> good(p.bytes().begin(), p.bytes().end());
    for (std::size_t n = 0; n < good.size(); n += n < 400 ? 1 : 37) {
      Plan cut = Plan::from_bytes(std::span(good).first(n));
      REQUIRE(cut.view().status() == Status::bad_plan);
      REQUIRE(cut.empty());
    }
    std::vector<std::byte> longer = good;
    longer.resize(good.size() + 64);
    CHECK(Plan::from_bytes(longer).view().status() == Status::bad_plan);

    // Each four bytes of header, table plans and head plans in turn, by values that hurt.
    std::int64_t accepted = 0;
    const std::size_t heads_end = static_cast<std::size_t>(detail::PlanLayout(p.header()).rows);
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
      REQUIRE(Plan::from_bytes(noise).view().status() == Status::bad_plan);
    }
  }
}

TEST_CASE("plan_bytes: rows out of order or out of range are not a plan", "[plan][fault]") {
  Planned planned;
  const PlanRef p = planned.make(ByScore{.keep = 6});
  const auto kept = p.kept_list(SequenceId{0}, LayerId{1}, HeadId{0});
  for (const std::int32_t bad : {-1, 18, 1'000'000'000}) {
    Plan copy(p);
    set(copy.view().kept_list(SequenceId{0}, LayerId{1}, HeadId{0})[5], bad);
    CHECK(Plan::from_bytes(copy.view().bytes()).view().status() == Status::bad_plan);
  }
  Plan doubled(p);
  set(doubled.view().kept_list(SequenceId{0}, LayerId{1}, HeadId{0})[1], kept[0]);
  CHECK(Plan::from_bytes(doubled.view().bytes()).view().status() == Status::bad_plan);
  Plan source(p);
  set(source.view().sources(SequenceId{0}, 1)[0], 5);
  CHECK(Plan::from_bytes(source.view().bytes()).view().status() == Status::bad_plan);
  Plan counted(p);
  ++counted.ref().own_header()->evicted_rows;
  CHECK(Plan::from_bytes(counted.view().bytes()).view().status() == Status::bad_plan);
}
