// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only file that may ask which compiler this is.

#include <bit>
#include <cassert>
#include <cstring>
#include <limits>

// nvcc's own default is C++17.
#if __cplusplus < 202002L
#  error "kvtrim: compile with -std=c++20"
#endif

// Compensated sums, NaN and infinities need arithmetic as it is written: without it sums lose digits and a query that
// overflows makes every score NaN.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ == 1)
#  error "kvtrim: compile without -ffast-math and -ffinite-math-only the files that include kvtrim"
#endif

// Plans are sent as bytes, f16 and bf16 are converted by their bits, scores are ordered by theirs.
static_assert(std::endian::native == std::endian::little,
              "kvtrim: numbers in memory must begin with their lowest byte");
static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559 &&
                  sizeof(float) == 4 && sizeof(double) == 8,
              "kvtrim: float and double must be the IEEE 754 formats of 32 and 64 bits");

#if defined(__CUDACC__)
// Always inlined: a call from a kernel would put its view on the stack.
#  define KVTRIM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#  define KVTRIM_HOST_DEVICE
#endif

// Off the hot path and never inlined: keeps the caller's code small.
#define KVTRIM_COLD [[gnu::noinline, gnu::cold]]

// Asks for memory that will be read soon.
#if defined(__GNUC__)
#  define KVTRIM_PREFETCH(address) __builtin_prefetch(address)
#else
#  define KVTRIM_PREFETCH(address) static_cast<void>(address)
#endif

// Reads a value from bytes that may have been written as another type of that size. In a kernel memory has no types, and a
// copy of bytes would be a load per byte.
#if defined(__CUDA_ARCH__)
#  define KVTRIM_LOAD(value, bytes) \
    static_cast<void>((value) = *reinterpret_cast<const decltype(value)*>(bytes))
#else
#  define KVTRIM_LOAD(value, bytes) static_cast<void>(std::memcpy(&(value), bytes, sizeof(value)))
#endif

// A broken precondition is a bug in the caller, not a condition to report. Without assertions the
// condition is still compiled, never evaluated: it cannot rot, and its variables count as used.
#if defined(NDEBUG)
#  define KVTRIM_ASSERT(...) (static_cast<void>(sizeof((__VA_ARGS__) ? 1 : 0)))
#else
#  define KVTRIM_ASSERT(...) assert((__VA_ARGS__))
#endif

// Work that a test counts (tests/counts defines KVTRIM_COUNTS before the first header); does nothing elsewhere.
#ifdef KVTRIM_COUNTS
#  include <cstdint>
namespace kvtrim::detail {
struct Counts {
  std::int64_t rows_read = 0;      // keys loaded for scores
  std::int64_t product_flops = 0;  // of their products with queries
};
inline thread_local Counts work_counts;
}  // namespace kvtrim::detail
#  define KVTRIM_COUNT(counter, n) (::kvtrim::detail::work_counts.counter += (n))
#else
#  define KVTRIM_COUNT(counter, n) static_cast<void>(0)
#endif
