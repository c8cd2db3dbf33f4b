// expect: at most 4,096 bytes of parameters
// SPDX-License-Identifier: Apache-2.0
// More parameters need CUDA 12.1 and a device that has them.
#include <kvtrim/cuda/detail/device.hpp>

struct alignas(8) Large {
#if defined(KVTRIM_TEST_VALID)
  char bytes[4088];
#else
  char bytes[4096];
#endif
};
__global__ void large_kernel(int, Large) {}

cudaError_t use(const Large& large) {
  return kvtrim::cuda::detail::launch(large_kernel, dim3(1), dim3(32), 0, nullptr, 1, large);
}
