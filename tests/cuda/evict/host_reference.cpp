// SPDX-License-Identifier: Apache-2.0
#include "cuda/evict/host_reference.hpp"

#include <kvtrim/evict/planner.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/window.hpp>

#include <cstddef>
#include <vector>

namespace kvtrim::test {

template <class P>
Plan host_plan(const P& policy, const CacheView& view, const Observation& obs, Removal removal) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  PlanOptions options;
  options.removal = removal;
  return Plan(plan(policy, view, obs, workspace, options));
}

template Plan host_plan(const ByScore&, const CacheView&, const Observation&, Removal);
template Plan host_plan(const SnapKVSelector<>&, const CacheView&, const Observation&, Removal);
template Plan host_plan(const StreamingSink<>&, const CacheView&, const Observation&, Removal);
template Plan host_plan(const StreamingSink<SinkForm::exact>&,
                        const CacheView&,
                        const Observation&,
                        Removal);
template Plan host_plan(const HeavyHitter<>&, const CacheView&, const Observation&, Removal);
template Plan host_plan(const HeavyHitter<AccumulateParams, HeavyMode::greedy>&,
                        const CacheView&,
                        const Observation&,
                        Removal);
template Plan host_plan(const HeavyHitter<AccumulateParams, HeavyMode::promote>&,
                        const CacheView&,
                        const Observation&,
                        Removal);

}  // namespace kvtrim::test
