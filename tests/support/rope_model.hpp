// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvtrim/core/rope.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim::test {

inline std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// A model's RoPE, with other frequencies in every layer.
struct RopeModel {
  std::int32_t dim = 8;
  std::int32_t offset = 0;
  RopePairs pairs = RopePairs::half_split;

  std::vector<double> frequencies(std::int32_t layers) const {
    std::vector<double> f;
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t j = 0; j < dim / 2; ++j) {
        f.push_back(std::pow(50.0 * (l + 1), -2.0 * j / dim));
      }
    }
    return f;
  }
  /// R(position) x, pair by pair, in double.
  std::vector<double> rotated(std::int32_t layer,
                              std::vector<double> x,
                              std::int32_t position) const {
    for (std::int32_t j = 0; j < dim / 2; ++j) {
      const double angle = position * std::pow(50.0 * (layer + 1), -2.0 * j / dim);
      const auto a = at(offset + (pairs == RopePairs::half_split ? j : 2 * j));
      const auto b = at(offset + (pairs == RopePairs::half_split ? j + dim / 2 : 2 * j + 1));
      const double u = x[a];
      const double v = x[b];
      x[a] = u * std::cos(angle) - v * std::sin(angle);
      x[b] = u * std::sin(angle) + v * std::cos(angle);
    }
    return x;
  }
};

/// Every pairing, with and without an offset, on 8 features.
inline constexpr std::array<RopeModel, 5> rope_models{RopeModel{8, 0, RopePairs::half_split},
                                                      RopeModel{8, 0, RopePairs::interleaved},
                                                      RopeModel{4, 2, RopePairs::half_split},
                                                      RopeModel{4, 0, RopePairs::interleaved},
                                                      RopeModel{2, 6, RopePairs::half_split}};

/// The library's description of a model, over frequencies that outlive it.
inline Rope rope_of(const RopeModel& model, const std::vector<double>& frequencies) {
  return {.inverse_frequencies = frequencies,
          .dim = model.dim,
          .offset = model.offset,
          .pairs = model.pairs};
}

}  // namespace kvtrim::test
