// SPDX-License-Identifier: Apache-2.0
#pragma once

// One query after another, each a rank-one update in double: the result does not change by a bit however a prompt is cut
// into chunks, and no query is kept.

#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/observation.hpp>
#include <kvtrim/policy/detail/check_sizes.hpp>

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrim {

/// Mean and covariance of the queries of each sequence, gathered while its prompt is read.
///
/// \par Source
/// Devoto et al., 2025, arXiv:2510.00636 (what is gathered; kvpress leaves out the first queries too); Welford, 1962
/// (the update)
/// \par Allocation
/// in the constructor only: 8 bytes * sequences * layers * query_heads * head_dim^2
/// \par Thread-safety
/// one thread per (sequence, layer)
class QueryMoments {
 public:
  /// What is gathered.
  struct Params {
    std::int32_t sequences = 1;    ///< sequences
    std::int32_t layers = 1;       ///< layers
    std::int32_t query_heads = 1;  ///< query heads
    std::int32_t head_dim = 0;     ///< features of a query
    std::int32_t sinks = 4;        ///< first queries of a sequence, left out
  };

  /// Makes empty moments.
  /// \throws std::invalid_argument if an extent is below 1 or `sinks` negative
  explicit QueryMoments(const Params& params) : p_(params) {
    const detail::Sizes sizes{{"sequences", p_.sequences, 1},
                              {"layers", p_.layers, 1},
                              {"query_heads", p_.query_heads, 1},
                              {"head_dim", p_.head_dim, 1},
                              {"sinks", p_.sinks}};
    detail::check_sizes("kvtrim::QueryMoments", sizes);
    detail::check_bytes("kvtrim::QueryMoments", static_cast<std::int64_t>(bytes(p_)), sizes);
    const std::size_t layers = index(p_.sequences) * index(p_.layers);
    const std::size_t heads = layers * index(p_.query_heads);
    const std::size_t dim = index(p_.head_dim);
    seen_.assign(layers, 0);
    counts_.assign(heads, 0);
    deltas_.assign(heads * dim, 0.0);
    means_.assign(heads * dim, 0.0);
    products_.assign(heads * triangle(), 0.0);
    mean_.assign(heads * dim, 0.0F);
    covariance_.assign(heads * dim * dim, 0.0F);
  }

  /// Bytes that moments allocate; `too_large` beyond 64 bits.
  [[nodiscard]] static constexpr std::size_t bytes(const Params& p) noexcept {
    constexpr std::int64_t per_dim = 2 * sizeof(double) + sizeof(float);
    const std::int64_t dim = p.head_dim;
    const std::int64_t head =
        saturated_sum({std::int64_t{sizeof(std::int64_t)},
                       per_dim * dim,
                       saturated_product({dim * (dim + 1) / 2, sizeof(double)}),
                       saturated_product({dim, dim, sizeof(float)})});
    const std::int64_t layer = saturated_sum(
        {std::int64_t{sizeof(std::int64_t)}, saturated_product({p.query_heads, head})});
    return static_cast<std::size_t>(saturated_product({p.sequences, p.layers, layer}));
  }

  /// Adds the queries of a chunk of sequence `s`, those of one layer; call it for each layer.
  ///
  /// \param queries      before RoPE, before the scale; one that is not finite is left out
  /// \param query_layer  layer index inside `queries`
  /// \pre `queries.query_heads == params().query_heads`
  /// \par Complexity
  /// O(rows * query_heads * head_dim^2); no allocation
  void accumulate(SequenceId s,
                  LayerId l,
                  const QueryBlock& queries,
                  LayerId query_layer) noexcept {
    add_heads(s, l, queries, s, query_layer, 0, p_.query_heads);
    advance(s, l, queries.count(s));
  }

  /// Adds the queries of heads [first_head, first_head + heads) alone: those that sequence `from` of `queries` has. Call
  /// `advance` once all heads have them.
  ///
  /// \pre `queries.query_heads == params().query_heads`
  /// \par Complexity
  /// O(rows * heads * head_dim^2); no allocation
  /// \par Thread-safety
  /// one thread per (sequence, layer, head)
  void add_heads(SequenceId s,
                 LayerId l,
                 const QueryBlock& queries,
                 SequenceId from,
                 LayerId query_layer,
                 std::int32_t first_head,
                 std::int32_t heads) noexcept {
    KVTRIM_ASSERT(queries.query_heads == p_.query_heads);
    const auto sinks = static_cast<std::int32_t>(p_.sinks - seen_[layer_index(s, l)]);
    const std::int32_t rows = queries.count(from);
    for (std::int32_t head = first_head; head < first_head + heads; ++head) {
      for (std::int32_t i = sinks; i < rows; ++i) {
        add(layer_index(s, l), head, queries.row(from, query_layer, head, i));
      }
    }
  }

  /// Counts `n` queries of a layer as seen.
  void advance(SequenceId s, LayerId l, std::int32_t n) noexcept {
    std::int64_t& seen = seen_[layer_index(s, l)];
    seen = std::min<std::int64_t>(seen + n, p_.sinks);
  }

  /// Sets `statistics()` of sequence `s` to those of the queries seen so far; zero if there are none.
  ///
  /// \par Complexity
  /// O(layers * query_heads * head_dim^2); no allocation
  void finish(SequenceId s) noexcept {
    for (std::int32_t l = 0; l < p_.layers; ++l) { finish(s, LayerId{l}); }
  }

  /// The same for one layer.
  void finish(SequenceId s, LayerId l) noexcept {
    const std::size_t dim = index(p_.head_dim);
    const std::size_t first = layer_index(s, l) * index(p_.query_heads);
    for (std::size_t head = first; head < first + index(p_.query_heads); ++head) {
      const double share = counts_[head] > 0 ? 1.0 / static_cast<double>(counts_[head]) : 0.0;
      const double* product = products_.data() + head * triangle();
      float* const out = covariance_.data() + head * dim * dim;
      for (std::size_t i = 0; i < dim; ++i) {
        mean_[head * dim + i] = static_cast<float>(means_[head * dim + i]);
        for (std::size_t j = 0; j <= i; ++j) {
          out[i * dim + j] = out[j * dim + i] = static_cast<float>(*product++ * share);
        }
      }
    }
  }

  /// Forgets the queries of sequence `s`; its statistics remain those of the last `finish`.
  void reset(SequenceId s) noexcept {
    const auto clear = [&](auto& v) {
      const std::size_t part = v.size() / index(p_.sequences);
      std::fill_n(v.data() + part * slot_index(s), part, 0);
    };
    clear(seen_), clear(counts_), clear(means_), clear(products_);
  }

  /// Copies the queries and statistics of `from` to `to`, as a fork of the sequence does.
  void fork(SequenceId from, SequenceId to) noexcept {
    const auto copy = [&](auto& v) {
      const std::size_t part = v.size() / index(p_.sequences);
      std::copy_n(v.data() + part * slot_index(from), part, v.data() + part * slot_index(to));
    };
    copy(seen_), copy(counts_), copy(means_), copy(products_), copy(mean_), copy(covariance_);
  }

  /// Statistics of every sequence, as `finish` left them.
  [[nodiscard]] QueryStatistics statistics() const noexcept { return statistics(SequenceId{0}); }

  /// The same, with sequence `s` as sequence 0; for a view of that one sequence.
  [[nodiscard]] QueryStatistics statistics(SequenceId s) const noexcept {
    const std::size_t first = layer_index(s, LayerId{0}) * index(p_.query_heads);
    const std::size_t dim = index(p_.head_dim);
    QueryStatistics q;
    q.mean = mean_.data() + first * dim;
    q.covariance = covariance_.data() + first * dim * dim;
    q.query_heads = p_.query_heads;
    q.dim = p_.head_dim;
    q.layers = p_.layers;
    q.per_sequence = true;
    return q;
  }

  /// The parameters.
  [[nodiscard]] const Params& params() const noexcept { return p_; }

 private:
  static constexpr std::size_t index(std::int64_t i) noexcept {
    return static_cast<std::size_t>(i);
  }
  [[nodiscard]] std::size_t triangle() const noexcept {
    return index(p_.head_dim) * (index(p_.head_dim) + 1) / 2;
  }
  // Every id of a caller goes through one of the next two.
  [[nodiscard]] std::size_t slot_index(SequenceId s) const noexcept {
    KVTRIM_ASSERT(raw(s) >= 0 && raw(s) < p_.sequences && "no such sequence of the moments");
    return index(raw(s));
  }
  [[nodiscard]] std::size_t layer_index(SequenceId s, LayerId l) const noexcept {
    KVTRIM_ASSERT(raw(l) >= 0 && raw(l) < p_.layers && "no such layer of the moments");
    return slot_index(s) * index(p_.layers) + index(raw(l));
  }

  void add(std::size_t layer, std::int32_t head, const float* query) noexcept {
    const std::int32_t dim = p_.head_dim;
    if (!detail::finite(query, dim)) { return; }
    const std::size_t at = layer * index(p_.query_heads) + index(head);
    const auto n = static_cast<double>(++counts_[at]);
    Eigen::Map<Eigen::ArrayXd> mean(means_.data() + at * index(dim), dim);
    Eigen::Map<Eigen::ArrayXd> delta(deltas_.data() + at * index(dim), dim);
    delta = Eigen::Map<const Eigen::ArrayXf>(query, dim).cast<double>() - mean;
    mean += delta / n;
    double* row = products_.data() + at * triangle();
    for (std::int32_t i = 0; i < dim; ++i) {
      Eigen::Map<Eigen::ArrayXd>(row, i + 1) += delta.head(i + 1) * (delta[i] * ((n - 1) / n));
      row += i + 1;
    }
  }

  Params p_;
  std::vector<std::int64_t> seen_;    // [sequences, layers] sinks included
  std::vector<std::int64_t> counts_;  // [sequences, layers, query_heads]
  std::vector<double> deltas_;        // as `means_`, working space
  std::vector<double> means_;         // [sequences, layers, query_heads, head_dim]
  std::vector<double> products_;      // [sequences, layers, query_heads, triangle] centred sums
  std::vector<float> mean_;           // as `means_`
  std::vector<float> covariance_;     // [sequences, layers, query_heads, head_dim, head_dim]
};

}  // namespace kvtrim
