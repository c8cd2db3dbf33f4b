// SPDX-License-Identifier: Apache-2.0
// The score kernels, all 34 instantiations: separate from kernels.cu so that two processors compile them.

#define KVTRIM_CUDA_KERNELS_HERE
#include <kvtrim/cuda/observe/detail/instances.cuh>

#if defined(EIGEN_WORLD_VERSION)
#  error "a .cuh includes Eigen"
#endif
