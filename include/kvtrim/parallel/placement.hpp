// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/error.hpp>
#include <kvtrim/core/types.hpp>

#include <algorithm>
#include <cstdint>

namespace kvtrim {

/// How context-parallel engines spread the tokens of a sequence over ranks.
enum class Spread : std::uint8_t {
  contiguous,  ///< one run of tokens per rank (Ulysses, ring attention)
  zigzag,  ///< of 2 * ranks runs the i-th and the i-th last, so that causal work is even (Llama 3, Megatron)
  page_striped,  ///< page p on rank p modulo ranks
  token_striped,  ///< token t on rank t modulo ranks (striped attention, vLLM's decode context parallel)
};

/// Which rank a token's row is on, as long as nothing was moved between ranks.
///
/// A run is a stretch of positions that one rank has; runs are numbered in the order of their positions.
class Placement {
 public:
  /// \param spread     how
  /// \param ranks      ranks
  /// \param tokens     of the prompt; later tokens join the last run (`contiguous`, `zigzag`)
  /// \param page_size  runs begin at multiples of it, so that a page lies wholly on one rank (not `token_striped`)
  /// \throws std::invalid_argument if there are no ranks, a negative number of tokens or a page size below 1
  constexpr Placement(Spread spread,
                      std::int32_t ranks,
                      std::int32_t tokens,
                      std::int32_t page_size)
      : spread_(spread), ranks_(ranks) {
    if (ranks < 1 || tokens < 0 || page_size < 1) {
      throw_invalid_argument(
          "kvtrim::Placement: {} ranks, {} tokens, page size {}: ranks and page size must be at "
          "least 1, tokens at least 0",
          ranks,
          tokens,
          page_size);
    }
    const std::int32_t runs = spread == Spread::zigzag ? 2 * ranks : ranks;
    run_ = spread == Spread::token_striped ? 1
           : spread == Spread::page_striped
               ? page_size
               : std::max(1, pages_for(pages_for(tokens, runs), page_size)) * page_size;
    last_ = runs - 1;
  }

  /// How.
  [[nodiscard]] constexpr Spread spread() const noexcept { return spread_; }
  /// Ranks.
  [[nodiscard]] constexpr std::int32_t ranks() const noexcept { return ranks_; }
  /// Run that a position is in.
  [[nodiscard]] constexpr std::int32_t run(Position p) const noexcept {
    const std::int32_t run = raw(p) / run_;
    return is_striped() ? run : std::min(run, last_);
  }
  /// Rank that has run `run`.
  [[nodiscard]] constexpr std::int32_t owner_of_run(std::int32_t run) const noexcept {
    if (spread_ == Spread::zigzag) { return run < ranks_ ? run : 2 * ranks_ - 1 - run; }
    return run % ranks_;
  }
  /// Rank that has the row of a position.
  [[nodiscard]] constexpr std::int32_t owner(Position p) const noexcept {
    return owner_of_run(run(p));
  }
  /// Runs that one rank has at most, of a sequence of `tokens` tokens.
  [[nodiscard]] constexpr std::int32_t runs_per_rank(std::int32_t tokens) const noexcept {
    if (spread_ == Spread::contiguous) { return 1; }
    if (spread_ == Spread::zigzag) { return 2; }
    return pages_for(pages_for(tokens, run_), ranks_);
  }

 private:
  [[nodiscard]] constexpr bool is_striped() const noexcept {
    return spread_ == Spread::page_striped || spread_ == Spread::token_striped;
  }
  Spread spread_;
  std::int32_t ranks_;
  std::int32_t run_ = 1;   // positions of a run
  std::int32_t last_ = 0;  // the last run, which has no end
};

}  // namespace kvtrim
