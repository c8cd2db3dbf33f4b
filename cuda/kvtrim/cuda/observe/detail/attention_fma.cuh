// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention kernel with fused multiply-adds: any key type, any head dim of instances.cuh, products in fp32.

#include <kvtrim/cuda/observe/detail/attention.cuh>

#include <cstdint>
#include <type_traits>

namespace kvtrim::cuda::detail {

/// Values of the elements of one 32-bit word.
template <class T>
KVTRIM_DEVICE void values_of(std::uint32_t word, float (&out)[4 / sizeof(T)]) {
  if constexpr (std::is_same_v<T, float>) {
    out[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    out[0] = __uint_as_float(word << 16U);
    out[1] = __uint_as_float(word & 0xFFFF'0000U);
  } else if constexpr (std::is_same_v<T, __half>) {
    out[0] = half_to_float(word);
    out[1] = half_to_float(word >> 16U);
  } else {
    KVTRIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = word >> (8 * i) & 0xFFU;
      if constexpr (std::is_same_v<T, __nv_fp8_e5m2>) {  // the upper byte of a half
        out[i] = half_to_float(bits << 8U);
      } else {
        // As a half, exponents are 8 too low. The one NaN has all bits set.
        const std::uint32_t half = (bits & 0x80U) << 8U | (bits & 0x7FU) << 7U;
        out[i] =
            (bits & 0x7FU) == 0x7FU ? __uint_as_float(0x7FC0'0000U) : half_to_float(half) * 256.0F;
      }
    }
  }
}

/// Dot products with fused multiply-adds, four queries at a time: each lane of a quad multiplies its chunks of its keys
/// with all four, then the quad adds up so that lane t ends up with query t.
template <class T, int D>
struct FmaProduct {
  using Type = T;
  static constexpr int per_chunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int chunks = D / per_chunk;
  static constexpr int steps = (chunks + 3) / 4;  // chunks per lane; the last may be padding
  static constexpr int features = steps * per_chunk;
  static constexpr int keys = tile_keys(D) / 32;
  static constexpr int pad = 4;
  static constexpr int queries_a_lane = 1;
  static constexpr int chunk_queries = 32;
  static constexpr int row_vectors = features;  // of four floats: a quad's features
  static_assert(D % per_chunk == 0);

  float key[keys][features];
  float4* staged;  // [chunk_queries, row_vectors]; vector 4 k + t is lane t's k-th

  const float4* read;  // what this lane reads of staged query 0

  KVTRIM_DEVICE explicit FmaProduct(float4* memory)
      : staged(memory), read(memory + (static_cast<int>(threadIdx.x) & 3)) {}

  // Key j from its 16-byte chunks, `chunk(c)`; whether some feature is not finite.
  template <class Chunk>
  KVTRIM_DEVICE bool take_key(int j, Chunk&& chunk) {
    const int t = static_cast<int>(threadIdx.x) & 3;
    bool bad = false;
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      const uint4 bits = 4 * i + t < chunks ? chunk(4 * i + t) : make_uint4(0, 0, 0, 0);
      const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
      KVTRIM_UNROLL
      for (int w = 0; w < 4; ++w) {
        constexpr int count = 4 / static_cast<int>(sizeof(T));
        float values[count];
        values_of<T>(words[w], values);
        KVTRIM_UNROLL
        for (int e = 0; e < count; ++e) {
          key[j][i * per_chunk + w * count + e] = values[e];
          bad = bad | !is_finite(values[e]);
        }
      }
    }
    return bad;
  }

  // Puts padded queries p0 .. p0 + count - 1 into shared memory; ends with the block synchronised.
  KVTRIM_DEVICE void stage(const AttentionArgs& a,
                           const KeyTile& tile,
                           const QueryRange& range,
                           std::int32_t p0,
                           std::int32_t count,
                           QueryFacts<chunk_queries>& facts) {
    constexpr int warps = attention_threads / 32;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    for (int q = static_cast<int>(threadIdx.x) >> 5; q < count; q += warps) {
      const std::int32_t p = p0 + q;
      const std::int32_t i = p % range.padded;
      const bool given = i < range.votes;
      float4* const row = staged + q * row_vectors;
      bool bad = !given;
      std::int64_t offset = 0;
      if (given) {
        offset = query_offset(a.queries.block,
                              tile.sequence,
                              tile.layer,
                              raw(tile.head) * range.group + p / range.padded,
                              range.first + i);
      }
      for (int v = lane; v < row_vectors; v += 32) {
        constexpr int in_chunk = per_chunk / 4;
        const int k = v / 4;
        const int c = k / in_chunk * 4 + v % 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (given && c < chunks) {
          x = load_query_4(a.queries.block.data,
                           offset + c * per_chunk + k % in_chunk * 4,
                           a.queries.dtype,
                           a.query_vectors);
        }
        bad = bad || !is_finite(x.x) || !is_finite(x.y) || !is_finite(x.z) || !is_finite(x.w);
        row[v] = x;
      }
      bad = __any_sync(full_warp, bad ? 1 : 0) != 0;
      if (bad) {
        for (int v = lane; v < row_vectors; v += 32) { row[v] = make_float4(0, 0, 0, 0); }
      }
      if (lane == 0) { note_query(a, tile, range, p, !bad, facts, q); }
    }
    __syncthreads();
  }

  // dots[0][j]: key j with staged query b + lane in the quad.
  KVTRIM_DEVICE void dots(int b, float (&out)[1][keys]) const {
    float sums[keys][4];
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) { sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0; }
    const float4* const rows = read + b * row_vectors;
    KVTRIM_UNROLL
    for (int k = 0; k < features / 4; ++k) {
      KVTRIM_UNROLL
      for (int q = 0; q < 4; ++q) {
        const float4 x = rows[q * row_vectors + 4 * k];
        KVTRIM_UNROLL
        for (int j = 0; j < keys; ++j) {
          sums[j][q] += key[j][4 * k] * x.x;
          sums[j][q] += key[j][4 * k + 1] * x.y;
          sums[j][q] += key[j][4 * k + 2] * x.z;
          sums[j][q] += key[j][4 * k + 3] * x.w;
        }
      }
    }
    const bool upper = (threadIdx.x & 2U) != 0;
    const bool odd = (threadIdx.x & 1U) != 0;
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) {
      float kept[2];
      KVTRIM_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float mine = upper ? sums[j][2 + i] : sums[j][i];
        const float theirs = upper ? sums[j][i] : sums[j][2 + i];
        kept[i] = mine + __shfl_xor_sync(full_warp, theirs, 2);
      }
      const float mine = odd ? kept[1] : kept[0];
      const float theirs = odd ? kept[0] : kept[1];
      out[0][j] = mine + __shfl_xor_sync(full_warp, theirs, 1);
    }
  }
  // Which staged query dots[i] belongs to.
  static KVTRIM_DEVICE int query_of(int b, int) { return b + (static_cast<int>(threadIdx.x) & 3); }
};

/// Attention of queries to tiles of keys, with fused multiply-adds.
template <class T, int D>
__global__ void KVTRIM_LAUNCH_BOUNDS(attention_threads, 2) attention_kernel(AttentionArgs a) {
  using Product = FmaProduct<T, D>;
  KVTRIM_SHARED(float4, staged, [Product::chunk_queries * Product::row_vectors]);
  KVTRIM_SHARED(QueryFacts<Product::chunk_queries>, facts, [1]);
  KVTRIM_SHARED(float2, warp_partials, [attention_threads / 32][Product::chunk_queries]);
  KVTRIM_SHARED(std::int32_t, warp_oldest, [attention_threads / 32]);
  Product product(staged);
  attend(a, product, facts[0], warp_partials, warp_oldest);
}

}  // namespace kvtrim::cuda::detail
