// SPDX-License-Identifier: Apache-2.0
#pragma once

// Window scores whose rows, or whose query heads, may lie on several ranks. What ranks must agree on before the next step
// is a short array of 64-bit integers, reduced by maximum or by sum; with one rank there is nothing to reduce.

#include <kvtrim/cache/head_ref.hpp>
#include <kvtrim/cache/live_rows.hpp>
#include <kvtrim/core/arena.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/detail/exact_panel.hpp>
#include <kvtrim/score/detail/window_layout.hpp>
#include <kvtrim/score/detail/window_queries.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

namespace detail {
/// `bad_observation` if a sum over live rows, or over the queries of a group, has more addends than an exact sum holds.
[[nodiscard]] inline Status check_exact_window(const WindowParams& params,
                                               const CacheView& view,
                                               const QueryBlock& queries) noexcept {
  std::int64_t most = 0;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    const std::int64_t votes = std::min(queries.count(SequenceId{s}), params.window);
    most = std::max(most, votes * (queries.query_heads / view.kv_heads));
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        most = std::max<std::int64_t>(most, view.live_rows(SequenceId{s}, LayerId{l}, HeadId{h}));
      }
    }
  }
  return exact_sum_holds(most) ? Status::ok : Status::bad_observation;
}
}  // namespace detail

/// The exact form of the window scores of one (sequence, layer, KV head), step by step: `WindowScorer` with
/// `Sums::exact` does all steps at once, on one rank.
///
/// ```
/// ExactWindow window(params, head, queries, scratch);
/// reduce_by_max(window.maxima());         // [queries of the group]
/// reduce_by_sum(window.denominators());   // [queries of the group]
/// reduce_by_sum(window.row_sums());       // [live rows + 1] only where ranks hold query heads of one KV head
/// window.score(out);                      // or `columns()`, to pool over rows of several ranks
/// ```
///
/// Each step reads what the one before it returned, after it was reduced. Ranks whose rows are parts of one sequence
/// reduce the first two; those that hold heads only, none. With an LSE, which must be that of all ranks' rows, the first
/// two are empty. The scores have the same bits for any order of rows, queries and heads and any parts of them, on ranks that run one build
/// on processors with the same instructions (a logit is one chain of multiply-adds, fused or not). `score` and
/// `columns` run the steps that were left out.
///
/// \par Error
/// of a score against the same in double on the same keys: relative 2^-22 + n * 2^-41 for the probability (n live rows; the
/// exponential 2^-23, the factor and the product 2^-24 each, the denominator n * 2^-41), absolute 2^-40 for its units and
/// those of a mean, besides the rounding of the logits
/// \par Ties
/// none broken here. NaN: as `WindowScorer`; a query that has a logit that is not finite has no vote on any rank
/// \par Complexity
/// O(query rows * live rows * head_dim) time in all; no allocation. The scratch belongs to the object until its last step
/// \par Thread-safety
/// one thread
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV), as `WindowScorer`; sums in integers: own
class ExactWindow {
 public:
  /// Working space of one object.
  [[nodiscard]] static std::size_t scratch_bytes(const WindowParams& params,
                                                 const PlanShape& shape) noexcept {
    return detail::window_bytes<detail::WindowLayout>(shape, params.window, Sums::exact);
  }

  /// Reads the queries.
  ///
  /// \param head     its view must outlive the object
  /// \param queries  likewise; `positions` where this rank holds only some of the sequence's rows
  /// \param scratch  [scratch_bytes(params, shape)]
  /// \pre `WindowScorer::check` is `ok`
  ExactWindow(const WindowParams& params,
              const HeadRef& head,
              const QueryBlock& queries,
              std::span<std::byte> scratch) noexcept
      : params_(exact(params)),
        head_(head),
        has_lse_(queries.lse != nullptr),
        scaled_(detail::scale_of(queries, head.view.k.head_dim), queries.soft_cap),
        arena_(scratch),
        mem_(detail::window_layout(arena_, params_, head, queries)) {
    KVTRIM_ASSERT(arena_.ok());
    detail::load_voters(mem_, head_, queries);
  }
  ExactWindow(const ExactWindow&) = delete;
  ExactWindow& operator=(const ExactWindow&) = delete;

  /// First step: of each query, the order key of its largest logit among this rank's rows; 0 if it sees none of them, and
  /// more than any key if it has no vote. Reduced by maximum.
  [[nodiscard]] std::span<std::uint64_t> maxima() noexcept {
    KVTRIM_ASSERT(done_ == 0);
    done_ = 1;
    if (has_lse_) { return {}; }
    multiply();
    for (std::int32_t q = 0; q < mem_.used; ++q) {
      const auto lanes = [&](std::span<float> x) {
        return detail::pload<Packet>(x.data() + mem_.lane(q));
      };
      const bool finite = detail::predux(lanes(mem_.lane_faults)) == 0.0F;
      const float largest = detail::predux_max(lanes(mem_.lanes));
      mem_.keys[index(q)] = mem_.has_vote[index(q)] == 0 || !finite ? no_vote
                            : largest > lowest                      ? order_key(largest)
                                                                    : 0;
    }
    return mem_.keys.first(index(mem_.used));
  }

  /// Second step: of each query, the units of the exponentials of this rank's rows, relative to the maximum. Reduced by sum.
  [[nodiscard]] std::span<std::uint64_t> denominators() noexcept {
    if (done_ < 1) { static_cast<void>(maxima()); }
    KVTRIM_ASSERT(done_ == 1);
    done_ = 2;
    if (has_lse_) { return {}; }
    std::fill(mem_.units.begin(), mem_.units.end(), 0);
    for (std::int32_t q = 0; q < mem_.used; ++q) {
      const std::uint64_t key = mem_.keys[index(q)];
      mem_.has_vote[index(q)] = key != 0 && key != no_vote ? 1 : 0;
      mem_.factors[index(q)] = score_of_key(static_cast<std::uint32_t>(key));
    }
    for (std::int32_t panel = 0; panel < detail::panels_of(mem_.rows); ++panel) {
      for (std::int32_t q = 0; q < mem_.used; ++q) {
        if (mem_.has_vote[index(q)] == 0) { continue; }
        const auto maximum = detail::pset1<Packet>(mem_.factors[index(q)]);
        float* const values = mem_.exponentials_of(panel, q);
        detail::Panel x;
        detail::load_panel(values, x);
        for (Packet& y : x) { y = detail::pexp(detail::psub(y, maximum)); }
        detail::store_panel(x, values);
        std::uint64_t sum =
            0;  // what a query does not see has no units: its exponential is below 2^-41
        for (std::int32_t i = 0; i < detail::panel_rows; ++i) { sum += exact_units(values[i]); }
        mem_.units[index(q)] += sum;
      }
    }
    return mem_.units.first(index(mem_.used));
  }

  /// Third step: of each live row in logical order, the units of its probabilities, reduced over the queries and then over
  /// the query heads of this rank; behind them the number of heads that voted. Where other ranks hold query heads of the same
  /// KV head, reduced by sum, or by maximum with `group` max. Rows whose keys are not finite have no units.
  [[nodiscard]] std::span<std::uint64_t> row_sums() noexcept {
    if (done_ < 2) { static_cast<void>(denominators()); }
    KVTRIM_ASSERT(done_ == 2);
    done_ = 3;
    std::uint64_t& heads = mem_.row_units.back();
    heads = 0;
    detail::ExactPanel reduction(params_, std::max(1, mem_.votes));
    const auto finish = [&](std::int32_t first) {
      const std::int32_t rows = std::min(detail::panel_rows, mem_.rows - first);
      heads = static_cast<std::uint64_t>(reduction.finish(mem_.row_units.data() + first, rows));
    };
    if (has_lse_) {
      attend_with_lse(reduction, finish);
      return mem_.row_units;
    }
    for (std::int32_t q = 0; q < mem_.used; ++q) {
      const std::uint64_t units = mem_.units[index(q)];
      mem_.has_vote[index(q)] &= units != 0 ? 1 : 0;
      mem_.factors[index(q)] = units != 0 ? exact_factor(units) : 0.0F;
    }
    for (std::int32_t panel = 0; panel < detail::panels_of(mem_.rows); ++panel) {
      for (std::int32_t q = 0; q < mem_.used; ++q) {
        if (mem_.has_vote[index(q)] == 0) { continue; }
        const auto factor = detail::pset1<Packet>(mem_.factors[index(q)]);
        detail::Panel x;
        detail::load_panel(mem_.exponentials_of(panel, q), x);
        for (Packet& y : x) { y = detail::pmul(y, factor); }
        reduction.add(q, x);
      }
      finish(panel * detail::panel_rows);
    }
    return mem_.row_units;
  }

  /// The scores of this rank's rows in logical order before they are pooled, the window's own among them.
  [[nodiscard]] std::span<const float> columns() noexcept {
    if (done_ < 3) { static_cast<void>(row_sums()); }
    for (std::int32_t i = 0; i < mem_.rows; ++i) {
      float& score = mem_.raw_scores[index(i)];
      score = is_nan(score)
                  ? score
                  : detail::exact_column(params_, mem_.row_units[index(i)], mem_.row_units.back());
    }
    return mem_.raw_scores;
  }

  /// Writes the score of each live row, pooled, as `WindowScorer` does; a hole's is 0.
  ///
  /// \param[out] out  by row of the table
  void score(std::span<float> out) noexcept {
    static_cast<void>(columns());
    std::fill(out.begin(), out.end(), 0.0F);
    mem_.pool_columns(params_, LiveRows(head_), out);
  }

 private:
  using Packet = detail::Packet;
  static constexpr std::uint64_t no_vote = 0xFFFF'FFFF;
  static constexpr float lowest = -1e30F;  // of what a query does not see

  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  [[nodiscard]] static constexpr WindowParams exact(WindowParams params) noexcept {
    params.sums = Sums::exact;
    return params;
  }

  // What is not finite is known only while the tile is loaded.
  void mark_rows(std::int32_t first, std::int32_t count) noexcept {
    for (std::int32_t t = 0; t < count; ++t) {
      mem_.raw_scores[index(first + t)] =
          mem_.tiles.bad[index(t)] != 0 ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
    }
  }

  // All logits, and of each lane the largest and whether one is not finite.
  void multiply() noexcept {
    std::fill(mem_.lanes.begin(), mem_.lanes.end(), lowest);
    std::fill(mem_.lane_faults.begin(), mem_.lane_faults.end(), 0.0F);
    detail::for_each_key_tile(head_, mem_.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem_.tiles, count);
      const bool masked = mem_.needs_mask(count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        const std::int32_t panel = (first + row) / detail::panel_rows;
        const bool any_hidden = masked || row + detail::panel_rows > count;
        mem_.for_each_query(row, [&](std::int32_t q, float* logits) {
          float* const to = mem_.exponentials_of(panel, q);
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = scaled_(logits + p * detail::packet_floats);
          }
          detail::store_panel(x, to);
          if (any_hidden) {
            mem_.mask(to, row, count, q, lowest);
            detail::load_panel(to, x);
          }
          float* const largest = mem_.lanes.data() + mem_.lane(q);
          float* const faults = mem_.lane_faults.data() + mem_.lane(q);
          Packet highest = detail::pload<Packet>(largest);
          Packet fault = detail::pload<Packet>(faults);
          for (const Packet& y : x) {
            highest = detail::pmax(highest, y);
            fault = detail::padd(fault, detail::psub(y, y));  // 0 if finite
          }
          detail::pstore(largest, highest);
          detail::pstore(faults, fault);
        });
      }
      mark_rows(first, count);
    });
  }

  template <class Finish>
  void attend_with_lse(detail::ExactPanel& reduction, const Finish& finish) noexcept {
    detail::for_each_key_tile(head_, mem_.tiles, [&](std::int32_t first, std::int32_t count) {
      detail::pack_keys(mem_.tiles, count);
      const bool masked = mem_.needs_mask(count);
      for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
        mem_.for_each_query(row, [&](std::int32_t q, float* values) {
          const Packet lse = detail::pset1<Packet>(mem_.lse[index(q)]);
          detail::Panel x;
          for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
            x[p] = detail::pexp(detail::psub(scaled_(values + p * detail::packet_floats), lse));
          }
          if (masked) {
            detail::store_panel(x, values);
            mem_.mask(values, row, count, q, 0.0F);
            detail::load_panel(values, x);
          }
          reduction.add(q, x);
        });
        finish(first + row);
      }
      mark_rows(first, count);
    });
  }

  WindowParams params_;
  HeadRef head_;
  bool has_lse_;
  detail::LogitScale scaled_;
  Arena arena_;
  detail::WindowLayout mem_;
  std::int32_t done_ = 0;  // steps
};

}  // namespace kvtrim
