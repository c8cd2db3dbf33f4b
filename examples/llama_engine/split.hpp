// SPDX-License-Identifier: Apache-2.0
#pragma once

// One model over several ranks: by KV heads (each rank has some heads of all tokens, and a part of the feed-forward features)
// or by context (each rank has all heads of some tokens). A whole model is one that has no ranks.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "linear.hpp"

namespace engine {

/// What the ranks of a model exchange: floats, which the engine may add up in any order. All ranks call the same functions
/// one after the other; a call returns when its result is there.
class Ranks {
 public:
  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
  virtual ~Ranks() = default;

  [[nodiscard]] virtual std::int32_t rank() const = 0;
  [[nodiscard]] virtual std::int32_t size() const = 0;
  /// Adds up the numbers of all ranks, in place.
  virtual void sum(std::span<float> numbers) = 0;
  /// Puts the numbers of all ranks side by side.
  /// \param counts  [size] how many each rank has
  virtual void gather(std::span<const float> own,
                      std::span<const std::int32_t> counts,
                      std::span<float> all) = 0;
  /// Adds up the numbers of all ranks; each rank gets its part of the sums.
  /// \param counts  [size] how many each rank gets, side by side in `all`
  virtual void sum_parts(std::span<const float> all,
                         std::span<const std::int32_t> counts,
                         std::span<float> own) = 0;
};

/// How a model is split.
struct Split {
  enum class By { heads, context };
  Ranks* ranks = nullptr;    ///< null: not at all; otherwise it must outlive the model
  By by = By::heads;         ///< what the ranks share
  std::int32_t stripe = 16;  ///< context: this many tokens to each rank in turn

  [[nodiscard]] bool by_heads() const noexcept { return ranks != nullptr && by == By::heads; }
  [[nodiscard]] bool by_context() const noexcept { return ranks != nullptr && by == By::context; }
  /// The rank that computes the token at a position, and keeps its row.
  [[nodiscard]] std::int32_t owner(std::int32_t position) const {
    return position / stripe % ranks->size();
  }
};

/// The exchange of rows that belong to different ranks. Keeps its buffers between steps.
class RowExchange {
 public:
  explicit RowExchange(Ranks& ranks) : ranks_(&ranks) {}

  /// Makes `rows`, which are this rank's own ones in order, those of all ranks.
  /// \param owners  of each of all rows
  void gather(Matrix& rows, std::span<const std::int32_t> owners) {
    const Eigen::Index width = rows.cols();
    start(owners, width);
    packed_.resize(static_cast<Eigen::Index>(owners.size()), width);
    ranks_->gather(span_of(rows), counts_, span_of(packed_));
    rows.resize(packed_.rows(), width);
    for (std::size_t i = 0; i < owners.size(); ++i)
      rows.row(static_cast<Eigen::Index>(i)) = packed_.row(place(owners[i]));
  }

  /// Attention over all rows from that over each rank's: outputs are weighted by exp(LSE - common LSE) and added up.
  ///
  /// \param[in,out] out  [tokens, heads * dim]; afterwards this rank's own tokens only
  /// \param[in,out] lse  [heads, tokens] for each segment, natural logarithm; -inf: no row was visible, and `out` is
  ///   undefined there. Afterwards over all rows, with the same bits on all ranks
  /// \param owners       of each token
  /// \param segments     tokens of each segment
  void combine(Matrix& out,
               std::vector<float>& lse,
               std::span<const std::int32_t> owners,
               std::span<const std::int32_t> segments,
               std::int32_t heads) {
    const auto size = static_cast<std::size_t>(ranks_->size());
    counts_.assign(size, static_cast<std::int32_t>(lse.size()));
    all_lse_.resize(size * lse.size());
    ranks_->gather(lse, counts_, all_lse_);
    weights_.resize(lse.size());
    for (std::size_t i = 0; i < lse.size(); ++i) {
      float highest = -std::numeric_limits<float>::infinity();
      for (std::size_t r = 0; r < size; ++r)
        highest = std::max(highest, all_lse_[r * lse.size() + i]);
      float mass = 0;
      for (std::size_t r = 0; r < size; ++r)
        mass += std::exp(all_lse_[r * lse.size() + i] - highest);
      const float common = highest + std::log(mass);
      weights_[i] = std::exp(lse[i] - common);
      lse[i] = common;
    }
    start(owners, out.cols());
    packed_.resize(out.rows(), out.cols());
    const Eigen::Index dim = out.cols() / heads;
    Eigen::Index row = 0;
    std::size_t first = 0;  // weight of the segment's first head and token
    for (const std::int32_t tokens : segments) {
      for (std::int32_t t = 0; t < tokens; ++t, ++row) {
        auto packed = packed_.row(place(owners[static_cast<std::size_t>(row)]));
        for (std::int32_t h = 0; h < heads; ++h) {
          const float weight = weights_[first + static_cast<std::size_t>(h * tokens + t)];
          auto part = packed.segment(h * dim, dim);
          if (weight > 0) {
            part = weight * out.row(row).segment(h * dim, dim);
          } else {
            part.setZero();
          }
        }
      }
      first += static_cast<std::size_t>(heads * tokens);
    }
    const auto own = std::count(owners.begin(), owners.end(), ranks_->rank());
    out.resize(own, packed_.cols());
    ranks_->sum_parts(span_of(packed_), counts_, span_of(out));
  }

 private:
  static std::span<float> span_of(Matrix& m) {
    return {m.data(), static_cast<std::size_t>(m.size())};
  }
  // Floats of each rank, and the place of its first row, where ranks lie side by side.
  void start(std::span<const std::int32_t> owners, Eigen::Index width) {
    counts_.assign(static_cast<std::size_t>(ranks_->size()), 0);
    for (const std::int32_t r : owners) ++counts_[static_cast<std::size_t>(r)];
    places_.assign(counts_.size(), 0);
    for (std::size_t r = 1; r < places_.size(); ++r) places_[r] = places_[r - 1] + counts_[r - 1];
    for (std::int32_t& count : counts_) count *= static_cast<std::int32_t>(width);
  }
  Eigen::Index place(std::int32_t owner) { return places_[static_cast<std::size_t>(owner)]++; }

  Ranks* ranks_;
  Matrix packed_;
  std::vector<float> all_lse_, weights_;
  std::vector<std::int32_t> counts_;
  std::vector<Eigen::Index> places_;
};

}  // namespace engine
