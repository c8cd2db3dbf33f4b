// SPDX-License-Identifier: Apache-2.0
#pragma once

// The definition of `host_plan`, for the sources that instantiate it.

#include "cuda/evict/host_reference.hpp"

#include <kvtrim/evict/planner.hpp>

#include <cstddef>
#include <vector>

namespace kvtrim::test {

template <class P>
Plan host_plan(const P& policy,
               const CacheView& view,
               const Observation& obs,
               const PlanOptions& options) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  return Plan(plan(policy, view, obs, workspace, options));
}

template <class P>
Plan host_plan(const P& policy,
               const CacheView& view,
               const Observation& obs,
               Removal removal,
               ReservedPages reserved) {
  PlanOptions options;
  options.removal = removal;
  options.reserved = reserved;
  return host_plan(policy, view, obs, options);
}

}  // namespace kvtrim::test
