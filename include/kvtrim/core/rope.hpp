// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model's rotation, and one key rotated by it. Angles are computed in double and reduced before they become floats: at
// position 100,000 a float has lost the third decimal of the angle.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvtrim {

/// Which two features RoPE rotates together.
enum class RopePairs : std::uint8_t {
  half_split,   ///< (j, j + dim / 2): NeoX, Hugging Face Llama
  interleaved,  ///< (2 j, 2 j + 1): GPT-J, Meta's Llama, GGUF's permuted Llama
};

/// How positions enter the keys.
enum class RopeKind : std::uint8_t {
  standard,  ///< one angle per pair, linear in the position (any fixed frequencies: scaling, YaRN, Llama 3)
  dynamic_ntk,  ///< frequencies depend on the length
  mrope,        ///< several positions per token
  alibi,        ///< no rotation: a bias by distance
};

/// A model's RoPE.
struct Rope {
  /// [layers of the model, dim / 2], or [dim / 2] with `same_for_all_layers`
  std::span<const double> inverse_frequencies;
  std::int32_t dim = 0;                     ///< rotated features; even
  std::int32_t offset = 0;                  ///< first rotated feature
  RopePairs pairs = RopePairs::half_split;  ///< which features are rotated together
  RopeKind kind = RopeKind::standard;       ///< how positions enter the keys
  bool same_for_all_layers = false;         ///< one array of frequencies serves all layers
};

/// Inverse frequencies base^(-2 j / dim), j = 0..dim/2-1.
[[nodiscard]] inline std::vector<double> rope_frequencies(double base, std::int32_t dim) {
  std::vector<double> f(static_cast<std::size_t>(dim / 2));
  for (std::size_t j = 0; j < f.size(); ++j) {
    f[j] = std::pow(base, -2.0 * static_cast<double>(j) / dim);
  }
  return f;
}

/// Rotates `key` by `delta` positions.
///
/// \param frequencies  [dim / 2] of the layer
/// \param delta        positions, may be negative: key R(p) becomes R(p + delta)
/// \param[in,out] key  features offset .. offset + dim - 1 change, the others do not
/// \par Complexity
/// O(dim); angles in double, reduced, then float
/// \par Source
/// Su et al., 2021, arXiv:2104.09864
inline void rotate_key(const Rope& rope,
                       std::span<const double> frequencies,
                       std::int32_t delta,
                       float* key) noexcept {
  const std::int32_t half = rope.dim / 2;
  for (std::int32_t j = 0; j < half; ++j) {
    constexpr double turn = 6.283185307179586476925286766559;
    const auto angle =
        static_cast<float>(std::remainder(delta * frequencies[static_cast<std::size_t>(j)], turn));
    const float c = std::cos(angle);
    const float s = std::sin(angle);
    float& x = key[rope.offset + (rope.pairs == RopePairs::half_split ? j : 2 * j)];
    float& y = key[rope.offset + (rope.pairs == RopePairs::half_split ? j + half : 2 * j + 1)];
    const float rotated = x * c - y * s;
    y = x * s + y * c;
    x = rotated;
  }
}

}  // namespace kvtrim
