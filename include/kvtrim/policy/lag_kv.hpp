// SPDX-License-Identifier: Apache-2.0
#pragma once

// The policy must protect exactly the rows that the scorer does not score, so both cut the rows with the same function.

#include <kvtrim/cache/sequence_state.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace kvtrim {

/// Parameters of `LagKVScorer`.
///
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704; sizes as kvpress
struct LagKVParams {
  static constexpr std::string_view name = "lag";
  static constexpr std::string_view title = "kvtrim::Lag";
  static constexpr Protection protects{4, 2 * 128 - 1};

  std::int32_t sinks = 4;      ///< first rows, in no partition
  std::int32_t lag = 128;      ///< rows per partition; each is scored by the partition after it
  bool cross_scoring = false;  ///< compare rows of different partitions by their scores, not ranks
  bool judged_once = false;    ///< rows before the last eviction's last partition are left alone

  /// \throws std::invalid_argument if lag is below 1 or beyond 2^30, or sinks are negative
  constexpr void check(std::string_view who) const {
    detail::check_sizes(who,
                        detail::Sizes{{"scores.sinks", sinks}, {"scores.lag", lag, 1, 1 << 30}});
  }
  /// The last partition and the remainder have nothing after them.
  [[nodiscard]] constexpr std::int32_t unscored() const noexcept { return 2 * lag - 1; }
  /// If rows are judged once: the tokens seen, and the rows that the last eviction left.
  [[nodiscard]] constexpr Needs needs() const noexcept { return {.states = judged_once}; }
};
static_assert(ScoreParams<LagKVParams>);

/// How rows are cut, by rank in position order: `begin` rows in no partition, then `partitions` full partitions, then a
/// remainder. All partitions except the last are scored.
struct LagLayout {
  std::int32_t begin = 0;       ///< sinks, or the rows already judged
  std::int32_t partitions = 0;  ///< full partitions after them

  /// Rows that are scored.
  [[nodiscard]] constexpr std::int32_t scored(std::int32_t lag) const noexcept {
    return partitions < 2 ? 0 : (partitions - 1) * lag;
  }
};

/// Cuts `live` rows of a table in `state`.
///
/// With `judged_once` the borders are those of the whole sequence, sinks + k * lag: what was scored at the last
/// eviction is derived from the number of rows it left and the next position at that time.
///
/// \par Complexity
/// O(1)
[[nodiscard]] constexpr LagLayout lag_layout(const LagKVParams& params,
                                             const SequenceState& state,
                                             std::int32_t live) noexcept {
  const std::int32_t lag = params.lag;
  LagLayout layout{std::min(params.sinks, live), 0};
  if (params.judged_once && state.rows_at_eviction > 0) {
    const std::int64_t next = state.next_position - (live - state.rows_at_eviction);  // then
    if (next - params.sinks >= 2 * static_cast<std::int64_t>(lag)) {
      const std::int64_t border = params.sinks + lag * ((next - params.sinks) / lag - 1);
      const std::int64_t judged = state.rows_at_eviction - (next - border);
      layout.begin =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(judged, layout.begin, live));
    }
  }
  layout.partitions = (live - layout.begin) / lag;
  return layout;
}

/// Keeps the rows whose channels stand out against the rows after them; the last `lag` to 2 * lag - 1 rows and the
/// first `sinks` always stay.
///
/// Needs keys and values only, so the question may come after the eviction. Use it at the end of a prompt. With fewer
/// than sinks + 2 * lag rows, or a budget too small for what always stays, it becomes a sliding window: the sinks and
/// the last rows.
///
/// \par Ties
/// ranks of different partitions are equal: the lower position is kept. NaN: lowest
/// \par Complexity
/// as `LagKVScorer`; selection O(rows)
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704, with the sizes and the selection of kvpress: one cut over all partitions,
/// whose equal ranks kvpress breaks arbitrarily; differs: a budget too small for the last partitions is a sliding
/// window, where kvpress keeps arbitrary ones of them. The authors' own schedule is `RecursiveLagKV`
class LagKV {
 public:
  /// Parameters.
  struct Params {
    std::int64_t budget = 1024;  ///< rows that stay, sinks and last partitions included
    std::int64_t sinks = 4;      ///< first rows, always kept
    std::int64_t lag = 128;      ///< rows per partition
    bool cross_scoring = false;  ///< compare rows of different partitions by scores, not ranks
  };
  static constexpr std::string_view name = "lagkv";

  /// The sizes of the authors' code: 16 sinks, partitions of 1,024 rows.
  [[nodiscard]] static constexpr Params authors(std::int64_t budget) noexcept {
    return {.budget = budget, .sinks = 16, .lag = 1024};
  }

  /// kvpress's sizes, a budget of 1,024 rows.
  constexpr LagKV() : LagKV(Params{}) {}

  /// \throws std::invalid_argument if lag is below 1, sinks negative, the budget below 1 or below sinks, or a size
  ///   beyond 31 bits
  explicit constexpr LagKV(const Params& params) : params_(params) {
    detail::check_sizes("kvtrim::LagKV",
                        detail::Sizes{{"sinks", params.sinks}, {"lag", params.lag, 1}});
    detail::check_budget("kvtrim::LagKV", params.budget, detail::Sizes{{"sinks", params.sinks}});
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const std::int32_t keep = std::min(in.budget_or(params_.budget), in.live);
    const LagLayout layout = lag_layout(scorer(), in.state, in.live);
    const auto sinks = static_cast<std::int32_t>(params_.sinks);
    const std::int32_t scored = layout.scored(static_cast<std::int32_t>(params_.lag));
    const std::int32_t recent = in.live - layout.begin - scored;
    const bool slides = scored == 0 || keep < layout.begin + recent;
    return {keep, {sinks, slides ? std::max(0, keep - sinks) : recent}, 0, Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// Ranks inside the partitions.
  [[nodiscard]] constexpr LagKVParams scorer() const noexcept {
    return {static_cast<std::int32_t>(params_.sinks),
            static_cast<std::int32_t>(params_.lag),
            params_.cross_scoring,
            false};
  }

 private:
  Params params_;
};
static_assert(Policy<LagKV>);

/// LagKV on its authors' schedule: as soon as a partition has a full one after it, it is cut to `keep` rows, once.
///
/// Call it at the end of a prompt and after each step; it cuts when two full partitions are waiting. There is no budget:
/// of n tokens, sinks + keep * (partitions - 1) + lag + the remainder stay. A budget given at run time replaces that
/// number. However the calls are spread over a sequence, the same rows stay; a late call cuts several partitions at once,
/// with the same result. Not for sequences touched by another policy, or truncated into rows that were already cut.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `LagKVScorer`; selection O(rows)
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704, sizes as in the authors' code; differs: the rows that stay keep their order
class RecursiveLagKV {
 public:
  /// Parameters.
  struct Params {
    std::int64_t sinks = 16;  ///< first rows, always kept
    std::int64_t lag = 1024;  ///< rows per partition
    std::int64_t keep = 512;  ///< rows that stay of each partition
  };
  static constexpr std::string_view name = "lagkv_recursive";

  /// The authors' sizes.
  constexpr RecursiveLagKV() : RecursiveLagKV(Params{}) {}

  /// \throws std::invalid_argument if lag is below 1, keep negative or above lag, sinks negative, or a size beyond 31
  ///   bits
  explicit constexpr RecursiveLagKV(const Params& params) : params_(params) {
    detail::check_sizes(
        "kvtrim::RecursiveLagKV",
        detail::Sizes{
            {"sinks", params.sinks}, {"lag", params.lag, 1}, {"keep", params.keep, 0, params.lag}});
  }

  /// The parameters.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const auto lag = static_cast<std::int32_t>(params_.lag);
    const LagLayout layout = lag_layout(scorer(), in.state, in.live);
    const std::int32_t scored = layout.scored(lag);
    const auto gone = scored / lag * (lag - static_cast<std::int32_t>(params_.keep));
    const std::int32_t keep = std::min(in.budget_or(in.live - gone), in.live);
    return {keep, {layout.begin, in.live - layout.begin - scored}, 0, Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// Ranks inside the partitions that have not been judged yet.
  [[nodiscard]] constexpr LagKVParams scorer() const noexcept {
    return {static_cast<std::int32_t>(params_.sinks),
            static_cast<std::int32_t>(params_.lag),
            false,
            true};
  }

 private:
  Params params_;
};
static_assert(Policy<RecursiveLagKV>);

}  // namespace kvtrim
