// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's only matrix product: activations times the transpose of a weight, as files store weights: [out, in].
// Work is cut into tiles of fixed size, so results do not depend on how many threads share them.

#include <Eigen/Core>
#include <algorithm>
#include <span>

namespace engine {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// `*out = x * weight^T`: one of the products that multiply() does at a time.
struct Product {
  const Matrix* weight;  ///< [out features, in features]
  Matrix* out;           ///< resized to [rows of x, out features]
};

/// Multiplies `x` [rows, in] with several weights that have the same `in`, on all OpenMP threads.
///
/// \par Complexity
/// O(rows * in * out) time; allocates if an output grows, and for what Eigen packs
inline void multiply(const Matrix& x, std::span<const Product> products) {
  constexpr Eigen::Index few = 16;
  constexpr Eigen::Index tile_rows = 128;
  constexpr Eigen::Index tile_features = 192;
  const auto tiles_of = [](const Product& product) {
    return (product.weight->rows() + tile_features - 1) / tile_features;
  };
  const Eigen::Index rows = x.rows();
  Eigen::Index feature_tiles = 0;
  for (const Product& product : products) {
    product.out->resize(rows, product.weight->rows());
    feature_tiles += tiles_of(product);
  }
  const Eigen::Index row_tiles = rows <= few ? 1 : (rows + tile_rows - 1) / tile_rows;
#pragma omp parallel for schedule(dynamic)
  for (Eigen::Index tile = 0; tile < row_tiles * feature_tiles; ++tile) {
    Eigen::Index feature_tile = tile / row_tiles;
    const Product* product = products.data();
    for (; feature_tile >= tiles_of(*product); ++product) feature_tile -= tiles_of(*product);
    const Eigen::Index begin = feature_tile * tile_features;
    const Eigen::Index width = std::min(tile_features, product->weight->rows() - begin);
    const auto weight = product->weight->middleRows(begin, width).transpose();
    if (rows <= few) {
      // Bound by reading the weight: the tile comes from memory for the first row, from the cache for the others.
      // A matrix product would pack it first: 1.5 to 3 times slower at 1 to 10 rows.
      for (Eigen::Index row = 0; row < rows; ++row) {
        product->out->row(row).segment(begin, width).noalias() = x.row(row) * weight;
      }
    } else {
      const Eigen::Index first = (tile % row_tiles) * tile_rows;
      const Eigen::Index height = std::min(tile_rows, rows - first);
      product->out->block(first, begin, height, width).noalias() =
          x.middleRows(first, height) * weight;
    }
  }
}

}  // namespace engine
