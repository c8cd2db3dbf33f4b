// SPDX-License-Identifier: Apache-2.0
#pragma once

// One decode step's attention over a paged f32 cache: what an eviction policy's work in that step is compared with. Keys and
// values are read once per KV head, for all query heads of its group; the probabilities are kept, as an engine has them.

#include "engine_cache.hpp"
#include "harness.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kvtrim_bench {

class DecodeAttention {
  using Packet = Eigen::internal::packet_traits<float>::type;
  static constexpr std::int32_t width = Eigen::internal::packet_traits<float>::size;
  static constexpr std::int32_t group = 4;

 public:
  DecodeAttention(const Shape& shape, std::int32_t max_rows)
      : shape_(shape),
        max_rows_(max_rows),
        queries_(normal_numbers(
            static_cast<std::size_t>(shape.query_heads) * static_cast<std::size_t>(shape.dim),
            7,
            1.0F / std::sqrt(static_cast<float>(shape.dim)))),
        probabilities_(static_cast<std::size_t>(shape.query_heads) *
                       static_cast<std::size_t>(max_rows)),
        out_(queries_.size()) {}

  /// Attention of the query heads of KV head `h` of sequence 0.
  void one_head(const CacheView& view, HeadId h) {
    using namespace Eigen::internal;
    const std::int32_t dim = shape_.dim;
    const std::int32_t live = view.live_rows(SequenceId{0}, LayerId{0}, h);
    const std::int32_t first = raw(h) * group;
    const float* const q = queries_.data() + static_cast<std::ptrdiff_t>(first) * dim;
    float* const p = probabilities_.data() + static_cast<std::ptrdiff_t>(first) * max_rows_;
    for_each_run({view, SequenceId{0}, LayerId{0}, h}, [&](Run run) {
      const auto* key =
          reinterpret_cast<const float*>(view.k.row(LayerId{0}, run.k_page, h, run.slot));
      for (std::int32_t i = 0; i < run.count; ++i, key += dim) {
        Packet sum[group];
        for (Packet& s : sum) { s = pset1<Packet>(0.0F); }
        for (std::int32_t d = 0; d < dim; d += width) {
          const Packet x = ploadu<Packet>(key + d);
          for (std::int32_t g = 0; g < group; ++g) {
            sum[g] = pmadd(x, ploadu<Packet>(q + g * dim + d), sum[g]);
          }
        }
        for (std::int32_t g = 0; g < group; ++g) {
          p[static_cast<std::ptrdiff_t>(g) * max_rows_ + run.row + i] = predux(sum[g]);
        }
      }
    });
    for (std::int32_t g = 0; g < group; ++g) {
      Eigen::Map<Eigen::ArrayXf> row(p + static_cast<std::ptrdiff_t>(g) * max_rows_, live);
      row = (row - row.maxCoeff()).exp();
      row *= 1.0F / row.sum();
    }
    float* const out = out_.data() + static_cast<std::ptrdiff_t>(first) * dim;
    std::fill_n(out, static_cast<std::ptrdiff_t>(group) * dim, 0.0F);
    // `span` features of a page's rows at a time, so that the sums stay in registers.
    constexpr std::int32_t packets = 4;
    for_each_run({view, SequenceId{0}, LayerId{0}, h}, [&](Run run) {
      const auto* const values =
          reinterpret_cast<const float*>(view.v.row(LayerId{0}, run.v_page, h, run.slot));
      for (std::int32_t d = 0; d < dim; d += packets * width) {
        Packet sum[group][packets];
        for (std::int32_t g = 0; g < group; ++g) {
          for (std::int32_t c = 0; c < packets; ++c) {
            sum[g][c] = ploadu<Packet>(out + g * dim + d + c * width);
          }
        }
        for (std::int32_t i = 0; i < run.count; ++i) {
          for (std::int32_t c = 0; c < packets; ++c) {
            const Packet x =
                ploadu<Packet>(values + static_cast<std::ptrdiff_t>(i) * dim + d + c * width);
            for (std::int32_t g = 0; g < group; ++g) {
              sum[g][c] =
                  pmadd(pset1<Packet>(p[static_cast<std::ptrdiff_t>(g) * max_rows_ + run.row + i]),
                        x,
                        sum[g][c]);
            }
          }
        }
        for (std::int32_t g = 0; g < group; ++g) {
          for (std::int32_t c = 0; c < packets; ++c) {
            pstoreu(out + g * dim + d + c * width, sum[g][c]);
          }
        }
      }
    });
  }
  /// [query heads, max_rows]
  [[nodiscard]] const float* probabilities(std::int32_t head) const {
    return probabilities_.data() + static_cast<std::ptrdiff_t>(head) * max_rows_;
  }
  [[nodiscard]] const std::vector<float>& queries() const { return queries_; }
  [[nodiscard]] std::int32_t max_rows() const { return max_rows_; }

  /// Attention of the query heads of KV head `h` of sequence 0.
 private:
  Shape shape_;
  std::int32_t max_rows_;
  std::vector<float> queries_;
  std::vector<float> probabilities_;
  std::vector<float> out_;
};

}  // namespace kvtrim_bench
