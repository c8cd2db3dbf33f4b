// SPDX-License-Identifier: Apache-2.0
#pragma once

// The product of a key tile with queries, one register block at a time, so that the rest of the work on the logits (scale,
// exponential, sum) is done while they are in the first-level cache. A logit is one chain of multiply-adds over the
// features, wherever its row and its query lie: no bit depends on the place.
// On two Zen 4 cores with g++ 12 and AVX-512, Eigen's own product reaches 87 GFLOP/s and sends the logits through memory;
// this one reaches 117 (the peak is 118), and the exponentials hide behind it.

#include <kvtrim/core/arena.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/packet.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvtrim::detail {

/// Packets per panel: without a fused multiply-add, a product needs a register of its own.
inline constexpr std::int32_t panel_packets = fused_multiply_add ? 3 : 2;
/// Key rows per panel: 48, 24, 12 or 8. Divides `tile_rows`.
inline constexpr std::int32_t panel_rows = panel_packets * packet_floats;
static_assert(48 % panel_rows == 0);
/// Queries per register block.
inline constexpr std::int32_t block_queries = packet_registers >= 32 ? 8 : 4;

/// Query rows per product: whole register blocks on every machine.
[[nodiscard]] constexpr std::int32_t padded_queries(std::int32_t rows) noexcept {
  return (rows + 7) / 8 * 8;
}
/// Number of whole panels that hold `rows` rows.
[[nodiscard]] constexpr std::int32_t panels_of(std::int32_t rows) noexcept {
  return (rows + panel_rows - 1) / panel_rows;
}

/// Writes query `q` to where products read it; null: zeros. `packed` [padded_queries, head_dim].
///
/// \param stride  floats between the query's features
inline void pack_query(const float* query,
                       std::int32_t head_dim,
                       std::int32_t q,
                       float* packed,
                       std::int64_t stride = 1) noexcept {
  float* const to = packed +
                    static_cast<std::ptrdiff_t>(q / block_queries) * block_queries * head_dim +
                    q % block_queries;
  for (std::int32_t d = 0; d < head_dim; ++d) {
    to[static_cast<std::ptrdiff_t>(d) * block_queries] =
        query == nullptr ? 0.0F : query[d * stride];
  }
}

/// Writes the tile's first `rows` rows, filled up to whole panels, to `s.packed_keys`: [panels, head_dim, panel_rows].
inline void pack_keys(const TileScratch& s, std::int32_t rows) noexcept {
  constexpr std::int32_t n = packet_floats;
  const std::int32_t head_dim = s.head_dim;
  for (std::int32_t first = 0; first < panels_of(rows) * panel_rows; first += n) {
    const float* const from = s.row(first);
    float* const to = s.packed_keys.data() +
                      static_cast<std::ptrdiff_t>(first / panel_rows) * panel_rows * head_dim +
                      first % panel_rows;
    std::int32_t d = 0;
    for (; d + n <= head_dim; d += n) {
      PacketSquare block;
      for (std::int32_t i = 0; i < n; ++i) {
        block.packet[i] = ploadu<Packet>(from + static_cast<std::ptrdiff_t>(i) * head_dim + d);
      }
      ptranspose(block);
      for (std::int32_t i = 0; i < n; ++i) {
        pstore(to + static_cast<std::ptrdiff_t>(d + i) * panel_rows, block.packet[i]);
      }
    }
    for (; d < head_dim; ++d) {
      for (std::int32_t i = 0; i < n; ++i) {
        to[static_cast<std::ptrdiff_t>(d) * panel_rows + i] =
            from[static_cast<std::ptrdiff_t>(i) * head_dim + d];
      }
    }
  }
}

// Logits of one panel and one block of queries: [block_queries, panel_rows], aligned. Both loops over registers must be
// fully unrolled, or the sums live in memory.
inline void multiply_block(const float* keys,
                           const float* queries,
                           std::int32_t head_dim,
                           float* logits) noexcept {
  Packet sums[block_queries][panel_packets];
#pragma GCC unroll 8
  for (std::int32_t q = 0; q < block_queries; ++q) {
#pragma GCC unroll 3
    for (std::int32_t p = 0; p < panel_packets; ++p) { sums[q][p] = pset1<Packet>(0.0F); }
  }
  for (std::int32_t d = 0; d < head_dim; ++d) {
    Packet key[panel_packets];
#pragma GCC unroll 3
    for (std::int32_t p = 0; p < panel_packets; ++p) {
      key[p] = pload<Packet>(keys + p * packet_floats);
    }
#pragma GCC unroll 8
    for (std::int32_t q = 0; q < block_queries; ++q) {
      const Packet query = pset1<Packet>(queries[q]);
#pragma GCC unroll 3
      for (std::int32_t p = 0; p < panel_packets; ++p) {
        sums[q][p] = pmadd(key[p], query, sums[q][p]);
      }
    }
    keys += panel_rows;
    queries += block_queries;
  }
#pragma GCC unroll 8
  for (std::int32_t q = 0; q < block_queries; ++q) {
#pragma GCC unroll 3
    for (std::int32_t p = 0; p < panel_packets; ++p) {
      pstore(logits + q * panel_rows + p * packet_floats, sums[q][p]);
    }
  }
}

/// Calls f(first query, logits [block_queries, panel_rows]) for each block of the packed queries [begin, end), with the
/// panel of the packed tile that starts at row `first`. Rows after the tile's last one have logit 0. `logits` may be written.
///
/// \pre `first` is a multiple of panel_rows, `begin` of block_queries, and queries are packed up to a multiple of 8
template <class F>
void for_each_logit_block(const TileScratch& s,
                          std::int32_t first,
                          const float* packed_queries,
                          std::int32_t begin,
                          std::int32_t end,
                          F&& f) noexcept {
  const std::int32_t head_dim = s.head_dim;
  KVTRIM_COUNT(product_flops, std::int64_t{2} * head_dim * panel_rows * (end - begin));
  alignas(64) float logits[block_queries * panel_rows];
  for (std::int32_t q = begin; q < end; q += block_queries) {
    multiply_block(s.packed_keys.data() + static_cast<std::ptrdiff_t>(first) * head_dim,
                   packed_queries + static_cast<std::ptrdiff_t>(q) * head_dim,
                   head_dim,
                   logits);
    f(q, logits);
  }
}

/// logits[q][t] = query q . row t of the whole tile: [padded_queries, tile_rows]. For scores that need the plain product.
///
/// \param packed   queries, as `pack_query` wrote them
/// \param queries  a multiple of 8
inline void multiply(const TileScratch& s,
                     const float* packed,
                     std::int32_t queries,
                     float* logits) noexcept {
  pack_keys(s, s.rows);
  for (std::int32_t first = 0; first < s.rows; first += panel_rows) {
    for_each_logit_block(s, first, packed, 0, queries, [&](std::int32_t q, float* block) {
      for (std::int32_t i = 0; i < block_queries; ++i) {
        float* const to = logits + static_cast<std::ptrdiff_t>(q + i) * s.rows + first;
        std::copy_n(block + i * panel_rows, panel_rows, to);
      }
    });
  }
}

/// The exponents of the softmax: the logits of one query and one panel, scaled and capped.
class LogitScale {
 public:
  LogitScale(float scale, float soft_cap) noexcept : soft_cap_(soft_cap) {
    factor_ = pset1<Packet>(soft_cap > 0 ? scale / soft_cap : scale);
    cap_ = pset1<Packet>(soft_cap);
  }
  [[nodiscard]] Packet operator()(const float* logits) const noexcept {
    const Packet scaled = pmul(pload<Packet>(logits), factor_);
    return soft_cap_ > 0 ? pmul(cap_, ptanh_fast(scaled)) : scaled;
  }

 private:
  float soft_cap_;
  Packet factor_;
  Packet cap_;
};

}  // namespace kvtrim::detail
