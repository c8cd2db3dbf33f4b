// SPDX-License-Identifier: Apache-2.0
#pragma once

// Pages of quantised rows, and the same rows widened beforehand by plain arithmetic: what scores must not tell apart.

#include <kvtrim/cache/cache_view.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace kvtrim::test {

/// Where the scales of a row are.
enum class ScaleKind : std::uint8_t { none, tensor, head, token, in_row };

struct Quantisation {
  DType dtype = DType::f8e4m3;
  BlockFormat format = BlockFormat::none;
  ScaleKind scales = ScaleKind::none;
};

/// Every format with every place of scales.
inline std::vector<Quantisation> quantisations() {
  std::vector<Quantisation> all;
  for (const DType t : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
    for (const ScaleKind k : {ScaleKind::none,
                              ScaleKind::tensor,
                              ScaleKind::head,
                              ScaleKind::token,
                              ScaleKind::in_row}) {
      if (t != DType::i8 || k != ScaleKind::none) { all.push_back({t, BlockFormat::none, k}); }
    }
  }
  for (const BlockFormat f :
       {BlockFormat::q8_0, BlockFormat::q4_0, BlockFormat::q4_1, BlockFormat::q5_1}) {
    all.push_back({DType::opaque, f, ScaleKind::none});
  }
  return all;
}

/// Blocks of 32 features that llama.cpp quantised, and what it widens them to (tests/data/engine/make_quantised_rows.py).
struct Blocks {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::array<float, 32>> values;
};
inline const Blocks& blocks_of(BlockFormat f) {
  static const auto all = [] {
    std::map<std::string, Blocks> out;
    std::ifstream in(KVTRIM_TEST_DATA "/engine/quantised_rows.txt");
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      std::string name, bytes, values;
      std::int32_t features = 0;
      words >> name >> features >> bytes >> values;
      const auto byte = [](const std::string& hex, std::size_t i) {
        return static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
      };
      const std::size_t blocks = values.size() / 8 / 32;
      const std::size_t each = bytes.size() / 2 / blocks;
      for (char& c : name) { c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c); }
      Blocks& to = out[name];
      for (std::size_t b = 0; b < blocks; ++b) {
        auto& block = to.bytes.emplace_back();
        for (std::size_t i = 0; i < each; ++i) { block.push_back(byte(bytes, b * each + i)); }
        auto& x = to.values.emplace_back();
        for (std::size_t i = 0; i < 32; ++i) {
          std::array<std::byte, 4> bits{};
          for (std::size_t k = 0; k < 4; ++k) { bits[k] = byte(values, (b * 32 + i) * 4 + k); }
          x[i] = std::bit_cast<float>(bits);
        }
      }
    }
    return out;
  }();
  return all.at(std::string(to_string(f)));
}

/// Value of an 8-bit element, by the definition of its format.
inline double plain_value(DType t, std::uint8_t x) {
  if (t == DType::i8) { return static_cast<std::int8_t>(x); }
  const int mantissa_bits = t == DType::f8e4m3 ? 3 : 2;
  const int bias = t == DType::f8e4m3 ? 7 : 15;
  const int exponent = (x & 127) >> mantissa_bits;
  const int mantissa = x & ((1 << mantissa_bits) - 1);
  const double sign = x >= 128 ? -1 : 1;
  if (t == DType::f8e4m3 && (x & 127) == 127) { return std::numeric_limits<double>::quiet_NaN(); }
  if (t == DType::f8e5m2 && exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1 + fraction, exponent - bias));
}

/// Keys and values of a view's pages as quantised rows, and the same as floats. Tables are the view's.
class QuantisedCache {
 public:
  QuantisedCache(const CacheView& like, const Quantisation& q, std::uint64_t seed = 1)
      : quantised(like), widened(like), q_(q) {
    Random random(seed);
    page_planes_.reserve(2);  // the view refers to them
    make(like, like.k, false, random);
    make(like, like.v, true, random);
    quantised.page_planes = page_planes_.data();
    quantised.page_plane_count = static_cast<std::int32_t>(page_planes_.size());
  }
  QuantisedCache(const QuantisedCache&) = delete;
  QuantisedCache& operator=(const QuantisedCache&) = delete;

  std::vector<std::byte>& bytes(bool values) { return bytes_[values ? 1 : 0]; }
  std::vector<float>& scales(bool values) { return scales_[values ? 1 : 0]; }

  CacheView quantised;
  CacheView widened;

 private:
  void make(const CacheView& like, const Plane& shape, bool of_values, Random& random) {
    const bool per_head = like.scope == TableScope::head;
    const std::int32_t heads = per_head ? 1 : like.kv_heads;
    const std::int32_t layers = like.scope == TableScope::group ? like.layers : 1;
    const std::int32_t dim = shape.head_dim;
    const std::int64_t rows = std::int64_t{layers} * like.pages * like.page_size * heads;
    const std::int32_t row_bytes = q_.format != BlockFormat::none
                                       ? dim / 32 * block_bytes(q_.format)
                                       : dim + (q_.scales == ScaleKind::in_row ? 4 : 0);
    auto& bytes = bytes_[of_values ? 1 : 0];
    auto& floats = floats_[of_values ? 1 : 0];
    auto& scales = scales_[of_values ? 1 : 0];
    bytes.resize(static_cast<std::size_t>(rows * row_bytes));
    floats.resize(static_cast<std::size_t>(rows * dim));
    scales.resize(static_cast<std::size_t>(q_.scales == ScaleKind::token  ? rows
                                           : q_.scales == ScaleKind::head ? layers * heads
                                                                          : 1));
    for (float& x : scales) { x = 0.05F + 0.3F * std::fabs(random.uniform()); }
    for (std::int64_t row = 0; row < rows; ++row) {  // [layers, pages, slots, heads]
      std::byte* const to = bytes.data() + row * row_bytes;
      float* const out = floats.data() + row * dim;
      if (q_.format != BlockFormat::none) {
        const Blocks& blocks = blocks_of(q_.format);
        for (std::int32_t b = 0; b < dim / 32; ++b) {
          const auto i = static_cast<std::size_t>(
              random.below(static_cast<std::int32_t>(blocks.bytes.size())));
          std::memcpy(
              to + b * block_bytes(q_.format), blocks.bytes[i].data(), blocks.bytes[i].size());
          std::memcpy(out + b * 32, blocks.values[i].data(), sizeof blocks.values[i]);
        }
        continue;
      }
      float scale = 1;
      const std::int64_t layer = row / (std::int64_t{like.pages} * like.page_size * heads);
      if (q_.scales == ScaleKind::tensor) { scale = scales[0]; }
      if (q_.scales == ScaleKind::head) {
        scale = scales[static_cast<std::size_t>(layer * heads + row % heads)];
      }
      if (q_.scales == ScaleKind::token) { scale = scales[static_cast<std::size_t>(row)]; }
      if (q_.scales == ScaleKind::in_row) {
        scale = 0.05F + 0.3F * std::fabs(random.uniform());
        std::memcpy(to + dim, &scale, 4);
      }
      for (std::int32_t d = 0; d < dim; ++d) {
        // No NaN and no infinity, and no huge ones: sums of squares stay floats.
        const auto x = static_cast<std::uint8_t>(q_.dtype == DType::f8e5m2
                                                     ? random.below(84) | random.below(2) << 7
                                                     : random.below(127) | random.below(2) << 7);
        to[d] = static_cast<std::byte>(x);
        out[d] = static_cast<float>(plain_value(q_.dtype, x)) * scale;
      }
    }
    Plane p = shape;
    p.layer_bases = nullptr;
    p.base = bytes.data();
    p.dtype = q_.dtype;
    p.format = q_.format;
    p.feature_stride = 1, p.pack = 1;
    p.opaque_row_bytes = q_.format != BlockFormat::none ? row_bytes : 0;
    const auto strides = [&](auto& to, std::int64_t each) {
      to.head_stride = per_head ? 0 : each;
      to.token_stride = each * heads;
      to.page_stride = to.token_stride * like.page_size;
      to.layer_stride = layers > 1 ? to.page_stride * like.pages : 0;
    };
    strides(p, row_bytes);
    if (q_.scales == ScaleKind::in_row) {
      p.scales.in_row = dim;
    } else if (q_.scales != ScaleKind::none) {
      p.scales.base = reinterpret_cast<const std::byte*>(scales.data());
      if (q_.scales == ScaleKind::head) {
        p.scales.head_stride = per_head ? 0 : 4;
        p.scales.layer_stride = layers > 1 ? 4 * heads : 0;
      }
      if (q_.scales == ScaleKind::token) {
        strides(p.scales, 4);
        PagePlane plane;
        plane.base = reinterpret_cast<std::byte*>(scales.data());
        strides(plane, 4);
        plane.row_bytes = 4;
        plane.of_values = of_values;
        page_planes_.push_back(plane);
      }
    }
    (of_values ? quantised.v : quantised.k) = p;
    Plane w = Plane::nhd(floats.data(), {like.page_size, heads, dim, DType::f32});
    strides(w, dim * std::int64_t{4});
    (of_values ? widened.v : widened.k) = w;
  }

  Quantisation q_;
  std::array<std::vector<std::byte>, 2> bytes_;
  std::array<std::vector<float>, 2> floats_, scales_;
  std::vector<PagePlane> page_planes_;
};

}  // namespace kvtrim::test
