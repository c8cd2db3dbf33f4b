// expect: policies with a second stage
// SPDX-License-Identifier: Apache-2.0
// Planned by the rest of its rules, CriticalKV would be its inner policy. A workspace for it is refused as well.
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>

#if defined(KVTRIM_TEST_VALID)
using Policy = kvtrim::HeavyHitter<>;
#else
using Policy = kvtrim::CriticalKV<kvtrim::HeavyHitter<>>;
#endif

std::size_t use(const kvtrim::PlanShape& shape) {
  return kvtrim::cuda::plan_workspace_bytes(Policy(), shape);
}
