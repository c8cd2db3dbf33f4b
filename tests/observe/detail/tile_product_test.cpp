// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/arena.hpp>
#include <kvtrim/observe/detail/tile_product.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::detail;

namespace {

// Logits [query][row] of `rows` keys and `queries` queries, both [count, dim].
std::vector<float> logits_of(const std::vector<float>& keys,
                             const std::vector<float>& queries,
                             std::int32_t dim) {
  const auto rows = static_cast<std::int32_t>(keys.size()) / dim;
  const auto count = static_cast<std::int32_t>(queries.size()) / dim;
  Arena size;
  static_cast<void>(TileScratch{size, dim});
  static_cast<void>(size.take<float>(static_cast<std::int64_t>(padded_queries(count)) * dim));
  std::vector<std::byte> memory(size.bytes());
  Arena arena(memory);
  const TileScratch tiles{arena, dim};
  const auto packed = arena.take<float>(static_cast<std::int64_t>(padded_queries(count)) * dim);
  std::fill(tiles.tile.begin(), tiles.tile.end(), 0.0F);
  std::copy(keys.begin(), keys.end(), tiles.tile.begin());
  for (std::int32_t q = 0; q < padded_queries(count); ++q) {
    pack_query(q < count ? queries.data() + q * dim : nullptr, dim, q, packed.data());
  }
  pack_keys(tiles, rows);
  std::vector<float> out(static_cast<std::size_t>(count) * static_cast<std::size_t>(rows));
  for (std::int32_t first = 0; first < rows; first += panel_rows) {
    for_each_logit_block(
        tiles, first, packed.data(), 0, count, [&](std::int32_t q, const float* logits) {
          for (std::int32_t i = 0; i < block_queries && q + i < count; ++i) {
            for (std::int32_t t = 0; t < panel_rows && first + t < rows; ++t) {
              out[static_cast<std::size_t>((q + i) * rows + first + t)] =
                  logits[i * panel_rows + t];
            }
          }
        });
  }
  return out;
}

std::vector<float> numbers(std::int32_t n, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& x : out) { x = random.uniform(); }
  return out;
}

}  // namespace

TEST_CASE("tile_product: logits equal the product in double, whatever the head dim and the counts",
          "[tile_product]") {
  for (const std::int32_t dim : {1, 3, 16, 40, 64, 130}) {
    for (const std::int32_t rows : {1, 11, tile_rows(dim)}) {
      for (const std::int32_t queries : {1, 5, 9}) {
        const auto keys = numbers(rows * dim, 1);
        const auto asked = numbers(queries * dim, 2);
        const auto logits = logits_of(keys, asked, dim);
        double worst = 0;
        for (std::int32_t q = 0; q < queries; ++q) {
          for (std::int32_t t = 0; t < rows; ++t) {
            double sum = 0;
            for (std::int32_t d = 0; d < dim; ++d) {
              sum += static_cast<double>(keys[static_cast<std::size_t>(t * dim + d)]) *
                     static_cast<double>(asked[static_cast<std::size_t>(q * dim + d)]);
            }
            const auto got = static_cast<double>(logits[static_cast<std::size_t>(q * rows + t)]);
            worst = std::max(worst, std::abs(got - sum));
          }
        }
        CHECK(worst < 1e-5);
      }
    }
  }
}

TEST_CASE("tile_product: no bit of a logit depends on where its row and its query lie",
          "[tile_product]") {
  constexpr std::int32_t dim = 40;
  const auto key = numbers(dim, 3);
  const auto query = numbers(dim, 4);
  const auto alone = logits_of(key, query, dim);
  const std::int32_t rows = tile_rows(dim);
  for (const std::int32_t place : {0, 1, 7, 13, 50, rows - 1}) {
    for (const std::int32_t position : {0, 3, 6, 10}) {
      auto keys = numbers(rows * dim, 5);
      auto queries = numbers(11 * dim, 6);
      std::copy(key.begin(), key.end(), keys.begin() + place * dim);
      std::copy(query.begin(), query.end(), queries.begin() + position * dim);
      const float there =
          logits_of(keys, queries, dim)[static_cast<std::size_t>(position * rows + place)];
      CHECK(std::bit_cast<std::uint32_t>(there) == std::bit_cast<std::uint32_t>(alone[0]));
    }
  }
}
