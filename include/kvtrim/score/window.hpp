// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention of the prompt's last queries over all live keys. With the engine's LSE a tile is done once it is
// multiplied; without it the exponentials of one KV head stay in the scratch (4 bytes a query and key) and are divided
// when the sums are known: a second product costs twice the time. Over 400 lines: both forms share layout and reduction.

#include <kvtrim/detail/key_tile.hpp>
#include <kvtrim/score/pooling.hpp>
#include <kvtrim/score/scorer.hpp>
#include <kvtrim/score/window_params.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by the attention that the last `window` queries pay to it, reduced over those queries, over the query
/// heads of its KV head, and pooled over its neighbours, in this order.
///
/// Softmax runs over all live keys, causal by position inside the window; the window's own columns are then cut and
/// score 0 (they are meant to be protected), unless `own_columns` asks for their scores.
///
/// \par Shapes
/// queries [query heads, at most window rows, head_dim], fp32; scores [live rows]
/// \par Ties
/// none broken here. NaN: a key that is not finite takes no part and scores NaN; a query or LSE that is not finite has
/// no vote, nor has, without an LSE, a query that sees no live row or whose logits overflow; without any vote all scores
/// are NaN
/// \par Complexity
/// O(query rows * live rows * head_dim) time; no allocation. The score of a row does not change by a bit with page
/// size, page placement, batch or thread
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV); differs: rows are averaged by default, as kvpress and Ada-KV do, and the
/// query heads of a group are reduced, so that a KV head has one set
class WindowScorer {
 public:
  /// \pre `params.window >= 1 && params.kernel` is odd
  explicit constexpr WindowScorer(const WindowParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    const std::int32_t group = shape.kv_heads > 0 ? shape.query_heads / shape.kv_heads : 0;
    return detail::largest_need(std::max(1, shape.head_dim), [&](std::int32_t head_dim) {
      Arena arena;
      const auto unused = Layout::take(arena,
                                       shape.max_rows,
                                       std::max(1, group),
                                       std::max(1, std::min(shape.query_rows, params_.window)),
                                       head_dim);
      static_cast<void>(unused);
      return arena.bytes();
    });
  }

  /// `bad_observation` without queries (no rows at all need no data), or when their heads are no multiple of the KV
  /// heads, or keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const QueryBlock& q = obs.queries;
    const bool given = q.data != nullptr || (q.rows == 0 && q.row_counts == nullptr);
    const bool fits = given && q.query_heads >= view.kv_heads && q.query_heads % view.kv_heads == 0;
    return fits && readable(view.k.dtype) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  ///
  /// \param scratch  [scratch_bytes(shape)]
  /// \param[out] out [rows of the table in use]
  void score(const CacheView& view,
             SequenceId s,
             LayerId l,
             HeadId h,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const QueryBlock& block = obs.queries;
    const std::int32_t live = view.live_rows(s, l, h);
    const std::int32_t group = block.query_heads / view.kv_heads;
    const std::int32_t given = block.count(s);
    const std::int32_t votes = std::min(given, params_.window);
    std::fill(out.begin(), out.end(), 0.0F);
    if (live <= cut_columns()) { return; }  // all columns are the window's own
    Arena arena(scratch);
    const Layout mem = Layout::take(arena, live, group, std::max(1, votes), view.k.head_dim);
    KVTRIM_ASSERT(arena.ok());

    const SequenceState state = view.state(s, l, h);
    for (std::int32_t i = 0; i < votes; ++i) {
      mem.query_positions[index(i)] = block.position(s, given - votes + i, state.next_position);
    }
    load_queries(view, s, l, h, block, given - votes, votes, mem);
    if (block.lse != nullptr) {
      attend_with_lse(view, s, l, h, block, votes, group, mem);
    } else {
      attend_with_sums(view, s, l, h, block, votes, group, mem);
    }
    pool_columns(view, s, l, h, state, live, mem, out);
  }

 private:
  using Column = Eigen::Map<Eigen::ArrayXf>;

  struct Layout {
    detail::TileScratch tiles;
    std::span<float> queries;             // [padded, head_dim]
    std::span<float> exponentials;        // [tiles, padded, tile_rows]; one tile with an LSE
    std::span<float> tile_maxima;         // [tiles, padded]
    std::span<float> maxima;              // [padded]
    std::span<double> sums;               // [padded]
    std::span<float> lse;                 // [padded]
    std::span<std::uint8_t> votes;        // [padded] the query counts
    std::span<Position> query_positions;  // [window]
    std::span<float> reduced;             // [tile_rows]
    std::span<float> raw_scores;          // [rows]
    std::span<float> pooled;              // [rows]
    std::span<std::int32_t> order;        // [rows]
    std::int32_t padded = 0;
    std::int32_t tile_count = 0;

    static Layout take(Arena& arena,
                       std::int32_t rows,
                       std::int32_t group,
                       std::int32_t votes,
                       std::int32_t head_dim) noexcept {
      const std::int32_t height = detail::tile_rows(head_dim);
      Layout m;
      m.padded = detail::padded_queries(group * votes);
      m.tile_count = std::max(1, (rows + height - 1) / height);
      m.tiles = detail::TileScratch::take(arena, head_dim);
      m.queries = arena.take<float>(static_cast<std::int64_t>(m.padded) * head_dim);
      m.tile_maxima = arena.take<float>(static_cast<std::int64_t>(m.tile_count) * m.padded);
      m.maxima = arena.take<float>(m.padded);
      m.sums = arena.take<double>(m.padded);
      m.lse = arena.take<float>(m.padded);
      m.votes = arena.take<std::uint8_t>(m.padded);
      m.query_positions = arena.take<Position>(votes);
      m.reduced = arena.take<float>(height);
      m.raw_scores = arena.take<float>(rows);
      m.pooled = arena.take<float>(rows);
      m.order = arena.take<std::int32_t>(rows);
      // Last, so that a call that has the LSE touches one tile of it only.
      m.exponentials =
          arena.take<float>(static_cast<std::int64_t>(m.tile_count) * m.padded * height);
      return m;
    }
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  std::int32_t cut_columns() const noexcept { return params_.own_columns ? 0 : params_.window; }

  // Query (head g of the group, vote i) is row g * votes + i.
  static void load_queries(const CacheView& view,
                           SequenceId s,
                           LayerId l,
                           HeadId h,
                           const QueryBlock& block,
                           std::int32_t first,
                           std::int32_t votes,
                           const Layout& mem) noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t group = block.query_heads / view.kv_heads;
    std::fill(mem.queries.begin(), mem.queries.end(), 0.0F);
    std::fill(mem.votes.begin(), mem.votes.end(), std::uint8_t{0});
    for (std::int32_t g = 0; g < group; ++g) {
      const std::int32_t head = raw(h) * group + g;
      for (std::int32_t i = 0; i < votes; ++i) {
        const std::int32_t q = g * votes + i;
        const float* const from = block.row(s, l, head, first + i);
        const float lse = block.lse != nullptr
                              ? detail::natural(block.lse_of(s, l, head, first + i), block.lse_base)
                              : 0.0F;
        if (!detail::finite(from, dim) || !detail::finite(&lse, 1)) { continue; }
        std::copy_n(from, dim, mem.queries.data() + static_cast<std::ptrdiff_t>(q) * dim);
        mem.lse[index(q)] = lse;
        mem.votes[index(q)] = 1;
      }
    }
  }

  // Whether some query may not see some row of the tile.
  static bool needs_mask(const Layout& mem,
                         std::int32_t count,
                         std::int32_t height,
                         std::int32_t votes) noexcept {
    bool any = count < height;
    Position newest{-1};
    for (std::int32_t t = 0; t < count; ++t) {
      newest = std::max(newest, mem.tiles.positions[index(t)]);
      any = any || mem.tiles.bad[index(t)] != 0;
    }
    for (std::int32_t i = 0; i < votes; ++i) {
      any = any || mem.query_positions[index(i)] < newest;
    }
    return any;
  }
  static void mask(
      Column column, const Layout& mem, std::int32_t count, Position query, float value) noexcept {
    for (std::int32_t t = 0; t < column.size(); ++t) {
      if (t >= count || mem.tiles.bad[index(t)] != 0 || mem.tiles.positions[index(t)] > query) {
        column[t] = value;
      }
    }
  }

  void attend_with_lse(const CacheView& view,
                       SequenceId s,
                       LayerId l,
                       HeadId h,
                       const QueryBlock& block,
                       std::int32_t votes,
                       std::int32_t group,
                       const Layout& mem) const noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t height = detail::tile_rows(dim);
    const std::int32_t used = group * votes;
    const float scale = detail::scale_of(block, dim);
    detail::for_each_key_tile(
        view, s, l, h, mem.tiles, [&](std::int32_t first, std::int32_t count) {
          float* const tile = mem.exponentials.data();
          detail::multiply(mem.tiles, dim, mem.queries.data(), mem.padded, tile);
          const bool masked = needs_mask(mem, count, height, votes);
          for (std::int32_t q = 0; q < used; ++q) {
            if (mem.votes[index(q)] == 0) { continue; }
            Column column(tile + static_cast<std::ptrdiff_t>(q) * height, height);
            detail::scale_logits(column, scale, block.soft_cap);
            column = (column - mem.lse[index(q)]).exp();
            if (masked) { mask(column, mem, count, mem.query_positions[index(q % votes)], 0.0F); }
            mem.maxima[index(q)] = 1.0F;
          }
          reduce_tile(tile, mem.maxima.data(), height, votes, group, mem, first, count);
        });
  }

  void attend_with_sums(const CacheView& view,
                        SequenceId s,
                        LayerId l,
                        HeadId h,
                        const QueryBlock& block,
                        std::int32_t votes,
                        std::int32_t group,
                        const Layout& mem) const noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t height = detail::tile_rows(dim);
    const std::int32_t used = group * votes;
    const float scale = detail::scale_of(block, dim);
    constexpr float lowest = -1e30F;
    std::fill(mem.maxima.begin(), mem.maxima.end(), lowest);
    std::fill(mem.sums.begin(), mem.sums.end(), 0.0);
    const auto tile_at = [&](std::int32_t t) {
      return mem.exponentials.data() + static_cast<std::ptrdiff_t>(t) * mem.padded * height;
    };
    const auto maxima_at = [&](std::int32_t t) {
      return mem.tile_maxima.data() + static_cast<std::ptrdiff_t>(t) * mem.padded;
    };
    std::int32_t tiles = 0;
    detail::for_each_key_tile(
        view, s, l, h, mem.tiles, [&](std::int32_t first, std::int32_t count) {
          float* const tile = tile_at(tiles);
          detail::multiply(mem.tiles, dim, mem.queries.data(), mem.padded, tile);
          const bool masked = needs_mask(mem, count, height, votes);
          for (std::int32_t q = 0; q < used; ++q) {
            if (mem.votes[index(q)] == 0) { continue; }
            Column column(tile + static_cast<std::ptrdiff_t>(q) * height, height);
            const Position position = mem.query_positions[index(q % votes)];
            detail::scale_logits(column, scale, block.soft_cap);
            if (masked) { mask(column, mem, count, position, lowest); }
            const float before = mem.maxima[index(q)];
            const float maximum = std::max(before, column.maxCoeff());
            column = (column - maximum).exp();
            if (masked) { mask(column, mem, count, position, 0.0F); }
            mem.maxima[index(q)] = maximum;
            maxima_at(tiles)[q] = maximum;
            mem.sums[index(q)] =
                mem.sums[index(q)] * std::exp(static_cast<double>(before) - maximum) +
                static_cast<double>(column.sum());
          }
          // The rows that are not finite are known only while the tile is here.
          for (std::int32_t t = 0; t < count; ++t) {
            mem.pooled[index(first + t)] = mem.tiles.bad[index(t)] != 0 ? 1.0F : 0.0F;
          }
          ++tiles;
        });
    // No live row seen, or logits that overflow: no vote, where dividing would make every row NaN.
    for (std::int32_t q = 0; q < used; ++q) {
      const double sum = mem.sums[index(q)];
      if (!(sum > 0 && sum < std::numeric_limits<double>::infinity())) { mem.votes[index(q)] = 0; }
    }
    const std::int32_t live = view.live_rows(s, l, h);
    for (std::int32_t t = 0; t < tiles; ++t) {
      for (std::int32_t q = 0; q < used; ++q) {
        if (mem.votes[index(q)] == 0) { continue; }
        float& factor = maxima_at(t)[q];
        factor = static_cast<float>(std::exp(static_cast<double>(factor) - mem.maxima[index(q)]) /
                                    mem.sums[index(q)]);
      }
      const std::int32_t first = t * height;
      const std::int32_t count = std::min(height, live - first);
      for (std::int32_t i = 0; i < count; ++i) {
        mem.tiles.bad[index(i)] = mem.pooled[index(first + i)] != 0 ? 1 : 0;
      }
      reduce_tile(tile_at(t), maxima_at(t), height, votes, group, mem, first, count);
    }
  }

  // raw_scores of the tile's rows from its exponentials, each query's times its factor.
  void reduce_tile(const float* tile,
                   const float* factors,
                   std::int32_t height,
                   std::int32_t votes,
                   std::int32_t group,
                   const Layout& mem,
                   std::int32_t first,
                   std::int32_t count) const noexcept {
    Column reduced(mem.reduced.data(), height);
    Column scores(mem.raw_scores.data() + first, count);
    std::int32_t heads = 0;
    for (std::int32_t g = 0; g < group; ++g) {
      std::int32_t rows = 0;
      for (std::int32_t i = 0; i < votes; ++i) {
        const std::int32_t q = g * votes + i;
        if (mem.votes[index(q)] == 0) { continue; }
        const auto weighted = Eigen::Map<const Eigen::ArrayXf>(
                                  tile + static_cast<std::ptrdiff_t>(q) * height, height) *
                              factors[q];
        if (rows++ == 0) {
          reduced = weighted;
        } else if (params_.rows == Reduction::max) {
          reduced = reduced.max(weighted);
        } else {
          reduced += weighted;
        }
      }
      if (rows == 0) { continue; }
      if (params_.rows == Reduction::mean) { reduced /= static_cast<float>(rows); }
      if (heads++ == 0) {
        scores = reduced.head(count);
      } else if (params_.group == Reduction::max) {
        scores = scores.max(reduced.head(count));
      } else {
        scores += reduced.head(count);
      }
    }
    if (heads == 0) { scores.setConstant(std::numeric_limits<float>::quiet_NaN()); }
    if (params_.group == Reduction::mean && heads > 0) { scores /= static_cast<float>(heads); }
    for (std::int32_t t = 0; t < count; ++t) {
      if (mem.tiles.bad[index(t)] != 0) { scores[t] = std::numeric_limits<float>::quiet_NaN(); }
    }
  }

  // raw_scores in logical order -> pooled in position order -> out by row.
  void pool_columns(const CacheView& view,
                    SequenceId s,
                    LayerId l,
                    HeadId h,
                    const SequenceState& state,
                    std::int32_t live,
                    const Layout& mem,
                    std::span<float> out) const noexcept {
    const auto row_of = [&](std::int32_t i) {
      return i + (state.append_row >= 0 && i >= state.append_row ? 1 : 0);
    };
    const std::int32_t scored = std::max(0, live - cut_columns());
    const auto columns = index(params_.columns == PoolColumns::all_columns ? live : scored);
    if (state.ordered) {
      pool(mem.raw_scores.first(columns),
           params_.pooling,
           params_.kernel,
           mem.pooled.first(columns));
      for (std::int32_t i = 0; i < scored; ++i) { out[index(row_of(i))] = mem.pooled[index(i)]; }
      return;
    }
    // `exponentials` is free again: raw scores in position order go there.
    const auto sorted = mem.exponentials.first(std::min(mem.exponentials.size(), index(live)));
    for (std::int32_t i = 0; i < live; ++i) { mem.order[index(i)] = i; }
    std::sort(mem.order.begin(), mem.order.begin() + live, [&](std::int32_t a, std::int32_t b) {
      return view.position(s, l, h, row_of(a)) < view.position(s, l, h, row_of(b));
    });
    for (std::int32_t i = 0; i < live; ++i) {
      sorted[index(i)] = mem.raw_scores[index(mem.order[index(i)])];
    }
    pool(sorted.first(columns), params_.pooling, params_.kernel, mem.pooled.first(columns));
    for (std::int32_t i = 0; i < scored; ++i) {
      out[index(row_of(mem.order[index(i)]))] = mem.pooled[index(i)];
    }
  }

  WindowParams params_;
};
static_assert(Scorer<WindowScorer>);

/// `WindowParams` are scored by `WindowScorer`.
template <>
struct ScorerOf<WindowParams> {
  using type = WindowScorer;
};

}  // namespace kvtrim
