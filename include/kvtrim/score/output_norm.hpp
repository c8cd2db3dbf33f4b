// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a row can change in the residual stream is bounded by its attention times |W_O v|, for each query head. No product
// of size rows x hidden is ever stored: tiles of values are multiplied by blocks of columns of W_O, transposed into the
// scratch.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/score/detail/rescale.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by the sum of magnitudes of its projected value, averaged over the query heads of its KV head: the factor
/// of `OutputNorm` by itself.
///
/// \par Shapes
/// values [live rows, value_dim]; `Observation::output` [query heads, value_dim, hidden]; scores [live rows], at least 0
/// \par Ties
/// none broken here. NaN: a value that is not finite scores NaN; with weights that are not finite, all rows are NaN or inf
/// \par Complexity
/// O(live rows * group * value_dim * hidden) time; no allocation
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805 (CriticalKV); the group's mean as kvpress
class OutputNormFactor {
 public:
  constexpr OutputNormFactor() noexcept = default;
  explicit constexpr OutputNormFactor(OutputNormFactorParams) noexcept {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return detail::largest_need(shape.value_dim,
                                [](Arena& arena, std::int32_t dim) { return Layout{arena, dim}; });
  }
  /// `bad_observation` without W_O, with one of another value_dim than the values', with query heads that are not a
  /// multiple of the KV heads or not those of the queries, or where the values are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const OutputProjection& w = obs.output;
    const std::int64_t layer = static_cast<std::int64_t>(w.query_heads) * w.value_dim * w.hidden;
    const bool fits = w && w.query_heads >= view.kv_heads && w.query_heads % view.kv_heads == 0 &&
                      w.value_dim == view.v.head_dim && w.hidden >= 1 &&
                      (obs.queries.data == nullptr || obs.queries.query_heads == w.query_heads) &&
                      (view.layers == 1 || w.layer_stride == 0 || w.layer_stride >= layer);
    return fits && readable(view.v) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const CacheView view = detail::value_view(head.view);
    const HeadRef values{view, head.sequence, head.layer, head.head};
    const LiveRows rows(values);
    const std::int32_t group = obs.output.query_heads / view.kv_heads;
    std::fill(out.begin(), out.end(), 0.0F);
    Arena arena(scratch);
    const Layout mem{arena, view.k.head_dim};
    KVTRIM_ASSERT(arena.ok());
    Eigen::Map<Eigen::ArrayXd> sums(mem.sums.data(), mem.tiles.rows);
    detail::for_each_key_tile(values, mem.tiles, [&](std::int32_t first, std::int32_t count) {
      sums.setZero();
      for (std::int32_t g = 0; g < group; ++g) {
        const float* const w = obs.output.of(head.layer, raw(head.head) * group + g);
        add_magnitudes(w, obs.output.hidden, mem);
      }
      for (std::int32_t t = 0; t < count; ++t) {
        const bool bad = mem.tiles.bad[static_cast<std::size_t>(t)] != 0;
        out[static_cast<std::size_t>(rows.row(first + t))] =
            bad ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(sums[t] / group);
      }
    });
  }

 private:
  static constexpr std::int32_t block = 128;  // columns of W_O in one product

  struct Layout {
    Arena& arena;
    std::int32_t dim;
    detail::TileScratch tiles{arena, dim};
    std::span<float> weights = arena.take<float>(std::int64_t{block} * dim);  // columns of W_O
    std::span<float> projected = arena.take<float>(std::int64_t{block} * tiles.rows);
    std::span<float> magnitudes = arena.take<float>(tiles.rows);  // of one block
    std::span<double> sums = arena.take<double>(tiles.rows);
  };

  // sums += magnitudes of the tile's rows times `w`, [dim, hidden].
  static void add_magnitudes(const float* w, std::int32_t hidden, const Layout& mem) noexcept {
    const std::int32_t height = mem.tiles.rows;
    Eigen::Map<Eigen::ArrayXf> magnitudes(mem.magnitudes.data(), height);
    for (std::int32_t first = 0; first < hidden; first += block) {
      const std::int32_t columns = std::min(block, hidden - first);
      const std::int32_t padded = detail::padded_queries(columns);
      for (std::int32_t c = 0; c < padded; ++c) {
        const float* const column = c < columns ? w + first + c : nullptr;
        detail::pack_query(column, mem.dim, c, mem.weights.data(), hidden);
      }
      detail::multiply(mem.tiles, mem.weights.data(), padded, mem.projected.data());
      magnitudes.setZero();
      for (std::int32_t c = 0; c < columns; ++c) {
        const float* const products =
            mem.projected.data() + static_cast<std::ptrdiff_t>(c) * height;
        magnitudes += Eigen::Map<const Eigen::ArrayXf>(products, height).abs();
      }
      Eigen::Map<Eigen::ArrayXd>(mem.sums.data(), height) += magnitudes.cast<double>();
    }
  }
};
static_assert(Scorer<OutputNormFactor>);

/// `OutputNormFactorParams` are scored by `OutputNormFactor`.
OutputNormFactor scorer_of(ScoreTag<OutputNormFactorParams>);

/// Scores a row by (its score + epsilon) * `OutputNormFactor`.
///
/// \tparam Scores  parameters that `ScorerOf` maps to a scorer, or a scorer; its scores are meant to be at least 0
/// \par Shapes
/// as `OutputNormFactor`
/// \par Ties
/// none broken here. NaN: where the score is, and where the factor is
/// \par Complexity
/// the scorer's and the factor's; no allocation
/// \par Source
/// Feng et al., 2025, arXiv:2502.03805 (CriticalKV), its second stage; as a decorator: own
template <class Scores>
using OutputNormScorer = detail::RescaledScorer<OutputNorm, Scores, OutputNormFactor>;
static_assert(Scorer<OutputNormScorer<detail::ScorerArchetype>>);

/// `OutputNorm<Scores>` are scored by `OutputNormScorer<Scores>`.
template <class Scores>
OutputNormScorer<Scores> scorer_of(ScoreTag<OutputNorm<Scores>>);

}  // namespace kvtrim
