// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/removal.hpp>
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/detail/joined_name.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace kvtrim {

/// The published algorithms that go by the name of H2O.
enum class HeavyMode : std::uint8_t {
  real_drop,  ///< FMInference's `real_drop`: the best `heavy` of all but the last `recent` rows; the row that leaves the window competes
  greedy,     ///< Algorithm 1 of the paper: no window, the row with the lowest score goes
  promote,  ///< FlexGen's: the row that leaves the window is always promoted, and one heavy row always goes
};

/// Parameters of `HeavyHitter` by other scores than its own.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \tparam Mode    which algorithm
template <class Scores, HeavyMode Mode>
struct HeavyHitterParams {
  std::int64_t heavy = 512;                                   ///< rows kept for their score
  std::int64_t recent = Mode == HeavyMode::greedy ? 0 : 512;  ///< last rows, always kept
  std::int64_t sinks = Scores::protects.sinks;                ///< first rows, always kept
  std::int64_t interval = 1;  ///< rows over the budget that trigger a cut: fewer of them stay
  std::int64_t grace = 0;     ///< rows younger than this many steps are not evicted
  Scores scores{};            ///< what ranks the rows
  Removal removal = Removal::overwrite_slot;  ///< how rows are removed
};

/// Parameters of `HeavyHitter`.
template <HeavyMode Mode>
struct HeavyHitterParams<AccumulateParams, Mode> {
  std::int64_t heavy = 512;                                   ///< rows kept for their score
  std::int64_t recent = Mode == HeavyMode::greedy ? 0 : 512;  ///< last rows, always kept
  std::int64_t sinks = 0;                                     ///< first rows, always kept
  std::int64_t interval = 1;    ///< rows over the budget that trigger a cut: fewer of them stay
  std::int64_t grace = 0;       ///< rows younger than this many steps are not evicted
  float decay = 1.0F;           ///< factor applied to the old sums at each query
  bool age_normalised = false;  ///< rank by sum / number of queries that saw the row
  bool squared = false;         ///< accumulate squared probabilities
  Sums sums = Sums::floating;   ///< of one step: `exact` for runs over ranks
  Removal removal = Removal::overwrite_slot;  ///< how rows are removed
};

/// Keeps the rows that got the most attention so far, and the most recent ones.
///
/// The engine must accumulate attention in its steps (`accumulate_column_sums` for a prompt; `accumulate_probabilities`
/// or `accumulate_column_sums` for a decode step). The first cut (after the prompt) is the same in `real_drop` and
/// `promote`; they differ from the second one on. By other scores, `HeavyHitter<KeyDiffParams>`, the rows that score highest
/// are the heavy ones.
///
/// \tparam Scores  parameters of a score (`ScoreParams`)
/// \tparam Mode    which algorithm: `HeavyHitter<AccumulateParams, HeavyMode::promote>`
/// \par Ties
/// the lower position is kept. NaN: lowest, then by position
/// \par Complexity
/// demand O(1); selection O(rows)
/// \par Source
/// Zhang et al., 2023, arXiv:2306.14048; `real_drop` is the default because it is the authors' only code that frees
/// memory at every step; differs: equal scores keep the lower position, grouped heads are averaged
template <class Scores = AccumulateParams, HeavyMode Mode = HeavyMode::real_drop>
class HeavyHitter {
  static_assert(
      ScoreParams<Scores>,
      "kvtrim::HeavyHitter: Scores must be parameters of a score with the members name, title, "
      "protects and check(who), as kvtrim::KeyNormParams has them");
  static_assert(Mode == HeavyMode::real_drop || Mode == HeavyMode::greedy ||
                    Mode == HeavyMode::promote,
                "kvtrim::HeavyHitter: Mode must be one of HeavyMode: real_drop, greedy, promote");

 public:
  /// Parameters.
  using Params = HeavyHitterParams<Scores, Mode>;
  static constexpr std::string_view name =
      detail::name_unless_default<"h2o", Scores, AccumulateParams>;

  /// 512 heavy rows, and 512 recent ones (none in `greedy`).
  constexpr HeavyHitter() : HeavyHitter(Params{}) {}

  /// \throws std::invalid_argument if a size is negative or beyond 31 bits, the budget is 0 or below the protected rows,
  ///   recent and grace are both 0 (except in `greedy`, whose recent must be 0), they are below the rows that have no score,
  ///   the interval is below 1, decay is not within (0, 1], or a parameter of the scores is out of range
  explicit constexpr HeavyHitter(Params params) : params_(params) {
    constexpr std::string_view who = "kvtrim::HeavyHitter";
    const Params& p = params_;
    detail::check_sizes(who,
                        detail::Sizes{{"heavy", p.heavy},
                                      {"recent", p.recent},
                                      {"sinks", p.sinks},
                                      {"grace", p.grace},
                                      {"interval", p.interval, 1}});
    detail::check_sizes(who,
                        detail::Sizes{{"heavy + recent + sinks", p.heavy + p.recent + p.sinks, 1}});
    if constexpr (Mode == HeavyMode::greedy) {
      if (p.recent != 0) {
        throw_invalid_argument("{}: greedy has no window, but recent is {}", who, p.recent);
      }
    } else if (p.recent == 0 && p.grace == 0) {
      throw_invalid_argument(
          "{}: with recent 0 and grace 0 each new row competes at once, and goes first where "
          "scores have to accumulate; give one of them, or use greedy",
          who);
    }
    const std::int64_t last = std::max(p.recent, p.grace);
    if (last > p.heavy + p.recent) {
      throw_invalid_argument("{}: budget {} is below the protected rows: sinks {} + grace {}",
                             who,
                             p.heavy + p.recent + p.sinks,
                             p.sinks,
                             p.grace);
    }
    scorer().check(who);
    detail::check_unscored(
        who, detail::Size{Mode == HeavyMode::greedy ? "grace" : "recent", last}, scorer());
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }
  /// Rows that stay after a cut.
  [[nodiscard]] constexpr std::int32_t budget() const noexcept {
    return static_cast<std::int32_t>(params_.heavy + params_.recent + params_.sinks);
  }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const auto sinks = static_cast<std::int32_t>(params_.sinks);
    const auto recent = static_cast<std::int32_t>(params_.recent);
    const std::int32_t keep = in.budget_or(budget());
    std::int32_t window = std::max(recent, static_cast<std::int32_t>(params_.grace));
    if (in.live - keep < params_.interval) {
      return {in.live, {sinks, window}, recent, Status::ok};
    }
    if constexpr (Mode == HeavyMode::promote) {
      // Rows that have left the window since the last cut are promoted: they do not compete.
      if (in.state.rows_at_eviction > 0) {
        window =
            std::max(window, std::min(recent + in.live - in.state.rows_at_eviction, keep - sinks));
      }
    }
    return {keep, {sinks, window}, recent, Status::ok};
  }

  /// As given in the parameters.
  [[nodiscard]] constexpr Removal removal() const noexcept { return params_.removal; }
  /// Accumulated attention, or the scores that were given.
  [[nodiscard]] constexpr Scores scorer() const noexcept {
    if constexpr (std::is_same_v<Scores, AccumulateParams>) {
      return {params_.decay, params_.squared, params_.age_normalised, params_.sums};
    } else {
      return params_.scores;
    }
  }
  /// Besides its scores: `promote` counts the rows since the last cut.
  [[nodiscard]] constexpr Needs needs() const noexcept {
    return {.states = Mode == HeavyMode::promote};
  }

 private:
  Params params_;
};
static_assert(Policy<HeavyHitter<>>);
static_assert(Policy<HeavyHitter<AccumulateParams, HeavyMode::greedy>>);
static_assert(Policy<HeavyHitter<AccumulateParams, HeavyMode::promote>>);

}  // namespace kvtrim
