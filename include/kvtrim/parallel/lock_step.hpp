// SPDX-License-Identifier: Apache-2.0
#pragma once

// All ranks in one thread: for a process that has several caches (one thread, several devices), for tests, and to count
// what an algorithm would send without a network.

#include <kvtrim/core/status.hpp>
#include <kvtrim/parallel/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// What one rank hands to its communicator.
struct Traffic {
  std::int64_t rounds = 0;  ///< collective calls
  std::int64_t bytes = 0;   ///< of its own words: all of a sum or maximum, its own part of a gather
};

/// Exchanges all rounds of the same algorithm on several ranks, all of them in the calling thread.
///
/// \param runs  one for each rank, in their order
/// \param[out] traffic  what one rank sent, added up; null: not wanted
/// \returns `ok`; `ranks_differ` if the ranks' rounds are not alike: another transport would have hung, or sent words past
///   the end of a buffer
/// \par Complexity
/// O(ranks * words); allocates a list of the ranks
template <RankRun R>
[[nodiscard]] Status drive_in_lock_step(std::span<R> runs, Traffic* traffic = nullptr) {
  std::vector<Round> rounds(runs.size());
  while (true) {
    for (std::size_t r = 0; r < runs.size(); ++r) { rounds[r] = runs[r].next(); }
    const Round& first = rounds.front();
    for (const Round& round : rounds) {
      if (round.words.size() != first.words.size() || (first && round.kind != first.kind)) {
        return Status::ranks_differ;
      }
    }
    if (!first) { return Status::ok; }
    const std::size_t own =
        first.kind == RoundKind::gather ? first.words.size() / runs.size() : first.words.size();
    if (traffic != nullptr) {
      ++traffic->rounds;
      traffic->bytes += static_cast<std::int64_t>(own * sizeof(std::uint64_t));
    }
    if (first.kind == RoundKind::gather) {
      if (own * runs.size() != first.words.size()) { return Status::ranks_differ; }
      for (std::size_t r = 0; r < runs.size(); ++r) {
        const auto part = rounds[r].words.subspan(r * own, own);
        std::ranges::copy(part, first.words.begin() + static_cast<std::ptrdiff_t>(r * own));
      }
    } else {
      for (std::size_t r = 1; r < runs.size(); ++r) {
        for (std::size_t i = 0; i < own; ++i) {
          std::uint64_t& to = first.words[i];
          const std::uint64_t from = rounds[r].words[i];
          to = first.kind == RoundKind::sum ? to + from : std::max(to, from);
        }
      }
    }
    for (std::size_t r = 1; r < runs.size(); ++r) {
      std::ranges::copy(first.words, rounds[r].words.begin());
    }
  }
}

}  // namespace kvtrim
