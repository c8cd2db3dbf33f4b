// expect: kvtrim/cuda/evict/window_scorer.cuh
// SPDX-License-Identifier: Apache-2.0
// Window scores bring all score kernels with them, so they have a header of their own. Given scores need none.
#define KVTRIM_CUDA_KERNELS_ELSEWHERE
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/policy/snapkv_selector.hpp>

cudaError_t use(const kvtrim::CacheView& view, const kvtrim::cuda::PlanWorkspace& workspace) {
#if defined(KVTRIM_TEST_VALID)
  const kvtrim::cuda::GivenScores scores(view.score_sums);
#else
  const kvtrim::cuda::DeviceObservation scores;
#endif
  return kvtrim::cuda::plan(kvtrim::SnapKVSelector(), view, scores, workspace, nullptr);
}
