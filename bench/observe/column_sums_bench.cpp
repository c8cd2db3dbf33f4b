// SPDX-License-Identifier: Apache-2.0
// H2O's prompt: the column sums of one KV head's causal attention with the LSE given, compared with the same causal half as Eigen's
// products on contiguous fp32 and one exponential per score.

#include <kvtrim/observe/column_sums.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

// Blocks of 256 queries over tiles of keys that do not lie wholly in their future.
class CausalProductAndExp {
 public:
  CausalProductAndExp(const std::vector<float>& keys,
                      const std::vector<float>& queries,
                      const Shape& shape)
      : keys_(keys), queries_(queries), shape_(shape), logits_(block * 1024) {
    double best = 1e9;
    for (const std::int32_t tile : {256, 480, 768, 1024}) {
      std::vector<double> seconds;
      for (int i = 0; i < 5; ++i) {
        seconds.push_back(seconds_of([&] { one_block(0, shape.tokens - block, tile); }));
      }
      if (const double median = quantile(seconds, 0.5); median < best) {
        best = median;
        tile_ = tile;
      }
    }
  }
  void operator()() {
    for (std::int32_t g = 0; g < shape_.group(); ++g) {
      for (std::int32_t q = 0; q < shape_.tokens; q += block) { one_block(g, q, tile_); }
    }
  }
  [[nodiscard]] double flops() const {
    return 2.0 * shape_.group() * shape_.tokens * (shape_.tokens + 1.0) / 2 * shape_.dim;
  }

 private:
  static constexpr std::int32_t block = 256;
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  void one_block(std::int32_t g, std::int32_t q, std::int32_t tile) {
    const std::int32_t rows = std::min(block, shape_.tokens - q);
    const Eigen::Map<const Rows> queries(
        queries_.data() + (static_cast<std::ptrdiff_t>(g) * shape_.tokens + q) * shape_.dim,
        rows,
        shape_.dim);
    for (std::int32_t t = 0; t < q + rows; t += tile) {
      const std::int32_t n = std::min(tile, q + rows - t);
      const Eigen::Map<const Rows> keys(
          keys_.data() + static_cast<std::ptrdiff_t>(t) * shape_.dim, n, shape_.dim);
      Eigen::Map<Eigen::MatrixXf> out(logits_.data(), n, rows);
      out.noalias() = keys * queries.transpose();
      out = out.array().exp().matrix();
      benchmark::DoNotOptimize(logits_.data());
    }
  }

  const std::vector<float>& keys_;
  const std::vector<float>& queries_;
  Shape shape_;
  std::int32_t tile_ = 256;
  Eigen::VectorXf logits_;
};

void sum(benchmark::State& state, const Shape& shape, Sums sums) {
  EngineCache cache(shape, {.values = false, .scores = true});
  const CacheView view = cache.view();
  const std::size_t rows =
      static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(shape.tokens);
  const std::vector<float> queries =
      normal_numbers(rows * static_cast<std::size_t>(shape.dim),
                     5,
                     1.0F / std::sqrt(static_cast<float>(shape.dim)));
  std::vector<float> lse(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    lse[i] = std::log(static_cast<float>(i % static_cast<std::size_t>(shape.tokens) + 1)) + 0.5F;
  }
  QueryBlock block{.data = queries.data(), .query_heads = shape.query_heads, .rows = shape.tokens};
  block.row_stride = shape.dim;
  block.head_stride = static_cast<std::int64_t>(shape.tokens) * shape.dim;
  block.lse = lse.data();
  block.lse_head_stride = shape.tokens;
  block.scale = 1.0F;
  std::vector<std::byte> scratch(column_sums_scratch_bytes(shape.dim));
  const std::vector<float> keys = cache.contiguous_keys();
  CausalProductAndExp bound(keys, queries, shape);
  const auto op = [&] {
    accumulate_column_sums(
        {.sums = sums}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, block, LayerId{0}, scratch);
  };
  report(state,
         interleave(op, bound),
         {.items = static_cast<double>(shape.tokens),
          .bytes = cache.key_bytes(),
          .flops = bound.flops()});
  state.counters["workspace_bytes"] = static_cast<double>(scratch.size());
}

const bool registered = [] {
  for (const std::int32_t tokens : {2048, 4096, 8192}) {
    Shape shape;
    shape.tokens = tokens;
    shape.query_heads = 4;
    shape.kv_heads = 1;
    for (const Sums sums : {Sums::floating, Sums::exact}) {
      if (sums == Sums::exact && tokens != 4096) { continue; }
      line(std::string("score/column_sums/") + (sums == Sums::exact ? "h2o_exact" : "h2o") +
               shape.axes(),
           [=](benchmark::State& state) { sum(state, shape, sums); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
