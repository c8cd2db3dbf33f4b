// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks exchange unsigned 64-bit integers alone: their sums and maxima do not depend on the order of the ranks, so every
// rank computes the same bits. An algorithm does not call a transport; it hands out its rounds one after the other.

#include <kvtrim/core/status.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace kvtrim {

/// One of the ranks that work on a cache together.
struct Rank {
  std::int32_t index = 0;  ///< 0..count-1
  std::int32_t count = 1;  ///< ranks
};

/// What happens to the words of a round.
enum class RoundKind : std::uint8_t {
  sum,     ///< each word becomes the sum of all ranks' (modulo 2^64)
  max,     ///< each word becomes the maximum
  gather,  ///< [ranks, words of a rank]: a rank has filled its own part, and gets the others'
};

/// Words that an algorithm wants exchanged; without words: nothing more, the algorithm is done.
struct Round {
  RoundKind kind = RoundKind::sum;  ///< how
  std::span<std::uint64_t>
      words{};  ///< in place: they stay the algorithm's, and valid until its next call of `next`

  /// Whether there is anything to exchange.
  [[nodiscard]] constexpr explicit operator bool() const noexcept { return !words.empty(); }
};

/// An algorithm over ranks: a value that hands out the words of its next round, and finds them exchanged when it is asked
/// for the round after it.
///
/// | expression | returns             | meaning                                                                  |
/// |------------|---------------------|--------------------------------------------------------------------------|
/// | `r.next()` | `Round`, `noexcept` | takes in the last round's words, hands out the next ones; false: all done |
///
/// Semantics the compiler cannot check: as long as all ranks were given what the algorithm says must be equal, the kinds
/// and sizes of their rounds are the same. If an exchange fails, the value is of no more use.
template <class R>
concept RankRun = requires(R& r) {
  { r.next() } noexcept -> std::same_as<Round>;
};

/// A transport between ranks. Calls are collective: all ranks make the same ones, in one order, with as many words.
///
/// | expression      | returns                    | meaning                                                    |
/// |-----------------|----------------------------|------------------------------------------------------------|
/// | `c.rank()`      | `Rank`, `noexcept`         | which rank this is, of how many                            |
/// | `c.sum(words)`  | `Status`, `noexcept`       | `RoundKind::sum`, in place                                 |
/// | `c.max(words)`  | `Status`, `noexcept`       | `RoundKind::max`, in place                                 |
/// | `c.all_gather(words)` | `Status`, `noexcept` | `RoundKind::gather`, in place                              |
///
/// Status: `ok`, or `rank_missing`, after which the communicator refuses every call and the words are of no value.
template <class C>
concept Communicator = requires(C& c, const C& k, std::span<std::uint64_t> words) {
  { k.rank() } noexcept -> std::same_as<Rank>;
  { c.sum(words) } noexcept -> std::same_as<Status>;
  { c.max(words) } noexcept -> std::same_as<Status>;
  { c.all_gather(words) } noexcept -> std::same_as<Status>;
};

/// The only rank: nothing is exchanged.
class SelfCommunicator {
 public:
  /// Rank 0 of 1.
  [[nodiscard]] constexpr Rank rank() const noexcept { return {}; }
  /// Nothing to add.
  [[nodiscard]] constexpr Status sum(std::span<std::uint64_t>) const noexcept { return Status::ok; }
  /// Nothing to compare.
  [[nodiscard]] constexpr Status max(std::span<std::uint64_t>) const noexcept { return Status::ok; }
  /// Nothing to gather.
  [[nodiscard]] constexpr Status all_gather(std::span<std::uint64_t>) const noexcept {
    return Status::ok;
  }
};
static_assert(Communicator<SelfCommunicator>);

/// Exchanges the words of one round.
///
/// \returns the communicator's status
template <Communicator C>
[[nodiscard]] Status exchange(C& communicator, const Round& round) noexcept {
  switch (round.kind) {
    case RoundKind::sum:
      return communicator.sum(round.words);
    case RoundKind::max:
      return communicator.max(round.words);
    default:
      return communicator.all_gather(round.words);
  }
}

/// Exchanges all rounds of an algorithm.
///
/// \returns `ok`, or the communicator's first other status; whether the ranks agreed is the algorithm's to say
template <Communicator C, RankRun R>
[[nodiscard]] Status drive(C& communicator, R&& run) noexcept {
  while (const Round round = run.next()) {
    if (const Status status = exchange(communicator, round); status != Status::ok) {
      return status;
    }
  }
  return Status::ok;
}

/// One round of words that the caller has, such as a denominator's maxima and sums, or the scores that heads of several
/// ranks have in common (`score_words`).
class OneRound {
 public:
  /// \param words  exchanged in place
  constexpr OneRound(RoundKind kind, std::span<std::uint64_t> words) noexcept
      : round_{kind, words} {}
  /// The round, once.
  [[nodiscard]] constexpr Round next() noexcept { return std::exchange(round_, Round{}); }

 private:
  Round round_;
};
static_assert(RankRun<OneRound>);

}  // namespace kvtrim
