// SPDX-License-Identifier: Apache-2.0
#pragma once

// Column sums of the attention matrix without the matrix: one key tile at a time, with the LSE that attention had
// anyway. Memory is one tile, whatever the prompt.

#include <kvtrim/core/compensated.hpp>
#include <kvtrim/detail/key_tile.hpp>
#include <kvtrim/score/accumulate_params.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

namespace detail {
struct ColumnSumScratch {
  TileScratch tiles;
  std::span<float> queries;  // [query_block, head_dim]
  std::span<float> logits;   // [query_block, tile_rows]
  std::span<float> partial;  // [tile_rows]
  static ColumnSumScratch take(Arena& arena, std::int32_t head_dim) noexcept {
    ColumnSumScratch m;
    m.tiles = TileScratch::take(arena, head_dim);
    m.queries = arena.take<float>(static_cast<std::int64_t>(query_block) * head_dim);
    m.logits = arena.take<float>(static_cast<std::int64_t>(query_block) * tile_rows(head_dim));
    m.partial = arena.take<float>(tile_rows(head_dim));
    return m;
  }
};
}  // namespace detail

/// Working space of `accumulate_column_sums`: one tile, whatever the rows.
[[nodiscard]] inline std::size_t column_sums_scratch_bytes(std::int32_t head_dim) noexcept {
  Arena arena;
  const auto unused = detail::ColumnSumScratch::take(arena, head_dim);
  static_cast<void>(unused);
  return arena.bytes();
}

/// Adds the attention that each of many queries pays to each live row to the accumulated scores of (sequence, layer, KV
/// head): the mean over the query heads of the group, summed over the queries.
///
/// \param queries      rows of the chunk just attended, with their LSE
/// \param query_layer  layer index inside `queries`
/// \param scratch      [column_sums_scratch_bytes(head_dim)]
/// \pre `queries.lse != nullptr`; score planes are there; no hole; the rows are those that the queries attended to
/// \par Ties
/// none. NaN: a key that is not finite gets NaN; a query or LSE that is not finite is left out
/// \par Complexity
/// O(queries * rows * head_dim) time, tiles that lie wholly in the future are skipped; O(1) space; no allocation
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048 (H2O, the prompt's column sums)
inline void accumulate_column_sums(const AccumulateParams& params,
                                   const CacheView& view,
                                   SequenceId s,
                                   LayerId l,
                                   HeadId h,
                                   const QueryBlock& queries,
                                   LayerId query_layer,
                                   std::span<std::byte> scratch) noexcept {
  Arena arena(scratch);
  const std::int32_t dim = view.k.head_dim;
  const std::int32_t height = detail::tile_rows(dim);
  const auto mem = detail::ColumnSumScratch::take(arena, dim);
  KVTRIM_ASSERT(arena.ok() && queries.lse != nullptr);
  const std::int32_t group = queries.query_heads / view.kv_heads;
  const std::int32_t count = queries.count(s);
  const std::int32_t next = view.state(s, l, h).next_position;
  const float scale = detail::scale_of(queries, dim);
  const float share = 1.0F / static_cast<float>(group);
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const auto decay_after = [&](std::int32_t i) {
    return params.decay == 1.0F ? 1.0 : std::pow(static_cast<double>(params.decay), count - 1 - i);
  };
  const double decay_all = decay_after(-1);

  detail::for_each_key_tile(view, s, l, h, mem.tiles, [&](std::int32_t first, std::int32_t rows) {
    Position oldest{std::numeric_limits<std::int32_t>::max()};
    Position newest{-1};
    for (std::int32_t t = 0; t < rows; ++t) {
      oldest = std::min(oldest, mem.tiles.positions[index(t)]);
      newest = std::max(newest, mem.tiles.positions[index(t)]);
    }
    Eigen::Map<Eigen::ArrayXf> partial(mem.partial.data(), height);
    if (decay_all != 1.0) {
      for (std::int32_t t = 0; t < rows; ++t) {
        scale_compensated(view.score_sums.at<float>(s, l, h, first + t),
                          view.score_compensations.at<float>(s, l, h, first + t),
                          decay_all);
      }
    }
    const auto flush = [&] {
      for (std::int32_t t = 0; t < rows; ++t) {
        add_compensated(view.score_sums.at<float>(s, l, h, first + t),
                        view.score_compensations.at<float>(s, l, h, first + t),
                        mem.partial[index(t)] * share);
      }
    };
    for (std::int32_t g = 0; g < group; ++g) {
      const std::int32_t head = raw(h) * group + g;
      for (std::int32_t begin = 0; begin < count; begin += detail::query_block) {
        const std::int32_t block = std::min(detail::query_block, count - begin);
        if (queries.position(s, begin + block - 1, next) < oldest) {
          continue;
        }  // all of the tile is their future
        for (std::int32_t i = 0; i < block; ++i) {
          std::copy_n(queries.row(s, query_layer, head, begin + i),
                      dim,
                      mem.queries.data() + static_cast<std::ptrdiff_t>(i) * dim);
        }
        const std::int32_t padded = detail::padded_queries(block);
        std::fill_n(mem.queries.data() + static_cast<std::ptrdiff_t>(block) * dim,
                    static_cast<std::ptrdiff_t>(padded - block) * dim,
                    0.0F);
        detail::multiply(mem.tiles, dim, mem.queries.data(), padded, mem.logits.data());
        partial.setZero();
        for (std::int32_t i = 0; i < block; ++i) {
          const float lse =
              detail::natural(queries.lse_of(s, query_layer, head, begin + i), queries.lse_base);
          const Position position = queries.position(s, begin + i, next);
          if (position < oldest || !detail::finite(&lse, 1) ||
              !detail::finite(mem.queries.data() + static_cast<std::ptrdiff_t>(i) * dim, dim)) {
            continue;
          }
          Eigen::Map<Eigen::ArrayXf> column(
              mem.logits.data() + static_cast<std::ptrdiff_t>(i) * height, height);
          detail::scale_logits(column, scale, queries.soft_cap);
          column = (column - lse).exp();
          if (params.squared) { column *= column; }
          if (position < newest) {
            for (std::int32_t t = 0; t < rows; ++t) {
              if (mem.tiles.positions[index(t)] > position) { column[t] = 0; }
            }
          }
          partial += column * static_cast<float>(decay_after(begin + i));
          if (i % 32 == 31) {  // short fp32 sums only: the long one is compensated
            flush();
            partial.setZero();
          }
        }
        flush();
      }
    }
    for (std::int32_t t = 0; t < rows; ++t) {
      if (mem.tiles.bad[index(t)] != 0) {
        view.score_sums.at<float>(s, l, h, first + t) = std::numeric_limits<float>::quiet_NaN();
      }
    }
  });
}

}  // namespace kvtrim
