// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention kernel on tensor cores. A dot product does not care in which order its features come, so a lane's 16-byte
// chunk of a key, as it lies in memory, is its part of two fragments (registers 0 and 2 of one product, then of the
// next), and the same chunk of a query is the other operand's: no ldmatrix, no K in shared memory, only 16-byte loads.
// Queries are copied as they are (cp.async), a row's halves swapped in every second row so that eight lanes read all 32
// banks.

#include <kvtrim/cuda/detail/mma.cuh>
#include <kvtrim/cuda/score/attention.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Dot products on tensor cores, eight queries at a time. `Mma` is `WarpProduct<T>`; tests put a wrong one.
template <class T, int D, class Mma>
struct MmaProduct {
  static constexpr int chunks = D / 8;
  static constexpr int steps = chunks / 4;  // chunks of a lane
  static constexpr int keys = 4;
  static constexpr int pad = 8;
  static constexpr int queries_a_lane = 2;
  static constexpr int chunk_queries = attention_threads;
  static_assert(sizeof(T) == 2 && tile_keys(D) == 32 * keys && D % 64 == 0);

  uint4 key[keys][steps];
  uint4* staged;  // [chunk_queries, chunks]

  static KVTRIM_DEVICE int place(int q, int c) { return q * chunks + (c ^ ((q & 1) * 4)); }

  // Whether a half of the word has an exponent of ones.
  static KVTRIM_DEVICE bool has_bad(std::uint32_t word) {
    constexpr std::uint32_t exponent = std::is_same_v<T, __half> ? 0x7C00'7C00U : 0x7F80'7F80U;
    constexpr std::uint32_t one = std::is_same_v<T, __half> ? 0x0400'0400U : 0x0080'0080U;
    return (((word & exponent) + one) & 0x8000'8000U) != 0;
  }
  static KVTRIM_DEVICE bool has_bad(const uint4& v) {
    return has_bad(v.x) || has_bad(v.y) || has_bad(v.z) || has_bad(v.w);
  }

  KVTRIM_DEVICE bool load_key(const AttentionArgs& a, const KeyRow* row, int lane_in_quad, int j) {
    bool bad = false;
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      key[j][i] = make_uint4(0, 0, 0, 0);
      if (row != nullptr) { key[j][i] = load_chunk<T>(a, *row, 4 * i + lane_in_quad); }
      bad = bad || has_bad(key[j][i]);
    }
    return bad;
  }

  KVTRIM_DEVICE void stage(const AttentionArgs& a,
                           const KeyTile& tile,
                           const QueryRange& range,
                           std::int32_t p0,
                           std::int32_t count,
                           QueryFacts<chunk_queries>& facts) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int x = thread; x < count * chunks; x += attention_threads) {
      const int q = x / chunks;
      const int c = x % chunks;
      const std::int32_t i = (p0 + q) % range.padded;
      uint4* const to = staged + place(q, c);
      if (i < range.votes) {
        const std::int64_t offset =
            query_offset(a.queries.block,
                         tile.sequence,
                         tile.layer,
                         raw(tile.head) * range.group + (p0 + q) / range.padded,
                         range.first + i);
        async_copy_16(to, reinterpret_cast<const T*>(a.queries.block.data) + offset + c * 8);
      } else {
        *to = make_uint4(0, 0, 0, 0);
      }
    }
    async_commit();
    async_wait<0>();
    __syncthreads();
    if (thread < count) {
      bool bad = false;
      for (int c = 0; c < chunks; ++c) { bad = bad || has_bad(staged[place(thread, c)]); }
      if (bad) {
        for (int c = 0; c < chunks; ++c) { staged[place(thread, c)] = make_uint4(0, 0, 0, 0); }
      }
      const bool given = (p0 + thread) % range.padded < range.votes;
      note_query(a, tile, range, p0 + thread, given && !bad, facts, thread);
    }
    __syncthreads();
  }

  KVTRIM_DEVICE void dots(int b, float (&out)[2][keys]) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int q = b + lane / 4;
    float sums[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      const uint4 x = staged[place(q, 4 * i + (lane & 3))];
      const std::uint32_t low[2] = {x.x, x.y};
      const std::uint32_t high[2] = {x.z, x.w};
      KVTRIM_UNROLL
      for (int m = 0; m < 2; ++m) {
        const uint4& upper = key[2 * m][i];
        const uint4& lower = key[2 * m + 1][i];
        const std::uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
        const std::uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
        Mma::add(sums[m], first, low);
        Mma::add(sums[m], second, high);
      }
    }
    KVTRIM_UNROLL
    for (int m = 0; m < 2; ++m) {
      out[0][2 * m] = sums[m][0];
      out[1][2 * m] = sums[m][1];
      out[0][2 * m + 1] = sums[m][2];
      out[1][2 * m + 1] = sums[m][3];
    }
  }
  static KVTRIM_DEVICE int query_of(int b, int n) {
    return b + 2 * (static_cast<int>(threadIdx.x) & 3) + n;
  }
};

/// Attention of queries to tiles of keys, on tensor cores.
template <class T, int D, class Mma = WarpProduct<T>>
__global__ void KVTRIM_LAUNCH_BOUNDS(attention_threads, 3) attention_mma_kernel(AttentionArgs a) {
  using Product = MmaProduct<T, D, Mma>;
  KVTRIM_SHARED(uint4, staged, [Product::chunk_queries * Product::chunks]);
  KVTRIM_SHARED(QueryFacts<Product::chunk_queries>, facts, [1]);
  KVTRIM_SHARED(float2, warp_partials, [attention_threads / 32][Product::chunk_queries]);
  KVTRIM_SHARED(std::int32_t, warp_oldest, [attention_threads / 32]);
  Product product;
  product.staged = staged;
  attend(a, product, facts[0], warp_partials, warp_oldest);
}

}  // namespace kvtrim::cuda::detail
