// SPDX-License-Identifier: Apache-2.0
#pragma once

// What comes next normalises what came before: no query is needed. Keys and values are read twice, first for the
// extremes of each partition, then for the scores, so that only the extremes need memory.

#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/policy/lag_kv.hpp>
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
/// O(rows + rows / lag * head_dim) space; no allocation
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
      return Layout{arena, params_.lag, std::max(shape.head_dim, shape.value_dim), shape.max_rows};
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
    const LagLayout cut = lag_layout(params_, head.state(), live);
    std::fill(out.begin(), out.end(), 0.0F);
    Arena arena(scratch);
    const std::int32_t dim = std::max(head.view.k.head_dim, head.view.v.head_dim);
    Layout mem{arena, params_.lag, dim, live};
    KVTRIM_ASSERT(arena.ok());
    rows.order(mem.order);
    const auto score_of = [&](std::int32_t i) -> float& { return out[index(rows.row(i))]; };
    const std::int32_t scored = cut.scored(params_.lag);
    if (scored == 0) {
      if (params_.judged_once) { return; }
      for (std::int32_t rank = cut.begin; rank < live; ++rank) {
        score_of(mem.order[index(rank)]) =
            static_cast<float>(rank - cut.begin) / static_cast<float>(live - cut.begin);
      }
      for (std::int32_t rank = 0; rank < cut.begin; ++rank) {
        score_of(mem.order[index(rank)]) = 1.0F;
      }
      return;
    }
    for (std::int32_t rank = 0; rank < live; ++rank) {
      mem.rank_of[index(mem.order[index(rank)])] = rank;
    }
    std::fill(mem.averages.begin(), mem.averages.end(), 0.0);
    mem.cut = cut;
    mem.first = rows.ordered() ? cut.begin : 0;
    mem.end = rows.ordered() ? cut.begin + cut.partitions * params_.lag : live;
    for (const detail::Side side : {detail::Side::keys, detail::Side::values}) {
      find_ranges(head, side, mem);
      find_deviations(head, side, mem);
      add_softmax(mem);
    }
    for (std::int32_t begin = cut.begin; begin < cut.begin + scored; begin += params_.lag) {
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
  using Channels = Eigen::Map<Eigen::ArrayXd>;
  using Row = Eigen::Map<const Eigen::ArrayXf>;

  struct Layout {
    Arena& arena;
    std::int32_t lag;
    std::int32_t dim;
    std::int32_t rows;
    std::int64_t ranges = (rows / lag + std::int64_t{1}) * dim;  // [partitions, dim]
    std::span<float> block = detail::take_block(arena, dim);
    std::span<double> lowest = arena.take<double>(ranges);  // of the following partition
    std::span<double> scales = arena.take<double>(ranges);  // its maximum, then 1 / width
    std::span<double> channels = arena.take<double>(dim);
    std::span<double> deviations = arena.take<double>(rows);  // NaN: not finite
    std::span<double> averages = arena.take<double>(rows);
    std::span<std::int32_t> order = arena.take<std::int32_t>(rows);
    std::span<std::int32_t> rank_of = arena.take<std::int32_t>(rows);
    LagLayout cut{};
    std::int32_t first = 0;  // live rows that are in a full partition
    std::int32_t end = 0;

    // Partition of a row; -1: none. Some rows lie after the last one.
    [[nodiscard]] std::int32_t partition_of(std::int32_t i) const noexcept {
      const std::int32_t rank = rank_of[index(i)] - cut.begin;
      return rank < 0 ? -1 : rank / lag;
    }
    // `count` channels of partition `p`.
    [[nodiscard]] Channels lowest_of(std::int32_t p, std::int32_t count) const noexcept {
      return {lowest.data() + static_cast<std::ptrdiff_t>(p) * dim, count};
    }
    [[nodiscard]] Channels scales_of(std::int32_t p, std::int32_t count) const noexcept {
      return {scales.data() + static_cast<std::ptrdiff_t>(p) * dim, count};
    }
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  // Range of each channel in the partition that follows partition p, at [p].
  static void find_ranges(const HeadRef& head, detail::Side side, const Layout& mem) noexcept {
    const std::int32_t dim = detail::plane_of(head.view, side).head_dim;
    constexpr double infinity = std::numeric_limits<double>::infinity();
    std::fill(mem.lowest.begin(), mem.lowest.end(), infinity);
    std::fill(mem.scales.begin(), mem.scales.end(), -infinity);
    const auto widen = [&](std::int32_t i, const float* row, bool finite) {
      const std::int32_t p = mem.partition_of(i) - 1;
      if (!finite || p < 0 || p >= mem.cut.partitions - 1) { return; }
      Channels low = mem.lowest_of(p, dim);
      Channels high = mem.scales_of(p, dim);
      low = low.min(Row(row, dim).cast<double>());
      high = high.max(Row(row, dim).cast<double>());
    };
    detail::for_each_row(head, side, mem.first, mem.end, mem.block, widen);
    for (std::size_t c = 0; c < mem.lowest.size(); ++c) {
      const double width = mem.scales[c] - mem.lowest[c];
      mem.scales[c] = width > 0 ? 1 / width : 1.0;
      if (width < 0) { mem.lowest[c] = 0; }  // no finite row there
    }
  }

  static void find_deviations(const HeadRef& head, detail::Side side, const Layout& mem) noexcept {
    const std::int32_t dim = detail::plane_of(head.view, side).head_dim;
    Channels channels(mem.channels.data(), dim);
    const auto measure = [&](std::int32_t i, const float* row, bool finite) {
      const std::int32_t p = mem.partition_of(i);
      if (p < 0 || p >= mem.cut.partitions - 1) { return; }
      channels = (Row(row, dim).cast<double>() - mem.lowest_of(p, dim)) * mem.scales_of(p, dim);
      const double mean = channels.sum() / dim;
      const double squares = (channels - mean).square().sum();
      mem.deviations[index(i)] = dim > 1 ? std::sqrt(squares / (dim - 1)) : 0.0;
      if (!finite) { mem.deviations[index(i)] = mem.averages[index(i)] = nan; }
    };
    detail::for_each_row(head, side, mem.first, mem.end, mem.block, measure);
  }

  // Half of each partition's softmax over its deviations.
  static void add_softmax(const Layout& mem) noexcept {
    const std::int32_t end = mem.cut.begin + mem.cut.scored(mem.lag);
    for (std::int32_t begin = mem.cut.begin; begin < end; begin += mem.lag) {
      const auto members = mem.order.subspan(index(begin), index(mem.lag));
      detail::for_each_probability(
          members.size(),
          [&](std::size_t m) { return !std::isnan(mem.deviations[index(members[m])]); },
          [&](std::size_t m) { return mem.deviations[index(members[m])]; },
          [&](std::size_t m, double x) { mem.averages[index(members[m])] += x / 2; });
    }
  }

  LagKVParams params_;
};
static_assert(Scorer<LagKVScorer>);

/// `LagKVParams` are scored by `LagKVScorer`.
LagKVScorer scorer_of(ScoreTag<LagKVParams>);

}  // namespace kvtrim
