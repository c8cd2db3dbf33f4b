// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every instantiation of the score kernels, in one place: 5 types x 6 head dims with fused multiply-adds, 2 x 2 on tensor
// cores, 34 per architecture. They take a minute to compile: if several translation units of a program use scores, one of
// them defines KVTRIM_CUDA_KERNELS_HERE before this header and the others define KVTRIM_CUDA_KERNELS_ELSEWHERE.

#include <kvtrim/cuda/observe/detail/attention_fma.cuh>
#include <kvtrim/cuda/observe/detail/attention_mma.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvtrim::cuda {

/// Which product the score kernels use.
enum class ScorePath : std::uint8_t {
  automatic,  ///< tensor cores where they apply, otherwise fused multiply-adds
  fma,        ///< fused multiply-adds; fp32 products
  tensor_cores,  ///< f16 or bf16 keys and queries of one type, head dim 64 or 128; otherwise `cudaErrorInvalidValue`
};

namespace detail {

/// Calls `f(std::integral_constant<int, D>)` with the key head dim, if there are kernels for it.
template <class R, class F>
[[nodiscard]] R dispatch_head_dim(std::int32_t head_dim, R otherwise, F&& f) {
  switch (head_dim) {
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 80:
      return f(std::integral_constant<int, 80>{});
    case 96:
      return f(std::integral_constant<int, 96>{});
    case 128:
      return f(std::integral_constant<int, 128>{});
    case 192:
      return f(std::integral_constant<int, 192>{});
    case 256:
      return f(std::integral_constant<int, 256>{});
    default:
      return otherwise;
  }
}

using AttentionKernel = void (*)(AttentionArgs);

#if defined(KVTRIM_CUDA_KERNELS_ELSEWHERE)
[[nodiscard]] AttentionKernel fma_kernel(DType dtype, std::int32_t head_dim) noexcept;
[[nodiscard]] AttentionKernel mma_kernel(DType dtype, std::int32_t head_dim) noexcept;
#else
#  if defined(KVTRIM_CUDA_KERNELS_HERE)
#    define KVTRIM_CUDA_KERNELS_LINKAGE [[gnu::used]] inline
#  else
#    define KVTRIM_CUDA_KERNELS_LINKAGE inline
#  endif
[[nodiscard]] KVTRIM_CUDA_KERNELS_LINKAGE AttentionKernel
fma_kernel(DType dtype, std::int32_t head_dim) noexcept {
  return dispatch_dtype(dtype, AttentionKernel{nullptr}, [&](auto type) {
    return dispatch_head_dim(head_dim, AttentionKernel{nullptr}, [&](auto dim) -> AttentionKernel {
      return &attention_kernel<typename decltype(type)::type, decltype(dim)::value>;
    });
  });
}

[[nodiscard]] KVTRIM_CUDA_KERNELS_LINKAGE AttentionKernel
mma_kernel(DType dtype, std::int32_t head_dim) noexcept {
  if (dtype == DType::f16) {
    return head_dim == 64    ? &attention_mma_kernel<__half, 64>
           : head_dim == 128 ? &attention_mma_kernel<__half, 128>
                             : AttentionKernel{nullptr};
  }
  if (dtype == DType::bf16) {
    return head_dim == 64    ? &attention_mma_kernel<__nv_bfloat16, 64>
           : head_dim == 128 ? &attention_mma_kernel<__nv_bfloat16, 128>
                             : AttentionKernel{nullptr};
  }
  return nullptr;
}
#  undef KVTRIM_CUDA_KERNELS_LINKAGE
#endif

/// The kernel for these keys and queries on this path, and the multiple it pads the queries of a head to; null: none.
struct AttentionChoice {
  AttentionKernel kernel = nullptr;
  std::int32_t pad = 0;
};
[[nodiscard]] inline AttentionChoice choose_attention(const CacheView& view,
                                                      const DeviceQueries& queries,
                                                      ScorePath path) noexcept {
  if (path != ScorePath::fma && queries.dtype == view.k.dtype && queries_aligned(queries, 16)) {
    const AttentionKernel mma = mma_kernel(view.k.dtype, view.k.head_dim);
    if (mma != nullptr) { return {mma, 8}; }
  }
  if (path == ScorePath::tensor_cores) { return {}; }
  return {fma_kernel(view.k.dtype, view.k.head_dim), 4};
}

}  // namespace detail

}  // namespace kvtrim::cuda
