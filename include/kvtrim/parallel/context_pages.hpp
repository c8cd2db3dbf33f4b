// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context parallel, whole pages: each page lies wholly on one rank, so a rank drops pages by closing up its own table.

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

/// One page of a set, on the rank that has it.
struct RankedPage {
  float score = 0;        ///< as `page_scores`, of all heads that share the set; NaN allowed
  Position first{};       ///< position of its first row
  Position last{};        ///< position of its last row
  std::int32_t rows = 0;  ///< rows in it
};

/// Chooses the pages that stay, of pages spread over ranks: the same that `choose_pages` keeps on one rank.
///
/// All sets of pages (sequence, table or unit) share each round: one of 2 sums per set, then 8 rounds of 256 counts per
/// set; before them 4 rounds of 512 counts per set if a set has protected rows and rows of it went before.
///
/// \par Ties
/// the page of the lower position is kept. NaN: lowest
/// \par Complexity
/// O(8 * own pages) time; memory is taken by the constructor
/// \par Source
/// own
class ContextPages {
 public:
  /// \param demands    one for each set: the same on all ranks
  /// \param pages      of each set, those that this rank has; read until the rounds are done. A rank may have none
  /// \param positions  of each set, those of all rows in `pages`, in any order; read only where `live` is not
  ///   `next_position`, and may be empty otherwise
  /// \param page_size  rows of a full page, the same on all ranks
  /// \pre as many sets of each; the positions of two pages of a set do not overlap
  ContextPages(std::span<const RankedDemand> demands,
               std::span<const std::span<const RankedPage>> pages,
               std::span<const std::span<const Position>> positions,
               std::int32_t page_size)
      : demands_(demands.begin(), demands.end()),
        pages_(pages.begin(), pages.end()),
        positions_(positions.begin(), positions.end()),
        page_size_(page_size),
        borders_(demands_),
        sums_(evicts() ? 2 * demands.size() : 0),
        rounds_(evicts() ? demands.size() : 0, 64) {
    KVTRIM_ASSERT(demands.size() == pages.size() && page_size >= 1);
    KVTRIM_ASSERT(positions.empty() || positions.size() == pages.size());
  }

  /// Next round.
  [[nodiscard]] Round next() noexcept {
    if (!evicts()) { return {}; }
    if (stage_ == Stage::borders) {
      if (const Round round = borders_.next([&](std::size_t i, auto&& f) {
            if (!positions_.empty()) { std::ranges::for_each(positions_[i], f); }
          })) {
        return round;
      }
      stage_ = Stage::sums;
      for (std::size_t i = 0; i < demands_.size(); ++i) {
        for (const RankedPage& page : pages_[i]) {
          sums_[2 * i] += static_cast<std::uint64_t>(page.rows);
          if (is_fixed(i, page)) { sums_[2 * i + 1] += static_cast<std::uint64_t>(page.rows); }
        }
      }
      return {RoundKind::sum, sums_};
    }
    if (stage_ == Stage::sums) {
      stage_ = Stage::pages;
      for (std::size_t i = 0; i < demands_.size(); ++i) {
        rounds_.want(i, (demands_[i].keep - fixed_rows(i)) / page_size_);
      }
    }
    return rounds_.next([&](std::size_t i, auto&& f) {
      for (const RankedPage& page : pages_[i]) {
        if (!is_fixed(i, page)) { f(row_key(page.score, page.first)); }
      }
    });
  }

  /// Once the rounds are done: `ok`; `over_budget` if the pages that must stay have more rows than `keep` in some set;
  /// `ranks_differ` if the ranks' rows of a set are not `live` rows together: nothing may be evicted then. The same on all
  /// ranks.
  [[nodiscard]] Status status() const noexcept {
    Status status = Status::ok;
    for (std::size_t i = 0; i < rounds_.selections(); ++i) {
      const RankedDemand& d = demands_[i];
      if (sums_[2 * i] != static_cast<std::uint64_t>(d.live)) { return Status::ranks_differ; }
      if (d.keep < d.live && fixed_rows(i) > d.keep) { status = Status::over_budget; }
    }
    return status;
  }
  /// Whether this page of set `i` stays.
  [[nodiscard]] bool keeps(std::size_t i, const RankedPage& page) const noexcept {
    return demands_[i].keep >= demands_[i].live || is_fixed(i, page) ||
           row_key(page.score, page.first) >= rounds_.threshold(i);
  }
  /// Hash of what stays: the same on all ranks (`PlanAgreement`).
  [[nodiscard]] std::uint64_t fingerprint() const noexcept {
    std::uint64_t hash = 0;
    for (std::size_t i = 0; i < rounds_.selections(); ++i) {
      hash = detail::mixed(detail::mixed(hash, sums_[2 * i + 1]), rounds_.threshold(i));
    }
    return hash;
  }

 private:
  enum class Stage : std::uint8_t { borders, sums, pages };

  // With a protected row, or not full: it stays.
  [[nodiscard]] bool is_fixed(std::size_t i, const RankedPage& page) const noexcept {
    const detail::PositionRange& range = borders_.range(i);
    return raw(page.first) < range.begin || raw(page.last) >= range.end || page.rows < page_size_;
  }
  [[nodiscard]] std::int64_t fixed_rows(std::size_t i) const noexcept {
    return static_cast<std::int64_t>(sums_[2 * i + 1]);
  }
  [[nodiscard]] bool evicts() const noexcept {
    return std::ranges::any_of(demands_, [](const RankedDemand& d) { return d.keep < d.live; });
  }

  std::vector<RankedDemand> demands_;
  std::vector<std::span<const RankedPage>> pages_;
  std::vector<std::span<const Position>> positions_;
  std::int32_t page_size_;
  Stage stage_ = Stage::borders;
  detail::ProtectedBorders borders_;
  std::vector<std::uint64_t>
      sums_;  // of each set: rows, rows of pages that stay whatever their scores
  detail::RadixRounds rounds_;
};
static_assert(RankRun<ContextPages>);

}  // namespace kvtrim
