// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/parallel/communicator.hpp>
#include <kvtrim/score/exact_window.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// Makes window scores of rows that are spread over ranks: afterwards each window's `columns` are those of one rank.
///
/// All windows (sequence, layer, KV head) share each round: a round of maxima and one of sums, of 8 bytes for each query of
/// each window. None with an LSE, which is that of all ranks' rows already. All windows keep their logits until then, 4
/// bytes for each query and row: where that is too much, take some of the layers at a time.
///
/// \par Complexity
/// as `ExactWindow`; allocates in the constructor and in the first round
/// \par Source
/// own
class WindowRounds {
 public:
  /// \param windows  of this rank, none asked for a step yet: as many as on the other ranks, in their order, with the same
  ///   queries. They must outlive the rounds. A rank may have no rows
  explicit WindowRounds(std::span<ExactWindow* const> windows)
      : windows_(windows.begin(), windows.end()), parts_(windows.size()) {}

  /// Next round.
  [[nodiscard]] Round next() noexcept {
    give_back();
    if (step_ == 2) { return {}; }
    ++step_;
    words_.clear();
    for (std::size_t i = 0; i < windows_.size(); ++i) {
      parts_[i] = step_ == 1 ? windows_[i]->maxima() : windows_[i]->denominators();
      words_.insert(words_.end(), parts_[i].begin(), parts_[i].end());
    }
    return {step_ == 1 ? RoundKind::max : RoundKind::sum, words_};
  }

 private:
  // The windows read what they handed out.
  void give_back() noexcept {
    auto from = words_.begin();
    for (const std::span<std::uint64_t> part : parts_) {
      std::copy_n(from, part.size(), part.begin());
      from += static_cast<std::ptrdiff_t>(part.size());
    }
  }

  std::vector<ExactWindow*> windows_;
  std::vector<std::span<std::uint64_t>> parts_;
  std::vector<std::uint64_t> words_;
  std::int32_t step_ = 0;
};
static_assert(RankRun<WindowRounds>);

}  // namespace kvtrim
