// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/evict/planner.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/random.hpp"
#include "support/tagged_cache.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrim::test {

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
    Random random(6);
    for (float& x : scores) { x = random.uniform(); }
  }
  template <class P>
  PlanRef make(const P& policy, Removal removal = Removal::automatic) {
    Observation obs;
    obs.scores = SequencePlane::dense(scores.data(), 2, 2, 24);
    workspace.assign(plan_workspace_bytes(policy, plan_shape(c.view(), obs)), std::byte{0});
    return plan(policy, c.view(), obs, workspace, {.removal = removal});
  }
};

}  // namespace kvtrim::test
