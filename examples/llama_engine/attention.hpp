// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention over a kvtrim cache. Rows are gathered through for_each_run into tiles of a fixed number of rows, in logical order,
// so results do not change with page size or placement. A tile's softmax is merged into the running one, so only one tile of
// scores exists at a time. Positions, not slots, decide what a query may see: after an eviction slots may be in any order.

#include <kvtrim/cache/live_rows.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "linear.hpp"

namespace engine {

/// Queries of consecutive tokens, for the query heads that share one KV head.
struct AttentionBlock {
  const float* queries =
      nullptr;  ///< first token, first head of the group: [tokens, group, head_dim]
  Eigen::Index query_stride = 0;  ///< floats between tokens of `queries`
  float* out = nullptr;           ///< [tokens, group, value_dim]
  Eigen::Index out_stride = 0;    ///< floats between tokens of `out`
  float* lse =
      nullptr;  ///< [group, tokens] natural log of the sum of exponentials of scaled scores
  Eigen::Index lse_stride = 0;      ///< floats between heads of `lse`
  Eigen::Index tokens = 0;          ///< at most `BlockAttention::max_tokens`
  std::int32_t first_position = 0;  ///< position of the first token
};

namespace detail {

/// Copies `count` rows of one page, as floats.
/// \pre rows are contiguous f32, f16 or bf16, as PagedCache makes them
inline void load_rows(const kvtrim::Plane& plane,
                      const std::byte* from,
                      std::int32_t count,
                      Eigen::Ref<Matrix, 0, Eigen::OuterStride<>> to) {
  const auto convert = [&]<class T>(const T* rows) {
    using Rows = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const Eigen::OuterStride<> stride(plane.token_stride / std::int64_t{sizeof(T)});
    const Eigen::Map<const Rows, 0, Eigen::OuterStride<>> page(rows, count, plane.head_dim, stride);
    to = page.template cast<float>();
  };
  switch (plane.dtype) {
    case kvtrim::DType::f16:
      return convert(reinterpret_cast<const Eigen::half*>(from));
    case kvtrim::DType::bf16:
      return convert(reinterpret_cast<const Eigen::bfloat16*>(from));
    default:
      return convert(reinterpret_cast<const float*>(from));
  }
}

}  // namespace detail

/// Computes attention for blocks of queries, one after the other, with memory that it keeps. Use one per thread.
class BlockAttention {
 public:
  static constexpr Eigen::Index max_tokens = 64;
  static constexpr Eigen::Index tile_rows = 128;

  BlockAttention(Eigen::Index group, Eigen::Index head_dim, Eigen::Index value_dim)
      : group_(group),
        queries_(max_tokens * group, head_dim),
        keys_(tile_rows, head_dim),
        values_(tile_rows, value_dim),
        scores_(max_tokens * group, tile_rows),
        sums_(max_tokens * group, value_dim),
        highest_(max_tokens * group),
        mass_(max_tokens * group) {}

  /// Softmax attention of `block` over the live rows of (sequence, layer, KV head) at or before each query's position.
  ///
  /// \pre the tokens' own rows have been written
  /// \par Complexity
  /// O(tokens * group * live rows * head_dim) time; gathers each row once
  void attend(const kvtrim::CacheView& view,
              kvtrim::SequenceId sequence,
              kvtrim::LayerId layer,
              kvtrim::HeadId head,
              const AttentionBlock& block) {
    start(block);
    Eigen::Index filled = 0;
    kvtrim::for_each_run({view, sequence, layer, head}, [&](const kvtrim::Run& run) {
      for (std::int32_t done = 0; done < run.count;) {
        const auto room = static_cast<std::int32_t>(tile_rows - filled);
        const std::int32_t count = std::min(run.count - done, room);
        const kvtrim::Slot slot{kvtrim::raw(run.slot) + done};
        detail::load_rows(view.k,
                          view.k.row(layer, run.k_page, head, slot),
                          count,
                          keys_.middleRows(filled, count));
        detail::load_rows(view.v,
                          view.v.row(layer, run.v_page, head, slot),
                          count,
                          values_.middleRows(filled, count));
        for (std::int32_t i = 0; i < count; ++i) {
          positions_[static_cast<std::size_t>(filled + i)] =
              kvtrim::raw(view.position(sequence, layer, head, run.row + done + i));
        }
        filled += count;
        done += count;
        if (filled == tile_rows) {
          add_tile(block, filled);
          filled = 0;
        }
      }
    });
    if (filled > 0) add_tile(block, filled);
    finish(block);
  }

 private:
  static constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
  using Rows = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;
  using ConstRows = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;

  // Scratch row of (token, head of the group): token * group + head, as the queries lie in memory.
  void start(const AttentionBlock& block) {
    const Eigen::Index dim = queries_.cols();
    const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
    Rows(queries_.data(), block.tokens, group_ * dim, Eigen::OuterStride<>(group_ * dim)) =
        scale *
        ConstRows(
            block.queries, block.tokens, group_ * dim, Eigen::OuterStride<>(block.query_stride));
    highest_.setConstant(minus_infinity);
    mass_.setZero();
    sums_.setZero();
  }

  void add_tile(const AttentionBlock& block, Eigen::Index count) {
    const auto [first, last] = std::minmax_element(positions_.begin(), positions_.begin() + count);
    if (*first >= block.first_position + block.tokens) return;
    const Eigen::Index rows = block.tokens * group_;
    auto scores = scores_.topLeftCorner(rows, count);
    scores.noalias() = queries_.topRows(rows) * keys_.topRows(count).transpose();
    for (Eigen::Index r = 0; r < rows; ++r) {
      auto row = scores.row(r);
      const Eigen::Index position = block.first_position + r / group_;
      for (Eigen::Index c = 0; *last > position && c < count; ++c) {
        if (positions_[static_cast<std::size_t>(c)] > position) row[c] = minus_infinity;
      }
      const float highest = std::max(highest_[r], row.maxCoeff());
      if (highest == minus_infinity) {  // nothing visible yet: the difference below would be NaN
        row.setZero();
        continue;
      }
      const float shrink = std::exp(highest_[r] - highest);
      row = (row.array() - highest).exp();
      mass_[r] = mass_[r] * shrink + row.sum();
      sums_.row(r) *= shrink;
      highest_[r] = highest;
    }
    sums_.topRows(rows).noalias() += scores * values_.topRows(count);
  }

  void finish(const AttentionBlock& block) {
    const Eigen::Index dim = values_.cols();
    for (Eigen::Index token = 0; token < block.tokens; ++token) {
      for (Eigen::Index head = 0; head < group_; ++head) {
        const Eigen::Index r = token * group_ + head;
        Eigen::Map<Eigen::RowVectorXf>(block.out + token * block.out_stride + head * dim, dim) =
            sums_.row(r) / mass_[r];
        block.lse[head * block.lse_stride + token] = highest_[r] + std::log(mass_[r]);
      }
    }
  }

  Eigen::Index group_;
  Matrix queries_;
  Matrix keys_;
  Matrix values_;
  Matrix scores_;
  Matrix sums_;
  Eigen::VectorXf highest_;
  Eigen::VectorXf mass_;
  std::array<std::int32_t, tile_rows> positions_{};
};

}  // namespace engine
