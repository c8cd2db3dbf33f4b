// SPDX-License-Identifier: Apache-2.0
// The host's plans of every policy, for the parity tests.

#include "cuda/evict/every_policy.hpp"

#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/per_layer.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "cuda/evict/host_plan.hpp"

#include <type_traits>

namespace kvtrim::test {

namespace {

using HostPlan = void (*)();
template <class P>
using PlanOf = Plan (*)(const P&, const CacheView&, const Observation&, Removal, ReservedPages);

template <class... P>
void instantiate(const std::tuple<P...>&) {
  [[maybe_unused]] static const volatile HostPlan all[] = {
      reinterpret_cast<HostPlan>(static_cast<PlanOf<P>>(&host_plan<P>))...};
}

}  // namespace

void instantiate_host_plans() {
  instantiate(every_policy());
}

}  // namespace kvtrim::test
