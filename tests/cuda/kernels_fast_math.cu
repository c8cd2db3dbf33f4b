// SPDX-License-Identifier: Apache-2.0
// The kernels that compute scores, under -use_fast_math: what its PTX must not contain is in ptx_table_fast_math.txt.

#include <kvtrim/cuda/observe/accumulate.cuh>
#include <kvtrim/cuda/observe/detail/attention_fma.cuh>
#define KVTRIM_CUDA_KERNELS_ELSEWHERE
#include <kvtrim/cuda/score/window.cuh>
#include <kvtrim/cuda/select/top_k.cuh>

namespace kvtrim::cuda::detail {

template __global__ void attention_kernel<__nv_fp8_e4m3, 64>(AttentionArgs);
template __global__ void accumulate_kernel<accumulate_threads>(AccumulateArgs);
template __global__ void pool_kernel<pool_threads>(
    CacheView, TileList, WindowParams, std::int32_t, const float*, const std::int32_t*, ScoreRows);
template __global__ void select_kernel<true>(
    RowScores, const SelectTask*, SelectBounds, bool, std::int32_t*, std::int32_t*);

}  // namespace kvtrim::cuda::detail
