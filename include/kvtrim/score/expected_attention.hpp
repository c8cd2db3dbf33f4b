// SPDX-License-Identifier: Apache-2.0
#pragma once

// Future queries are assumed to be normally distributed, with a mean and a covariance before RoPE that the mean rotation of
// the next positions turns. So a whole prompt votes at the price of two small matrices, and no query has to be kept.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

namespace detail {
/// Mean of a rotation over consecutive positions.
struct MeanRotation {
  double cosine = 1;
  double sine = 0;
};

/// Mean of the rotations by `frequency * p`, p = first .. first + count - 1, in closed form.
[[nodiscard]] inline MeanRotation mean_rotation(double frequency,
                                                std::int32_t first,
                                                std::int32_t count) noexcept {
  constexpr double turn = 6.283185307179586476925286766559;
  const double step = std::remainder(frequency, turn);  // positions are whole: the same rotations
  const double length =
      step == 0 ? 1.0 : std::sin(count * (step / 2)) / (count * std::sin(step / 2));
  const double middle = std::remainder((first + (count - 1) * 0.5) * step, turn);
  return {length * std::cos(middle), length * std::sin(middle)};
}
}  // namespace detail

/// Scores a row by the attention that future queries are expected to pay to it, times the norm of its value.
///
/// A query at one of the next `future` positions is normal with mean m and covariance C, before RoPE; R is the mean
/// rotation of those positions. The logit of key k is `scale * k.Rm + scale^2 / 2 * k.(R C R^T)k`; softmax for each query
/// head over all rows except the sinks; mean over the query heads of the KV head; plus epsilon; times the value's norm.
///
/// \par Shapes
/// `Observation::statistics` [query heads, head_dim] and [query heads, head_dim, head_dim]; scores [live rows]
/// \par Ties
/// none broken here. NaN: a key (or, with `value_norm`, a value) that is not finite scores NaN, and such a key takes no
/// part; a query head whose statistics are not finite, or whose logits overflow, has no vote; without any vote all
/// scores are NaN
/// \par Complexity
/// O(group * live rows * head_dim^2) time, O(group * live rows * head_dim) without the covariance; no allocation. The
/// score of a row does not change by a bit with page size, page placement, batch or thread
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636, as kvpress computes it; differs: sinks score as rows without attention
/// instead of above all others (the policy protects them), and future positions are counted from the sequence's next
/// rope position, so that it may be called while generating
class ExpectedAttentionScorer {
 public:
  /// \pre `params.sinks >= 0 && params.future >= 1`
  explicit constexpr ExpectedAttentionScorer(const ExpectedAttentionParams& params) noexcept
      : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    const std::int32_t group = shape.kv_heads > 0 ? shape.query_heads / shape.kv_heads : 0;
    return detail::largest_need(std::max(1, shape.head_dim), [&](std::int32_t head_dim) {
      return Arena::bytes_for([&](Arena& arena) {
        return Layout::take(
            arena, params_, head_dim, shape.value_dim, std::max(1, group), shape.max_rows);
      });
    });
  }

  /// `bad_observation` without statistics, with statistics of the wrong shape, without a rotation of fixed frequencies
  /// that fits the keys, or if rows are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const QueryStatistics& q = obs.statistics;
    const Rope& rope = params_.rope;
    const std::int64_t frequencies =
        static_cast<std::int64_t>(rope.same_for_all_layers ? 1 : view.layers_of_model()) *
        (rope.dim / 2);
    const bool rotates = rope.kind == RopeKind::standard && rope.dim >= 2 && rope.dim % 2 == 0 &&
                         rope.offset >= 0 && rope.dim <= view.k.head_dim - rope.offset &&
                         static_cast<std::int64_t>(rope.inverse_frequencies.size()) >= frequencies;
    const bool fits = q && q.dim == view.k.head_dim &&
                      q.layers >= view.layer_offset + view.layers &&
                      q.query_heads >= view.kv_heads && q.query_heads % view.kv_heads == 0;
    const bool read = readable(view.k) && (!params_.value_norm || readable(view.v));
    return rotates && fits && read ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  ///
  /// \param scratch  [scratch_bytes(shape)]
  /// \param[out] out [rows of the table in use]
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const CacheView& view = head.view;
    const LiveRows rows(head);
    const std::int32_t live = rows.count();
    const std::int32_t group = obs.statistics.query_heads / view.kv_heads;
    Arena arena(scratch);
    const Layout mem = Layout::take(arena, params_, view.k.head_dim, view.v.head_dim, group, live);
    KVTRIM_ASSERT(arena.ok());
    std::fill(out.begin(), out.end(), 0.0F);

    rows.order(mem.order);
    std::fill(mem.takes_part.begin(), mem.takes_part.end(), std::uint8_t{1});
    for (std::int32_t rank = 0; rank < std::min(params_.sinks, live); ++rank) {
      mem.takes_part[index(mem.order[index(rank)])] = 0;
    }
    rotate_statistics(head, obs.statistics, group, mem);
    const bool matrix = params_.covariance && obs.statistics.covariance != nullptr;
    expected_logits(head, group, matrix, mem);
    const bool any = expected_attention(group, mem);
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    const auto finish = [&](std::int32_t i, double norm) {
      const double attention = mem.attention[index(i)] + static_cast<double>(params_.epsilon);
      out[index(rows.row(i))] =
          any && mem.bad[index(i)] == 0 ? static_cast<float>(attention * norm) : nan;
    };
    if (!params_.value_norm) {
      for (std::int32_t i = 0; i < live; ++i) { finish(i, 1.0); }
      return;
    }
    const std::int32_t value_dim = view.v.head_dim;
    const auto score_value = [&](std::int32_t i, const float* row, bool finite) {
      const Eigen::Map<const Eigen::ArrayXf> value(row, value_dim);
      finish(i,
             finite ? std::sqrt(value.cast<double>().square().sum())
                    : std::numeric_limits<double>::quiet_NaN());
    };
    detail::for_each_row(head, detail::Side::values, mem.values, score_value);
  }

 private:
  struct Layout {
    detail::TileScratch tiles;
    std::span<float>
        statistics;  // [padded, head_dim] of one query head: rotated mean, then rotated covariance
    std::span<float>
        queries;  // [group, padded, head_dim] the same for all heads, as products read them
    std::span<float> products;           // [padded, tile_rows]
    std::span<float> logits;             // [group, rows]
    std::span<double> attention;         // [rows]
    std::span<std::int32_t> order;       // [rows]
    std::span<std::uint8_t> takes_part;  // [rows] in the softmax
    std::span<std::uint8_t> bad;         // [rows] the key is not finite
    std::span<std::uint8_t> votes;       // [group]
    std::span<float> values;             // [block_rows, value_dim]
    std::int32_t padded = 0;

    static Layout take(Arena& arena,
                       const ExpectedAttentionParams& params,
                       std::int32_t dim,
                       std::int32_t value_dim,
                       std::int32_t group,
                       std::int32_t rows) noexcept {
      Layout m;
      m.padded = detail::padded_queries(params.covariance ? dim + 1 : 1);
      m.tiles = detail::TileScratch::take(arena, dim);
      m.statistics = arena.take<float>(static_cast<std::int64_t>(m.padded) * dim);
      m.queries = arena.take<float>(static_cast<std::int64_t>(group) * m.padded * dim);
      m.products = arena.take<float>(static_cast<std::int64_t>(m.padded) * detail::tile_rows(dim));
      m.logits = arena.take<float>(static_cast<std::int64_t>(group) * rows);
      m.attention = arena.take<double>(rows);
      m.order = arena.take<std::int32_t>(rows);
      m.takes_part = arena.take<std::uint8_t>(rows);
      m.bad = arena.take<std::uint8_t>(rows);
      m.votes = arena.take<std::uint8_t>(group);
      m.values = arena.take<float>(
          params.value_norm ? static_cast<std::int64_t>(detail::block_rows) * value_dim : 0);
      return m;
    }
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  // Calls f(a, b, rotation) for each pair of features that RoPE turns.
  template <class F>
  void for_each_pair(LayerId l, std::int32_t first, F&& f) const noexcept {
    const Rope& rope = params_.rope;
    const std::int32_t half = rope.dim / 2;
    const bool split = rope.pairs == RopePairs::half_split;
    const double* const frequencies =
        rope.inverse_frequencies.data() + (rope.same_for_all_layers ? 0 : raw(l) * half);
    for (std::int32_t j = 0; j < half; ++j) {
      f(rope.offset + (split ? j : 2 * j),
        rope.offset + (split ? j + half : 2 * j + 1),
        detail::mean_rotation(frequencies[j], first, params_.future));
    }
  }
  static void turn(const detail::MeanRotation& by, float& a, float& b) noexcept {
    const double x = static_cast<double>(a) * by.cosine - static_cast<double>(b) * by.sine;
    const double y = static_cast<double>(a) * by.sine + static_cast<double>(b) * by.cosine;
    a = static_cast<float>(x);
    b = static_cast<float>(y);
  }

  // Query g: row 0 is R m, rows 1 .. head_dim are R C R^T, followed by zeros.
  void rotate_statistics(const HeadRef& head,
                         const QueryStatistics& statistics,
                         std::int32_t group,
                         const Layout& mem) const noexcept {
    const auto [view, s, layer, h] = head;
    const LayerId l = view.model_layer(layer);
    const std::int32_t first = head.state().next_rope_position;
    const std::int32_t dim = statistics.dim;
    const bool matrix = params_.covariance && statistics.covariance != nullptr;
    std::fill(mem.statistics.begin(), mem.statistics.end(), 0.0F);
    for (std::int32_t g = 0; g < group; ++g) {
      const std::int32_t query_head = raw(h) * group + g;
      float* const mean = mem.statistics.data();
      const auto row = [&](std::int32_t i) {
        return mean + static_cast<std::ptrdiff_t>(i + 1) * dim;
      };
      std::copy_n(statistics.mean_of(s, l, query_head), dim, mean);
      bool finite = detail::finite(mean, dim);
      for (std::int32_t i = 0; matrix && i < dim; ++i) {
        std::copy_n(
            statistics.covariance_of(s, l, query_head) + static_cast<std::ptrdiff_t>(i) * dim,
            dim,
            row(i));
        finite = finite && detail::finite(row(i), dim);
      }
      mem.votes[index(g)] = finite ? 1 : 0;
      if (!finite) { continue; }
      for_each_pair(l, first, [&](std::int32_t a, std::int32_t b, const detail::MeanRotation& by) {
        turn(by, mean[a], mean[b]);
        for (std::int32_t i = 0; matrix && i < dim; ++i) { turn(by, row(i)[a], row(i)[b]); }
        for (std::int32_t i = 0; matrix && i < dim; ++i) { turn(by, row(a)[i], row(b)[i]); }
      });
      for (std::int32_t q = 0; q < mem.padded; ++q) {
        detail::pack_query(mean + static_cast<std::ptrdiff_t>(q) * dim,
                           dim,
                           q,
                           mem.queries.data() + static_cast<std::ptrdiff_t>(g) * mem.padded * dim);
      }
    }
  }

  void expected_logits(const HeadRef& head,
                       std::int32_t group,
                       bool matrix,
                       const Layout& mem) const noexcept {
    const std::int32_t dim = head.view.k.head_dim;
    const std::int32_t height = detail::tile_rows(dim);
    const auto live = static_cast<std::int32_t>(mem.order.size());
    const float scale =
        params_.scale != 0 ? params_.scale : 1.0F / std::sqrt(static_cast<float>(dim));
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      for (std::int32_t t = 0; t < count; ++t) {
        mem.bad[index(first + t)] = mem.tiles.bad[index(t)];
        if (mem.tiles.bad[index(t)] != 0) { mem.takes_part[index(first + t)] = 0; }
      }
      for (std::int32_t g = 0; g < group; ++g) {
        if (mem.votes[index(g)] == 0) { continue; }
        detail::multiply(mem.tiles,
                         dim,
                         mem.queries.data() + static_cast<std::ptrdiff_t>(g) * mem.padded * dim,
                         matrix ? mem.padded : detail::padded_queries(1),
                         mem.products.data());
        Eigen::Map<Eigen::ArrayXf> logit(mem.products.data(), height);
        logit *= scale;
        for (std::int32_t i = 0; matrix && i < dim; ++i) {
          const Eigen::Map<const Eigen::ArrayXf> product(
              mem.products.data() + static_cast<std::ptrdiff_t>(i + 1) * height, height);
          const Eigen::Map<const Eigen::ArrayXf, 0, Eigen::InnerStride<>> feature(
              mem.tiles.tile.data() + i, height, Eigen::InnerStride<>(dim));
          logit += feature * product * (scale * scale / 2);
        }
        std::copy_n(mem.products.data(),
                    count,
                    mem.logits.data() + static_cast<std::ptrdiff_t>(g) * live + first);
      }
    });
  }

  // Softmax of each query head in double, and their mean. False: no query head has a vote.
  [[nodiscard]] static bool expected_attention(std::int32_t group, const Layout& mem) noexcept {
    const std::size_t live = mem.order.size();
    std::fill(mem.attention.begin(), mem.attention.end(), 0.0);
    std::int32_t heads = 0;
    for (std::int32_t g = 0; g < group; ++g) {
      if (mem.votes[index(g)] == 0) { continue; }
      const auto logits = mem.logits.subspan(index(g) * live, live);
      float maximum = -std::numeric_limits<float>::infinity();
      bool finite = true;
      for (std::size_t i = 0; i < live; ++i) {
        if (mem.takes_part[i] == 0) { continue; }
        finite = finite && std::isfinite(logits[i]);
        maximum = std::max(maximum, logits[i]);
      }
      if (!finite) { continue; }
      const auto exponential = [&](std::size_t i) {
        return std::exp(static_cast<double>(logits[i]) - static_cast<double>(maximum));
      };
      double sum = 0;
      for (std::size_t i = 0; i < live; ++i) {
        if (mem.takes_part[i] != 0) { sum += exponential(i); }
      }
      for (std::size_t i = 0; i < live; ++i) {
        if (mem.takes_part[i] != 0) { mem.attention[i] += exponential(i) / sum; }
      }
      ++heads;
    }
    for (double& a : mem.attention) { a /= std::max(1, heads); }
    return heads > 0;
  }

  ExpectedAttentionParams params_;
};
static_assert(Scorer<ExpectedAttentionScorer>);

/// `ExpectedAttentionParams` are scored by `ExpectedAttentionScorer`.
template <>
struct ScorerOf<ExpectedAttentionParams> {
  using type = ExpectedAttentionScorer;
};

}  // namespace kvtrim
