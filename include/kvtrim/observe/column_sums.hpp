// SPDX-License-Identifier: Apache-2.0
#pragma once

// Column sums of the attention matrix without the matrix: one key tile at a time, with the LSE that attention computes
// anyway. The memory is one tile, whatever the prompt's length.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/compensated.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/observe/accumulate.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/accumulate_params.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

namespace detail {
/// Queries that are packed at a time.
inline constexpr std::int32_t column_sum_queries = 128;

struct ColumnSumScratch {
  Arena& arena;
  std::int32_t head_dim;
  TileScratch tiles{arena, head_dim};
  std::span<float> queries = arena.take<float>(std::int64_t{column_sum_queries} * head_dim);
  std::span<Position> positions = arena.take<Position>(column_sum_queries);
  std::span<float> lse = arena.take<float>(column_sum_queries);
  std::span<float> weights = arena.take<float>(column_sum_queries);  // decay; 0: no vote
  std::span<float> sums = arena.take<float>(tiles.rows);
  std::span<float> compensations = arena.take<float>(tiles.rows);
  std::span<std::uint64_t> units = arena.take<std::uint64_t>(tiles.rows);  // of exact sums
};
}  // namespace detail

/// Working space of `accumulate_column_sums`: one tile, whatever the number of rows.
[[nodiscard]] inline std::size_t column_sums_scratch_bytes(std::int32_t head_dim) noexcept {
  return Arena::bytes_for([&](Arena& arena) { return detail::ColumnSumScratch{arena, head_dim}; });
}

namespace detail {
// The form is known at compile time: a branch for each query and panel would cost the default form 1 %.
template <Sums Form>
void accumulate_columns(const AccumulateParams& params,
                        const HeadRef& head,
                        const QueryBlock& queries,
                        LayerId query_layer,
                        std::span<std::byte> scratch) noexcept {
  constexpr bool exact = Form == Sums::exact;
  const auto [view, s, l, h] = head;
  Arena arena(scratch);
  const std::int32_t dim = view.k.head_dim;
  const ColumnSumScratch mem{arena, dim};
  KVTRIM_ASSERT(arena.ok() && queries.lse != nullptr);
  const std::int32_t group = queries.query_heads / view.kv_heads;
  const std::int32_t count = queries.count(s);
  const std::int32_t next = head.state().next_position;
  const float share = 1.0F / static_cast<float>(group);
  const LogitScale scaled(scale_of(queries, dim), queries.soft_cap);
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  const auto decay_after = [&](std::int32_t i) {
    return params.decay == 1.0F ? 1.0 : std::pow(static_cast<double>(params.decay), count - 1 - i);
  };
  const double decay_all = decay_after(-1);

  for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t rows) {
    pack_keys(mem.tiles, rows);
    std::fill(mem.units.begin(), mem.units.end(), 0);
    for (std::int32_t t = 0; !exact && t < rows; ++t) {
      float& sum = mem.sums[index(t)];
      float& compensation = mem.compensations[index(t)];
      sum = view.score_sums.at<float>(s, l, h, first + t);
      compensation = view.score_compensations.at<float>(s, l, h, first + t);
      if (decay_all != 1.0) { scale_compensated(sum, compensation, decay_all); }
    }
    const auto first_position = mem.tiles.positions.begin();
    const Position oldest = *std::min_element(first_position, first_position + rows);
    for (std::int32_t g = 0; g < group; ++g) {
      const std::int32_t query_head = raw(h) * group + g;
      for (std::int32_t begin = 0; begin < count; begin += column_sum_queries) {
        const std::int32_t block = std::min(column_sum_queries, count - begin);
        const Position newest = queries.position(s, begin + block - 1, next);
        if (newest < oldest) { continue; }  // the whole tile lies in their future
        for (std::int32_t i = 0; i < padded_queries(block); ++i) {
          const float* const query =
              i < block ? queries.row(s, query_layer, query_head, begin + i) : nullptr;
          pack_query(query, dim, i, mem.queries.data());
          if (query == nullptr) { continue; }
          const float lse =
              natural(queries.lse_of(s, query_layer, query_head, begin + i), queries.lse_base);
          const bool votes = finite(&lse, 1) && finite(query, dim);
          mem.positions[index(i)] = queries.position(s, begin + i, next);
          mem.lse[index(i)] = lse;
          mem.weights[index(i)] = votes ? static_cast<float>(decay_after(begin + i)) : 0.0F;
        }
        for (std::int32_t row = 0; row < rows; row += panel_rows) {
          const std::int32_t end = std::min(row + panel_rows, rows);
          const auto positions = mem.tiles.positions.subspan(index(row), index(end - row));
          const auto [panel_oldest, panel_newest] =
              std::minmax_element(positions.begin(), positions.end());
          // Only short sums are plain fp32; the long one is compensated.
          alignas(64) float partial[panel_rows] = {};
          const auto flush = [&] {
            if (exact) { return; }
            for (std::int32_t t = row; t < end; ++t) {
              const float x = partial[t - row] * share;
              add_compensated(mem.sums[index(t)], mem.compensations[index(t)], x);
            }
            std::fill(std::begin(partial), std::end(partial), 0.0F);
          };
          const auto add_query = [&](std::int32_t i, float* x) {
            const Position position = mem.positions[index(i)];
            if (position < *panel_oldest || mem.weights[index(i)] == 0) { return; }
            const auto lse = pset1<Packet>(mem.lse[index(i)]);
            for (std::int32_t p = 0; p < panel_rows; p += packet_floats) {
              pstore(x + p, pexp(psub(scaled(x + p), lse)));
            }
            if (position < *panel_newest) {
              for (std::int32_t t = row; t < end; ++t) {
                if (mem.tiles.positions[index(t)] > position) { x[t - row] = 0; }
              }
            }
            const auto weight = pset1<Packet>(mem.weights[index(i)]);
            if constexpr (exact) {
              std::uint64_t* const units = mem.units.data() + row;
              for (std::int32_t p = 0; p < panel_rows; p += packet_floats) {
                Packet y = pload<Packet>(x + p);
                if (params.squared) { y = pmul(y, y); }
                pstore(x + p, pmul(y, weight));
              }
              for (std::int32_t k = 0; k < panel_rows; ++k) { units[k] += exact_units(x[k]); }
            } else {
              for (std::int32_t p = 0; p < panel_rows; p += packet_floats) {
                Packet y = pload<Packet>(x + p);
                if (params.squared) { y = pmul(y, y); }
                pstore(partial + p, pmadd(y, weight, pload<Packet>(partial + p)));
              }
            }
          };
          // Leading queries that see nothing of the panel are skipped, in whole register blocks.
          std::int32_t seeing = 0;
          while (seeing < block && mem.positions[index(seeing)] < *panel_oldest) { ++seeing; }
          seeing -= seeing % block_queries;
          const auto add_block = [&](std::int32_t q, float* logits) {
            for (std::int32_t i = q; i < std::min(q + block_queries, block); ++i) {
              add_query(i, logits + static_cast<std::ptrdiff_t>(i - q) * panel_rows);
            }
            if ((q + block_queries) % 32 == 0) { flush(); }
          };
          for_each_logit_block(mem.tiles, row, mem.queries.data(), seeing, block, add_block);
          flush();
        }
      }
    }
    for (std::int32_t t = 0; t < rows; ++t) {
      const bool bad = mem.tiles.bad[index(t)] != 0;
      if (exact) {
        add_units(head, first + t, mem.units[index(t)], group, decay_all);
        if (bad) {
          view.score_sums.at<float>(s, l, h, first + t) = std::numeric_limits<float>::quiet_NaN();
        }
        continue;
      }
      view.score_sums.at<float>(s, l, h, first + t) =
          bad ? std::numeric_limits<float>::quiet_NaN() : mem.sums[index(t)];
      view.score_compensations.at<float>(s, l, h, first + t) = mem.compensations[index(t)];
    }
  });
}
}  // namespace detail

/// Adds the attention that each of many queries pays to each live row to the accumulated scores of one KV head: the mean
/// over the query heads of the group, summed over the queries.
///
/// With `Sums::exact` what this call adds has the same bits for any order of heads, and however its queries are put into
/// blocks.
///
/// \param queries      rows of the chunk just attended, with their LSE
/// \param query_layer  layer index inside `queries`
/// \param scratch      [column_sums_scratch_bytes(head_dim)]
/// \pre `queries.lse != nullptr`; score planes are present; no hole; queries * group fit an exact sum (`Recorder` checks it); the rows are those that the queries attended to
/// \par Ties
/// none. NaN: the row of a key that is not finite gets NaN; a query with a non-finite value or LSE is left out
/// \par Complexity
/// O(queries * rows * head_dim) time, skipping tiles that lie wholly in the future; O(1) space; no allocation
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048 (H2O, the prompt's column sums)
inline void accumulate_column_sums(const AccumulateParams& params,
                                   const HeadRef& head,
                                   const QueryBlock& queries,
                                   LayerId query_layer,
                                   std::span<std::byte> scratch) noexcept {
  if (params.sums == Sums::exact) {
    detail::accumulate_columns<Sums::exact>(params, head, queries, query_layer, scratch);
  } else {
    detail::accumulate_columns<Sums::floating>(params, head, queries, query_layer, scratch);
  }
}

}  // namespace kvtrim
