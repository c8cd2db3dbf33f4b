// SPDX-License-Identifier: Apache-2.0
#pragma once

// Heads that share one budget, on several ranks. Rows compete by score, then position, then head; two heads may have rows
// of one score and position, so the last rows are handed out by the number of the head, after all ranks know who has one.

#include <kvtrim/budget/adaptive.hpp>
#include <kvtrim/cache/generation.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/parallel/detail/radix_rounds.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// One head of a group, on the rank that has it.
struct RankedHead {
  std::int32_t group =
      0;  ///< heads of one group share a budget: (sequence, layer), or the sequence
  std::int32_t index =
      0;  ///< number in its group, the same that the head has on one rank: decides ties
  AdaptiveHead head{};  ///< its keys are read until the rounds are done
};

/// Shares budgets among heads spread over ranks: the same rows for each head as `adaptive_rows` on one rank.
///
/// All groups share each round: a gather of 2 words for each head, 8 rounds of 256 counts per group, a gather of 1 word for
/// each head.
///
/// \par Ties
/// the lower position, then the lower head. NaN: lowest class
/// \par Complexity
/// as `adaptive_rows`, and O(8 * own candidates); memory is taken by the constructor
/// \par Source
/// Feng et al., 2024, arXiv:2407.11550; differs: as `adaptive_rows`
class SharedBudget {
 public:
  /// \param rank        this rank
  /// \param params      the same on all ranks
  /// \param groups      how many, the same on all ranks
  /// \param members     heads of a group on all ranks together, the same on all ranks
  /// \param most_heads  heads that any rank has at most, of all groups: the same on all ranks
  /// \param heads       those of this rank, at most `most_heads`. `budget`: what a head would keep if it did not share, asked
  ///   for the longest head of the group on any rank
  SharedBudget(Rank rank,
               const AdaptiveParams& params,
               std::int32_t groups,
               std::int32_t members,
               std::int32_t most_heads,
               std::span<const RankedHead> heads)
      : rank_(rank),
        params_(params),
        members_(static_cast<std::size_t>(members)),
        own_(heads.begin(), heads.end()),
        limits_(heads.size(), detail::RadixRounds::none),
        words_(static_cast<std::size_t>(rank.count) * static_cast<std::size_t>(most_heads) * 2),
        all_(static_cast<std::size_t>(groups) * members_),
        wins_(members_),
        rounds_(static_cast<std::size_t>(groups), 64) {
    KVTRIM_ASSERT(heads.size() <= static_cast<std::size_t>(most_heads));
    std::size_t longest = 0;
    for (const RankedHead& h : heads) { longest = std::max(longest, h.head.keys.size()); }
    scratch_.resize(longest);
  }

  /// Next round.
  [[nodiscard]] Round next() noexcept {
    if (stage_ == Stage::sizes) {
      stage_ = Stage::counts_begin;
      for (std::size_t j = 0; j < own_.size(); ++j) {
        const auto& [group, index, head] = own_[j];
        const std::span<std::uint64_t> words = own_words(2).subspan(2 * j, 2);
        // Numbers from 1 on: 0 is no head.
        words[0] = pair(1 + group * static_cast<std::int32_t>(members_) + index, head.candidates());
        words[1] = pair(head.fixed, head.budget);
      }
      return {RoundKind::gather, words_};
    }
    if (stage_ == Stage::counts_begin) {
      stage_ = Stage::counts;
      if (!take_sizes()) { return {}; }
    }
    if (stage_ == Stage::counts) {
      if (const Round round = rounds_.next([&](std::size_t group, auto&& f) {
            for (std::size_t j = 0; j < own_.size(); ++j) {
              if (static_cast<std::size_t>(own_[j].group) != group) { continue; }
              for (const std::uint64_t key : own_[j].head.keys) {
                if (key < limits_[j]) { f(key); }
              }
            }
          })) {
        return round;
      }
      stage_ = Stage::wins;
      for (std::size_t j = 0; j < own_.size(); ++j) {
        const std::uint64_t threshold = rounds_.threshold(static_cast<std::size_t>(own_[j].group));
        std::int64_t above = 0;
        bool tied = false;
        for (const std::uint64_t key : own_[j].head.keys) {
          if (key >= limits_[j]) { continue; }
          above += key > threshold ? 1 : 0;
          tied = tied || key == threshold;  // positions differ within a head: it has one such row
        }
        own_words(1)[j] = pair(static_cast<std::int32_t>(above), tied ? 1 : 0);
      }
      return {RoundKind::gather, std::span(words_).first(words_.size() / 2)};
    }
    if (stage_ == Stage::wins) {
      stage_ = Stage::done;
      take_wins();
    }
    return {};
  }

  /// Once the rounds are done: `ok`; `ranks_differ` if the ranks' heads are not `members` of each group, each once.
  [[nodiscard]] Status status() const noexcept {
    return stage_ == Stage::done ? Status::ok : Status::ranks_differ;
  }
  /// Rows that head `j` of this rank's keeps, protected ones included: `Observation::budgets` of a plan by the policy
  /// without the shared budget.
  [[nodiscard]] std::int32_t rows(std::size_t j) const noexcept {
    return all_[place(own_[j])].rows;
  }

  /// Hash of all heads' rows: the same on all ranks (`PlanAgreement`).
  [[nodiscard]] std::uint64_t fingerprint() const noexcept {
    std::uint64_t hash = 0;
    for (const Sizes& h : all_) { hash = detail::mixed(hash, static_cast<std::uint64_t>(h.rows)); }
    return hash;
  }

 private:
  enum class Stage : std::uint8_t { sizes, counts_begin, counts, wins, done };

  // Any head, by its sizes alone.
  struct Sizes {
    std::int64_t competing = -1;  // -1: no rank has it
    std::int32_t fixed = 0;
    std::int32_t budget = 0;
    std::int32_t rows = 0;
    std::size_t word = 0;  // where its rank tells of it
    [[nodiscard]] std::int64_t candidates() const noexcept { return competing; }
  };

  [[nodiscard]] static std::uint64_t pair(std::int32_t high, std::int64_t low) noexcept {
    return std::uint64_t{static_cast<std::uint32_t>(high)} << 32U | static_cast<std::uint32_t>(low);
  }
  [[nodiscard]] static std::int32_t high(std::uint64_t word) noexcept {
    return static_cast<std::int32_t>(word >> 32U);
  }
  [[nodiscard]] static std::int32_t low(std::uint64_t word) noexcept {
    return static_cast<std::int32_t>(word);
  }
  [[nodiscard]] std::size_t place(const RankedHead& h) const noexcept {
    return static_cast<std::size_t>(h.group) * members_ + static_cast<std::size_t>(h.index);
  }
  // This rank's part of a gather of `each` words for each head.
  [[nodiscard]] std::span<std::uint64_t> own_words(std::size_t each) noexcept {
    const std::size_t part = words_.size() / 2 * each / static_cast<std::size_t>(rank_.count);
    return std::span(words_).subspan(static_cast<std::size_t>(rank_.index) * part, part);
  }
  [[nodiscard]] std::span<Sizes> group(std::size_t g) noexcept {
    return std::span(all_).subspan(g * members_, members_);
  }

  // Whether the group has more rows than its budgets: otherwise nothing goes.
  [[nodiscard]] bool exceeds(std::size_t g) noexcept {
    std::int64_t excess = 0;
    for (const Sizes& h : group(g)) { excess += h.fixed + h.competing - h.budget; }
    return excess > 0;
  }
  [[nodiscard]] bool take_sizes() noexcept {
    std::size_t heads = 0;
    for (std::size_t i = 0; i < words_.size() / 2; ++i) {
      if (words_[2 * i] == 0) { continue; }
      const auto at = static_cast<std::size_t>(high(words_[2 * i]) - 1);
      if (at >= all_.size() || all_[at].competing >= 0) { return false; }
      all_[at] = {low(words_[2 * i]), high(words_[2 * i + 1]), low(words_[2 * i + 1]), 0, i};
      ++heads;
    }
    if (heads != all_.size()) { return false; }
    for (std::size_t g = 0; g < rounds_.selections(); ++g) {
      if (exceeds(g)) {
        rounds_.want(g, detail::give_safe_rows(params_, group(g)));
      } else {
        for (Sizes& h : group(g)) { h.rows = h.fixed + static_cast<std::int32_t>(h.competing); }
      }
    }
    for (std::size_t j = 0; j < own_.size(); ++j) {
      const Sizes& head = all_[place(own_[j])];
      if (head.rows == head.fixed) { continue; }
      const auto keys = std::span(scratch_).first(own_[j].head.keys.size());
      std::ranges::copy(own_[j].head.keys, keys.begin());
      limits_[j] = detail::kth_highest(keys, head.rows - head.fixed);
    }
    return true;
  }
  void take_wins() noexcept {
    for (std::size_t g = 0; g < rounds_.selections(); ++g) {
      std::int64_t ties = rounds_.equal(g);
      for (std::size_t i = 0; i < members_; ++i) {
        const std::uint64_t word = words_[group(g)[i].word];
        const bool next = low(word) != 0 && ties > 0;
        wins_[i] = high(word) + (next ? 1 : 0);
        ties -= next ? 1 : 0;
      }
      if (exceeds(g)) {
        detail::give_won_rows(params_, group(g), std::span<const std::int64_t>(wins_));
      }
    }
  }

  Rank rank_;
  AdaptiveParams params_;
  std::size_t members_;
  std::vector<RankedHead> own_;
  std::vector<std::uint64_t> limits_;  // keys from these on are safe, and do not compete
  std::vector<std::uint64_t> words_;   // [ranks, most_heads, 2]
  std::vector<std::uint64_t> scratch_;
  std::vector<Sizes> all_;  // [groups, members]
  std::vector<std::int64_t> wins_;
  detail::RadixRounds rounds_;
  Stage stage_ = Stage::sizes;
};
static_assert(RankRun<SharedBudget>);

}  // namespace kvtrim
