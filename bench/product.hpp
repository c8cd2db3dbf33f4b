// SPDX-License-Identifier: Apache-2.0
#pragma once

// The bound of scores: Eigen's own product on contiguous fp32, and one vectorised exponential per score. No softmax, no scale,
// no mask, no reduction, no paging.

#include "engine_cache.hpp"
#include "harness.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace kvtrim_bench {

class ProductAndExp {
 public:
  /// \param keys    [items, tokens, dim]
  /// \param queries [items, rows, dim]
  ProductAndExp(const std::vector<float>& keys,
                const std::vector<float>& queries,
                std::int32_t items,
                std::int32_t tokens,
                std::int32_t rows,
                std::int32_t dim,
                std::int32_t threads = 1)
      : keys_(keys),
        queries_(queries),
        items_(items),
        tokens_(tokens),
        rows_(rows),
        dim_(dim),
        threads_{threads} {
    for (std::int32_t w = 0; w < threads; ++w) { logits_.emplace_back(1024 * rows); }
    std::array<std::vector<double>, tiles.size()> seconds;
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < tiles.size(); ++i) {
        seconds[i].push_back(seconds_of([&] { one_item(0, 0, tiles[i]); }));
      }
    }
    double best = 1e9;
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const double median = quantile(seconds[i], 0.5);
      if (median < best) {
        best = median;
        tile_ = tiles[i];
      }
    }
  }

  /// All items, with the tile that was fastest.
  void operator()() {
    threads_.for_each(items_, [&](std::int64_t i, std::int32_t w) { one_item(i, w, tile_); });
  }
  [[nodiscard]] std::int32_t tile() const { return tile_; }
  [[nodiscard]] double flops() const {
    return 2.0 * items_ * static_cast<double>(tokens_) * rows_ * dim_;
  }

 private:
  static constexpr std::array<std::int32_t, 4> tiles{256, 480, 768, 1024};
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  void one_item(std::int64_t item, std::int32_t worker, std::int32_t tile) {
    const float* const keys = keys_.data() + item * tokens_ * dim_;
    const Eigen::Map<const Rows> queries(queries_.data() + item * rows_ * dim_, rows_, dim_);
    Eigen::VectorXf& logits = logits_[static_cast<std::size_t>(worker)];
    for (std::int64_t t = 0; t < tokens_; t += tile) {
      const Eigen::Index n = std::min<std::int64_t>(tile, tokens_ - t);
      const Eigen::Map<const Rows> block(keys + t * dim_, n, dim_);
      Eigen::Map<Eigen::MatrixXf, Eigen::Unaligned> out(logits.data(), n, rows_);
      out.noalias() = block * queries.transpose();
      out = out.array().exp().matrix();
      benchmark::DoNotOptimize(logits.data());
    }
  }

  const std::vector<float>& keys_;
  const std::vector<float>& queries_;
  std::int32_t items_, tokens_, rows_, dim_;
  Threads threads_;
  std::int32_t tile_ = tiles[0];
  std::vector<Eigen::VectorXf> logits_;
};

}  // namespace kvtrim_bench
