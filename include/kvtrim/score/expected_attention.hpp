// SPDX-License-Identifier: Apache-2.0
#pragma once

// Future queries are assumed to be normally distributed, with a mean and a covariance before RoPE that the mean rotation of
// the next positions turns. So a whole prompt votes at the price of two small matrices, and no query has to be kept.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/detail/softmax.hpp>
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
/// O(group * live rows * head_dim^2) time, O(group * live rows * head_dim) without the covariance; no allocation
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
    return detail::largest_need(shape.head_dim, [&](Arena& arena, std::int32_t dim) {
      return Layout{arena, params_, dim, shape.value_dim, std::max(1, group), shape.max_rows};
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
    const bool fits = q && q.dim == view.k.head_dim && q.layers >= view.layers &&
                      q.query_heads >= view.kv_heads && q.query_heads % view.kv_heads == 0;
    const bool read = readable(view.k) && (!params_.value_norm || readable(view.v));
    return rotates && fits && read ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const CacheView& view = head.view;
    const LiveRows rows(head);
    const std::int32_t live = rows.count();
    const std::int32_t group = obs.statistics.query_heads / view.kv_heads;
    Arena arena(scratch);
    const Layout mem{arena, params_, view.k.head_dim, view.v.head_dim, group, live};
    KVTRIM_ASSERT(arena.ok());
    std::fill(out.begin(), out.end(), 0.0F);

    rows.order(mem.order);
    std::fill(mem.takes_part.begin(), mem.takes_part.end(), std::uint8_t{1});
    for (std::int32_t rank = 0; rank < std::min(params_.sinks, live); ++rank) {
      mem.takes_part[index(mem.order[index(rank)])] = 0;
    }
    const bool matrix = params_.covariance && obs.statistics.covariance != nullptr;
    rotate_statistics(head, obs.statistics, matrix, mem);
    expected_logits(head, matrix, mem);
    const bool any = expected_attention(mem);
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
    const auto score_value = [&](std::int32_t i, const float* row, bool finite) {
      const Eigen::Map<const Eigen::ArrayXf> value(row, mem.value_dim);
      finish(i, finite ? std::sqrt(value.cast<double>().square().sum()) : double{nan});
    };
    detail::for_each_row(head, detail::Side::values, 0, live, mem.values, score_value);
  }

 private:
  struct Layout {
    Arena& arena;
    const ExpectedAttentionParams& params;
    std::int32_t dim;
    std::int32_t value_dim;
    std::int32_t group;  // query heads of the KV head
    std::int32_t rows;
    std::int32_t padded = detail::padded_queries(params.covariance ? dim + 1 : 1);
    std::int64_t floats = static_cast<std::int64_t>(padded) * dim;
    detail::TileScratch tiles{arena, dim};
    // [padded, dim] of one query head: rotated mean, then rotated covariance.
    std::span<float> statistics = arena.take<float>(floats);
    std::span<float> queries = arena.take<float>(group * floats);  // as products read them
    std::span<float> products =                                    // [padded, tile_rows]
        arena.take<float>(static_cast<std::int64_t>(padded) * tiles.rows);
    std::span<float> logits = arena.take<float>(static_cast<std::int64_t>(group) * rows);
    std::span<double> attention = arena.take<double>(rows);
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
    std::span<std::uint8_t> takes_part = arena.take<std::uint8_t>(rows);  // in the softmax
    std::span<std::uint8_t> bad = arena.take<std::uint8_t>(rows);         // the key is not finite
    std::span<std::uint8_t> votes = arena.take<std::uint8_t>(group);
    std::span<float> values = detail::take_block(arena, params.value_norm ? value_dim : 0);

    // Query `g`, as products read it.
    [[nodiscard]] float* query(std::int32_t g) const noexcept {
      return queries.data() + g * floats;
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
                         bool matrix,
                         const Layout& mem) const noexcept {
    const auto [view, s, layer, h] = head;
    const LayerId l = view.model_layer(layer);
    const std::int32_t first = head.state().next_rope_position;
    const std::int32_t dim = mem.dim;
    std::fill(mem.statistics.begin(), mem.statistics.end(), 0.0F);
    for (std::int32_t g = 0; g < mem.group; ++g) {
      const std::int32_t query_head = raw(h) * mem.group + g;
      float* const mean = mem.statistics.data();
      const auto row = [&](std::int32_t i) { return mean + static_cast<std::ptrdiff_t>(i) * dim; };
      std::copy_n(statistics.mean_of(s, layer, query_head), dim, mean);
      bool finite = detail::finite(mean, dim);
      for (std::int32_t i = 0; matrix && i < dim; ++i) {
        const float* const covariance = statistics.covariance_of(s, layer, query_head);
        std::copy_n(covariance + static_cast<std::ptrdiff_t>(i) * dim, dim, row(1 + i));
        finite = finite && detail::finite(row(1 + i), dim);
      }
      mem.votes[index(g)] = finite ? 1 : 0;
      if (!finite) { continue; }
      for_each_pair(l, first, [&](std::int32_t a, std::int32_t b, const detail::MeanRotation& by) {
        turn(by, mean[a], mean[b]);
        for (std::int32_t i = 1; matrix && i <= dim; ++i) { turn(by, row(i)[a], row(i)[b]); }
        for (std::int32_t i = 0; matrix && i < dim; ++i) { turn(by, row(1 + a)[i], row(1 + b)[i]); }
      });
      for (std::int32_t q = 0; q < mem.padded; ++q) {
        detail::pack_query(row(q), dim, q, mem.query(g));
      }
    }
  }

  void expected_logits(const HeadRef& head, bool matrix, const Layout& mem) const noexcept {
    const std::int32_t dim = mem.dim;
    const std::int32_t height = mem.tiles.rows;
    const std::int32_t used = matrix ? mem.padded : detail::padded_queries(1);
    const float scale =
        params_.scale != 0 ? params_.scale : 1.0F / std::sqrt(static_cast<float>(dim));
    detail::for_each_key_tile(head, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      for (std::int32_t t = 0; t < count; ++t) {
        mem.bad[index(first + t)] = mem.tiles.bad[index(t)];
        if (mem.tiles.bad[index(t)] != 0) { mem.takes_part[index(first + t)] = 0; }
      }
      for (std::int32_t g = 0; g < mem.group; ++g) {
        if (mem.votes[index(g)] == 0) { continue; }
        detail::multiply(mem.tiles, mem.query(g), used, mem.products.data());
        Eigen::Map<Eigen::ArrayXf> logit(mem.products.data(), height);
        logit *= scale;
        for (std::int32_t i = 0; matrix && i < dim; ++i) {
          const Eigen::Map<const Eigen::ArrayXf> product(
              mem.products.data() + static_cast<std::ptrdiff_t>(i + 1) * height, height);
          const Eigen::Map<const Eigen::ArrayXf, 0, Eigen::InnerStride<>> feature(
              mem.tiles.tile.data() + i, height, Eigen::InnerStride<>(dim));
          logit += feature * product * (scale * scale / 2);
        }
        float* const logits = mem.logits.data() + static_cast<std::ptrdiff_t>(g) * mem.rows;
        std::copy_n(mem.products.data(), count, logits + first);
      }
    });
  }

  // Softmax of each query head, and their mean. False: no query head has a vote.
  [[nodiscard]] static bool expected_attention(const Layout& mem) noexcept {
    const std::size_t live = index(mem.rows);
    std::fill(mem.attention.begin(), mem.attention.end(), 0.0);
    std::int32_t heads = 0;
    for (std::int32_t g = 0; g < mem.group; ++g) {
      if (mem.votes[index(g)] == 0) { continue; }
      const auto logits = mem.logits.subspan(index(g) * live, live);
      const auto takes_part = [&](std::size_t i) { return mem.takes_part[i] != 0; };
      const auto logit = [&](std::size_t i) { return static_cast<double>(logits[i]); };
      const auto add = [&](std::size_t i, double x) { mem.attention[i] += x; };
      heads += detail::for_each_probability(live, takes_part, logit, add) ? 1 : 0;
    }
    for (double& a : mem.attention) { a /= std::max(1, heads); }
    return heads > 0;
  }

  ExpectedAttentionParams params_;
};
static_assert(Scorer<ExpectedAttentionScorer>);

/// `ExpectedAttentionParams` are scored by `ExpectedAttentionScorer`.
ExpectedAttentionScorer scorer_of(ScoreTag<ExpectedAttentionParams>);

}  // namespace kvtrim
