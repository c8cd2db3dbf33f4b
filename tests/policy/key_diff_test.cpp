// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/key_diff.hpp>

#include <kvtrim/score/key_diff.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

using namespace kvtrim;
using test::MethodWorld;

namespace {

// Minus the cosine with the mean of the normalised keys, in double.
std::vector<double> scores_of(const MethodWorld& world,
                              std::int32_t l,
                              std::int32_t h,
                              const std::vector<std::int32_t>& positions) {
  const auto dim = static_cast<std::size_t>(world.setup().dim);
  std::vector<std::vector<double>> units;
  std::vector<double> mean(dim, 0.0);
  for (const std::int32_t p : positions) {
    const auto key = world.key(0, l, h, p);
    double square = 0;
    for (const float x : key) { square += static_cast<double>(x) * static_cast<double>(x); }
    auto& unit = units.emplace_back(dim);
    for (std::size_t d = 0; d < dim; ++d) {
      unit[d] = static_cast<double>(key[d]) / std::sqrt(square);
      mean[d] += unit[d];
    }
  }
  std::vector<double> out;
  for (const auto& unit : units) {
    out.push_back(-std::inner_product(unit.begin(), unit.end(), mean.begin(), 0.0));
  }
  return out;
}

}  // namespace

TEST_CASE("key_diff policy: block by block, the rows that point elsewhere stay",
          "[key_diff][paper]") {
  // The paper's way with a prompt: after each block the best of the kept rows and the block.
  MethodWorld world({});
  std::vector<std::vector<std::int32_t>> kept(4);
  for (std::int32_t block = 0; block < 5; ++block) {
    REQUIRE(world.append(0, 8) == Status::ok);
    REQUIRE(world.evict(KeyDiff({.budget = 12}), {}).status == Status::ok);
    for (std::size_t i = 0; i < 4; ++i) {
      for (std::int32_t p = 0; p < 8; ++p) { kept[i].push_back(8 * block + p); }
      const auto scores = scores_of(
          world, static_cast<std::int32_t>(i / 2), static_cast<std::int32_t>(i % 2), kept[i]);
      std::vector<std::size_t> order(kept[i].size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return scores[a] > scores[b];
      });
      std::vector<std::int32_t> best;
      for (std::size_t n = 0; n < std::min<std::size_t>(12, order.size()); ++n) {
        best.push_back(kept[i][order[n]]);
      }
      std::sort(best.begin(), best.end());
      kept[i] = best;
    }
    CHECK(world.kept(0) == kept);
  }
}

TEST_CASE("key_diff_params: there is nothing to set", "[key_diff]") {
  STATIC_REQUIRE(std::is_empty_v<KeyDiffParams>);
  STATIC_REQUIRE(std::is_aggregate_v<KeyDiffParams>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<KeyDiffParams>);
}
