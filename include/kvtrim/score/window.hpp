// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention of the prompt's last queries over all live keys. With the engine's LSE, a tile is done once it has been
// multiplied; without it, the exponentials of one KV head stay in the scratch (4 bytes per query and key) and are divided
// when the sums are known: a second product takes twice the time. Over 400 lines: both forms share layout and reduction.

#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/detail/key_tile.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>
#include <kvtrim/policy/window_params.hpp>
#include <kvtrim/score/scorer.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

namespace kvtrim {

/// Scores a row by the attention that the last `window` queries pay to it: reduced over those queries, then over the query
/// heads of its KV head, then pooled over its neighbours.
///
/// Softmax runs over all live keys, causal by position inside the window; the window's own columns are then cut and
/// score 0 (they are meant to be protected), unless `own_columns` asks for their scores.
///
/// \par Shapes
/// queries [query heads, at most window rows, head_dim], fp32; scores [live rows]
/// \par Ties
/// none broken here. NaN: a key that is not finite takes no part and scores NaN; a query that is not finite, or whose LSE
/// is not, has no vote; without an LSE, nor has a query that sees no live row or whose logits overflow; without any vote
/// all scores are NaN
/// \par Complexity
/// O(query rows * live rows * head_dim) time; no allocation. The score of a row does not change by a bit with page
/// size, page placement, batch or thread
/// \par Source
/// Li et al., 2024, arXiv:2404.14469 (SnapKV); differs: rows are averaged by default, as kvpress and Ada-KV do, and the
/// query heads of a group are reduced, so that there is one set per KV head
class WindowScorer {
 public:
  /// \pre `params.window >= 1 && params.kernel` is odd
  explicit constexpr WindowScorer(const WindowParams& params) noexcept : params_(params) {}

  /// Working space of one call.
  [[nodiscard]] std::size_t scratch_bytes(const PlanShape& shape) const noexcept {
    const std::int32_t group = shape.kv_heads > 0 ? shape.query_heads / shape.kv_heads : 0;
    return detail::largest_need(std::max(1, shape.head_dim), [&](std::int32_t head_dim) {
      Arena arena;
      const auto unused = Layout::take(arena,
                                       shape.max_rows,
                                       std::max(1, group),
                                       std::max(1, std::min(shape.query_rows, params_.window)),
                                       head_dim);
      static_cast<void>(unused);
      return arena.bytes();
    });
  }

  /// `bad_observation` without queries (no rows at all need no data), or when their heads are not a multiple of the KV
  /// heads, or keys are not readable.
  [[nodiscard]] Status check(const CacheView& view, const Observation& obs) const noexcept {
    const QueryBlock& q = obs.queries;
    const bool given = q.data != nullptr || (q.rows == 0 && q.row_counts == nullptr);
    const bool fits = given && q.query_heads >= view.kv_heads && q.query_heads % view.kv_heads == 0;
    return fits && readable(view.k.dtype) ? Status::ok : Status::bad_observation;
  }

  /// Writes the score of each live row; a hole's is 0.
  ///
  /// \param scratch  [scratch_bytes(shape)]
  /// \param[out] out [rows of the table in use]
  void score(const CacheView& view,
             SequenceId s,
             LayerId l,
             HeadId h,
             const Observation& obs,
             std::span<std::byte> scratch,
             std::span<float> out) const noexcept {
    const QueryBlock& block = obs.queries;
    const std::int32_t live = view.live_rows(s, l, h);
    const std::int32_t group = block.query_heads / view.kv_heads;
    const std::int32_t given = block.count(s);
    const std::int32_t votes = std::min(given, params_.window);
    std::fill(out.begin(), out.end(), 0.0F);
    if (live <= cut_columns()) { return; }  // all columns belong to the window
    Arena arena(scratch);
    const Layout mem = Layout::take(arena, live, group, std::max(1, votes), view.k.head_dim);
    KVTRIM_ASSERT(arena.ok());

    const SequenceState state = view.state(s, l, h);
    for (std::int32_t i = 0; i < votes; ++i) {
      mem.query_positions[index(i)] = block.position(s, given - votes + i, state.next_position);
    }
    load_queries(view, s, l, h, block, given - votes, votes, mem);
    if (block.lse != nullptr) {
      attend_with_lse(view, s, l, h, block, votes, group, mem);
    } else {
      attend_with_sums(view, s, l, h, block, votes, group, mem);
    }
    pool_columns(view, s, l, h, state, live, mem, out);
  }

 private:
  using Packet = detail::Packet;
  static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

  struct Layout {
    detail::TileScratch tiles;
    std::span<float> queries;       // [padded, head_dim], packed
    std::span<float> exponentials;  // [panels, padded, panel_rows]; none with an LSE
    std::span<float> references;    // [panels, padded] what a panel's exponentials are relative to
    std::span<float> maxima;        // [padded]
    std::span<float> lane_sums;     // [padded, packet_floats]
    std::span<double> sums;         // [padded]
    std::span<float> lse;           // [padded]
    std::span<std::uint8_t> votes;  // [padded] whether the query has a vote
    std::span<Position> query_positions;  // [window]
    std::span<float> raw_scores;          // [rows]
    std::span<float> pooled;              // [rows]
    std::span<std::int32_t> order;        // [rows]
    std::int32_t padded = 0;

    static Layout take(Arena& arena,
                       std::int32_t rows,
                       std::int32_t group,
                       std::int32_t votes,
                       std::int32_t head_dim) noexcept {
      const std::int64_t panels = detail::panels_of(rows);
      Layout m;
      m.padded = detail::padded_queries(group * votes);
      m.tiles = detail::TileScratch::take(arena, head_dim);
      m.queries = arena.take<float>(static_cast<std::int64_t>(m.padded) * head_dim);
      m.maxima = arena.take<float>(m.padded);
      m.lane_sums = arena.take<float>(static_cast<std::int64_t>(m.padded) * detail::packet_floats);
      m.sums = arena.take<double>(m.padded);
      m.lse = arena.take<float>(m.padded);
      m.votes = arena.take<std::uint8_t>(m.padded);
      m.query_positions = arena.take<Position>(votes);
      m.raw_scores = arena.take<float>(rows);
      m.pooled = arena.take<float>(rows);
      m.order = arena.take<std::int32_t>(rows);
      // Last, so that a call with an LSE does not touch them.
      m.references = arena.take<float>(panels * m.padded);
      m.exponentials = arena.take<float>(panels * m.padded * detail::panel_rows);
      return m;
    }
  };

  static std::size_t index(std::int64_t i) noexcept { return static_cast<std::size_t>(i); }

  std::int32_t cut_columns() const noexcept { return params_.own_columns ? 0 : params_.window; }

  // Query (head g of the group, vote i) is row g * votes + i.
  static void load_queries(const CacheView& view,
                           SequenceId s,
                           LayerId l,
                           HeadId h,
                           const QueryBlock& block,
                           std::int32_t first,
                           std::int32_t votes,
                           const Layout& mem) noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t group = block.query_heads / view.kv_heads;
    for (std::int32_t q = 0; q < mem.padded; ++q) {
      detail::pack_query(nullptr, dim, q, mem.queries.data());
    }
    std::fill(mem.votes.begin(), mem.votes.end(), std::uint8_t{0});
    for (std::int32_t g = 0; g < group; ++g) {
      const std::int32_t head = raw(h) * group + g;
      for (std::int32_t i = 0; i < votes; ++i) {
        const std::int32_t q = g * votes + i;
        const float* const from = block.row(s, l, head, first + i);
        const float lse = block.lse != nullptr
                              ? detail::natural(block.lse_of(s, l, head, first + i), block.lse_base)
                              : 0.0F;
        if (!detail::finite(from, dim) || !detail::finite(&lse, 1)) { continue; }
        detail::pack_query(from, dim, q, mem.queries.data());
        mem.lse[index(q)] = lse;
        mem.votes[index(q)] = 1;
      }
    }
  }

  // Whether there is a query that must not see some row of the tile.
  static bool needs_mask(const Layout& mem, std::int32_t count, std::int32_t votes) noexcept {
    bool any = false;
    Position newest{-1};
    for (std::int32_t t = 0; t < count; ++t) {
      newest = std::max(newest, mem.tiles.positions[index(t)]);
      any = any || mem.tiles.bad[index(t)] != 0;
    }
    for (std::int32_t i = 0; i < votes; ++i) {
      any = any || mem.query_positions[index(i)] < newest;
    }
    return any;
  }
  // Masks what the query must not see among the panel's rows first .. first + panel_rows of the tile.
  static void mask(float* values,
                   const Layout& mem,
                   std::int32_t first,
                   std::int32_t count,
                   Position query,
                   float value) noexcept {
    for (std::int32_t i = 0; i < detail::panel_rows; ++i) {
      const std::int32_t t = first + i;
      if (t >= count || mem.tiles.bad[index(t)] != 0 || mem.tiles.positions[index(t)] > query) {
        values[i] = value;
      }
    }
  }

  using Panel = Packet[detail::panel_packets];
  static void load(const float* from, Panel& to) noexcept {
    for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
      to[p] = detail::pload<Packet>(from + p * detail::packet_floats);
    }
  }
  static void store(const Panel& from, float* to) noexcept {
    for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
      detail::pstore(to + p * detail::packet_floats, from[p]);
    }
  }

  // Reduces one panel's probabilities: over the rows of a query head, then over the heads. Queries come in their order.
  class PanelReduction {
   public:
    PanelReduction(const WindowParams& params, std::int32_t votes) noexcept
        : params_(params), votes_(votes), head_end_(votes) {}

    // Probabilities of query q.
    void add(std::int32_t q, Panel& x) noexcept {
      while (q >= head_end_) {
        close_head();
        head_end_ += votes_;
      }
      if (votes_seen_++ > 0) {
        for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
          const Packet before = detail::pload<Packet>(rows_ + p * detail::packet_floats);
          x[p] = params_.rows == Reduction::max ? detail::pmax(before, x[p])
                                                : detail::padd(before, x[p]);
        }
      }
      store(x, rows_);
    }
    // Writes the scores of `count` rows and starts over.
    void finish(float* scores, std::int32_t count) noexcept {
      close_head();
      for (std::int32_t i = 0; i < count; ++i) {
        scores[i] = heads_seen_ == 0                   ? not_a_number
                    : params_.group == Reduction::mean ? heads_[i] / static_cast<float>(heads_seen_)
                                                       : heads_[i];
      }
      head_end_ = votes_;
      heads_seen_ = 0;
    }

   private:
    void close_head() noexcept {
      if (votes_seen_ == 0) { return; }
      for (std::int32_t i = 0; i < detail::panel_rows; ++i) {
        const float x =
            params_.rows == Reduction::mean ? rows_[i] / static_cast<float>(votes_seen_) : rows_[i];
        heads_[i] = heads_seen_ == 0                  ? x
                    : params_.group == Reduction::max ? std::max(heads_[i], x)
                                                      : heads_[i] + x;
      }
      ++heads_seen_;
      votes_seen_ = 0;
    }

    const WindowParams& params_;
    std::int32_t votes_;
    std::int32_t head_end_;
    std::int32_t votes_seen_ = 0;
    std::int32_t heads_seen_ = 0;
    alignas(64) float rows_[detail::panel_rows];
    alignas(64) float heads_[detail::panel_rows];
  };

  void attend_with_lse(const CacheView& view,
                       SequenceId s,
                       LayerId l,
                       HeadId h,
                       const QueryBlock& block,
                       std::int32_t votes,
                       std::int32_t group,
                       const Layout& mem) const noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t used = group * votes;
    const detail::LogitScale scaled(detail::scale_of(block, dim), block.soft_cap);
    PanelReduction reduction(params_, std::max(1, votes));
    detail::for_each_key_tile(
        view, s, l, h, mem.tiles, [&](std::int32_t first, std::int32_t count) {
          detail::pack_keys(mem.tiles, dim, count);
          const bool masked = needs_mask(mem, count, votes);
          for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
            for_each_query(mem, dim, row, used, [&](std::int32_t q, float* values) {
              const Packet lse = detail::pset1<Packet>(mem.lse[index(q)]);
              Panel x;
              for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
                x[p] = detail::pexp(detail::psub(scaled(values + p * detail::packet_floats), lse));
              }
              if (masked) {
                store(x, values);
                mask(values, mem, row, count, mem.query_positions[index(q % votes)], 0.0F);
                load(values, x);
              }
              reduction.add(q, x);
            });
            const std::int32_t rows = std::min(detail::panel_rows, count - row);
            reduction.finish(mem.raw_scores.data() + first + row, rows);
            for (std::int32_t i = 0; i < rows; ++i) {
              if (mem.tiles.bad[index(row + i)] != 0) {
                mem.raw_scores[index(first + row + i)] = not_a_number;
              }
            }
          }
        });
  }

  void attend_with_sums(const CacheView& view,
                        SequenceId s,
                        LayerId l,
                        HeadId h,
                        const QueryBlock& block,
                        std::int32_t votes,
                        std::int32_t group,
                        const Layout& mem) const noexcept {
    const std::int32_t dim = view.k.head_dim;
    const std::int32_t used = group * votes;
    const detail::LogitScale scaled(detail::scale_of(block, dim), block.soft_cap);
    constexpr float lowest = -1e30F;
    std::fill(mem.maxima.begin(), mem.maxima.end(), lowest);
    std::fill(mem.sums.begin(), mem.sums.end(), 0.0);
    std::fill(mem.lane_sums.begin(), mem.lane_sums.end(), 0.0F);
    const auto exponentials_of = [&](std::int32_t panel, std::int32_t q) {
      return mem.exponentials.data() +
             (static_cast<std::ptrdiff_t>(panel) * mem.padded + q) * detail::panel_rows;
    };
    const auto references_of = [&](std::int32_t panel) {
      return mem.references.data() + static_cast<std::ptrdiff_t>(panel) * mem.padded;
    };
    const auto lanes_of = [&](std::int32_t q) {
      return mem.lane_sums.data() + static_cast<std::ptrdiff_t>(q) * detail::packet_floats;
    };
    detail::for_each_key_tile(
        view, s, l, h, mem.tiles, [&](std::int32_t first, std::int32_t count) {
          detail::pack_keys(mem.tiles, dim, count);
          const bool masked = needs_mask(mem, count, votes);
          for (std::int32_t row = 0; row < count; row += detail::panel_rows) {
            const std::int32_t panel = (first + row) / detail::panel_rows;
            const bool any_hidden = masked || row + detail::panel_rows > count;
            for_each_query(mem, dim, row, used, [&](std::int32_t q, float* values) {
              const Position position = mem.query_positions[index(q % votes)];
              Panel x;
              for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
                x[p] = scaled(values + p * detail::packet_floats);
              }
              if (any_hidden) {
                store(x, values);
                mask(values, mem, row, count, position, lowest);
                load(values, x);
              }
              Packet highest = x[0];
              for (std::int32_t p = 1; p < detail::panel_packets; ++p) {
                highest = detail::pmax(highest, x[p]);
              }
              // A new maximum is rare: the sums so far are rescaled, stored exponentials keep their reference.
              float reference = mem.maxima[index(q)];
              if (const float maximum = detail::predux_max(highest); maximum > reference) {
                const float shrink = std::exp(reference - maximum);
                mem.sums[index(q)] *= static_cast<double>(shrink);
                detail::pstore(lanes_of(q),
                               detail::pmul(detail::pload<Packet>(lanes_of(q)),
                                            detail::pset1<Packet>(shrink)));
                mem.maxima[index(q)] = reference = maximum;
              }
              references_of(panel)[q] = reference;
              for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
                x[p] = detail::pexp(detail::psub(x[p], detail::pset1<Packet>(reference)));
              }
              float* const to = exponentials_of(panel, q);
              store(x, to);
              if (any_hidden) {
                mask(to, mem, row, count, position, 0.0F);
                load(to, x);
              }
              Packet sum = detail::pload<Packet>(lanes_of(q));
              for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
                sum = detail::padd(sum, x[p]);
              }
              detail::pstore(lanes_of(q), sum);
            });
          }
          // Only short sums are plain fp32.
          for (std::int32_t q = 0; q < used; ++q) {
            mem.sums[index(q)] +=
                static_cast<double>(detail::predux(detail::pload<Packet>(lanes_of(q))));
            detail::pstore(lanes_of(q), detail::pset1<Packet>(0.0F));
          }
          // Which rows are not finite is known only while the tile is loaded.
          for (std::int32_t t = 0; t < count; ++t) {
            mem.raw_scores[index(first + t)] = mem.tiles.bad[index(t)] != 0 ? not_a_number : 0.0F;
          }
        });
    // No live row seen, or logits that overflow: no vote, because dividing would make every row NaN.
    for (std::int32_t q = 0; q < used; ++q) {
      const double sum = mem.sums[index(q)];
      if (!(sum > 0 && sum < std::numeric_limits<double>::infinity())) { mem.votes[index(q)] = 0; }
    }
    PanelReduction reduction(params_, std::max(1, votes));
    const std::int32_t live = view.live_rows(s, l, h);
    for (std::int32_t first = 0; first < live; first += detail::panel_rows) {
      const std::int32_t panel = first / detail::panel_rows;
      for (std::int32_t q = 0; q < used; ++q) {
        if (mem.votes[index(q)] == 0) { continue; }
        const float reference = references_of(panel)[q];
        const float maximum = mem.maxima[index(q)];
        const float shrink = reference == maximum ? 1.0F : std::exp(reference - maximum);
        const auto factor = static_cast<float>(static_cast<double>(shrink) / mem.sums[index(q)]);
        Panel x;
        load(exponentials_of(panel, q), x);
        for (std::int32_t p = 0; p < detail::panel_packets; ++p) {
          x[p] = detail::pmul(x[p], detail::pset1<Packet>(factor));
        }
        reduction.add(q, x);
      }
      const std::int32_t rows = std::min(detail::panel_rows, live - first);
      alignas(64) float scores[detail::panel_rows];
      reduction.finish(scores, rows);
      for (std::int32_t i = 0; i < rows; ++i) {
        float& score = mem.raw_scores[index(first + i)];
        score = is_nan(score) ? not_a_number : scores[i];
      }
    }
  }

  // Calls f(q, logits [panel_rows]) for each query with a vote, with the panel of the packed tile that starts at `row`.
  template <class F>
  static void for_each_query(
      const Layout& mem, std::int32_t dim, std::int32_t row, std::int32_t used, F&& f) noexcept {
    detail::for_each_logit_block(
        mem.tiles, dim, row, mem.queries.data(), 0, used, [&](std::int32_t begin, float* logits) {
          const std::int32_t end = std::min(begin + detail::block_queries, used);
          for (std::int32_t q = begin; q < end; ++q) {
            if (mem.votes[index(q)] == 0) { continue; }
            f(q, logits + static_cast<std::ptrdiff_t>(q - begin) * detail::panel_rows);
          }
        });
  }

  // raw_scores in logical order -> pooled in position order -> out by row.
  void pool_columns(const CacheView& view,
                    SequenceId s,
                    LayerId l,
                    HeadId h,
                    const SequenceState& state,
                    std::int32_t live,
                    const Layout& mem,
                    std::span<float> out) const noexcept {
    const auto row_of = [&](std::int32_t i) {
      return i + (state.append_row >= 0 && i >= state.append_row ? 1 : 0);
    };
    const std::int32_t scored = std::max(0, live - cut_columns());
    const auto columns = index(params_.columns == PoolColumns::all_columns ? live : scored);
    if (state.ordered) {
      pool(mem.raw_scores.first(columns),
           params_.pooling,
           params_.kernel,
           mem.pooled.first(columns));
      for (std::int32_t i = 0; i < scored; ++i) { out[index(row_of(i))] = mem.pooled[index(i)]; }
      return;
    }
    // `exponentials` is free again: raw scores in position order go there.
    const auto sorted = mem.exponentials.first(std::min(mem.exponentials.size(), index(live)));
    for (std::int32_t i = 0; i < live; ++i) { mem.order[index(i)] = i; }
    std::sort(mem.order.begin(), mem.order.begin() + live, [&](std::int32_t a, std::int32_t b) {
      return view.position(s, l, h, row_of(a)) < view.position(s, l, h, row_of(b));
    });
    for (std::int32_t i = 0; i < live; ++i) {
      sorted[index(i)] = mem.raw_scores[index(mem.order[index(i)])];
    }
    pool(sorted.first(columns), params_.pooling, params_.kernel, mem.pooled.first(columns));
    for (std::int32_t i = 0; i < scored; ++i) {
      out[index(row_of(mem.order[index(i)]))] = mem.pooled[index(i)];
    }
  }

  WindowParams params_;
};
static_assert(Scorer<WindowScorer>);

/// `WindowParams` are scored by `WindowScorer`.
template <>
struct ScorerOf<WindowParams> {
  using type = WindowScorer;
};

}  // namespace kvtrim
