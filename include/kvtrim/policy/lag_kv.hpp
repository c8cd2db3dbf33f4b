// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/detail/error.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/score/lag_kv_params.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string_view>

namespace kvtrim {

/// Keeps the rows whose channels stand out against the rows behind them; the last `lag` to 2 * lag - 1 rows and the
/// first `sinks` always stay.
///
/// Needs keys and values only, so the question may come after the eviction. At the end of a prompt. Where there are
/// fewer than sinks + 2 * lag rows, or the budget does not hold what always stays, it is a sliding window: the sinks
/// and the last rows.
///
/// \par Ties
/// ranks of different partitions are equal: the lower position is kept. NaN: lowest
/// \par Complexity
/// as `LagKVScorer`; selection O(rows)
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704, with the sizes and the selection of kvpress: one cut over all partitions,
/// whose equal ranks kvpress breaks arbitrarily; differs: a budget too small for the last partitions is a sliding
/// window, where kvpress keeps any of them. The authors' own schedule is `RecursiveLagKV`
class LagKV {
 public:
  /// Parameters.
  struct Params {
    std::int64_t budget = 1024;  ///< rows that stay, sinks and last partitions included
    std::int64_t sinks = 4;      ///< first rows, always kept
    std::int64_t lag = 128;      ///< rows of a partition
    bool cross_scoring =
        false;  ///< compare rows of different partitions by their scores, not ranks
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
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    const Params& p = params_;
    if (p.lag < 1 || p.sinks < 0 || p.lag > most || p.sinks > most || p.budget > most) {
      detail::throw_invalid_argument(
          "kvtrim::LagKV: lag {} must be at least 1, sinks {} at least 0, budget {} within 31 bits",
          p.lag,
          p.sinks,
          p.budget);
    }
    if (p.budget < 1 || p.budget < p.sinks) {
      detail::throw_invalid_argument(
          "kvtrim::LagKV: budget {} must be at least 1, and at least sinks {}", p.budget, p.sinks);
    }
  }

  /// What it was made of.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const std::int32_t keep =
        std::min(in.budget >= 0 ? in.budget : static_cast<std::int32_t>(params_.budget), in.live);
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

/// LagKV on its authors' schedule: as soon as a partition has a full one behind it, it is cut to `keep` rows, once.
///
/// Call it at the end of a prompt and after each step; it cuts when two full partitions wait. There is no budget: of n
/// tokens stay sinks + keep * (partitions - 1) + lag + the remainder. A budget given at run time replaces that number.
/// However a sequence is cut into calls, the same rows stay, but for calls that come late: those cut several partitions
/// with the same result. Not for sequences that another policy, or a truncation into cut rows, has touched.
///
/// \par Ties
/// the lower position is kept. NaN: lowest
/// \par Complexity
/// as `LagKVScorer`; selection O(rows)
/// \par Source
/// Liang et al., 2025, arXiv:2504.04704, sizes as the authors' code; differs: the rows that stay keep their order
class RecursiveLagKV {
 public:
  /// Parameters.
  struct Params {
    std::int64_t sinks = 16;  ///< first rows, always kept
    std::int64_t lag = 1024;  ///< rows of a partition
    std::int64_t keep = 512;  ///< rows that stay of each partition
  };
  static constexpr std::string_view name = "lagkv_recursive";

  /// The authors' sizes.
  constexpr RecursiveLagKV() : RecursiveLagKV(Params{}) {}

  /// \throws std::invalid_argument if lag is below 1, keep negative or above lag, sinks negative, or a size beyond 31
  ///   bits
  explicit constexpr RecursiveLagKV(const Params& params) : params_(params) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    const Params& p = params_;
    if (p.lag < 1 || p.sinks < 0 || p.keep < 0 || p.keep > p.lag || p.lag > most ||
        p.sinks > most) {
      detail::throw_invalid_argument(
          "kvtrim::RecursiveLagKV: lag {} must be at least 1, keep {} between 0 and lag, sinks {} "
          "at least 0, all within 31 bits",
          p.lag,
          p.keep,
          p.sinks);
    }
  }

  /// What it was made of.
  [[nodiscard]] constexpr const Params& params() const noexcept { return params_; }

  /// Rows that stay.
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    const auto lag = static_cast<std::int32_t>(params_.lag);
    const LagLayout layout = lag_layout(scorer(), in.state, in.live);
    const std::int32_t scored = layout.scored(lag);
    const auto gone = scored / lag * (lag - static_cast<std::int32_t>(params_.keep));
    const std::int32_t keep = in.budget >= 0 ? in.budget : in.live - gone;
    return {
        std::min(keep, in.live), {layout.begin, in.live - layout.begin - scored}, 0, Status::ok};
  }
  /// Rows close up in order.
  [[nodiscard]] constexpr Removal removal() const noexcept { return Removal::stable_pack; }
  /// Ranks inside the partitions that were not judged yet.
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
