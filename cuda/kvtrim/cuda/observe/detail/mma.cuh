// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tensor cores' product of a warp: d = a b + c, 16 x 8 x 16, 16-bit operands, fp32 sums. What lane i = 4 g + t
// holds (PTX manual, mma.m16n8k16 with .f16 or .bf16):
//   a, 16 x 16: registers 0..3 are rows g, g + 8, g, g + 8 at columns 2t, 2t + 1 (0 and 1) or 2t + 8, 2t + 9 (2 and 3)
//   b, 16 x 8:  registers 0, 1 are column g at rows 2t, 2t + 1 and 2t + 8, 2t + 9
//   c and d, 16 x 8: values 0..3 are (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// The lower index of a pair is in the lower half of its register.

#include <kvtrim/cuda/detail/device.hpp>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// `d += a b` on the tensor cores, by all lanes of the warp together. `T` is `__half` or `__nv_bfloat16`.
template <class T>
struct WarpProduct {
  static KVTRIM_DEVICE void add(float (&d)[4],
                                const std::uint32_t (&a)[4],
                                const std::uint32_t (&b)[2]) {
#if defined(KVTRIM_EMULATED)
    struct Operands {
      float* d;
      const std::uint32_t* a;
      const std::uint32_t* b;
    } mine{d, a, b};
    emulator::whole_warp(
        "mma.m16n8k16",
        &mine,
        [](void* const operands[32]) {
          const auto value = [](std::uint32_t bits, int part) {
            const auto x = static_cast<std::uint16_t>(bits >> (16 * part));
            return std::is_same_v<T, __half> ? f16_to_float(x) : bf16_to_float(x);
          };
          float rows[16][16];
          float columns[8][16];
          for (int lane = 0; lane < 32; ++lane) {
            const auto* const o = static_cast<const Operands*>(operands[lane]);
            const int g = lane / 4;
            const int t = lane % 4;
            for (int part = 0; part < 2; ++part) {
              for (int r = 0; r < 4; ++r) {
                rows[g + 8 * (r % 2)][2 * t + part + 8 * (r / 2)] = value(o->a[r], part);
              }
              for (int r = 0; r < 2; ++r) {
                columns[g][2 * t + part + 8 * r] = value(o->b[r], part);
              }
            }
          }
          for (int lane = 0; lane < 32; ++lane) {
            const auto* const o = static_cast<const Operands*>(operands[lane]);
            for (int i = 0; i < 4; ++i) {
              const float* const row = rows[lane / 4 + 8 * (i / 2)];
              const float* const column = columns[lane % 4 * 2 + i % 2];
              float sum = o->d[i];
              for (int k = 0; k < 16; ++k) { sum += row[k] * column[k]; }
              o->d[i] = sum;
            }
          }
        },
        emulator::Site::here());
#else
    if constexpr (std::is_same_v<T, __half>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, "
          "{%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
  }
};

}  // namespace kvtrim::cuda::detail
