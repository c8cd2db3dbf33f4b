// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention kernel on tensor cores. The order of the features does not matter to a dot product, so a lane's 16-byte
// chunk of a key, as it lies in memory, is its part of two fragments (registers 0 and 2 of one product, then of the
// next), and the same chunk of a query is the other operand's: no ldmatrix, no K in shared memory, only 16-byte loads.
// Queries are copied as they are (cp.async), with the halves swapped in every second row so that eight lanes read all 32
// banks.

#include <kvtrim/cuda/observe/detail/attention.cuh>
#include <kvtrim/cuda/observe/detail/mma.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Dot products on tensor cores, eight queries at a time. `Mma` is `WarpProduct<T>`; tests put a wrong one.
template <class T, int D, class Mma>
struct MmaProduct {
  using Type = T;
  static constexpr int chunks = D / 8;
  static constexpr int steps = chunks / 4;  // chunks per lane
  static constexpr int keys = 4;
  static constexpr int pad = 8;
  static constexpr int queries_a_lane = 2;
  static constexpr int chunk_queries = attention_threads;
  static_assert(sizeof(T) == 2 && tile_keys(D) == 32 * keys && D % 64 == 0);

  std::uint32_t fragment[keys / 2][2 * steps][4];  // in the product's order: no moves in the loop
  uint4* staged;                                   // [chunk_queries, chunks]
  const uint4* even;  // what this lane reads of staged query 0: chunks 4 i + t of even i ...
  const uint4* odd;   // ... and of odd i, which lie the other way round in odd queries

  KVTRIM_DEVICE explicit MmaProduct(uint4* memory) : staged(memory) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const uint4* const mine = memory + lane / 4 * chunks + (lane & 3);
    const int swapped = lane / 4 % 2 * 4;
    even = mine + swapped;
    odd = mine - swapped;
  }

  static KVTRIM_DEVICE int place(int q, int c) { return q * chunks + (c ^ ((q & 1) * 4)); }

  // Whether a half of the word has an exponent of all ones.
  static KVTRIM_DEVICE bool has_bad(std::uint32_t word) {
    constexpr std::uint32_t exponent = std::is_same_v<T, __half> ? 0x7C00'7C00U : 0x7F80'7F80U;
    constexpr std::uint32_t one = std::is_same_v<T, __half> ? 0x0400'0400U : 0x0080'0080U;
    return (((word & exponent) + one) & 0x8000'8000U) != 0;
  }
  static KVTRIM_DEVICE bool has_bad(const uint4& v) {
    return has_bad(v.x) | has_bad(v.y) | has_bad(v.z) | has_bad(v.w);
  }

  template <class Chunk>
  KVTRIM_DEVICE bool take_key(int j, Chunk&& chunk) {
    const int t = static_cast<int>(threadIdx.x) & 3;
    uint4 bits[steps];
    bool bad = false;
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      bits[i] = chunk(4 * i + t);
      bad = bad | has_bad(bits[i]);
    }
    // Values that are not finite must not reach the product. The mask also creates new registers in the product's order:
    // without it ptxas keeps those of the loads and moves 64 of them for every eight queries.
    const std::uint32_t keep = bad ? 0 : ~0U;
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      std::uint32_t(&low)[4] = fragment[j / 2][2 * i];
      std::uint32_t(&high)[4] = fragment[j / 2][2 * i + 1];
      low[j % 2] = bits[i].x & keep;
      low[j % 2 + 2] = bits[i].y & keep;
      high[j % 2] = bits[i].z & keep;
      high[j % 2 + 2] = bits[i].w & keep;
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
    float sums[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    KVTRIM_UNROLL
    for (int i = 0; i < steps; ++i) {
      const uint4 x = (i % 2 == 0 ? even : odd)[b * chunks + 4 * i];
      const std::uint32_t low[2] = {x.x, x.y};
      const std::uint32_t high[2] = {x.z, x.w};
      KVTRIM_UNROLL
      for (int m = 0; m < 2; ++m) { Mma::add(sums[m], fragment[m][2 * i], low); }
      KVTRIM_UNROLL
      for (int m = 0; m < 2; ++m) { Mma::add(sums[m], fragment[m][2 * i + 1], high); }
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
  Product product(staged);
  attend(a, product, facts[0], warp_partials, warp_oldest);
}

}  // namespace kvtrim::cuda::detail
