// SPDX-License-Identifier: Apache-2.0
#pragma once

// One kernel for all that looks at keys with many queries: window scores, their normalisation, column sums.
//
// Keys stay in registers and queries pass by: a block holds one tile of keys for as long as it takes to see every query,
// so each key is read once, a score is summed by one thread in one order (no atomics), and K never goes through shared
// memory. Four neighbouring lanes share a key, each with every fourth 16-byte chunk of it: eight keys are eight runs of
// 64 bytes. A lane's keys and its place in the quad are the same for both products, fused multiply-adds (here) and
// tensor cores (attention_mma.cuh), so all that follows a logit is written once.
//
// Specification: score/window.hpp, score/column_sums.hpp.

#include <kvtrim/core/compensated.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/score/key_tiles.cuh>
#include <kvtrim/cuda/score/queries.cuh>
#include <kvtrim/score/window_params.hpp>

#include <cstdint>
#include <limits>

namespace kvtrim::cuda::detail {

/// What becomes of the logits.
enum class AttentionUse : std::uint8_t {
  window_scores,  ///< probabilities, reduced over rows and heads, to `raw`
  partials,       ///< maximum and sum of exponentials of a tile, to `partials`
  column_sums,    ///< probabilities, summed into the score planes
};

/// Arguments of the attention kernels.
struct AttentionArgs {
  CacheView view;
  DeviceQueries queries;
  KeyScales key_scales;
  TileList tiles;
  std::int64_t chunk_stride;  // of the keys; 0: element by element
  std::int32_t most_queries;  // padded queries of an item; what the workspace is indexed by
  std::int32_t most_tiles;    // of a table; likewise
  std::int32_t window;        // queries that vote: the last so many
  AttentionUse use;
  Reduction rows;
  Reduction group;
  bool query_vectors;         // queries may be loaded by four elements
  bool squared;               // column sums: of squared probabilities
  bool age_normalised;        // column sums: `scores` are divided by the age
  double decay;               // column sums
  float* raw;                 // [items, max_rows] by live index, or rank
  const std::int32_t* ranks;  // [items, max_rows] by live index; null: tables are ordered
  const float* lse2;          // [items, most_queries] base 2; null: the engine's
  float2* partials;           // [items, most_queries, most_tiles]
  SequencePlane scores;       // column sums: sum over both planes; absent: not wanted
};

inline constexpr int attention_threads = 128;
inline constexpr std::int32_t never_seen = std::numeric_limits<std::int32_t>::max();
inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// What is known of the queries of a chunk beside their features. A query without a vote has an LSE of +inf: all its
/// probabilities are 0, which changes neither a sum nor a maximum.
template <int Queries>
struct QueryFacts {
  float lse2[Queries];
  std::int32_t position[Queries];
  float weight[Queries];
};

/// The queries of one item: votes of head 0, padding to a multiple of `pad`, votes of head 1, ...
struct QueryRange {
  std::int32_t group;
  std::int32_t first;  // of the block's rows
  std::int32_t votes;  // a head
  std::int32_t padded;
  [[nodiscard]] KVTRIM_DEVICE std::int32_t count() const { return group * padded; }
};

KVTRIM_DEVICE QueryRange query_range(const AttentionArgs& a, SequenceId s, std::int32_t pad) {
  QueryRange q;
  const std::int32_t given = query_count(a.queries.block, s);
  q.group = a.queries.block.query_heads / a.view.kv_heads;
  q.votes = given < a.window ? given : a.window;
  q.first = given - q.votes;
  q.padded = (q.votes + pad - 1) / pad * pad;
  return q;
}

/// base^n.
KVTRIM_DEVICE double power(double base, std::int32_t n) {
  double result = 1;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) { result *= base; }
    base *= base;
  }
  return result;
}

/// Fills in the facts of padded query `p`; `readable`: it is a query, and all its features are finite.
template <int Queries>
KVTRIM_DEVICE void note_query(const AttentionArgs& a,
                              const KeyTile& tile,
                              const QueryRange& range,
                              std::int32_t p,
                              bool readable,
                              QueryFacts<Queries>& facts,
                              std::int32_t slot) {
  const std::int32_t head = p / range.padded;
  const std::int32_t i = range.first + p % range.padded;
  float lse2 = infinity;
  std::int32_t position = never_seen;
  float weight = 1;
  if (readable) {
    const QueryBlock& b = a.queries.block;
    const std::int32_t query_head = raw(tile.head) * range.group + head;
    float given = 0;
    if (a.lse2 != nullptr) {
      given = a.lse2[static_cast<std::int64_t>(tile.item) * a.most_queries + p];
    } else if (a.use != AttentionUse::partials) {
      given = query_lse2(b, tile.sequence, tile.layer, query_head, i);
    }
    if (is_finite(given)) { lse2 = given; }
    position = query_position(b, tile.sequence, i, tile.next_position);
    if (a.decay != 1) {
      weight = static_cast<float>(power(a.decay, range.first + range.votes - 1 - i));
    }
  }
  facts.lse2[slot] = lse2;
  facts.position[slot] = position;
  facts.weight[slot] = weight;
}

/// 2^x; relative error 2^-22 on the device, results below 2^-126 are 0.
KVTRIM_DEVICE float exp2_of(float x) {
#if defined(KVTRIM_EMULATED)
  return std::exp2(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

KVTRIM_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(full_warp, x, 1);
  return x + __shfl_xor_sync(full_warp, x, 2);
}
KVTRIM_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(full_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(full_warp, x, 2));
}

/// Largest of the logits that a warp's eight quads have of one query, and the sum of 2^(logit - largest).
template <int Keys>
KVTRIM_DEVICE float2 partial_of(const float (&logit)[Keys]) {
  float largest = logit[0];
  KVTRIM_UNROLL
  for (int j = 1; j < Keys; ++j) { largest = fmaxf(largest, logit[j]); }
  KVTRIM_UNROLL
  for (int d = 4; d < 32; d <<= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, d));
  }
  const float origin = largest > -infinity ? largest : 0;  // all unseen: exponentials are 0
  float sum = 0;
  KVTRIM_UNROLL
  for (int j = 0; j < Keys; ++j) { sum += exp2_of(logit[j] - origin); }
  KVTRIM_UNROLL
  for (int d = 4; d < 32; d <<= 1) { sum += __shfl_xor_sync(full_warp, sum, d); }
  return make_float2(largest, sum);
}

/// Reduces probabilities over the queries of a head, then over the heads: each lane those of its own queries, the quad's
/// lanes together at the end of a chunk. All lanes of a quad hold the same results.
template <int Keys>
struct Reducer {
  float part[Keys];   // of this lane, since the last flush
  float sum[Keys];    // of this head; of all of them for column sums
  float rest[Keys];   // rounding error of `sum`
  float group[Keys];  // of the heads that ended
  std::int32_t votes;
  std::int32_t heads;

  KVTRIM_DEVICE void clear() {
    KVTRIM_UNROLL
    for (int j = 0; j < Keys; ++j) { part[j] = sum[j] = rest[j] = group[j] = 0; }
    votes = heads = 0;
  }
  KVTRIM_DEVICE void flush(bool maximum) {
    KVTRIM_UNROLL
    for (int j = 0; j < Keys; ++j) {
      if (maximum) {
        sum[j] = fmaxf(sum[j], quad_max(part[j]));
      } else {
        add_compensated(sum[j], rest[j], quad_sum(part[j]));
      }
      part[j] = 0;
    }
  }
  KVTRIM_DEVICE void end_head(Reduction rows, Reduction heads_by) {
    flush(rows == Reduction::max);
    votes += __shfl_xor_sync(full_warp, votes, 1);
    votes += __shfl_xor_sync(full_warp, votes, 2);
    const float divisor = rows == Reduction::mean ? static_cast<float>(votes) : 1.0F;
    KVTRIM_UNROLL
    for (int j = 0; j < Keys; ++j) {
      const float value = (sum[j] + rest[j]) / divisor;
      if (votes > 0) {
        group[j] = heads_by == Reduction::max ? fmaxf(group[j], value) : group[j] + value;
      }
      sum[j] = rest[j] = 0;
    }
    heads += votes > 0 ? 1 : 0;
    votes = 0;
  }
};

/// Chunk `c` of the key at `row`, by one load.
KVTRIM_DEVICE uint4 load_chunk(const AttentionArgs& a, const std::byte* row, int c) {
  return __ldg(reinterpret_cast<const uint4*>(row + c * a.chunk_stride));
}

/// The same element by element, for rows that are not made of aligned chunks. Never unrolled: it is the slow path.
template <class T>
KVTRIM_DEVICE uint4 gather_chunk(const AttentionArgs& a, const std::byte* row, int c) {
  constexpr int in_word = 4 / static_cast<int>(sizeof(T));
  using Bits = std::conditional_t<sizeof(T) == 4,
                                  std::uint32_t,
                                  std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint8_t>>;
  uint4 v = make_uint4(0, 0, 0, 0);
  KVTRIM_NO_UNROLL
  for (int w = 0; w < 4; ++w) {
    std::uint32_t word = 0;
    KVTRIM_UNROLL
    for (int e = 0; e < in_word; ++e) {
      const std::int32_t d = (4 * c + w) * in_word + e;
      const Bits bits = *reinterpret_cast<const Bits*>(row + a.view.k.feature_offset(d));
      word |= static_cast<std::uint32_t>(bits) << (e * 8 * static_cast<int>(sizeof(T)));
    }
    v = make_uint4(v.y, v.z, v.w, word);
  }
  return v;
}

/// Values of the elements of one 32-bit word.
template <class T>
KVTRIM_DEVICE void values_of(std::uint32_t word, float (&out)[4 / sizeof(T)]) {
  if constexpr (std::is_same_v<T, float>) {
    out[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    out[0] = __uint_as_float(word << 16U);
    out[1] = __uint_as_float(word & 0xFFFF'0000U);
  } else if constexpr (std::is_same_v<T, __half>) {
    const auto widened = [](std::uint32_t bits) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    };
    out[0] = widened(word & 0xFFFFU);
    out[1] = widened(word >> 16U);
  } else {
    KVTRIM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t bits = word >> (8 * i) & 0xFFU;
      if constexpr (std::is_same_v<T, __nv_fp8_e5m2>) {  // the upper byte of a half
        out[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits << 8U)));
      } else {
        // Exponents are 120 too low; the product normalises subnormals too. The one NaN has all bits set.
        const float magnitude = (bits & 0x7FU) == 0x7FU ? __uint_as_float(0x7FC0'0000U)
                                                        : __uint_as_float((bits & 0x7FU) << 20U) *
                                                              __uint_as_float(0x7B80'0000U);
        out[i] = (bits & 0x80U) != 0 ? -magnitude : magnitude;
      }
    }
  }
}

/// Dot products by fused multiply-adds, four queries at a time: each lane of a quad multiplies its chunks of its keys with
/// all four, then the quad adds up so that lane t is left with query t.
template <class T, int D>
struct FmaProduct {
  using Type = T;
  static constexpr int per_chunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int chunks = D / per_chunk;
  static constexpr int steps = (chunks + 3) / 4;  // chunks of a lane; the last may be padding
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

  // Puts padded queries p0 .. p0 + count - 1 into shared memory; ends with the block in step.
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

/// The body of the attention kernels: all tiles of a block, all queries of a tile.
template <class Product>
KVTRIM_DEVICE void attend(const AttentionArgs& a,
                          Product& product,
                          QueryFacts<Product::chunk_queries>& facts,
                          float2 (&warp_partials)[attention_threads / 32][Product::chunk_queries],
                          std::int32_t (&warp_oldest)[attention_threads / 32]) {
  constexpr int keys = Product::keys;
  constexpr int step = Product::pad;
  constexpr int warps = attention_threads / 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  const int t = lane & 3;
  const bool sums = a.use == AttentionUse::column_sums;
  const std::int32_t tiles = a.tiles.starts[a.tiles.tables];
  // A block's tiles follow each other, so that it stages the queries of a head once. Those of column sums do not: early
  // tiles are seen by more queries.
  const std::int64_t blocks = gridDim.x;
  const auto begin =
      sums ? static_cast<std::int32_t>(blockIdx.x)
           : static_cast<std::int32_t>(tiles * static_cast<std::int64_t>(blockIdx.x) / blocks);
  const std::int32_t end =
      sums
          ? tiles
          : static_cast<std::int32_t>(tiles * (static_cast<std::int64_t>(blockIdx.x) + 1) / blocks);
  const std::int32_t stride = sums ? static_cast<std::int32_t>(blocks) : 1;
  std::int32_t staged_item = -1;

  for (std::int32_t i = begin; i < end; i += stride) {
    const KeyTile tile = tile_at(a.view, a.tiles, i);
    if (!sums && tile.live <= a.window) { continue; }  // all columns are the window's own
    const QueryRange range = query_range(a, tile.sequence, Product::pad);

    // Addresses of all keys first, then all loads: nothing between them waits for either.
    std::int32_t position[keys];
    const std::byte* at[keys];
    const std::int32_t first = tile.first + warp * 8 * keys + lane / 4;
    bool chunks = a.chunk_stride != 0;
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) {
      const std::int32_t row = first + 8 * j;
      at[j] = nullptr;
      position[j] = never_seen;
      if (tile.holds(row)) {
        at[j] = a.view.key(tile.sequence, tile.layer, tile.head, row);
        position[j] = raw(a.view.position(tile.sequence, tile.layer, tile.head, row));
      }
      chunks = chunks && (reinterpret_cast<std::uintptr_t>(at[j]) & 15U) == 0;
    }
    std::int32_t bad = 0;
    const uint4 none = make_uint4(0, 0, 0, 0);
    if (__all_sync(full_warp, chunks ? 1 : 0) != 0) {
      KVTRIM_UNROLL
      for (int j = 0; j < keys; ++j) {
        const bool is_bad = product.take_key(
            j, [&](int c) { return at[j] != nullptr ? load_chunk(a, at[j], c) : none; });
        bad |= is_bad ? 1 << j : 0;
      }
    } else {
      KVTRIM_UNROLL
      for (int j = 0; j < keys; ++j) {
        const bool is_bad = product.take_key(j, [&](int c) {
          return at[j] != nullptr ? gather_chunk<typename Product::Type>(a, at[j], c) : none;
        });
        bad |= is_bad ? 1 << j : 0;
      }
    }
    bad |= __shfl_xor_sync(full_warp, bad, 1);
    bad |= __shfl_xor_sync(full_warp, bad, 2);
    std::int32_t oldest = never_seen;
    std::int32_t newest = -1;
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) {
      oldest = position[j] < oldest ? position[j] : oldest;
      if ((bad >> j & 1) != 0) { position[j] = never_seen; }
      newest = position[j] > newest ? position[j] : newest;
    }
    if (sums) {
      oldest = __reduce_min_sync(full_warp, oldest);
      if (lane == 0) { warp_oldest[warp] = oldest; }
      __syncthreads();
      KVTRIM_UNROLL
      for (int w = 0; w < warps; ++w) { oldest = min(oldest, warp_oldest[w]); }
    }

    float scale = a.queries.block.scale;
    if (a.key_scales.data != nullptr) {
      scale *= a.key_scales.data[raw(tile.layer) * a.key_scales.layer_stride +
                                 raw(tile.head) * a.key_scales.head_stride];
    }
    constexpr float log2_e = 1.44269504088896340736F;
    const float cap = a.queries.block.soft_cap;
    const float factor = cap > 0 ? scale / cap : scale * log2_e;
    const float cap2 = cap * log2_e;
    const bool maxima = a.rows == Reduction::max;
    const bool plain = a.use != AttentionUse::partials && !(cap > 0) && !maxima && !a.squared &&
                       (!sums || a.decay == 1);

    Reducer<keys> reduced;
    reduced.clear();
    const float* const lse2_of_lane = facts.lse2 + Product::query_of(0, 0);
    for (std::int32_t p0 = 0; p0 < range.count(); p0 += Product::chunk_queries) {
      const std::int32_t left = range.count() - p0;
      const std::int32_t count = left < Product::chunk_queries ? left : Product::chunk_queries;
      if (sums && p0 % range.padded + count <= range.padded) {  // queries of one head
        const std::int32_t last = p0 % range.padded + count - 1;
        const std::int32_t latest = range.first + (last < range.votes ? last : range.votes - 1);
        if (query_position(a.queries.block, tile.sequence, latest, tile.next_position) < oldest) {
          continue;  // all of the tile is their future
        }
      }
      __syncthreads();  // nobody reads the last chunk any more
      if (staged_item != tile.item || range.count() > Product::chunk_queries) {
        product.stage(a, tile, range, p0, count, facts);
        staged_item = tile.item;
      }
      std::int32_t earliest = never_seen;
      for (std::int32_t q = lane; q < count; q += 32) {
        earliest = min(earliest, facts.position[q]);
      }
      earliest = __reduce_min_sync(full_warp, earliest);
      const bool masked = newest > earliest;
      std::int32_t in_head = p0 % range.padded;
      for (std::int32_t b = 0; b < count; b += step) {
        float dots[Product::queries_a_lane][keys];
        product.dots(b, dots);
        KVTRIM_UNROLL
        for (int n = 0; n < Product::queries_a_lane; ++n) {
          const int q = Product::query_of(b, n);
          const float lse2 = lse2_of_lane[b + n];
          reduced.votes += is_finite(lse2) ? 1 : 0;
          if (plain && !masked) {  // nearly all of the time
            KVTRIM_UNROLL
            for (int j = 0; j < keys; ++j) {
              reduced.part[j] += exp2_of(fmaf(dots[n][j], factor, -lse2));
            }
            continue;
          }
          float logit[keys];
          KVTRIM_UNROLL
          for (int j = 0; j < keys; ++j) {
            logit[j] = fmaf(dots[n][j], factor, cap > 0 ? 0 : -lse2);
          }
          if (cap > 0) {
            KVTRIM_UNROLL
            for (int j = 0; j < keys; ++j) { logit[j] = tanhf(logit[j]) * cap2 - lse2; }
          }
          if (masked) {
            const std::int32_t seen_until = facts.position[q];
            KVTRIM_UNROLL
            for (int j = 0; j < keys; ++j) {
              if (position[j] > seen_until || position[j] == never_seen) { logit[j] = -infinity; }
            }
          }
          if (a.use == AttentionUse::partials) {
            const float2 part = partial_of(logit);
            if (lane < 4) { warp_partials[warp][q] = part; }
            continue;
          }
          const float weight = facts.weight[q];
          KVTRIM_UNROLL
          for (int j = 0; j < keys; ++j) {
            float x = exp2_of(logit[j]);
            if (sums) { x = (a.squared ? x * x : x) * weight; }
            reduced.part[j] = maxima ? fmaxf(reduced.part[j], x) : reduced.part[j] + x;
          }
        }
        in_head += step;
        if (in_head == range.padded && a.use == AttentionUse::window_scores) {
          reduced.end_head(a.rows, a.group);
          in_head = 0;
        }
      }
      if (a.use == AttentionUse::partials) {
        __syncthreads();
        for (int q = thread; q < count; q += attention_threads) {
          float2 all = warp_partials[0][q];
          KVTRIM_UNROLL
          for (int w = 1; w < warps; ++w) { all.x = fmaxf(all.x, warp_partials[w][q].x); }
          all.y = 0;
          if (all.x > -infinity) {
            KVTRIM_UNROLL
            for (int w = 0; w < warps; ++w) {
              const float2 part = warp_partials[w][q];
              if (part.y > 0) { all.y += part.y * exp2_of(part.x - all.x); }
            }
          }
          a.partials[(static_cast<std::int64_t>(tile.item) * a.most_queries + p0 + q) *
                         a.most_tiles +
                     tile.index] = all;
        }
      } else {
        reduced.flush(maxima);
      }
    }

    if (a.use == AttentionUse::partials) { continue; }
    const float nan = __uint_as_float(0x7FC0'0000U);
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) {
      const std::int32_t row = first + 8 * j;
      if (j % 4 != t || !tile.holds(row)) { continue; }
      const bool is_bad = (bad >> j & 1) != 0;
      if (!sums) {
        float score = reduced.group[j];
        if (a.group == Reduction::mean) { score /= static_cast<float>(reduced.heads); }
        if (reduced.heads == 0 || is_bad) { score = nan; }
        const std::int64_t item_rows = static_cast<std::int64_t>(tile.item) * a.tiles.max_rows;
        const std::int32_t live = tile.live_index(row);
        a.raw[item_rows +
              (a.ranks != nullptr && !tile.ordered ? a.ranks[item_rows + live] : live)] = score;
        continue;
      }
      auto& total = *reinterpret_cast<float*>(
          a.view.score_sums.row(tile.sequence, tile.layer, tile.head, row));
      auto& rest = *reinterpret_cast<float*>(
          a.view.score_compensations.row(tile.sequence, tile.layer, tile.head, row));
      float now = total;
      float now_rest = rest;
      if (a.decay != 1) {
        scale_compensated(now, now_rest, power(a.decay, range.first + range.votes));
      }
      const float share = 1.0F / static_cast<float>(range.group);
      add_compensated(now, now_rest, __fmul_rn(reduced.sum[j], share));
      add_compensated(now, now_rest, __fmul_rn(reduced.rest[j], share));
      if (is_bad) { now = nan; }
      total = now;
      rest = now_rest;
      if (a.scores) {
        const std::int32_t age =
            tile.next_position - raw(a.view.position(tile.sequence, tile.layer, tile.head, row));
        const float score = now + now_rest;
        *reinterpret_cast<float*>(a.scores.row(tile.sequence, tile.layer, tile.head, row)) =
            a.age_normalised && age > 0 ? score / static_cast<float>(age) : score;
      }
    }
  }
}

/// Attention of queries to tiles of keys, by fused multiply-adds.
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
