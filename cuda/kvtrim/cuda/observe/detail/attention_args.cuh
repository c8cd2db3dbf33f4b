// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the attention kernels are given, and what their two products share: queries with and without a vote, the order in
// which probabilities are reduced, loads of keys.

#include <kvtrim/core/compensated.hpp>
#include <kvtrim/cuda/detail/device.hpp>
#include <kvtrim/cuda/observe/detail/key_tiles.cuh>
#include <kvtrim/cuda/observe/detail/queries.cuh>
#include <kvtrim/policy/window_params.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvtrim::cuda::detail {

/// What the logits are turned into.
enum class AttentionUse : std::uint8_t {
  window_scores,  ///< probabilities, reduced over rows and heads, to `raw`
  partials,       ///< maximum and sum of exponentials of a tile, to `partials`
  column_sums,    ///< probabilities, summed into the score planes
};

/// Arguments of the attention kernels.
struct AttentionArgs {
  CacheView view;
  DeviceQueries queries;
  TileList tiles;
  std::int64_t chunk_stride;  // of the keys; 0: element by element
  std::int32_t most_queries;  // padded queries per item; the workspace is indexed by it
  std::int32_t window;        // how many of the last queries vote
  std::int32_t unscored;      // window scores: last columns that get none
  AttentionUse use;
  Reduction rows;
  Reduction group;
  bool query_vectors;         // queries may be loaded four elements at a time
  bool squared;               // column sums: of squared probabilities
  bool age_normalised;        // column sums: `scores` are divided by the age
  double decay;               // column sums
  float* raw;                 // by `rows_before` and live index, or rank
  const std::int32_t* ranks;  // by `rows_before` and live index; null: tables are ordered
  const float* lse2;          // [items, most_queries] base 2; null: the engine's
  float2* partials;           // of each KV head: [most_queries, its tiles]
  SequencePlane scores;       // column sums: sum over both planes; absent: not wanted
};

inline constexpr int attention_threads = 128;
inline constexpr std::int32_t never_seen = std::numeric_limits<std::int32_t>::max();
inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// What is known about the queries of a chunk besides their features. A query without a vote has an LSE of +inf: all its
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
  std::int32_t votes;  // per head
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

/// Largest of the logits that a warp's eight quads hold for one query, and the sum of 2^(logit - largest).
template <int Keys>
KVTRIM_DEVICE float2 partial_of(const float (&logit)[Keys]) {
  float largest = logit[0];
  KVTRIM_UNROLL
  for (int j = 1; j < Keys; ++j) { largest = fmaxf(largest, logit[j]); }
  KVTRIM_UNROLL
  for (int d = 4; d < 32; d <<= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, d));
  }
  const float origin = largest > -infinity ? largest : 0;  // none seen: exponentials are 0
  float sum = 0;
  KVTRIM_UNROLL
  for (int j = 0; j < Keys; ++j) { sum += exp2_of(logit[j] - origin); }
  KVTRIM_UNROLL
  for (int d = 4; d < 32; d <<= 1) { sum += __shfl_xor_sync(full_warp, sum, d); }
  return make_float2(largest, sum);
}

/// Reduces probabilities over the queries of a head, then over the heads: each lane reduces those of its own queries, and
/// the quad's lanes are combined at the end of a chunk. All lanes of a quad hold the same results.
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
      const float value = __fdiv_rn(sum[j] + rest[j], divisor);
      if (votes > 0) {
        group[j] = heads_by == Reduction::max ? fmaxf(group[j], value) : group[j] + value;
      }
      sum[j] = rest[j] = 0;
    }
    heads += votes > 0 ? 1 : 0;
    votes = 0;
  }
};

/// Chunk `c` of the key at `row`, with one load.
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

}  // namespace kvtrim::cuda::detail
