// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only file that knows whether a `.cuh` is compiled by nvcc or, with KVTRIM_EMULATED set, by a host compiler against
// the emulator of tests/emulator. Kernels use CUDA's own spelling (threadIdx, __syncthreads, __shfl_*_sync, atomicAdd)
// and these few names for what cannot be written the same way for both.

#include <kvtrim/core/dtype.hpp>
#include <kvtrim/core/types.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(KVTRIM_EMULATED)
#  include "emulator.hpp"
#elif defined(__CUDACC__)
#  include <cuda_bf16.h>
#  include <cuda_fp16.h>
#  include <cuda_fp8.h>
#  include <cuda_pipeline_primitives.h>
#  include <cuda_runtime.h>
#else
#  error \
      "kvtrim::cuda: compile with nvcc, or set KVTRIM_EMULATED and put tests/emulator on the include path"
#endif

// Static shared memory: KVTRIM_SHARED(float, sums, [32]); never initialised.
// Dynamic shared memory: KVTRIM_DYNAMIC_SHARED(std::uint32_t, keys); aligned to 16 bytes, one block for the whole kernel.
#if defined(KVTRIM_EMULATED)
#  define KVTRIM_SHARED(type, name, ...)                                                    \
    auto& name = *::kvtrim::emulator::static_shared<type __VA_ARGS__>([]() -> const void* { \
      static const char key = 0;                                                            \
      return &key;                                                                          \
    }())
#  define KVTRIM_DYNAMIC_SHARED(type, name) \
    type* const name = reinterpret_cast<type*>(::kvtrim::emulator::dynamic_shared())
#  define KVTRIM_UNROLL
#  define KVTRIM_NO_UNROLL
#  define KVTRIM_LAUNCH_BOUNDS(...)
#else
#  define KVTRIM_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#  define KVTRIM_DYNAMIC_SHARED(type, name)                                \
    extern __shared__ __align__(16) unsigned char kvtrim_dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(kvtrim_dynamic_shared)
#  define KVTRIM_UNROLL _Pragma("unroll")
#  define KVTRIM_NO_UNROLL _Pragma("unroll 1")
#  define KVTRIM_LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
#endif
// A function called from kernels: always inlined.
#define KVTRIM_DEVICE __device__ __forceinline__

namespace kvtrim::cuda::detail {

inline constexpr unsigned full_warp = 0xFFFF'FFFFU;
inline constexpr std::size_t default_shared_bytes = 48U * 1024U;  // of a block, without opting in
inline constexpr std::size_t most_parameter_bytes = 4096;         // of a kernel

/// Multiprocessors of the current device; grids have at most four times as many blocks.
[[nodiscard]] inline int multiprocessors() noexcept {
  int device = 0;
  int count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  return count;
}

/// Shared memory that one block may have on the current device, static arrays included: 227 KiB on sm_90, 163 KiB on sm_80.
[[nodiscard]] inline std::size_t block_shared_bytes() noexcept {
  int device = 0;
  int bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return default_shared_bytes;
  }
  return static_cast<std::size_t>(bytes);
}

/// Shared memory of a launch. The limit of a block counts both kinds.
struct SharedBytes {
  std::size_t dynamic = 0;
  std::size_t fixed =
      0;  ///< of the kernel's `KVTRIM_SHARED` arrays; may be 0 if `dynamic` is small

  constexpr SharedBytes(std::size_t dynamic_bytes = 0, std::size_t fixed_bytes = 0) noexcept
      : dynamic(dynamic_bytes), fixed((fixed_bytes + 255) / 256 * 256) {}
  /// Whether the kernel must be allowed more than a block has without asking.
  [[nodiscard]] constexpr bool opts_in() const noexcept {
    return dynamic + fixed > default_shared_bytes;
  }
  /// Whether a block of the current device can have it.
  [[nodiscard]] bool fits() const noexcept { return dynamic + fixed <= block_shared_bytes(); }
};

/// Kernels that were allowed all of a block's shared memory, with their device: asking costs more than a launch, and is not
/// possible in a capture.
inline std::atomic<std::uint64_t> raised_limits[64];

/// Allows `kernel` as much dynamic shared memory as its static arrays leave, once per device. The limit is never lowered, so
/// bounds of other plans, other host threads and graphs that were captured before do not matter.
[[nodiscard]] inline cudaError_t raise_shared_limit(const void* kernel,
                                                    const SharedBytes& shared) noexcept {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) { return e; }
  const std::uint64_t mine =
      reinterpret_cast<std::uintptr_t>(kernel) ^ static_cast<std::uint64_t>(device) << 48U;
  for (const auto& known : raised_limits) {
    const std::uint64_t other = known.load(std::memory_order_acquire);
    if (other == mine) { return cudaSuccess; }
    if (other == 0) { break; }
  }
  const std::size_t all = block_shared_bytes();
  if (shared.dynamic + shared.fixed > all) { return cudaErrorInvalidValue; }
  const cudaError_t set = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(all - shared.fixed));
  if (set != cudaSuccess) { return set; }
  for (auto& known : raised_limits) {  // a full list costs the next call, no more
    std::uint64_t other = 0;
    if (known.compare_exchange_strong(other, mine, std::memory_order_acq_rel) || other == mine) {
      break;
    }
  }
  return cudaSuccess;
}

/// Bytes of kernel parameters, each aligned to its own size as the driver lays them out.
template <class... P>
[[nodiscard]] constexpr std::size_t parameter_bytes() noexcept {
  std::size_t end = 0;
  ((end = (end + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
  return end;
}

/// Queues `kernel` on `stream`; its arguments convert to the kernel's parameters.
///
/// \returns the status of the launch itself: an error inside the kernel is reported later, as everywhere in CUDA (the
///   emulator has run the kernel by then, and returns `cudaErrorLaunchFailure`)
template <class... P, class... A>
[[nodiscard]] cudaError_t launch(void (*kernel)(P...),
                                 dim3 grid,
                                 dim3 block,
                                 const SharedBytes& shared,
                                 cudaStream_t stream,
                                 A&&... arguments) noexcept {
  static_assert((std::is_trivially_copyable_v<P> && ...), "kernel parameters are copied bytewise");
  static_assert(sizeof...(P) == sizeof...(A));
  static_assert(
      parameter_bytes<P...>() <= most_parameter_bytes,
      "kvtrim::cuda: a kernel has at most 4,096 bytes of parameters on every device: pass "
      "a pointer to the rest");
  const auto* const address = reinterpret_cast<const void*>(kernel);
  if (shared.opts_in()) {
    const cudaError_t raised = raise_shared_limit(address, shared);
    if (raised != cudaSuccess) { return raised; }
  }
#if defined(KVTRIM_EMULATED)
  return emulator::launch(
      kernel,
      {address, stream, grid, block, shared.dynamic, 0, parameter_bytes<P...>()},
      static_cast<P>(arguments)...);
#else
  return [&](P... values) {
    void* pointers[] = {static_cast<void*>(&values)..., nullptr};
    return cudaLaunchKernel(address, grid, block, pointers, shared.dynamic, stream);
  }(static_cast<P>(arguments)...);
#endif
}

/// Loads `kernel` and allows it the shared memory. Must not be called inside a capture.
template <class... P>
[[nodiscard]] cudaError_t load(void (*kernel)(P...), const SharedBytes& shared = {}) noexcept {
  const auto* const address = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes{};
  const cudaError_t loaded = cudaFuncGetAttributes(&attributes, address);
  if (loaded != cudaSuccess || !shared.opts_in()) { return loaded; }
  return raise_shared_limit(address, shared);
}

/// The first of some statuses that is an error.
template <std::size_t N>
[[nodiscard]] cudaError_t first_error(const cudaError_t (&all)[N]) noexcept {
  for (const cudaError_t e : all) {
    if (e != cudaSuccess) { return e; }
  }
  return cudaSuccess;
}

/// Blocks for `items` work items, at most four per multiprocessor: kernels walk the rest with a stride.
[[nodiscard]] inline unsigned bounded_grid(std::int64_t items) noexcept {
  const std::int64_t most = 4 * static_cast<std::int64_t>(multiprocessors());
  return static_cast<unsigned>(items < 1 ? 1 : items < most ? items : most);
}

/// Starts a copy of 16 bytes from global to shared memory (cp.async); both addresses are multiples of 16.
KVTRIM_DEVICE void async_copy_16(void* shared, const void* global) {
#if defined(KVTRIM_EMULATED)
  emulator::async_copy_16(shared, global);
#else
  __pipeline_memcpy_async(shared, global, 16);
#endif
}
/// Closes a group of copies.
KVTRIM_DEVICE void async_commit() {
#if defined(KVTRIM_EMULATED)
  emulator::async_commit();
#else
  __pipeline_commit();
#endif
}
/// Waits for all but the last `Newest` groups of this thread. A barrier must follow before other threads read.
template <int Newest>
KVTRIM_DEVICE void async_wait() {
#if defined(KVTRIM_EMULATED)
  emulator::async_wait(Newest);
#else
  __pipeline_wait_prior(Newest);
#endif
}

/// Stores a word to which other threads of the launch may store too: one of the values stays.
KVTRIM_DEVICE void store_any(unsigned long long* address, unsigned long long value) {
#if defined(KVTRIM_EMULATED)
  emulator::device_written(address, sizeof value);  // what was there before is not looked at
#endif
  static_cast<void>(atomicExch(address, value));
}

/// Whether this is the last block of the grid to come here, which then sees all that the others wrote before. No block waits.
/// For all threads of a block.
///
/// \param arrived  [1] in global memory, 0 at first and in the end
/// \param shared   [1]
KVTRIM_DEVICE bool last_block(std::int32_t* arrived, std::int32_t* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const std::int32_t before = atomicAdd(arrived, 1);
    const bool last = before == static_cast<std::int32_t>(gridDim.x) - 1;
    if (last) {
      __threadfence();
      atomicExch(arrived, 0);
    }
    shared[0] = last ? 1 : 0;
  }
  __syncthreads();
  return shared[0] != 0;
}

/// Element of a cache plane as CUDA spells it.
template <DType T>
struct ElementOf;
template <>
struct ElementOf<DType::f32> {
  using type = float;
};
template <>
struct ElementOf<DType::f16> {
  using type = __half;
};
template <>
struct ElementOf<DType::bf16> {
  using type = __nv_bfloat16;
};
template <>
struct ElementOf<DType::f8e4m3> {
  using type = __nv_fp8_e4m3;
};
template <>
struct ElementOf<DType::f8e5m2> {
  using type = __nv_fp8_e5m2;
};
template <DType T>
using Element = typename ElementOf<T>::type;

/// Value of one element; exact.
__host__ KVTRIM_DEVICE float to_float(float x) {
  return x;
}
__host__ KVTRIM_DEVICE float to_float(__half x) {
  return __half2float(x);
}
__host__ KVTRIM_DEVICE float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__host__ KVTRIM_DEVICE float to_float(__nv_fp8_e4m3 x) {
  return static_cast<float>(x);
}
__host__ KVTRIM_DEVICE float to_float(__nv_fp8_e5m2 x) {
  return static_cast<float>(x);
}

/// Value of a half, the low bits of `bits`. No float on the way is subnormal, so that -ftz=true (-use_fast_math) changes nothing.
__host__ KVTRIM_DEVICE float half_to_float(std::uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// `x` as an element, rounded to nearest even.
template <class T>
__host__ KVTRIM_DEVICE T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return static_cast<T>(x);
  }
}

/// 16 bytes of elements: one load or store.
template <class T>
struct alignas(16) Vector16 {
  static constexpr int count = static_cast<int>(16 / sizeof(T));
  T at[16 / sizeof(T)];
};
/// Loads 16 bytes through the read-only path: never use it for memory that the same launch writes.
template <class T>
KVTRIM_DEVICE Vector16<T> load_16_constant(const T* p) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
  Vector16<T> v;
  memcpy(&v, &raw, 16);
  return v;
}
/// Loads 16 bytes.
template <class T>
KVTRIM_DEVICE Vector16<T> load_16(const T* p) {
#if defined(KVTRIM_EMULATED)
  emulator::check_aligned(p, 16);
#endif
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  Vector16<T> v;
  memcpy(&v, &raw, 16);
  return v;
}

/// Calls `f(std::type_identity<Element>)` with the element type of a scored plane; `otherwise` for any other.
template <class R, class F>
[[nodiscard]] R dispatch_dtype(DType dtype, R otherwise, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(std::type_identity<float>{});
    case DType::f16:
      return f(std::type_identity<__half>{});
    case DType::bf16:
      return f(std::type_identity<__nv_bfloat16>{});
    case DType::f8e4m3:
      return f(std::type_identity<__nv_fp8_e4m3>{});
    case DType::f8e5m2:
      return f(std::type_identity<__nv_fp8_e5m2>{});
    case DType::i8:
    case DType::opaque:
      break;
  }
  return otherwise;
}

/// Whether an address, and any sum of it and these steps, is a multiple of `bytes`.
[[nodiscard]] inline bool aligned_to(std::size_t bytes, const void* p) noexcept {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

}  // namespace kvtrim::cuda::detail
