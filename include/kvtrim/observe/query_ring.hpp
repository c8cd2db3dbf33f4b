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
    const detail::Sizes sizes{{"sequences", p_.sequences, 1},
                              {"layers", p_.layers, 1},
                              {"query_heads", p_.query_heads, 1},
                              {"head_dim", p_.head_dim, 1},
                              {"window", p_.window, 1, 0x3FFF'FFFF}};
    detail::check_sizes("kvtrim::QueryRing", sizes);
    detail::check_bytes("kvtrim::QueryRing", static_cast<std::int64_t>(bytes(p_)), sizes);
    const auto heads = index(p_.sequences) * index(p_.layers) * index(p_.query_heads);
    queries_.resize(heads * index(2 * p_.window) * index(p_.head_dim));
    if (p_.lse) { lse_.resize(heads * index(2 * p_.window)); }
    positions_.resize(index(p_.sequences) * index(2 * p_.window));
    firsts_.assign(index(p_.sequences), 0);
    counts_.assign(index(p_.sequences), 0);
    shown_.assign(index(p_.sequences), 0);
    layers_.assign(index(p_.sequences) * index(p_.layers), {});
  }

  /// Bytes that a ring allocates; `too_large` beyond 64 bits.
  [[nodiscard]] static constexpr std::size_t bytes(const Params& p) noexcept {
    const std::int64_t rows = std::int64_t{2} * p.window;
    const std::int64_t row = saturated_product(
        {p.layers, p.query_heads, std::int64_t{p.head_dim} + (p.lse ? 1 : 0), sizeof(float)});
    const std::int64_t sequence =
        saturated_sum({saturated_product({rows, row}),
                       rows * static_cast<std::int64_t>(sizeof(Position)),
                       static_cast<std::int64_t>(2 * sizeof(std::int32_t) + sizeof(std::int64_t)),
                       p.layers * static_cast<std::int64_t>(sizeof(Layer))});
    return static_cast<std::size_t>(saturated_product({p.sequences, sequence}));
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
    QueryBlock block;
    block.data = queries;
    block.query_heads = p_.query_heads;
    block.rows = n;
    block.head_stride = p_.head_dim;
    block.row_stride = static_cast<std::int64_t>(p_.query_heads) * p_.head_dim;
    block.positions = positions;
    block.lse = lse;
    block.lse_head_stride = n;
    store(s, l, block, SequenceId{0}, 0, p_.query_heads);
    advance(s, l, block, SequenceId{0}, 0);
  }

  /// Stores the queries of heads [first_head, first_head + heads) alone: those that sequence `from` of `step` has in its
  /// layer 0. They count once `advance` was called.
  ///
  /// \pre `step.lse` is there if `Params::lse`
  /// \par Complexity
  /// O(min(rows, window) * heads * head_dim)
  /// \par Thread-safety
  /// one thread per (sequence, layer, head)
  void store(SequenceId s,
             LayerId l,
             const QueryBlock& step,
             SequenceId from,
             std::int32_t first_head,
             std::int32_t heads) noexcept {
    KVTRIM_ASSERT((step.lse != nullptr || !p_.lse) && "the ring keeps an LSE, the step has none");
    const std::int32_t n = step.count(from);
    const std::int32_t begin = std::max(0, n - p_.window);
    const auto begin_slot = static_cast<std::int32_t>((layer(s, l).seen + begin) % p_.window);
    const std::int64_t row = p_.head_dim;
    for (std::int32_t h = first_head; h < first_head + heads; ++h) {
      const std::int64_t head =
          (static_cast<std::int64_t>(layer_index(s, l)) * p_.query_heads + h) * 2 * p_.window;
      std::int32_t slot = begin_slot;
      for (std::int32_t i = begin; i < n; ++i) {
        const float* const query = step.row(from, LayerId{0}, h, i);
        for (const std::int64_t at : {head + slot, head + slot + p_.window}) {
          std::memcpy(queries_.data() + at * row, query, index(row) * sizeof(float));
          if (p_.lse) {
            lse_[index(at)] = detail::natural(step.lse_of(from, LayerId{0}, h, i), step.lse_base);
          }
        }
        if (++slot == p_.window) { slot = 0; }
      }
    }
  }

  /// Makes the queries count that `store` stored for all heads.
  ///
  /// \param next_position  of the sequence, after the step; read where `step` has no positions
  void advance(SequenceId s,
               LayerId l,
               const QueryBlock& step,
               SequenceId from,
               std::int32_t next_position) noexcept {
    const std::int32_t n = step.count(from);
    if (n == 0) { return; }
    Layer& at = layer(s, l);
    for (std::int32_t i = std::max(0, n - p_.window); i < n; ++i) {
      const std::int64_t slot = (at.seen + i) % p_.window;
      for (const std::int64_t place : {slot, slot + p_.window}) {
        position_at(s, place) = step.position(from, i, next_position);
      }
    }
    at.seen += n;
    at.kept = static_cast<std::int32_t>(std::min<std::int64_t>(at.kept + n, p_.window));
    at.last = step.position(from, n - 1, next_position);
    show(s, at);
  }

  /// Drops the queries from position `next` on, as a truncation of the sequence does. Those that they pushed out of the
  /// ring are gone: fewer than `window` stay until as many have been seen again.
  ///
  /// \par Complexity
  /// O(layers * window)
  void truncate(SequenceId s, Position next) noexcept {
    std::int32_t least = p_.window;
    Layer* any = nullptr;
    for (std::int32_t l = 0; l < p_.layers; ++l) {
      Layer& at = layer(s, LayerId{l});
      if (at.seen == 0) { continue; }
      while (at.kept > 0 && position_at(s, (at.seen - 1) % p_.window) >= next) {
        --at.seen;
        --at.kept;
      }
      at.last = std::min(at.last, Position{raw(next) - 1});
      least = std::min(least, at.kept);
      any = &at;
    }
    if (any == nullptr) { return; }
    // A layer that a step had not reached still has older queries, whose positions the step has overwritten; and where
    // nothing is left, it was another number of queries that went.
    for (std::int32_t l = 0; l < p_.layers; ++l) {
      Layer& at = layer(s, LayerId{l});
      at.kept = std::min(at.kept, least);
      if (least == 0) { at.seen = 0; }
    }
    show(s, *any);
  }

  /// Forgets the queries of sequence `s`.
  void reset(SequenceId s) noexcept {
    for (std::int32_t l = 0; l < p_.layers; ++l) { layer(s, LayerId{l}) = {}; }
    show(s, {});
  }

  /// Position of the last query seen in a layer, -1 if there is none.
  [[nodiscard]] Position last(SequenceId s, LayerId l) const noexcept { return layer(s, l).last; }

  /// Queries kept of a layer.
  [[nodiscard]] std::int32_t count(SequenceId s, LayerId l) const noexcept {
    return layer(s, l).kept;
  }

  /// Whether the block has the last queries of these layers: not between layers of a step, where some are ahead of the
  /// others.
  [[nodiscard]] bool complete(SequenceId s, LayerId first, std::int32_t layers) const noexcept {
    for (std::int32_t l = raw(first); l < raw(first) + layers; ++l) {
      const Layer& at = layer(s, LayerId{l});
      if (at.kept != counts_[index(raw(s))] || at.seen != shown_[index(raw(s))]) { return false; }
    }
    return true;
  }

  /// Copies the queries of `from` to `to`, as a fork of the sequence does.
  void fork(SequenceId from, SequenceId to) noexcept {
    const auto copy = [&](auto& v) {
      const std::size_t part = v.size() / index(p_.sequences);
      std::copy_n(v.data() + part * slot_index(from), part, v.data() + part * slot_index(to));
    };
    copy(queries_), copy(lse_), copy(positions_), copy(firsts_), copy(counts_), copy(shown_),
        copy(layers_);
  }

  /// The last `min(seen, window)` queries of every sequence, ascending by position. Valid until the next push.
  [[nodiscard]] QueryBlock queries() const noexcept { return block(0); }

  /// The queries of sequence `s` alone, as sequence 0; for a view of that one sequence.
  [[nodiscard]] QueryBlock queries(SequenceId s) const noexcept {
    return block(static_cast<std::int64_t>(slot_index(s)));
  }

  /// The parameters.
  [[nodiscard]] const Params& params() const noexcept { return p_; }

 private:
  struct Layer {
    std::int64_t seen = 0;  // place of the next query, modulo the window
    std::int32_t kept = 0;  // queries
    Position last{-1};      // of the newest
  };

  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  // Every id of a caller goes through one of the next two.
  [[nodiscard]] std::size_t slot_index(SequenceId s) const noexcept {
    KVTRIM_ASSERT(raw(s) >= 0 && raw(s) < p_.sequences && "no such sequence of the ring");
    return index(raw(s));
  }
  [[nodiscard]] std::size_t layer_index(SequenceId s, LayerId l) const noexcept {
    KVTRIM_ASSERT(raw(l) >= 0 && raw(l) < p_.layers && "no such layer of the ring");
    return slot_index(s) * index(p_.layers) + index(raw(l));
  }
  [[nodiscard]] Layer& layer(SequenceId s, LayerId l) noexcept {
    return layers_[layer_index(s, l)];
  }
  [[nodiscard]] const Layer& layer(SequenceId s, LayerId l) const noexcept {
    return layers_[layer_index(s, l)];
  }
  [[nodiscard]] Position& position_at(SequenceId s, std::int64_t place) noexcept {
    return positions_[index(raw(s) * static_cast<std::int64_t>(2 * p_.window) + place)];
  }
  void show(SequenceId s, const Layer& at) noexcept {
    counts_[index(raw(s))] = at.kept;
    firsts_[index(raw(s))] = static_cast<std::int32_t>((at.seen - at.kept) % p_.window);
    shown_[index(raw(s))] = at.seen;
  }

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
  std::vector<std::int64_t>
      shown_;                  // [sequences] Layer::seen of the layer that the two above are of
  std::vector<Layer> layers_;  // [sequences, layers]
};

}  // namespace kvtrim
