// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/top_rows.hpp>

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/tova.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

// A method that says no to one parameter.
struct PickyScores {
  static constexpr std::string_view name = "picky";
  static constexpr std::string_view title = "kvtrim::Picky";
  static constexpr Protection protects{3, 5};
  std::int32_t size = 1;

  constexpr void check(std::string_view who) const {
    if (size < 1) { throw_invalid_argument("{}: size {} is below 1", who, size); }
  }
};

DemandInput input(std::int32_t live, std::int32_t budget = -1) {
  DemandInput in;
  in.live = live;
  in.budget = budget;
  return in;
}

}  // namespace

TEMPLATE_TEST_CASE("top_rows: a budget of 1,024 rows by default, in order, as the method protects",
                   "[top_rows]",
                   KeyDiff,
                   KeyNorm,
                   QFilter,
                   Random,
                   External,
                   Tova,
                   TopRows<PickyScores>) {
  STATIC_REQUIRE(Policy<TestType>);
  constexpr TestType policy;
  STATIC_REQUIRE(policy.params().budget == 1024);
  using Scores = std::remove_cvref_t<decltype(policy.scorer())>;
  STATIC_REQUIRE(policy.params().sinks == Scores::protects.sinks);
  STATIC_REQUIRE(policy.params().recent == Scores::protects.recent);
  STATIC_REQUIRE(policy.removal() == Removal::stable_pack);
  STATIC_REQUIRE(TestType::name == Scores::name);
  const Demand demand = policy.demand(input(5000));
  CHECK(demand.keep == 1024);
  CHECK(demand.protection.sinks == Scores::protects.sinks);
  CHECK(demand.protection.recent == Scores::protects.recent);
  CHECK(demand.window == Scores::protects.recent);
  CHECK(demand.status == Status::ok);
  CHECK(std::string(Scores::title).rfind("kvtrim::", 0) == 0);
}

TEMPLATE_TEST_CASE("top_rows: errors name the class, the parameters and their values",
                   "[top_rows][edge]",
                   KeyDiff,
                   KeyNorm,
                   QFilter,
                   Random,
                   External,
                   Tova) {
  using Scores = std::remove_cvref_t<decltype(TestType().scorer())>;
  const std::string title(Scores::title);
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  CHECK_NOTHROW(TestType({.budget = 1, .sinks = 0, .recent = 0}));
  CHECK_NOTHROW(TestType({.budget = 7, .sinks = 3, .recent = 4}));
  CHECK_NOTHROW(TestType({.budget = most, .sinks = 1, .recent = 1}));
  CHECK_THROWS_AS(TestType({.budget = 0, .sinks = 0, .recent = 0}), std::invalid_argument);
  CHECK_THROWS_WITH(TestType({.budget = 0, .sinks = 0, .recent = 0}),
                    ContainsSubstring(title + ": budget 0 must be at least 1"));
  CHECK_THROWS_WITH(TestType({.budget = -5, .sinks = 0, .recent = 0}),
                    ContainsSubstring("budget -5"));
  CHECK_THROWS_WITH(TestType({.budget = 6, .sinks = 3, .recent = 4}),
                    ContainsSubstring("budget 6") && ContainsSubstring("sinks 3") &&
                        ContainsSubstring("recent 4"));
  CHECK_THROWS_WITH(TestType({.budget = 6, .sinks = -1, .recent = 0}),
                    ContainsSubstring(title) && ContainsSubstring("sinks -1"));
  CHECK_THROWS_WITH(TestType({.budget = 6, .sinks = 0, .recent = -2}),
                    ContainsSubstring("recent -2"));
  CHECK_THROWS_WITH(TestType({.budget = most + 1, .sinks = 0, .recent = 0}),
                    ContainsSubstring("budget 2147483648"));
  CHECK_THROWS_WITH(TestType({.budget = 6, .sinks = most + 1, .recent = 0}),
                    ContainsSubstring("sinks 2147483648"));
  // Two sizes that overflow 31 bits together are above any budget.
  CHECK_THROWS_AS(TestType({.budget = most, .sinks = most, .recent = most}), std::invalid_argument);
}

TEST_CASE("top_rows: a method's own check speaks too", "[top_rows][edge]") {
  CHECK_NOTHROW(TopRows<PickyScores>({.budget = 8}));
  CHECK_THROWS_WITH(TopRows<PickyScores>({.budget = 7}), ContainsSubstring("sinks 3 + recent 5"));
  CHECK_THROWS_WITH(TopRows<PickyScores>({.budget = 8, .scores = {.size = 0}}),
                    ContainsSubstring("kvtrim::Picky: size 0 is below 1"));
}

TEST_CASE("top_rows: a budget at run time counts, never more rows than there are", "[top_rows]") {
  const KeyNorm policy({.budget = 10, .sinks = 2, .recent = 3});
  CHECK(policy.demand(input(100)).keep == 10);
  CHECK(policy.demand(input(7)).keep == 7);
  CHECK(policy.demand(input(0)).keep == 0);
  CHECK(policy.demand(input(100, 40)).keep == 40);
  CHECK(policy.demand(input(30, 40)).keep == 30);
  CHECK(policy.demand(input(100, 0)).keep == 0);  // the plan then keeps what is protected
}

TEST_CASE("top_rows: the best rows stay, the lower position among equals, and both ends",
          "[top_rows][ties]") {
  PagedCache cache({.pages = 8, .page_size = 4, .key_dim = 2});
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_extend(SequenceId{0}, 12) == Status::ok);
  const std::vector<float> zeros(24, 0.0F);
  REQUIRE(cache.write(SequenceId{0}, LayerId{0}, {zeros.data()}, {zeros.data()}) ==
          kvtrim::Status::ok);
  std::vector<float> scores{0, 0, 5, 1, 5, 5, 2, 5, 3, 1, 0, 0};
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 12);
  const auto kept = [&](const External& policy, std::int32_t budget = -1) {
    obs.budgets = budget < 0 ? nullptr : &budget;
    const CacheView view = cache.view();
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    const PlanRef made = plan(policy, view, obs, workspace);
    std::vector<std::int32_t> rows;
    made.for_each_kept(
        SequenceId{0}, LayerId{0}, HeadId{0}, [&](std::int32_t r) { rows.push_back(r); });
    rows.push_back(-static_cast<std::int32_t>(made.status()));
    return rows;
  };
  using Rows = std::vector<std::int32_t>;
  CHECK(kept(External({.budget = 3})) == Rows{2, 4, 5, 0});
  CHECK(kept(External({.budget = 5, .sinks = 1, .recent = 2})) == Rows{0, 2, 4, 10, 11, 0});
  CHECK(kept(External({.budget = 3, .sinks = 1, .recent = 2})) == Rows{0, 10, 11, 0});
  CHECK(kept(External({.budget = 12})).size() == 13);
  // A budget at run time below what is protected keeps just that, and says so.
  CHECK(kept(External({.budget = 5, .sinks = 1, .recent = 2}), 1) ==
        Rows{0, 10, 11, -static_cast<std::int32_t>(Status::over_budget)});
  CHECK(kept(External({.budget = 5}), 2) == Rows{2, 4, 0});
}
