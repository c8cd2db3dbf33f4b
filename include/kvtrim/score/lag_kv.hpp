// SPDX-License-Identifier: Apache-2.0
#pragma once

// What comes next normalises what came before: no query is needed. Keys and values are read twice, first for the
// extremes of each partition, then for the scores, so that only the extremes need memory.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/score/detail/row_blocks.hpp>
#include <kvtrim/score/scorer.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by how unevenly its channels stand in the range that the next partition of rows spans.
///
/// Rows after the sinks are cut into partitions of `lag` by position. A channel of a row is normalised by the minimum
/// and maximum of that channel in the following partition; the standard deviation over the channels goes through a
/// softmax over the partition; the results for keys and values are averaged. Scores are ranks inside the partition,
/// divided by `lag`, or these averages themselves (`cross_scoring`). The last full partition and the remainder have
/// nothing after them: they score 0 and are meant to be protected, as are the sinks. In a prompt of fewer than
/// sinks + 2 * lag rows, rows are scored by their order alone: the later, the higher.
///
/// \par Shapes
/// keys and values [live rows, head_dim]; scores [live rows], 0 <= score < 1
/// \par Ties
/// equal averages inside a partition: the lower position has the higher rank. Ranks of different partitions are equal.
/// NaN: a key or value that is not finite scores NaN and sets no minimum or maximum. A channel that is constant in the
/// following partition is shifted, not scaled (its width counts as 1), where the formula divides 0 by 0; a single channel
/// has a deviation of 0
/// \par Complexity
/// O(rows in partitions * (head dims + log lag) + live rows) time, two reads of the keys and values in partitions only;
/// O(rows + rows / lag * head_dim) space; no allocation. The score of a row does not change by a bit with page size, page
/// placement, batch or thread
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704, as kvpress computes it; differs: protected rows by range, not by a score of 1;
/// constant channels
class LagKVScorer {
 public:
  /// \pre `params.sinks >= 0 && params.lag >= 1`
  explicit constexpr LagKVScorer(const LagKVParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    return Arena::bytes_for([&](Arena& arena) {
      return Layout::take(
          arena, params_.lag, std::max(shape.head_dim, shape.value_dim), shape.max_rows);
    });
  }
  /// `bad_observation` if keys or values are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation&) const noexcept {
    return readable(view.k) && readable(view.v) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  void score(const HeadRef& head,
             const Observation&,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const LiveRows rows(head);
    const std::int32_t live = rows.count();
    const LagLayout layout = lag_layout(params_, head.state(), live);
    std::fill(out.begin(), out.end(), 0.0F);
    Arena arena(scratch);
    const std::int32_t dim = std::max(head.view.k.head_dim, head.view.v.head_dim);
    Layout mem = Layout::take(arena, params_.lag, dim, live);
    KVTRIM_ASSERT(arena.ok());
    rows.order(mem.order);
    const auto score_of = [&](std::int32_t i) -> float& { return out[index(rows.row(i))]; };
    const std::int32_t scored = layout.scored(params_.lag);
    if (scored == 0) {
      if (params_.judged_once) { return; }
      for (std::int32_t rank = layout.begin; rank < live; ++rank) {
        score_of(mem.order[index(rank)]) =
            static_cast<float>(rank - layout.begin) / static_cast<float>(live - layout.begin);
      }
      for (std::int32_t rank = 0; rank < layout.begin; ++rank) {
        score_of(mem.order[index(rank)]) = 1.0F;
      }
      return;
    }
    for (std::int32_t rank = 0; rank < live; ++rank) {
      mem.rank_of[index(mem.order[index(rank)])] = rank;
    }
    std::fill(mem.averages.begin(), mem.averages.end(), 0.0);
    mem.first = rows.ordered() ? layout.begin : 0;
    mem.end = rows.ordered() ? layout.begin + layout.partitions * params_.lag : live;
    for (const detail::Side side : {detail::Side::keys, detail::Side::values}) {
      find_ranges(head, side, layout, mem);
      find_deviations(head, side, layout, mem);
      add_softmax(layout, mem);
    }
    for (std::int32_t begin = layout.begin; begin < layout.begin + scored; begin += params_.lag) {
      const auto members = mem.order.subspan(index(begin), index(params_.lag));
      const auto average = [&](std::int32_t i) {
        return static_cast<float>(mem.averages[index(i)]);
      };
      if (params_.cross_scoring) {
        for (const std::int32_t i : members) { score_of(i) = average(i); }
        continue;
      }
      const auto key = [&](std::int32_t i) {
        return row_key(average(i), head.position(rows.row(i)));
      };
      std::sort(members.begin(), members.end(), [&](std::int32_t a, std::int32_t b) {
        return key(a) < key(b);
      });
      std::int32_t rank = 0;
      for (const std::int32_t i : members) {
        score_of(i) = is_nan(average(i))
                          ? average(i)
                          : static_cast<float>(rank) / static_cast<float>(params_.lag);
        ++rank;
      }
    }
  }

 private:
  static constexpr double nan = std::numeric_limits<double>::quiet_NaN();

  struct Layout {
    std::span<float> block;           // [block_rows, dim]
    std::span<double> lowest;         // [partitions, dim] of the following partition
    std::span<double> scales;         // [partitions, dim] its maximum, then 1 / width
    std::span<double> channels;       // [dim]
    std::span<double> deviations;     // [rows] NaN: not finite
    std::span<double> averages;       // [rows]
    std::span<std::int32_t> order;    // [rows]
    std::span<std::int32_t> rank_of;  // [rows]
    std::int32_t dim = 0;
    std::int32_t first = 0;  // live rows that are in a full partition
    std::int32_t end = 0;

    static Layout take(Arena& arena,
                       std::int32_t lag,
                       std::int32_t dim,
                       std::int32_t rows) noexcept {
      const std::int64_t partitions = rows / lag + 1;
      Layout m;
      m.dim = dim;
      m.block = arena.take<float>(static_cast<std::int64_t>(detail::block_rows) * dim);
      m.lowest = arena.take<double>(partitions * dim);
      m.scales = arena.take<double>(partitions * dim);
      m.channels = arena.take<double>(dim);
      m.deviations = arena.take<double>(rows);
      m.averages = arena.take<double>(rows);
      m.order = arena.take<std::int32_t>(rows);
      m.rank_of = arena.take<std::int32_t>(rows);
      return m;
    }
  };
  using Channels = Eigen::Map<Eigen::ArrayXd>;
  using Row = Eigen::Map<const Eigen::ArrayXf>;

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }
  // Partition of a row; -1: none. Some rows lie after the last one.
  [[nodiscard]] std::int32_t partition_of(std::int32_t i,
                                          const LagLayout& layout,
                                          const Layout& mem) const noexcept {
    const std::int32_t rank = mem.rank_of[index(i)] - layout.begin;
    return rank < 0 ? -1 : rank / params_.lag;
  }

  // Range of each channel in the partition that follows partition p, at [p].
  void find_ranges(const HeadRef& head,
                   detail::Side side,
                   const LagLayout& layout,
                   const Layout& mem) const noexcept {
    const std::int32_t dim = detail::dim_of(head.view, side);
    constexpr double infinity = std::numeric_limits<double>::infinity();
    std::fill(mem.lowest.begin(), mem.lowest.end(), infinity);
    std::fill(mem.scales.begin(), mem.scales.end(), -infinity);
    detail::for_each_row(
        head,
        side,
        mem.first,
        mem.end,
        mem.block,
        [&](std::int32_t i, const float* row, bool finite) {
          const std::int32_t p = partition_of(i, layout, mem) - 1;
          if (!finite || p < 0 || p >= layout.partitions - 1) { return; }
          Channels low(mem.lowest.data() + static_cast<std::ptrdiff_t>(p) * mem.dim, dim);
          Channels high(mem.scales.data() + static_cast<std::ptrdiff_t>(p) * mem.dim, dim);
          low = low.min(Row(row, dim).cast<double>());
          high = high.max(Row(row, dim).cast<double>());
        });
    for (std::size_t c = 0; c < mem.lowest.size(); ++c) {
      const double width = mem.scales[c] - mem.lowest[c];
      mem.scales[c] = width > 0 ? 1 / width : 1.0;
      if (width < 0) { mem.lowest[c] = 0; }  // no finite row there
    }
  }

  void find_deviations(const HeadRef& head,
                       detail::Side side,
                       const LagLayout& layout,
                       const Layout& mem) const noexcept {
    const std::int32_t dim = detail::dim_of(head.view, side);
    Channels channels(mem.channels.data(), dim);
    detail::for_each_row(
        head,
        side,
        mem.first,
        mem.end,
        mem.block,
        [&](std::int32_t i, const float* row, bool finite) {
          const std::int32_t p = partition_of(i, layout, mem);
          if (p < 0 || p >= layout.partitions - 1) { return; }
          const Channels low(mem.lowest.data() + static_cast<std::ptrdiff_t>(p) * mem.dim, dim);
          const Channels scale(mem.scales.data() + static_cast<std::ptrdiff_t>(p) * mem.dim, dim);
          channels = (Row(row, dim).cast<double>() - low) * scale;
          const double mean = channels.sum() / dim;
          const double squares = (channels - mean).square().sum();
          mem.deviations[index(i)] = !finite ? nan : dim > 1 ? std::sqrt(squares / (dim - 1)) : 0.0;
        });
  }

  // Half of each partition's softmax over its deviations.
  void add_softmax(const LagLayout& layout, const Layout& mem) const noexcept {
    const std::int32_t end = layout.begin + layout.scored(params_.lag);
    for (std::int32_t begin = layout.begin; begin < end; begin += params_.lag) {
      const auto members = mem.order.subspan(index(begin), index(params_.lag));
      double maximum = 0;
      double sum = 0;
      for (const std::int32_t i : members) {
        maximum = std::fmax(maximum, mem.deviations[index(i)]);
      }
      for (const std::int32_t i : members) {
        const double x = std::exp(mem.deviations[index(i)] - maximum);
        sum += std::isnan(x) ? 0.0 : x;
      }
      for (const std::int32_t i : members) {
        mem.averages[index(i)] += std::exp(mem.deviations[index(i)] - maximum) / sum / 2;
      }
    }
  }

  LagKVParams params_;
};
static_assert(Scorer<LagKVScorer>);

/// `LagKVParams` are scored by `LagKVScorer`.
template <>
struct ScorerOf<LagKVParams> {
  using type = LagKVScorer;
};

}  // namespace kvtrim
