// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which keys say the same thing is a question about all pairs of rows. A row's answer is a sum, so the pairs are visited
// tile by tile and none of them is kept.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/score/detail/softmax.hpp>
#include <kvtrim/score/detail/window_queries.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by `lambda * attention - (1 - lambda) * redundancy`.
///
/// Attention: softmax of the last `window` queries over the rows before the window; maximum over the query heads of the
/// KV head; mean over the queries; max-pooled over `kernel` neighbours. Redundancy: each row gives every other row the
/// cosine of their keys, except that its newest copy (the last position whose cosine is above `threshold`) is spared; the
/// mean of what a row gets from all others goes through a softmax over all rows. The window's rows have redundancy only;
/// they are meant to be protected.
///
/// \par Shapes
/// queries [query heads, at most window rows, head_dim], fp32; scores [live rows], between -1 and 1
/// \par Ties
/// none broken here. NaN: a key that is not finite takes no part and scores NaN; a query that is not finite, or whose
/// logits overflow, has no vote; without any vote all scores are NaN, unless all rows are the window's. A key of norm 0
/// resembles no other key
/// \par Complexity
/// O(live rows^2 * head_dim) time, O(live rows * (head_dim + votes)) space with votes = group * window; no allocation
/// \par Source
/// Cai et al., 2025, arXiv:2505.24133 (R-KV); differs: softmax before the maximum over the group (`RKVGroup`); a row
/// without a copy spares none, where the authors' code spares row 0; each sequence has its own redundancy, where theirs
/// is that of the first one
class RKVScorer {
 public:
  /// \pre `params.window >= 1 && params.kernel` is odd
  explicit constexpr RKVScorer(const RKVParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::window_bytes<Layout>(shape, params_.window);
  }

  /// `bad_observation` without queries (no rows need no data), with heads that do not fit, or where keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    return detail::check_window_queries(view, obs.queries);
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const QueryBlock& block = obs.queries;
    const LiveRows rows(head);
    const std::int32_t live = rows.count();
    const std::int32_t group = block.query_heads / head.view.kv_heads;
    const std::int32_t votes = std::min(block.count(head.sequence), params_.window);
    const std::int32_t columns = std::max(0, live - params_.window);
    std::fill(out.begin(), out.end(), 0.0F);
    Arena arena(scratch);
    const Layout mem{arena, live, group, votes, head.view.k.head_dim};
    KVTRIM_ASSERT(arena.ok());
    rows.order(mem.order);

    find_redundancy(head, rows.ordered(), mem);
    bool any = true;
    if (columns > 0) {
      find_logits(head, block, mem);
      any = find_attention(columns, mem);
      pool(mem.raw_scores.first(index(columns)),
           Pooling::max,
           params_.kernel,
           mem.pooled.first(index(columns)));
    }
    const double lambda = static_cast<double>(params_.lambda);
    for (std::int32_t rank = 0; rank < live; ++rank) {
      const std::int32_t i = mem.order[index(rank)];
      const double attention = rank < columns ? static_cast<double>(mem.pooled[index(rank)]) : 0.0;
      const double score = lambda * attention - (1 - lambda) * mem.redundancy[index(i)];
      out[index(rows.row(i))] = any && mem.bad[index(i)] == 0
                                    ? static_cast<float>(score)
                                    : std::numeric_limits<float>::quiet_NaN();
    }
  }

 private:
  struct Layout {
    Arena& arena;
    std::int32_t rows;
    std::int32_t group;  // query heads of the KV head
    std::int32_t votes;  // queries of each
    std::int32_t head_dim;
    std::int32_t padded = detail::padded_queries(group * std::max(1, votes));
    detail::TileScratch tiles{arena, head_dim};   // the rows that give
    detail::TileScratch others{arena, head_dim};  // the rows that they are compared with
    std::int64_t height = tiles.rows;
    std::span<float> packed = arena.take<float>(tiles.floats);      // as products read them
    std::span<float> cosines = arena.take<float>(height * height);  // by row that gives
    // Of the newest copy of a row that gives: position, or -1 if there is none; live index; cosine.
    std::span<Position> newest = arena.take<Position>(height);
    std::span<std::int32_t> copies = arena.take<std::int32_t>(height);
    std::span<float> similar = arena.take<float>(height);
    std::span<float> queries = arena.take<float>(static_cast<std::int64_t>(padded) * head_dim);
    std::span<float> logits =  // [tiles, padded, height]
        arena.take<float>((rows + height - 1) / height * padded * height);
    std::span<std::uint8_t> has_vote = arena.take<std::uint8_t>(padded);
    std::span<double> strongest = arena.take<double>(rows);  // of one query, by rank
    std::span<double> attention = arena.take<double>(rows);  // by rank
    std::span<double> redundancy = arena.take<double>(rows);
    std::span<float> raw_scores = arena.take<float>(rows);  // by rank
    std::span<float> pooled = arena.take<float>(rows);      // by rank
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
    std::span<std::uint8_t> bad = arena.take<std::uint8_t>(rows);  // the key is not finite
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  static void normalise(const detail::TileScratch& tiles, std::int32_t count) noexcept {
    for (std::int32_t t = 0; t < count; ++t) {
      Eigen::Map<Eigen::ArrayXf> row(tiles.row(t), tiles.head_dim);
      const double norm = std::sqrt(row.cast<double>().square().sum());
      if (norm > 0) { row = (row.cast<double>() / norm).cast<float>(); }
    }
  }

  void find_redundancy(const HeadRef& head, bool ordered, const Layout& mem) const noexcept {
    std::fill(mem.redundancy.begin(), mem.redundancy.end(), 0.0);
    std::int32_t finite = 0;
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      normalise(mem.tiles, count);
      for (std::int32_t q = 0; q < count; ++q) {
        mem.bad[index(first + q)] = mem.tiles.bad[index(q)];
        finite += mem.tiles.bad[index(q)] == 0 ? 1 : 0;
      }
      for (std::int32_t q = 0; q < mem.tiles.rows; ++q) {
        detail::pack_query(mem.tiles.row(q), mem.head_dim, q, mem.packed.data());
      }
      std::fill(mem.newest.begin(), mem.newest.end(), Position{-1});
      detail::for_each_key_tile(head, mem.others, [&](std::int32_t begin, std::int32_t others) {
        normalise(mem.others, others);
        detail::multiply(mem.others, mem.packed.data(), mem.tiles.rows, mem.cosines.data());
        for (std::int32_t q = 0; q < count; ++q) {
          compare(mem, q, first + q - begin, begin, others, ordered);
        }
      });
      for (std::int32_t q = 0; q < count; ++q) {
        if (mem.newest[index(q)] >= Position{0}) {
          mem.redundancy[index(mem.copies[index(q)])] -= static_cast<double>(mem.similar[index(q)]);
        }
      }
    });
    double sum = 0;
    for (std::size_t i = 0; i < mem.redundancy.size(); ++i) {  // a mean of cosines: no overflow
      mem.redundancy[i] = std::exp(mem.redundancy[i] / std::max(1, finite));
      sum += mem.bad[i] == 0 ? mem.redundancy[i] : 0.0;
    }
    for (double& x : mem.redundancy) { x /= sum; }
  }

  // Adds the cosines of row q of the tile with the rows of `others`, from live index `begin` on; `self` is q among them.
  void compare(const Layout& mem,
               std::int32_t q,
               std::int32_t self,
               std::int32_t begin,
               std::int32_t others,
               bool ordered) const noexcept {
    float* const cosine = mem.cosines.data() + q * mem.height;
    if (self >= 0 && self < others) { cosine[self] = 0; }
    Eigen::Map<Eigen::ArrayXd>(mem.redundancy.data() + begin, others) +=
        Eigen::Map<const Eigen::ArrayXf>(cosine, others).cast<double>();
    Position newest = mem.newest[index(q)];
    for (std::int32_t t = others - 1; t >= 0; --t) {
      if (cosine[t] > params_.threshold && mem.others.positions[index(t)] > newest) {
        newest = mem.others.positions[index(t)];
        mem.copies[index(q)] = begin + t;
        mem.similar[index(q)] = cosine[t];
        if (ordered) { break; }  // older ones follow
      }
    }
    mem.newest[index(q)] = newest;
  }

  void find_logits(const HeadRef& head, const QueryBlock& block, const Layout& mem) const noexcept {
    detail::load_window_queries(head, block, mem.votes, mem.queries, {}, mem.has_vote);
    const float scale = detail::scale_of(block, mem.head_dim);
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t) {
      float* const tile = mem.logits.data() + static_cast<std::ptrdiff_t>(first) * mem.padded;
      detail::multiply(mem.tiles, mem.queries.data(), mem.padded, tile);
      Eigen::Map<Eigen::ArrayXf> logits(tile, mem.group * mem.votes * mem.height);
      if (block.soft_cap > 0) {
        logits = block.soft_cap * (logits * (scale / block.soft_cap)).tanh();
      } else {
        logits *= scale;
      }
    });
  }

  [[nodiscard]] static float logit(const Layout& mem, std::int32_t q, std::int32_t i) noexcept {
    const std::int64_t tile = i / mem.height;
    return mem.logits[index((tile * mem.padded + q) * mem.height + i % mem.height)];
  }

  // raw_scores of the first `columns` ranks. False: no query has a vote.
  [[nodiscard]] bool find_attention(std::int32_t columns, const Layout& mem) const noexcept {
    const std::size_t n = index(columns);
    const auto strongest = mem.strongest.first(n);
    const auto attention = mem.attention.first(n);
    const auto takes_part = [&](std::size_t rank) { return mem.bad[index(mem.order[rank])] == 0; };
    const bool by_logits = params_.group == RKVGroup::logits;
    std::fill(attention.begin(), attention.end(), 0.0);
    std::int32_t voters = 0;
    for (std::int32_t i = 0; i < mem.votes; ++i) {
      std::fill(strongest.begin(), strongest.end(), -std::numeric_limits<double>::infinity());
      bool any = false;
      for (std::int32_t g = 0; g < mem.group; ++g) {
        const std::int32_t q = g * mem.votes + i;
        if (mem.has_vote[index(q)] == 0) { continue; }
        const auto logit_at = [&](std::size_t rank) {
          return static_cast<double>(logit(mem, q, mem.order[rank]));
        };
        const auto raise = [&](std::size_t rank, double probability) {
          strongest[rank] = std::max(strongest[rank], by_logits ? logit_at(rank) : probability);
        };
        any |= detail::for_each_probability(n, takes_part, logit_at, raise);
      }
      if (!any) { continue; }
      ++voters;
      const auto strength = [&](std::size_t rank) { return strongest[rank]; };
      const auto add = [&](std::size_t rank, double x) { attention[rank] += x; };
      if (by_logits) {
        detail::for_each_probability(n, takes_part, strength, add);
      } else {
        for (std::size_t rank = 0; rank < n; ++rank) { add(rank, strength(rank)); }
      }
    }
    for (std::size_t rank = 0; rank < n; ++rank) {
      mem.raw_scores[rank] = takes_part(rank)
                                 ? static_cast<float>(attention[rank] / std::max(1, voters))
                                 : std::numeric_limits<float>::quiet_NaN();
    }
    return voters > 0;
  }

  RKVParams params_;
};
static_assert(Scorer<RKVScorer>);

/// `RKVParams` are scored by `RKVScorer`.
RKVScorer scorer_of(ScoreTag<RKVParams>);

}  // namespace kvtrim
