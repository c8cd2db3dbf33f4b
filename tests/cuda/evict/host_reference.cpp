// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/window.hpp>

#include "cuda/evict/host_plan.hpp"

namespace kvtrim::test {

template Plan host_plan(
    const ByScore&, const CacheView&, const Observation&, Removal, ReservedPages);
template Plan host_plan(const ByScore&, const CacheView&, const Observation&, const PlanOptions&);
template Plan host_plan(const HeavyHitter<>&,
                        const CacheView&,
                        const Observation&,
                        const PlanOptions&);
template Plan host_plan(const HeavyHitter<AccumulateParams, HeavyMode::promote>&,
                        const CacheView&,
                        const Observation&,
                        const PlanOptions&);
template Plan host_plan(const StreamingSink<>&,
                        const CacheView&,
                        const Observation&,
                        const PlanOptions&);
template Plan host_plan(const StreamingSink<SinkForm::exact>&,
                        const CacheView&,
                        const Observation&,
                        const PlanOptions&);
}  // namespace kvtrim::test
