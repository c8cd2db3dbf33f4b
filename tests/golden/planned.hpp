// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores and kept rows of the one sequence and layer that a golden file holds.

#include <kvtrim/evict/planner.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace golden {

inline constexpr kvtrim::SequenceId seq{0};
inline constexpr kvtrim::LayerId layer{0};

/// Scores of a KV head.
template <class S>
std::vector<float> scores_of(const S& scorer,
                             const kvtrim::CacheView& view,
                             kvtrim::HeadId h,
                             const kvtrim::Observation& obs) {
  REQUIRE(scorer.check(view, obs) == kvtrim::Status::ok);
  std::vector<std::byte> scratch(scorer.scratch_bytes(kvtrim::plan_shape(view, obs)));
  std::vector<float> out(static_cast<std::size_t>(view.live_rows(seq, layer, h)));
  scorer.score({view, seq, layer, h}, obs, scratch, out);
  return out;
}

/// Rows of a KV head that a plan keeps, ascending.
template <class P>
std::vector<double> kept_by(const P& policy,
                            const kvtrim::CacheView& view,
                            kvtrim::HeadId h,
                            const kvtrim::Observation& obs) {
  std::vector<std::byte> workspace(
      kvtrim::plan_workspace_bytes(policy, kvtrim::plan_shape(view, obs)));
  const kvtrim::PlanRef made = kvtrim::plan(policy, view, obs, workspace);
  REQUIRE(made.status() == kvtrim::Status::ok);
  std::vector<double> kept;
  made.for_each_kept(seq, layer, h, [&](std::int32_t r) { kept.push_back(r); });
  return kept;
}

}  // namespace golden
