// SPDX-License-Identifier: Apache-2.0
#pragma once

// The k-th highest key of all ranks, eight bits a round: each rank counts the next digit of its own keys that begin like
// the key sought, the counts are added up, and every rank picks the same digit.

#include <kvtrim/core/types.hpp>
#include <kvtrim/parallel/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim::detail {

// Values of a digit: 256 counts of 8 B a round and selection.
inline constexpr std::size_t digit_values = 256;

// A key sought: its first digits, and which of the keys that begin so it is, from the highest.
struct RadixState {
  std::uint64_t prefix = 0;
  std::uint64_t left = 0;  // 0: no key is sought
};

// Takes the next digit by its counts. With fewer keys than are wanted, the lowest key is found.
KVTRIM_HOST_DEVICE constexpr void take_digit(RadixState& state,
                                             const std::uint64_t* counts) noexcept {
  if (state.left == 0) { return; }
  std::uint64_t digit = digit_values - 1;
  while (digit > 0 && counts[digit] < state.left) { state.left -= counts[digit--]; }
  if (counts[digit] < state.left) { state.left = counts[digit]; }
  state.prefix = state.prefix << 8U | digit;
}

// Several selections that share each round.
class RadixRounds {
 public:
  // No key is above it: what is sought where nothing is wanted.
  static constexpr std::uint64_t none = ~std::uint64_t{0};

  RadixRounds(std::size_t selections, std::uint32_t bits)
      : bits_(bits),
        shift_(bits),
        states_(selections),
        totals_(selections),
        counts_(selections * digit_values) {}

  [[nodiscard]] std::size_t selections() const noexcept { return states_.size(); }
  // How many of the highest keys of selection `i` are wanted. Before the first round's counts are taken.
  void want(std::size_t i, std::int64_t count) noexcept {
    states_[i] = {0, static_cast<std::uint64_t>(std::max<std::int64_t>(0, count))};
  }
  // Takes the last round's counts, and counts for the next one: for_each_key(i, f) calls f(key) for this rank's keys of
  // selection i. Empty: the keys are found.
  template <class ForEachKey>
  [[nodiscard]] Round next(ForEachKey&& for_each_key) noexcept {
    if (shift_ < bits_) {
      for (std::size_t i = 0; i < states_.size(); ++i) { take(i); }
    }
    if (shift_ == 0 || states_.empty()) { return {}; }
    shift_ -= 8;
    std::ranges::fill(counts_, std::uint64_t{0});
    const bool first = shift_ + 8 == bits_;
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (!first && states_[i].left == 0) { continue; }  // the first round counts all keys
      std::uint64_t* const counts = counts_.data() + i * digit_values;
      const std::uint64_t prefix = states_[i].prefix;
      for_each_key(i, [&](std::uint64_t key) {
        // Two shifts: one by all 64 bits is not defined.
        if (first || (key >> shift_) >> 8U == prefix) { ++counts[(key >> shift_) & 0xFFU]; }
      });
    }
    return {RoundKind::sum, counts_};
  }

  // The lowest of the keys that are wanted; `none` where none is.
  [[nodiscard]] std::uint64_t threshold(std::size_t i) const noexcept {
    return states_[i].left == 0 ? none : states_[i].prefix;
  }
  // How many keys equal to it are among those wanted.
  [[nodiscard]] std::int64_t equal(std::size_t i) const noexcept {
    return static_cast<std::int64_t>(states_[i].left);
  }
  // Keys of all ranks together.
  [[nodiscard]] std::int64_t total(std::size_t i) const noexcept { return totals_[i]; }

 private:
  void take(std::size_t i) noexcept {
    const std::uint64_t* const counts = counts_.data() + i * digit_values;
    if (shift_ + 8 == bits_) {
      std::uint64_t total = 0;
      for (std::size_t d = 0; d < digit_values; ++d) { total += counts[d]; }
      totals_[i] = static_cast<std::int64_t>(total);
      states_[i].left = std::min(states_[i].left, total);
    }
    take_digit(states_[i], counts);
  }

  std::uint32_t bits_;
  std::uint32_t shift_;
  std::vector<RadixState> states_;
  std::vector<std::int64_t> totals_;
  std::vector<std::uint64_t> counts_;
};

}  // namespace kvtrim::detail
