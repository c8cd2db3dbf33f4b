// SPDX-License-Identifier: Apache-2.0
// Input that no engine should give, and some does.
#include <kvtrim/evict/planner.hpp>

#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/policy/external.hpp>

#include "catch.hpp"
#include "fault/fault_support.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;

TEST_CASE("C20 the last page of a CSR row has 1 to page_size rows, and none without pages",
          "[fault][length]") {
  EnginePages engine(8, 4, 1, 2, {{3, 1, 6}});
  engine.fill(0, 12);
  const auto status = [&](std::int32_t pages, std::int32_t last) {
    const std::array<std::int32_t, 2> indptr{0, pages};
    CacheView view = engine.view();
    view.lengths = nullptr;
    view.table.indptr = indptr.data();
    view.last_page_len = &last;
    return check_lengths(view).status;
  };
  for (const std::int32_t last : {1, 2, 3, 4}) { CHECK(status(3, last) == Status::ok); }
  CHECK(status(0, 0) == Status::ok);
  for (const std::int32_t last : {0, -1, -3, -4, -5, 5, std::numeric_limits<std::int32_t>::min()}) {
    CHECK(status(3, last) == Status::length_beyond_table);
  }
  for (const std::int32_t last : {-1, 1, 4}) {
    CHECK(status(0, last) == Status::length_beyond_table);
  }
}

TEST_CASE("C19 lengths that overflow are the table's fault", "[fault][length]") {
  EnginePages engine(8, 4, 1, 2, {{3, 1, 6}});
  engine.fill(0, 12);
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  for (const std::int32_t padding : {0, 3, most}) {
    for (const std::int32_t length :
         {most, most - 2, 13, -1, std::numeric_limits<std::int32_t>::min()}) {
      engine.padding[0] = padding;
      engine.lengths[0] = length;
      const CacheView view = engine.view();
      CHECK(check_lengths(view).status == Status::length_beyond_table);
      const External policy({.budget = 4});
      Observation obs;
      std::vector<float> scores(16);
      obs.scores = SequencePlane::dense(scores.data(), 1, 1, 16);
      std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
      CHECK(plan(policy, view, obs, workspace).status() == Status::length_beyond_table);
    }
  }
}

TEST_CASE("C22 a negative budget is the policy's own only by its name", "[fault][budget]") {
  for (const TableScope scope : {TableScope::group, TableScope::head}) {
    TestCache t(
        {.pages = 60, .page_size = 4, .kv_heads = 2, .key_dim = 2, .scope = scope, .max_rows = 32});
    const SequenceId s = t.filled(20);
    Input in;
    in.score = scores_of({});
    in.budget_rows = {2, 0, 1};
    const External policy({.budget = 12});
    for (const std::int32_t bad : {-2, -7, std::numeric_limits<std::int32_t>::min()}) {
      in.budgets = {policy_budget, bad};
      CHECK(evict(policy, t, s, in).report.status == Status::bad_observation);
    }
    CHECK(t.positions(s) == range(0, 20));
    in.budgets = {policy_budget, policy_budget};
    CHECK(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) == 12);
    in.budgets = {0, 0};
    CHECK(evict(policy, t, s, in).report.status == Status::ok);
    CHECK(t.cache.live_rows(s) == 0);
  }
}
