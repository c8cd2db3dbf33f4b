// SPDX-License-Identifier: Apache-2.0
// Of kind K18 only the two cases that are about attending first and evicting then.
#include <kvtrim/policy/streaming_sink.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <set>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("B123 a first append longer than the window leaves the window", "[ring][fault]") {
  for (const std::int32_t page_size : {1, 2, 4}) {
    TestCache t({.pages = 12, .page_size = page_size, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.create();
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 4});
    REQUIRE(t.append(s, 2) == Status::ok);
    t.cache.reset(s);
    REQUIRE(t.append(s, 7) == Status::ok);  // attended in full
    CHECK(t.positions(s, 0, 1) == range(0, 7));
    REQUIRE(evict(policy, t, s).report.status == Status::ok);
    CHECK(t.positions(s, 0, 1) == Rows{3, 4, 5, 6});
    CHECK(t.cache.pool().in_use() == 4 / page_size);
  }
}

TEST_CASE("B125 a chunk longer than the window writes no place twice", "[ring][fault]") {
  for (const Removal way : {Removal::automatic, Removal::stable_pack, Removal::fill_holes}) {
    TestCache t({.pages = 8, .page_size = 2, .kv_heads = 2, .key_dim = 2, .value_dim = 2});
    const SequenceId s = t.filled(4);
    REQUIRE(t.append(s, 6) == Status::ok);  // a chunk of 10 in all, on a window of 4
    const StreamingSink<SinkForm::exact> policy({.sinks = 0, .recent = 4});
    Input in;
    in.options.removal = way;
    const CacheView view = t.cache.view(s);
    Prepared prepared(view, in);
    const PlanRef plan = prepared.plan(policy, view, in.options);
    REQUIRE(plan.status() == Status::ok);
    CHECK(plan.head({}, {}, HeadId{1}).moved == 4);
    std::set<std::int32_t> targets;
    detail::for_each_target(
        plan.kept_list({}, {}, HeadId{1}),
        plan.table({}, 0).removal,
        [&](std::int32_t, std::int32_t to, std::int32_t) { CHECK(targets.insert(to).second); });
    CHECK(targets == std::set<std::int32_t>{0, 1, 2, 3});
    REQUIRE(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.positions(s, 0, 1) == Rows{6, 7, 8, 9});
    CHECK(t.raw_key_error(s, 0, 1) == 0);
  }
}
