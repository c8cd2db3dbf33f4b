// SPDX-License-Identifier: Apache-2.0
// Every .cuh in one translation unit, with every kernel except the score kernels instantiated. Spills, the PTX and the
// absence of Eigen are checked on this object and on that of kernels_score.cu.

#define KVTRIM_CUDA_KERNELS_ELSEWHERE  // kernels_score.cu
#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/device_plan.cuh>
#include <kvtrim/cuda/evict/device_scorer.cuh>
#include <kvtrim/cuda/evict/extend.cuh>
#include <kvtrim/cuda/evict/key_scorer.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/rerotate.cuh>
#include <kvtrim/cuda/evict/step.cuh>
#include <kvtrim/cuda/evict/window_scorer.cuh>
#include <kvtrim/cuda/observe/accumulate.cuh>
#include <kvtrim/cuda/observe/column_sums.cuh>
#include <kvtrim/cuda/parallel/context_top_k.cuh>
#include <kvtrim/cuda/score/window.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/tova.hpp>

#include <cstddef>

#if defined(EIGEN_WORLD_VERSION)
#  error "a .cuh includes Eigen"
#endif

namespace kvtrim::test {

// Uses every launcher once; it is never called.
cudaError_t use_all_kernels(const CacheView& view,
                            const cuda::DeviceObservation& obs,
                            const cuda::PlanWorkspace& workspace,
                            const cuda::DeviceTables& tables,
                            cudaStream_t stream) {
  cudaError_t e = cuda::prepare(StreamingSink(), view, obs, workspace.shape);
  if (e == cudaSuccess) { e = cuda::prepare(SnapKVSelector(), view, obs, workspace.shape); }
  if (e == cudaSuccess) { e = cuda::plan(PageSelector(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::plan(StreamingSink(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::plan(HeavyHitter(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::plan(SnapKVSelector(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::plan(KeyDiff(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::plan(Tova(), view, obs, workspace, stream); }
  if (e == cudaSuccess) { e = cuda::apply(workspace, view, stream); }
  if (e == cudaSuccess) { e = cuda::commit(workspace, view, tables, stream); }
  if (e == cudaSuccess) { e = cuda::extend(view, tables, {}, stream); }
  if (e == cudaSuccess) { e = cuda::step(StreamingSink(), view, obs, workspace, tables, stream); }
  if (e == cudaSuccess) { e = cuda::step(HeavyHitter(), view, obs, workspace, tables, stream); }
  if (e == cudaSuccess) { e = cuda::written(view, LayerId{0}, nullptr, stream); }
  if (e == cudaSuccess) {
    e = cuda::accumulate_column_sums(
        {}, view, {obs.queries, obs.query_dtype}, {}, {}, nullptr, 0, stream);
  }
  if (e == cudaSuccess) {
    e = cuda::accumulate_probabilities({}, view, {}, {}, 1, nullptr, 0, stream);
  }
  if (e == cudaSuccess) {
    e = cuda::rerotate(view, {}, PositionMode::in_cache, {}, {}, 1, nullptr, 0, stream);
  }
  cuda::ContextTopK ranked({}, nullptr, {}, nullptr, nullptr, nullptr, 0, stream);
  return ranked.next() ? e : ranked.error();
}

}  // namespace kvtrim::test
