// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/evict/plan.hpp>

#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "support/planned.hpp"

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
using test::Planned;
using test::TaggedCache;

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
  const StreamingSink<SinkForm::exact> policy({.sinks = 2, .recent = 5});
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
  const Plan a(planned.make(ByScore{.keep = 6}));
  const Plan b(planned.make(ByScore{.keep = 6}));
  CHECK(a.view() == b.view());
  const Plan fewer(planned.make(ByScore{.keep = 5}));
  CHECK_FALSE(a.view() == fewer.view());
  const Plan filled(planned.make(ByScore{.keep = 6}, Removal::fill_holes));
  CHECK_FALSE(a.view() == filled.view());
  planned.scores[0] += 10;
  planned.scores[1] += 10;
  const Plan other(planned.make(ByScore{.keep = 6}));
  CHECK_FALSE(a.view() == other.view());
  CHECK(PlanView() == PlanView());
  CHECK_FALSE(PlanView() == PlanView(Status::out_of_pages));
  CHECK_FALSE(PlanView() == a.view());
}

TEST_CASE("plan: in words, a line per table", "[plan]") {
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
