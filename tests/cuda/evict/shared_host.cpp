// SPDX-License-Identifier: Apache-2.0
#include "cuda/evict/shared_host.hpp"

#include <kvtrim/evict/planner.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>

#include <cstddef>
#include <vector>

namespace kvtrim::test {

template <class P>
Plan host_plan_by(const P& policy,
                  const CacheView& view,
                  const Observation& obs,
                  const PlanOptions& options) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  return Plan(plan(policy, view, obs, workspace, options));
}

template Plan host_plan_by(const ByScore&,
                           const CacheView&,
                           const Observation&,
                           const PlanOptions&);
template Plan host_plan_by(const HeavyHitter<>&,
                           const CacheView&,
                           const Observation&,
                           const PlanOptions&);
template Plan host_plan_by(const HeavyHitter<AccumulateParams, HeavyMode::promote>&,
                           const CacheView&,
                           const Observation&,
                           const PlanOptions&);
template Plan host_plan_by(const StreamingSink<>&,
                           const CacheView&,
                           const Observation&,
                           const PlanOptions&);
template Plan host_plan_by(const StreamingSink<SinkForm::exact>&,
                           const CacheView&,
                           const Observation&,
                           const PlanOptions&);

}  // namespace kvtrim::test
