// SPDX-License-Identifier: Apache-2.0
#include "cuda/evict/host_reference.hpp"

#include <kvtrim/evict/planner.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/window.hpp>

#include <cstddef>
#include <vector>

namespace kvtrim::test {

namespace {

template <class P>
Plan planned(const P& policy, const CacheView& view, const Observation& obs, Removal removal) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  PlanOptions options;
  options.removal = removal;
  return Plan(plan(policy, view, obs, workspace, options));
}

}  // namespace

Plan host_plan(const StreamingSink& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal) {
  return planned(policy, view, obs, removal);
}
Plan host_plan(const HeavyHitter& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal) {
  return planned(policy, view, obs, removal);
}
Plan host_plan(const ByScore& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal) {
  return planned(policy, view, obs, removal);
}

Plan host_plan(const SnapKVSelector& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal) {
  return planned(policy, view, obs, removal);
}

}  // namespace kvtrim::test
