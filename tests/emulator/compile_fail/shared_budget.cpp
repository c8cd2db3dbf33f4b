// expect: heads that share a budget
// SPDX-License-Identifier: Apache-2.0
// Planned by the rest of its rules, AdaKV would be its inner policy.
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/key_norm.hpp>

#if defined(KVTRIM_TEST_VALID)
using Policy = kvtrim::KeyNorm;
#else
using Policy = kvtrim::AdaKV<kvtrim::KeyNorm>;
#endif

cudaError_t use(const kvtrim::CacheView& view, const kvtrim::cuda::PlanWorkspace& workspace) {
  const kvtrim::cuda::GivenScores given(view.score_sums);
  return kvtrim::cuda::plan(Policy(), view, given, workspace, nullptr);
}
