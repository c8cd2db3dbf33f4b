// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/score/page_scores.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// What `page_scores` takes from all rows of a KV head, where they are spread over ranks: the norm, and what a NaN counts as.
///
/// All pairs (sequence, layer, KV head) share each round: a round of 2 maxima for each pair, and with `HeadNorm::sum` one
/// of 1 sum.
///
/// \pre `norm` is `none`, or `sums` is `exact`
/// \par Complexity
/// O(own rows); memory is taken by the constructor
/// \par Source
/// own
class PageNormRounds {
 public:
  /// \param params  the same on all ranks
  /// \param rows    of each pair, the scores of this rank's rows; read until the rounds are done. A rank may have none
  PageNormRounds(const PageScoreParams& params, std::span<const std::span<const float>> rows)
      : params_(params),
        rows_(rows.begin(), rows.end()),
        heads_(rows.size()),
        words_(2 * rows.size()) {
    KVTRIM_ASSERT(params.norm == HeadNorm::none || params.sums == Sums::exact);
  }

  /// Next round.
  [[nodiscard]] Round next() noexcept {
    ++step_;
    if (step_ == 1) {
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        heads_[i] = HeadRows::of(params_, rows_[i]);
        words_[2 * i] = heads_[i].largest;
        words_[2 * i + 1] = heads_[i].lowest;
      }
      return {RoundKind::max, words_};
    }
    if (step_ == 2) {
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        heads_[i].largest = words_[2 * i];
        heads_[i].lowest = words_[2 * i + 1];
      }
      if (params_.norm == HeadNorm::none) { return {}; }
      for (std::size_t i = 0; i < heads_.size(); ++i) {
        heads_[i].add_units(rows_[i]);
        words_[i] = heads_[i].units;
      }
      return {RoundKind::sum, std::span(words_).first(heads_.size())};
    }
    if (step_ == 3 && params_.norm != HeadNorm::none) {
      for (std::size_t i = 0; i < heads_.size(); ++i) { heads_[i].units = words_[i]; }
    }
    return {};
  }

  /// Once the rounds are done: of all ranks' rows of pair `i`.
  [[nodiscard]] const HeadRows& of(std::size_t i) const noexcept { return heads_[i]; }

 private:
  PageScoreParams params_;
  std::vector<std::span<const float>> rows_;
  std::vector<HeadRows> heads_;
  std::vector<std::uint64_t> words_;
  std::int32_t step_ = 0;
};
static_assert(RankRun<PageNormRounds>);

}  // namespace kvtrim
