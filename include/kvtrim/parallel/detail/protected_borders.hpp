// SPDX-License-Identifier: Apache-2.0
#pragma once

// Protection counts rows in the order of their positions, on all ranks together. As long as nothing was evicted, a row's
// rank in that order is its position; afterwards both borders are looked for, in four rounds.

#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/detail/radix_rounds.hpp>
#include <kvtrim/parallel/ranked_demand.hpp>
#include <kvtrim/select/protection.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace kvtrim::detail {

// Positions [begin, end) of the rows that compete.
struct PositionRange {
  std::int64_t begin = 0;
  std::int64_t end = std::numeric_limits<std::int64_t>::max();
};

class ProtectedBorders {
 public:
  explicit ProtectedBorders(std::span<const RankedDemand> demands)
      : rounds_(are_known(demands) ? 0 : 2 * demands.size(), 32) {
    for (std::size_t i = 0; i < demands.size(); ++i) {
      const CandidateRange range = demands[i].range();
      ranges_.push_back({range.begin, range.end});
      if (known()) { continue; }
      rounds_.want(2 * i, range.begin);
      rounds_.want(2 * i + 1, demands[i].live - range.end);
    }
  }
  // for_each_position(i, f) calls f(position) for this rank's rows of pair i.
  template <class ForEachPosition>
  [[nodiscard]] Round next(ForEachPosition&& for_each_position) noexcept {
    if (known()) { return {}; }
    const Round round = rounds_.next([&](std::size_t selection, auto&& count) {
      const bool first_rows = selection % 2 == 0;
      for_each_position(selection / 2, [&](Position position) {
        const auto p = static_cast<std::uint32_t>(raw(position));
        count(std::uint64_t{first_rows ? ~p : p});  // the lowest positions, and the highest
      });
    });
    if (!round) { take(); }
    return round;
  }
  // Only once the rounds are done.
  [[nodiscard]] const PositionRange& range(std::size_t i) const noexcept { return ranges_[i]; }

 private:
  [[nodiscard]] bool known() const noexcept { return rounds_.selections() == 0; }
  [[nodiscard]] static bool are_known(std::span<const RankedDemand> demands) noexcept {
    for (const RankedDemand& d : demands) {
      const bool none = d.range().count() == d.live;
      if (!none && d.live != d.next_position) { return false; }
    }
    return true;
  }
  void take() noexcept {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      const auto first = static_cast<std::uint32_t>(rounds_.threshold(2 * i));
      const std::uint64_t last = rounds_.threshold(2 * i + 1);
      ranges_[i].begin =
          rounds_.threshold(2 * i) == RadixRounds::none ? 0 : std::int64_t{~first} + 1;
      ranges_[i].end = last == RadixRounds::none ? std::numeric_limits<std::int64_t>::max()
                                                 : static_cast<std::int64_t>(last);
    }
  }

  RadixRounds rounds_;
  std::vector<PositionRange> ranges_;
};

}  // namespace kvtrim::detail
