// SPDX-License-Identifier: Apache-2.0
// Pages that an engine keeps in its tables for rows to come: drafts, look-ahead.
#include <kvtrim/evict/planner.hpp>

#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"
#include "support/by_score.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

namespace {

struct After {
  Status status = Status::ok;
  Rows ids, released, freed, tags;
  std::int64_t allocated = 0;
};

template <Policy P>
After run(
    const P& policy, Rows table, std::int32_t rows, std::int32_t reserved, PlanOptions options) {
  EnginePages engine(16, 4, 1, 2, {std::move(table)});
  engine.fill(0, rows);
  CacheView view = engine.view();
  view.reserved_pages = &reserved;
  std::array<PageId, 8> freed{};
  DenseTables sink(view, engine.ids.data(), engine.lengths.data(), nullptr, freed);
  Input in;
  in.score = [](std::int32_t, std::int32_t p, std::int32_t, std::int32_t) { return noise(p, 3); };
  in.options = options;
  const Outcome out = evict_into(policy, view, sink, in);
  After after{out.report.status, engine.ids, {}, {}, engine.tags(0), out.report.allocated_rows};
  if (!out.released.empty()) { after.released = out.released[0]; }
  for (const PageId p : sink.freed()) { after.freed.push_back(raw(p)); }
  return after;
}

}  // namespace

TEST_CASE("C10 reserved pages follow the kept ones, or come back", "[fault][reserved]") {
  // Ids {3, 1, 4, 7}, pages of 4, length 12: the fourth is kept for drafts.
  const StreamingSink by_pages({.sinks = 4, .recent = 4});
  const After kept = run(by_pages, {3, 1, 4, 7}, 12, 1, {});
  CHECK(kept.status == Status::ok);
  CHECK(kept.ids == Rows{3, 4, 7, -1});
  CHECK(kept.released == Rows{1});
  CHECK(kept.tags == range(0, 4) + range(8, 12));
  CHECK(kept.allocated == 12);
  const After gone = run(by_pages, {3, 1, 4, 7}, 12, 1, {.reserved = ReservedPages::release});
  CHECK(gone.ids == Rows{3, 4, -1, -1});
  CHECK(gone.released == Rows{7, 1});
  CHECK(gone.freed == Rows{7, 1});
  CHECK(gone.allocated == 8);

  for (const Removal way : {Removal::stable_pack, Removal::automatic}) {
    const test::ByScore packs{.keep = 5, .way = way};
    CHECK(run(packs, {3, 1, 4, 7, 9}, 12, 2, {}).ids == Rows{3, 1, 7, 9, -1});
    CHECK(run(packs, {3, 1, 4, 7, 9}, 12, 2, {}).released == Rows{4});
    const After all = run(packs, {3, 1, 4, 7, 9}, 12, 2, {.reserved = ReservedPages::release});
    CHECK(all.ids == Rows{3, 1, -1, -1, -1});
    CHECK(all.released == Rows{9, 7, 4});
  }
  // Nothing goes: nothing comes back either.
  const StreamingSink wide({.sinks = 4, .recent = 40});
  const After idle = run(wide, {3, 1, 4, 7}, 12, 1, {.reserved = ReservedPages::release});
  CHECK(idle.status == Status::ok);
  CHECK(idle.ids == Rows{3, 1, 4, 7});
  CHECK(idle.freed.empty());
}

TEST_CASE("C10 reserved pages are checked, and a change of them makes a plan stale",
          "[fault][reserved]") {
  const StreamingSink by_pages({.sinks = 4, .recent = 4});
  CHECK(run(by_pages, {3, 1, 4, 99}, 12, 1, {}).status == Status::page_out_of_range);
  CHECK(run(by_pages, {3, 1, 4, -1}, 12, 1, {}).status == Status::page_out_of_range);
  CHECK(run(by_pages, {3, 1, 4, 1}, 12, 1, {}).status == Status::page_twice);
  CHECK(run(by_pages, {3, 1, 4, 7}, 12, 2, {}).status == Status::length_beyond_table);
  CHECK(run(by_pages, {3, 1, 4, 7}, 12, -1, {}).status == Status::length_beyond_table);

  EnginePages engine(16, 4, 1, 2, {{3, 1, 4, 7}});
  engine.fill(0, 12);
  const std::int32_t reserved = 1;
  CacheView view = engine.view();
  view.reserved_pages = &reserved;
  Prepared prepared(view, {});
  const PlanRef plan = prepared.plan(by_pages, view);
  engine.ids[3] = 8;
  CHECK(apply(plan, view) == Status::stale_plan);
  engine.ids[3] = 7;
  CHECK(apply(plan, view) == Status::ok);
}

TEST_CASE("C10 a plan has room for more entries than its longest table uses", "[fault][reserved]") {
  // Two sequences with ids for K and V: 8 rows in two pages, and two pages for drafts, of which all follow or leave.
  for (const ReservedPages what : {ReservedPages::follow, ReservedPages::release}) {
    EnginePages engine(16, 4, 1, 2, {{0, 1, 2, 3}, {8, 9, 10, 11}});
    engine.fill(0, 8), engine.fill(1, 8);
    Rows ids;  // of each sequence: K, then V
    for (std::int32_t s = 0; s < 2; ++s) {
      for (std::int32_t e = 0; e < 8; ++e) { ids.push_back(s * 8 + e); }
    }
    CacheView view = engine.view();
    view.table.ids = ids.data();
    view.table.row_stride = 8;
    view.table.v_offset = 4;
    const std::array<std::int32_t, 2> reserved{2, 2};
    view.reserved_pages = reserved.data();
    Prepared prepared(view, {});
    const PlanRef plan = prepared.plan(StreamingSink({.sinks = 1, .recent = 3}),
                                       view,
                                       {.removal = Removal::stable_pack, .reserved = what});
    REQUIRE(plan.status() == Status::ok);
    for (std::int32_t s = 0; s < 2; ++s) {
      const auto list = [&](const auto& pages) {
        Rows out;
        for (const PageId p : pages) { out.push_back(raw(p) - 8 * s); }
        return out;
      };
      const bool follow = what == ReservedPages::follow;
      CHECK(list(plan.k_pages(SequenceId{s}, 0)) == (follow ? Rows{0, 2, 3} : Rows{0}));
      CHECK(list(plan.v_pages(SequenceId{s}, 0)) == (follow ? Rows{4, 6, 7} : Rows{4}));
      CHECK(list(plan.released(SequenceId{s}, 0)) ==
            (follow ? Rows{1, 5} : Rows{3, 7, 2, 6, 1, 5}));
    }
  }
}

TEST_CASE("C10 reserved pages of a padded sequence without rows lie behind the padding",
          "[fault][reserved]") {
  // The second sequence lost all of its rows: a null page for the padding, and two pages for drafts.
  EnginePages engine(16, 4, 1, 2, {{3, 1, 4, -1}, {-1, 5, 6, -1}});
  engine.fill(0, 12);
  engine.padding = {0, 4};
  const std::array<std::int32_t, 2> reserved{0, 2};
  CacheView view = engine.view();
  view.reserved_pages = reserved.data();
  const auto status = [&] {
    Prepared prepared(view, {});
    return prepared.plan(StreamingSink({.sinks = 4, .recent = 4}), view).status();
  };
  CHECK(status() == Status::ok);
  engine.ids[6] = 4;
  CHECK(status() == Status::page_twice);
  engine.ids[6] = -1;
  CHECK(status() == Status::page_out_of_range);
}

TEST_CASE("C10 a plan with an empty sequence behind padding or reserved pages can be sent",
          "[fault][reserved]") {
  for (const bool padded : {false, true}) {
    EnginePages engine(16, 4, 1, 2, {{3, 1, 4, 7}, {2, 5, 6, 9}});
    engine.fill(0, 8);
    engine.padding[1] = padded ? 12 : 0;
    const std::array<std::int32_t, 2> reserved{0, padded ? 0 : 4};
    CacheView view = engine.view();
    view.reserved_pages = reserved.data();
    Prepared prepared(view, {});
    const PlanRef made = prepared.plan(StreamingSink({.sinks = 1, .recent = 1}), view);
    REQUIRE(made.status() == Status::ok);
    Plan sent = Plan::from_bytes(made.bytes(), view);
    CHECK(sent.view().status() == Status::ok);
    CHECK(apply(sent.ref(), view) == Status::ok);
  }
}
