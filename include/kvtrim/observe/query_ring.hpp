// SPDX-License-Identifier: Apache-2.0
#pragma once

// Every row is written twice, `window` rows apart, so that the last `window` rows form one block in position order
// wherever the ring stands.

#include <kvtrim/cache/cache_view.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvtrim {

/// Keeps the last queries of each sequence, so that the observation window may span the chunks of a prompt.
///
/// Queries are stored as attention uses them: after RoPE, before the scale, with the position of their token.
///
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (the observation window)
/// \par Allocation
/// in the constructor only: 2 * sequences * layers * query_heads * window * head_dim floats
/// \par Thread-safety
/// one thread per (sequence, layer)
class QueryRing {
 public:
  /// What a ring holds.
  struct Params {
    std::int32_t sequences = 1;    ///< sequences
    std::int32_t layers = 1;       ///< layers
    std::int32_t query_heads = 1;  ///< query heads
    std::int32_t head_dim = 0;     ///< features of a query
    std::int32_t window = 32;      ///< queries kept
    bool lse = false;              ///< also keep the engine's LSE (natural logarithm)
  };

  /// Makes an empty ring.
  /// \throws std::invalid_argument if an extent is below 1
  explicit QueryRing(const Params& params) : p_(params) {
    detail::check_sizes("kvtrim::QueryRing",
                        {{"sequences", p_.sequences, 1},
                         {"layers", p_.layers, 1},
                         {"query_heads", p_.query_heads, 1},
                         {"head_dim", p_.head_dim, 1},
                         {"window", p_.window, 1}});
    const auto heads = index(p_.sequences) * index(p_.layers) * index(p_.query_heads);
    queries_.resize(heads * index(2 * p_.window) * index(p_.head_dim));
    if (p_.lse) { lse_.resize(heads * index(2 * p_.window)); }
    positions_.resize(index(p_.sequences) * index(2 * p_.window));
    firsts_.assign(index(p_.sequences), 0);
    counts_.assign(index(p_.sequences), 0);
    seen_.assign(index(p_.sequences) * index(p_.layers), 0);
  }

  /// Stores `n` queries of one layer; call it for each layer of a chunk, with the same positions.
  ///
  /// \param queries    [n, query_heads, head_dim]
  /// \param positions  [n] positions of the tokens
  /// \param lse        [query_heads, n]; needed if and only if `Params::lse`
  /// \par Complexity
  /// O(min(n, window) * query_heads * head_dim)
  void push(SequenceId s,
            LayerId l,
            std::int32_t n,
            const float* queries,
            const Position* positions,
            const float* lse = nullptr) noexcept {
    KVTRIM_ASSERT((lse != nullptr) == p_.lse && raw(s) < p_.sequences && raw(l) < p_.layers);
    std::int64_t& seen = seen_[index(raw(s)) * index(p_.layers) + index(raw(l))];
    const std::int64_t row = p_.head_dim;
    for (std::int32_t i = std::max(0, n - p_.window); i < n; ++i) {
      const std::int64_t slot = (seen + i) % p_.window;
      for (const std::int64_t at : {slot, slot + p_.window}) {
        for (std::int32_t h = 0; h < p_.query_heads; ++h) {
          const std::int64_t head =
              ((static_cast<std::int64_t>(raw(s)) * p_.layers + raw(l)) * p_.query_heads + h) * 2 *
              p_.window;
          std::memcpy(queries_.data() + (head + at) * row,
                      queries + (i * static_cast<std::int64_t>(p_.query_heads) + h) * row,
                      index(row) * sizeof(float));
          if (p_.lse) { lse_[index(head + at)] = lse[h * static_cast<std::int64_t>(n) + i]; }
        }
        positions_[index(raw(s) * static_cast<std::int64_t>(2 * p_.window) + at)] = positions[i];
      }
    }
    seen += n;
    counts_[index(raw(s))] = static_cast<std::int32_t>(std::min<std::int64_t>(seen, p_.window));
    firsts_[index(raw(s))] = seen <= p_.window ? 0 : static_cast<std::int32_t>(seen % p_.window);
  }

  /// Forgets the queries of sequence `s`.
  void reset(SequenceId s) noexcept {
    std::fill_n(seen_.data() + index(raw(s)) * index(p_.layers), p_.layers, 0);
    counts_[index(raw(s))] = 0;
    firsts_[index(raw(s))] = 0;
  }

  /// Copies the queries of `from` to `to`, as a fork of the sequence does.
  void fork(SequenceId from, SequenceId to) noexcept {
    const auto copy = [&](auto& v) {
      const std::size_t part = v.size() / index(p_.sequences);
      std::copy_n(v.data() + part * index(raw(from)), part, v.data() + part * index(raw(to)));
    };
    copy(queries_), copy(lse_), copy(positions_), copy(firsts_), copy(counts_), copy(seen_);
  }

  /// The last `min(seen, window)` queries of every sequence, ascending by position. Valid until the next push.
  [[nodiscard]] QueryBlock queries() const noexcept { return block(0); }

  /// The queries of sequence `s` alone, as sequence 0; for a view of that one sequence.
  [[nodiscard]] QueryBlock queries(SequenceId s) const noexcept { return block(raw(s)); }

  /// The parameters.
  [[nodiscard]] const Params& params() const noexcept { return p_; }

 private:
  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  [[nodiscard]] QueryBlock block(std::int64_t first) const noexcept {
    QueryBlock b;
    const std::int64_t rows = 2 * static_cast<std::int64_t>(p_.window);
    b.query_heads = p_.query_heads;
    b.rows = p_.window;
    b.row_firsts = firsts_.data() + first;
    b.row_counts = counts_.data() + first;
    b.row_stride = p_.head_dim;
    b.head_stride = rows * p_.head_dim;
    b.layer_stride = p_.query_heads * b.head_stride;
    b.sequence_stride = p_.layers * b.layer_stride;
    b.data = queries_.data() + first * b.sequence_stride;
    b.positions = positions_.data() + first * rows;
    b.position_sequence_stride = rows;
    b.lse_head_stride = rows;
    b.lse_layer_stride = p_.query_heads * rows;
    b.lse_sequence_stride = p_.layers * b.lse_layer_stride;
    b.lse = p_.lse ? lse_.data() + first * b.lse_sequence_stride : nullptr;
    return b;
  }

  Params p_;
  std::vector<float> queries_;        // [sequences, layers, query_heads, 2 * window, head_dim]
  std::vector<float> lse_;            // [sequences, layers, query_heads, 2 * window]
  std::vector<Position> positions_;   // [sequences, 2 * window]
  std::vector<std::int32_t> firsts_;  // [sequences]
  std::vector<std::int32_t> counts_;  // [sequences]
  std::vector<std::int64_t> seen_;    // [sequences, layers]
};

}  // namespace kvtrim
