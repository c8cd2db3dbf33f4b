// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pooling looks at the scores next to a row. Where these are on other ranks, each run of neighbouring rows hands its first
// and last scores to all; a run shorter than half the kernel hands on what lies behind it by being there itself.

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/pooling.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/placement.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvtrim {

/// Scores of one pair (sequence, layer, KV head) that a rank has: of the rows that are pooled, without a window's own.
struct RankedScores {
  std::span<const float> scores;        ///< [rows] ascending by position; NaN allowed
  std::span<const Position> positions;  ///< [rows]
};

/// Pools scores of rows spread over ranks as `pool` does on one rank, bit for bit.
///
/// One gather: of each pair and run, (kernel - 1) / 2 words of 8 B and one more. None where the kernel is 1.
///
/// \par Ties
/// irrelevant. NaN: as `pool`
/// \par Complexity
/// O(rows * kernel + ranks * runs log(ranks * runs)) per pair; allocates in the constructor and in `pooled`
/// \par Source
/// own
class PooledScores {
 public:
  /// \param rank       this rank
  /// \param placement  the same on all ranks
  /// \param tokens     of the longest sequence, the same on all ranks
  /// \param pooling    how
  /// \param kernel     odd, at least 1
  /// \param pairs      read until the rounds are done and `pooled` was called
  /// \pre no position is `tokens` or more
  /// \throws std::invalid_argument if the kernel is even or below 1, or above 1 where tokens are striped: then every score
  ///   would be sent to every rank
  PooledScores(Rank rank,
               const Placement& placement,
               std::int32_t tokens,
               Pooling pooling,
               std::int32_t kernel,
               std::span<const RankedScores> pairs)
      : rank_(rank),
        pooling_(pooling),
        kernel_(kernel),
        runs_(static_cast<std::size_t>(placement.runs_per_rank(tokens))),
        placement_(placement),
        pairs_(pairs.begin(), pairs.end()) {
    if (kernel < 1 || kernel % 2 == 0) {
      throw_invalid_argument("kvtrim::PooledScores: kernel {} is not an odd number from 1 on",
                             kernel);
    }
    if (placement.spread() == Spread::token_striped && kernel > 1) {
      throw_invalid_argument(
          "kvtrim::PooledScores: kernel {} over striped tokens: no two neighbouring rows are on "
          "one "
          "of the {} ranks, so every score would be sent to every rank; use kernel 1, or another "
          "placement",
          kernel,
          placement.ranks());
    }
    if (kernel > 1 && rank.count > 1) {
      words_.resize(static_cast<std::size_t>(rank.count) * part());
    }
  }

  /// The gather.
  [[nodiscard]] Round next() noexcept {
    if (words_.empty() || gathered_) { return {}; }
    gathered_ = true;
    const std::size_t own = static_cast<std::size_t>(rank_.index) * part();
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      std::size_t at = own + i * runs_ * entry();
      for_each_run(i, [&](std::size_t begin, std::size_t end) {
        const RankedScores& pair = pairs_[i];
        KVTRIM_ASSERT(at + entry() <= own + (i + 1) * runs_ * entry());
        const auto first = static_cast<std::uint32_t>(raw(pair.positions[begin]));
        words_[at] = std::uint64_t{first} << 32U | (end - begin);
        for (std::size_t j = 0; j < std::min(half(), end - begin); ++j) {
          const auto head = std::bit_cast<std::uint32_t>(pair.scores[begin + j]);
          const auto tail = std::bit_cast<std::uint32_t>(pair.scores[end - 1 - j]);
          words_[at + 1 + j] = std::uint64_t{head} << 32U | tail;
        }
        at += entry();
      });
    }
    return {RoundKind::gather, words_};
  }

  /// Once the round is done: pools the scores of pair `i`.
  ///
  /// \param[out] out  [rows of the pair on this rank]; must not overlap its scores
  void pooled(std::size_t i, std::span<float> out) const {
    const RankedScores& pair = pairs_[i];
    KVTRIM_ASSERT(out.size() == pair.scores.size());
    if (words_.empty()) {  // all rows are here
      pool(pair.scores, pooling_, kernel_, out);
      return;
    }
    std::vector<std::size_t> order;  // places of the runs of all ranks, by position
    for (std::size_t r = 0; r < static_cast<std::size_t>(rank_.count); ++r) {
      for (std::size_t run = 0; run < runs_; ++run) {
        const std::size_t at = r * part() + (i * runs_ + run) * entry();
        if (words_[at] != 0) { order.push_back(at); }
      }
    }
    std::ranges::sort(order, {}, [&](std::size_t at) { return words_[at]; });
    std::vector<float> in;
    std::vector<float> wide;
    for_each_run(i, [&](std::size_t begin, std::size_t end) {
      const auto first = std::uint64_t{static_cast<std::uint32_t>(raw(pair.positions[begin]))};
      const auto here = static_cast<std::size_t>(
          std::ranges::lower_bound(
              order, first << 32U, {}, [&](std::size_t at) { return words_[at]; }) -
          order.begin());
      in.clear();
      for (std::size_t k = here; k-- > 0 && in.size() < half();) {
        take(order[k], in, [](std::uint64_t word) { return static_cast<std::uint32_t>(word); });
      }
      std::ranges::reverse(in);
      const std::size_t before = in.size();
      in.insert(in.end(),
                pair.scores.begin() + static_cast<std::ptrdiff_t>(begin),
                pair.scores.begin() + static_cast<std::ptrdiff_t>(end));
      const std::size_t most = in.size() + half();
      for (std::size_t k = here + 1; k < order.size() && in.size() < most; ++k) {
        take(order[k], in, [](std::uint64_t word) {
          return static_cast<std::uint32_t>(word >> 32U);
        });
      }
      wide.resize(in.size());
      pool(in, pooling_, kernel_, wide);
      std::copy_n(wide.begin() + static_cast<std::ptrdiff_t>(before),
                  end - begin,
                  out.begin() + static_cast<std::ptrdiff_t>(begin));
    });
  }

 private:
  [[nodiscard]] std::size_t half() const noexcept { return static_cast<std::size_t>(kernel_ / 2); }
  // Words of a run: first position and rows, then from both ends inwards the first and the last score.
  [[nodiscard]] std::size_t entry() const noexcept { return 1 + half(); }
  [[nodiscard]] std::size_t part() const noexcept { return pairs_.size() * runs_ * entry(); }
  // Adds a run's scores, from one of its ends on. Too many do no harm: `pool` looks no further than half its kernel.
  template <class End>
  void take(std::size_t at, std::vector<float>& in, End&& end) const {
    const std::size_t rows = words_[at] & 0xFFFF'FFFFU;
    for (std::size_t j = 0; j < std::min(half(), rows); ++j) {
      in.push_back(std::bit_cast<float>(end(words_[at + 1 + j])));
    }
  }
  // Calls f(begin, end) for the runs of this rank's rows of pair i.
  template <class F>
  void for_each_run(std::size_t i, F&& f) const {
    const auto& positions = pairs_[i].positions;
    for (std::size_t begin = 0; begin < positions.size();) {
      std::size_t end = begin + 1;
      while (end < positions.size() &&
             placement_.run(positions[end]) == placement_.run(positions[begin])) {
        ++end;
      }
      f(begin, end);
      begin = end;
    }
  }

  Rank rank_;
  Pooling pooling_;
  std::int32_t kernel_;
  std::size_t runs_;  // of a rank at most
  Placement placement_;
  std::vector<RankedScores> pairs_;
  std::vector<std::uint64_t> words_;
  bool gathered_ = false;
};
static_assert(RankRun<PooledScores>);

}  // namespace kvtrim
