// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallel: a sequence's rows are spread over ranks, in whatever way. A row's key holds its position, so no two
// rows of a head have the same one, and the lowest key that stays says on every rank which of its own rows stay.

#include <kvtrim/cache/generation.hpp>
#include <kvtrim/core/order_key.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/detail/protected_borders.hpp>
#include <kvtrim/parallel/detail/radix_rounds.hpp>
#include <kvtrim/parallel/ranked_demand.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// Chooses the rows that stay, of rows spread over ranks: the same that `choose_rows` keeps on one rank.
///
/// All pairs (sequence, layer, KV head) share each round: 8 rounds of 256 counts per pair, before them 4 rounds of 512
/// counts per pair if a pair has protected rows and rows of it went before. No round where nothing goes. The number of
/// rows does not matter.
///
/// \par Ties
/// the lower position is kept. NaN: lowest, by `order_key`
/// \par Complexity
/// O(8 * own rows) time; memory is taken by the constructor, 4 KiB per pair (8 KiB with the 4 rounds)
/// \par Source
/// own
class ContextTopK {
 public:
  /// \param demands  one for each pair: the same on all ranks
  /// \param keys     of each pair, `row_key` of all rows that this rank has, protected ones included, in any order; read
  ///   until the rounds are done. A rank may have none
  /// \pre as many pairs of both
  ContextTopK(std::span<const RankedDemand> demands,
              std::span<const std::span<const std::uint64_t>> keys)
      : demands_(demands.begin(), demands.end()),
        keys_(keys.begin(), keys.end()),
        borders_(demands_),
        rounds_(evicts() ? demands.size() : 0, 64) {
    KVTRIM_ASSERT(demands.size() == keys.size());
    for (std::size_t i = 0; i < rounds_.selections(); ++i) {
      rounds_.want(i, demands_[i].wanted());
    }
  }

  /// Next round.
  [[nodiscard]] Round next() noexcept {
    if (!evicts()) { return {}; }
    if (!borders_done_) {
      if (const Round round = borders_.next([&](std::size_t i, auto&& f) {
            for (const std::uint64_t key : keys_[i]) { f(position_of(key)); }
          })) {
        return round;
      }
      borders_done_ = true;
    }
    return rounds_.next([&](std::size_t i, auto&& f) {
      for (const std::uint64_t key : keys_[i]) {
        if (competes(i, key)) { f(key); }
      }
    });
  }

  /// Once the rounds are done: `ok`; `over_budget` if the protected rows of a pair exceed `keep` and stay; `ranks_differ`
  /// if the ranks' rows of a pair are not `live` rows together: nothing may be evicted then. The same on all ranks.
  [[nodiscard]] Status status() const noexcept {
    Status status = Status::ok;
    for (std::size_t i = 0; i < rounds_.selections(); ++i) {
      const RankedDemand& d = demands_[i];
      if (rounds_.total(i) != d.range().count()) { return Status::ranks_differ; }
      if (d.keep < d.live - d.range().count()) { status = Status::over_budget; }
    }
    return status;
  }
  /// Whether the row of pair `i` with this key stays.
  [[nodiscard]] bool keeps(std::size_t i, std::uint64_t key) const noexcept {
    const RankedDemand& d = demands_[i];
    return d.keep >= d.live || !competes(i, key) || key >= rounds_.threshold(i);
  }
  /// Hash of what stays: the same on all ranks (`PlanAgreement`).
  [[nodiscard]] std::uint64_t fingerprint() const noexcept {
    std::uint64_t hash = 0;
    for (std::size_t i = 0; i < rounds_.selections(); ++i) {
      const detail::PositionRange& range = borders_.range(i);
      for (const auto x : {static_cast<std::uint64_t>(range.begin),
                           static_cast<std::uint64_t>(range.end),
                           rounds_.threshold(i)}) {
        hash = detail::mixed(hash, x);
      }
    }
    return hash;
  }

 private:
  [[nodiscard]] static Position position_of(std::uint64_t key) noexcept {
    return Position{static_cast<std::int32_t>(~static_cast<std::uint32_t>(key))};
  }
  [[nodiscard]] bool competes(std::size_t i, std::uint64_t key) const noexcept {
    const std::int64_t position = raw(position_of(key));
    return position >= borders_.range(i).begin && position < borders_.range(i).end;
  }
  [[nodiscard]] bool evicts() const noexcept {
    return std::ranges::any_of(demands_, [](const RankedDemand& d) { return d.keep < d.live; });
  }

  std::vector<RankedDemand> demands_;
  std::vector<std::span<const std::uint64_t>> keys_;
  detail::ProtectedBorders borders_;
  bool borders_done_ = false;
  detail::RadixRounds rounds_;
};
static_assert(RankRun<ContextTopK>);

}  // namespace kvtrim
