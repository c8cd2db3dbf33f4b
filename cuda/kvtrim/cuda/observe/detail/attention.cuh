// SPDX-License-Identifier: Apache-2.0
#pragma once

// One kernel for everything that looks at keys with many queries: window scores, their normalisation, column sums.
//
// Keys stay in registers and queries pass by: a block holds one tile of keys for as long as it takes to see every query,
// so each key is read once, a score is summed by one thread in one order (no atomics), and K never goes through shared
// memory. Four neighbouring lanes share a key, each with every fourth 16-byte chunk of it: eight keys are eight runs of
// 64 bytes. A lane's keys and its place in the quad are the same for both products, fused multiply-adds
// (attention_fma.cuh) and tensor cores (attention_mma.cuh), so everything that follows a logit is written once.
//
// Specification: score/window.hpp, observe/column_sums.hpp.

#include <kvtrim/cuda/observe/detail/attention_args.cuh>

#include <cstdint>

namespace kvtrim::cuda::detail {

/// Merges the partials of a block's warps.
template <int Warps>
KVTRIM_DEVICE float2 partial_of_block(const float2 (&parts)[Warps]) {
  float2 all = parts[0];
  KVTRIM_UNROLL
  for (int w = 1; w < Warps; ++w) { all.x = fmaxf(all.x, parts[w].x); }
  const float origin = all.x > -infinity ? all.x : 0;
  all.y = 0;
  KVTRIM_UNROLL
  for (int w = 0; w < Warps; ++w) { all.y += parts[w].y * exp2_of(parts[w].x - origin); }
  return all;
}

/// Ends a row of window scores: `group` over `heads` that had a vote.
KVTRIM_DEVICE void write_window_score(const AttentionArgs& a,
                                      const KeyTile& tile,
                                      std::int64_t rows_before,
                                      std::int32_t row,
                                      float group,
                                      std::int32_t heads,
                                      bool is_bad) {
  const float mean =
      a.group == Reduction::mean ? __fdiv_rn(group, static_cast<float>(heads)) : group;
  const std::int32_t live = tile.live_index(row);
  const bool by_rank = a.ranks != nullptr && !tile.ordered;
  a.raw[rows_before + (by_rank ? a.ranks[rows_before + live] : live)] =
      heads == 0 || is_bad ? not_a_number : mean;
}

/// Ends a row of column sums: `sum + rest` over all queries and heads goes into the planes.
KVTRIM_DEVICE void write_column_sum(const AttentionArgs& a,
                                    const KeyTile& tile,
                                    const QueryRange& range,
                                    std::int32_t row,
                                    float sum,
                                    float rest,
                                    bool is_bad) {
  const auto plane = [&](const SequencePlane& p) {
    return reinterpret_cast<float*>(p.row(tile.sequence, tile.layer, tile.head, row));
  };
  float* const total = plane(a.view.score_sums);
  float* const total_rest = plane(a.view.score_compensations);
  float now = *total;
  float now_rest = *total_rest;
  if (a.decay != 1) { scale_compensated(now, now_rest, power(a.decay, range.votes)); }
  const float share = __fdiv_rn(1.0F, static_cast<float>(range.group));
  // Products are rounded first: fused into the sum, they would differ from what the compensation subtracts again.
  add_compensated(now, now_rest, __fmul_rn(sum, share));
  add_compensated(now, now_rest, __fmul_rn(rest, share));
  if (is_bad) { now = not_a_number; }
  *total = now;
  *total_rest = now_rest;
  if (a.scores) {
    const std::int32_t age =
        tile.next_position - raw(a.view.position(tile.sequence, tile.layer, tile.head, row));
    const float score = now + now_rest;
    *plane(a.scores) =
        a.age_normalised && age > 0 ? __fdiv_rn(score, static_cast<float>(age)) : score;
  }
}

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
  // A block's tiles are consecutive, so that it stages the queries of a head once. For column sums they are not, because
  // early tiles are seen by more queries.
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
    if (!sums && tile.live <= a.unscored) { continue; }  // all columns belong to the window
    const QueryRange range = query_range(a, tile.sequence, Product::pad);

    // Addresses of all keys first, then all loads, so that no load waits for an address.
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
    newest = __reduce_max_sync(full_warp, newest);  // lanes of a warp take the same branches
    if (sums) {
      oldest = __reduce_min_sync(full_warp, oldest);
      __syncthreads();  // a tile whose queries were all skipped has no other barrier
      if (lane == 0) { warp_oldest[warp] = oldest; }
      __syncthreads();
      KVTRIM_UNROLL
      for (int w = 0; w < warps; ++w) { oldest = min(oldest, warp_oldest[w]); }
    }

    const float scale = a.queries.block.scale * tile_scale(a.view.k.scales, tile.layer, tile.head);
    constexpr float log2_e = 1.44269504088896340736F;
    const float cap = a.queries.block.soft_cap;
    const float factor = cap > 0 ? __fdiv_rn(scale, cap) : scale * log2_e;
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
          continue;  // the whole tile lies in their future
        }
      }
      __syncthreads();  // no thread reads the last chunk any more
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
          if (plain && !masked) {  // almost always
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
          float2 parts[warps];
          KVTRIM_UNROLL
          for (int w = 0; w < warps; ++w) { parts[w] = warp_partials[w][q]; }
          const std::int64_t head =
              static_cast<std::int64_t>(i - tile.index) * a.most_queries + tile.index;
          a.partials[head + static_cast<std::int64_t>(p0 + q) * tiles_of(a.tiles, tile.extent)] =
              partial_of_block(parts);
        }
      } else {
        reduced.flush(maxima);
      }
    }

    if (a.use == AttentionUse::partials) { continue; }
    KVTRIM_UNROLL
    for (int j = 0; j < keys; ++j) {
      const std::int32_t row = first + 8 * j;
      if (j % 4 != t || !tile.holds(row)) { continue; }
      const bool is_bad = (bad >> j & 1) != 0;
      if (sums) {
        write_column_sum(a, tile, range, row, reduced.sum[j], reduced.rest[j], is_bad);
      } else {
        const std::int64_t before = rows_before(a.tiles, tile, i);
        write_window_score(a, tile, before, row, reduced.group[j], reduced.heads, is_bad);
      }
    }
  }
}

}  // namespace kvtrim::cuda::detail
