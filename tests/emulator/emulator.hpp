// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs CUDA kernels on a CPU, for tests: every CUDA thread is a fiber, one block at a time, on one host thread. Fibers
// switch only inside collectives (barriers, shuffles, votes) and atomics, in an order that the schedule chooses, so a seed
// repeats a run exactly. Beyond running kernels, it checks what a GPU leaves undefined: collectives that not all
// threads of a mask reach, barriers in divergent code, deadlocks, values read from absent lanes, launch limits,
// asynchronous copies that are never awaited, exits before a barrier. Under AddressSanitizer it finds accesses beyond any
// device_buffer or shared array; linked with racecheck.cpp, races and reads of memory never written.
//
// This header is what kernels see; the machine is in emulator.cpp, which is never compiled with a sanitizer.

#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#undef __launch_bounds__
#define __launch_bounds__(...)

namespace kvtrim::emulator {

/// Size of the machine that launchers see: small, so that tests reach every branch of their grids; a test may change it.
inline int multiprocessors = 4;
inline std::size_t block_shared_bytes = 227U * 1024U;
inline constexpr std::size_t static_shared_bytes = 48U * 1024U;
inline thread_local int device = 0;  // the host thread's current one

/// In which order blocks, warps and lanes run.
enum class Schedule : std::uint8_t { in_order, reverse, random };

/// How kernels are run. The environment sets the start: KVTRIM_EMU_SCHEDULE=in_order|reverse|random, KVTRIM_EMU_SEED=n.
struct Options {
  Schedule schedule = Schedule::in_order;
  std::uint64_t seed = 1;
};
Options& options();

/// What was wrong with the last launch that failed; empty after one that did not.
const std::string& message();
/// Whether the race checker is linked in.
bool checks_races();

/// Place in the source that called a collective.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) {
    return {f, l};
  }
  friend constexpr bool operator==(const Site&, const Site&) = default;
};

struct Block;
struct Warp;
struct Collective;
struct Lane;

struct PendingCopy {
  void* to;
  const void* from;
  unsigned group;
};

/// One CUDA thread.
struct Lane {
  static constexpr unsigned most_copies = 64;
  void* stack_pointer = nullptr;
  std::byte* stack = nullptr;
  std::size_t stack_bytes = 0;
  void* sanitizer_stack = nullptr;
  Block* block = nullptr;
  Warp* warp = nullptr;
  uint3 thread{};
  unsigned linear = 0;  // in the block
  unsigned id = 0;      // in the warp
  // The collective that it is in.
  const Collective* collective = nullptr;
  Site site{};
  std::uint32_t mask = 0;
  std::uint32_t argument = 0;
  std::uint32_t width = 32;
  std::uint64_t in = 0;
  std::uint64_t out = 0;
  PendingCopy copies[most_copies];
  unsigned copy_count = 0;
  unsigned copy_group = 0;
};

/// Indices that a kernel asks for.
struct Geometry {
  uint3 block{};
  dim3 block_dim;
  dim3 grid_dim;
};
extern Lane* current;
extern Geometry geometry;

/// Something that lanes of a warp do together: once all of a mask are there, `resolve` fills in their `out`.
struct Collective {
  const char* name;
  void (*resolve)(Lane* lanes, std::uint32_t mask);
  bool orders_memory = false;
};
std::uint64_t meet(const Collective& what,
                   std::uint32_t mask,
                   std::uint64_t value,
                   std::uint32_t argument,
                   std::uint32_t width,
                   Site site);
unsigned meet_block(const char* name, char combine, unsigned value, Site site);

/// Calls `work` once for a full warp, with what every lane passed; each lane goes on when it is done. What an emulated
/// instruction of a whole warp (mma) is made of: lane i's operands and results are behind `operands[i]`.
void whole_warp(const char* name,
                void* operands,
                void (*work)(void* const operands[32]),
                Site site);

/// Ends the kernel unless `p` is a multiple of `bytes`: a GPU does not load vectors from other addresses.
void check_aligned(const void* p, std::size_t bytes);

void async_copy_16(void* to, const void* from);
void async_commit();
void async_wait(unsigned newest);
void fence();

void* static_shared_memory(const void* key, std::size_t bytes);
void* dynamic_shared();
template <class T>
T* static_shared(const void* key) {
  static_assert(std::is_trivially_default_constructible_v<std::remove_all_extents_t<T>>,
                "shared memory is never initialised");
  return static_cast<T*>(static_shared_memory(key, sizeof(T)));
}

/// Reads, changes and writes `bytes` (2, 4 or 8) at `address` as one atomic; the old bits.
std::uint64_t atomic_update(void* address,
                            unsigned bytes,
                            std::uint64_t (*next)(std::uint64_t old, const std::uint64_t* operands),
                            const std::uint64_t* operands);

/// A launch as the runtime sees it.
struct Launch {
  const void* kernel = nullptr;
  cudaStream_t stream = nullptr;
  dim3 grid;
  dim3 block;
  std::size_t dynamic_bytes = 0;    // of shared memory
  std::size_t static_bytes = 0;     // of shared memory, as far as the kernel came by its arrays
  std::size_t parameter_bytes = 0;  // of the kernel
};
/// Every launch since the list was cleared, those into a capture too.
std::vector<Launch>& launches();

/// What the runtime knows of a kernel on one device.
struct Kernel {
  bool loaded = false;
  int shared_limit = -1;  // cudaFuncAttributeMaxDynamicSharedMemorySize; -1: never set
  int times_set = 0;
};
/// The kernel's on the current device.
Kernel kernel_state(const void* kernel);
/// Forgets all kernels, as in a process that has just begun.
void unload_kernels();

/// A stream capture: while one is under way, launches are kept instead of run, and what would load a kernel or set an
/// attribute fails.
class Graph {
 public:
  /// Runs what was captured; the status of the first launch that fails.
  [[nodiscard]] cudaError_t run() const {
    for (const auto& node : nodes) {
      if (const cudaError_t e = node(); e != cudaSuccess) { return e; }
    }
    return cudaSuccess;
  }
  std::vector<std::function<cudaError_t()>> nodes;
};
inline Graph* capture = nullptr;

/// Whether the launch may take place; `run_grid` follows unless it goes into a capture.
cudaError_t admit(const Launch& launch) noexcept;
cudaError_t run_grid(const Launch& launch, void (*entry)(void*), void* arguments) noexcept;

template <class... P>
cudaError_t launch(void (*kernel)(P...),
                   const Launch& what,
                   std::type_identity_t<P>... values) noexcept {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> values;
  };
  if (const cudaError_t e = admit(what); e != cudaSuccess) { return e; }
  const auto run = [](const Launch& where, Call call) {
    return run_grid(
        where,
        [](void* c) {
          auto* self = static_cast<Call*>(c);
          std::apply(self->kernel, self->values);
        },
        &call);
  };
  const Call call{kernel, {values...}};
  if (capture == nullptr) { return run(what, call); }
  capture->nodes.push_back([what, call, run] { return run(what, call); });
  return cudaSuccess;
}

/// Memory that kernels may use: exactly as large as requested, filled with 0xFF, known to the race checker.
void* device_allocate(std::size_t bytes, const char* name);
void device_free(void* p);
/// The host wrote these bytes.
void device_written(const void* p, std::size_t bytes);

template <class T>
std::uint64_t to_bits(T v) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
  T v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

extern const Collective shuffle_index, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all,
    sync_warp, match_any, reduce_add, reduce_min_unsigned, reduce_max_unsigned, reduce_min_signed,
    reduce_max_signed, reduce_and, reduce_or, reduce_xor;

}  // namespace kvtrim::emulator

// --- the runtime's functions that launchers call ----------------------------------------------------------------------
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

// --- CUDA's names ----------------------------------------------------------------------------------------------------
#define threadIdx (::kvtrim::emulator::current->thread)
#define blockIdx (::kvtrim::emulator::geometry.block)
#define blockDim (::kvtrim::emulator::geometry.block_dim)
#define gridDim (::kvtrim::emulator::geometry.grid_dim)

#define KVTRIM_EMULATOR_SITE ::kvtrim::emulator::Site site = ::kvtrim::emulator::Site::here()

inline void __syncthreads(KVTRIM_EMULATOR_SITE) {
  kvtrim::emulator::meet_block("__syncthreads", '.', 0, site);
}
inline int __syncthreads_count(int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<int>(kvtrim::emulator::meet_block("__syncthreads_count", '+', p != 0, site));
}
inline int __syncthreads_and(int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<int>(kvtrim::emulator::meet_block("__syncthreads_and", '&', p != 0, site));
}
inline int __syncthreads_or(int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<int>(kvtrim::emulator::meet_block("__syncthreads_or", '|', p != 0, site));
}
inline void __syncwarp(unsigned mask = ~0U, KVTRIM_EMULATOR_SITE) {
  kvtrim::emulator::meet(kvtrim::emulator::sync_warp, mask, 0, 0, 32, site);
}
template <class T>
T __shfl_sync(unsigned mask, T v, int lane, int width = 32, KVTRIM_EMULATOR_SITE) {
  using namespace kvtrim::emulator;
  return from_bits<T>(meet(shuffle_index,
                           mask,
                           to_bits(v),
                           static_cast<unsigned>(lane),
                           static_cast<unsigned>(width),
                           site));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, KVTRIM_EMULATOR_SITE) {
  using namespace kvtrim::emulator;
  return from_bits<T>(
      meet(shuffle_up, mask, to_bits(v), delta, static_cast<unsigned>(width), site));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, KVTRIM_EMULATOR_SITE) {
  using namespace kvtrim::emulator;
  return from_bits<T>(
      meet(shuffle_down, mask, to_bits(v), delta, static_cast<unsigned>(width), site));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, KVTRIM_EMULATOR_SITE) {
  using namespace kvtrim::emulator;
  return from_bits<T>(meet(shuffle_xor,
                           mask,
                           to_bits(v),
                           static_cast<unsigned>(lanes),
                           static_cast<unsigned>(width),
                           site));
}
inline unsigned __ballot_sync(unsigned mask, int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<unsigned>(
      kvtrim::emulator::meet(kvtrim::emulator::ballot, mask, p != 0, 0, 32, site));
}
inline int __any_sync(unsigned mask, int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<int>(kvtrim::emulator::meet(kvtrim::emulator::any, mask, p != 0, 0, 32, site));
}
inline int __all_sync(unsigned mask, int p, KVTRIM_EMULATOR_SITE) {
  return static_cast<int>(kvtrim::emulator::meet(kvtrim::emulator::all, mask, p != 0, 0, 32, site));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v, KVTRIM_EMULATOR_SITE) {
  using namespace kvtrim::emulator;
  return static_cast<unsigned>(meet(match_any, mask, to_bits(v), 0, 32, site));
}
#define KVTRIM_EMULATOR_REDUCE(name, type, collective)                               \
  inline type name(unsigned mask, type v, KVTRIM_EMULATOR_SITE) {                    \
    return static_cast<type>(kvtrim::emulator::meet(                                 \
        kvtrim::emulator::collective, mask, static_cast<unsigned>(v), 0, 32, site)); \
  }
KVTRIM_EMULATOR_REDUCE(__reduce_add_sync, unsigned, reduce_add)
KVTRIM_EMULATOR_REDUCE(__reduce_add_sync, int, reduce_add)
KVTRIM_EMULATOR_REDUCE(__reduce_min_sync, unsigned, reduce_min_unsigned)
KVTRIM_EMULATOR_REDUCE(__reduce_min_sync, int, reduce_min_signed)
KVTRIM_EMULATOR_REDUCE(__reduce_max_sync, unsigned, reduce_max_unsigned)
KVTRIM_EMULATOR_REDUCE(__reduce_max_sync, int, reduce_max_signed)
KVTRIM_EMULATOR_REDUCE(__reduce_and_sync, unsigned, reduce_and)
KVTRIM_EMULATOR_REDUCE(__reduce_or_sync, unsigned, reduce_or)
KVTRIM_EMULATOR_REDUCE(__reduce_xor_sync, unsigned, reduce_xor)
#undef KVTRIM_EMULATOR_REDUCE
#undef KVTRIM_EMULATOR_SITE

#define KVTRIM_EMULATOR_ATOMIC(name, expression)                                              \
  template <class T>                                                                          \
  __attribute__((always_inline)) inline T name(T* address, std::type_identity_t<T> operand) { \
    const std::uint64_t bits = kvtrim::emulator::to_bits(operand);                            \
    return kvtrim::emulator::from_bits<T>(kvtrim::emulator::atomic_update(                    \
        address,                                                                              \
        sizeof(T),                                                                            \
        [](std::uint64_t before, const std::uint64_t* operands) {                             \
          const T old = kvtrim::emulator::from_bits<T>(before);                               \
          const T v = kvtrim::emulator::from_bits<T>(operands[0]);                            \
          static_cast<void>(old);                                                             \
          return kvtrim::emulator::to_bits(static_cast<T>(expression));                       \
        },                                                                                    \
        &bits));                                                                              \
  }
KVTRIM_EMULATOR_ATOMIC(atomicAdd, old + v)
KVTRIM_EMULATOR_ATOMIC(atomicSub, old - v)
KVTRIM_EMULATOR_ATOMIC(atomicExch, v)
KVTRIM_EMULATOR_ATOMIC(atomicMin, old < v ? old : v)
KVTRIM_EMULATOR_ATOMIC(atomicMax, old > v ? old : v)
KVTRIM_EMULATOR_ATOMIC(atomicAnd, old& v)
KVTRIM_EMULATOR_ATOMIC(atomicOr, old | v)
KVTRIM_EMULATOR_ATOMIC(atomicXor, old ^ v)
#undef KVTRIM_EMULATOR_ATOMIC
template <class T>
inline T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  const std::uint64_t bits[2] = {kvtrim::emulator::to_bits(expected),
                                 kvtrim::emulator::to_bits(desired)};
  return kvtrim::emulator::from_bits<T>(kvtrim::emulator::atomic_update(
      address,
      sizeof(T),
      [](std::uint64_t old, const std::uint64_t* operands) {
        return old == operands[0] ? operands[1] : old;
      },
      bits));
}
inline void __threadfence() {
  kvtrim::emulator::fence();
}
inline void __threadfence_block() {}

template <class T>
inline T __ldg(const T* p) {
  kvtrim::emulator::check_aligned(p, sizeof(T));
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return __ldg(p);
}
template <class T>
inline T __ldcs(const T* p) {
  return __ldg(p);
}
template <class T>
inline void __stcs(T* p, T v) {
  kvtrim::emulator::check_aligned(p, sizeof(T));
  *p = v;
}
template <class T>
inline void __stcg(T* p, T v) {
  __stcs(p, v);
}
inline int __popc(unsigned v) {
  return std::popcount(v);
}
inline int __popcll(unsigned long long v) {
  return std::popcount(v);
}
inline int __clz(int v) {
  return std::countl_zero(static_cast<unsigned>(v));
}
inline int __ffs(int v) {
  return v != 0 ? std::countr_zero(static_cast<unsigned>(v)) + 1 : 0;
}
inline unsigned __float_as_uint(float f) {
  return std::bit_cast<unsigned>(f);
}
inline float __uint_as_float(unsigned u) {
  return std::bit_cast<float>(u);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float rsqrtf(float x) {
  return 1.0F / std::sqrt(x);
}
inline void sincospif(float x, float* sine, float* cosine) {
  constexpr double pi = 3.14159265358979323846;
  *sine = static_cast<float>(std::sin(pi * static_cast<double>(x)));
  *cosine = static_cast<float>(std::cos(pi * static_cast<double>(x)));
}
inline int min(int a, int b) {
  return a < b ? a : b;
}
inline int max(int a, int b) {
  return a > b ? a : b;
}
inline unsigned min(unsigned a, unsigned b) {
  return a < b ? a : b;
}
inline unsigned max(unsigned a, unsigned b) {
  return a > b ? a : b;
}
