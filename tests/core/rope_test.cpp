// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/core/rope.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/rope_model.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace kvtrim;
using test::rope_models;
using test::rope_of;
using test::RopeModel;

TEST_CASE("rope: a rotation equals the plain one in double, at positions up to a million",
          "[rope][property]") {
  test::Random random(1);
  for (const RopeModel& model : rope_models) {
    const auto frequencies = model.frequencies(1);
    for (const std::int32_t delta : {0, 1, -1, 17, -4095, 131'072, -1'000'000}) {
      std::vector<float> key;
      for (std::int32_t d = 0; d < 8; ++d) { key.push_back(random.uniform()); }
      const auto expected = model.rotated(0, {key.begin(), key.end()}, delta);
      rotate_key(rope_of(model, frequencies), frequencies, delta, key.data());
      for (std::size_t d = 0; d < 8; ++d) {
        CHECK(std::abs(static_cast<double>(key[d]) - expected[d]) < 1e-6);
      }
    }
  }
}

TEST_CASE("rope: features outside the rotary range do not change by a bit", "[rope]") {
  const RopeModel model{4, 2, RopePairs::interleaved};
  const auto frequencies = model.frequencies(1);
  std::array<float, 8> key{1, 2, 3, 4, 5, 6, 7, 8};
  rotate_key(rope_of(model, frequencies), frequencies, 5, key.data());
  CHECK(key[0] == 1.0F);
  CHECK(key[1] == 2.0F);
  CHECK(key[6] == 7.0F);
  CHECK(key[7] == 8.0F);
  CHECK(key[2] != 3.0F);
}

TEST_CASE("rope: lengths stay, rotations add up, a turn back undoes a turn", "[rope][property]") {
  test::Random random(2);
  for (const RopeModel& model : rope_models) {
    const auto frequencies = model.frequencies(1);
    const Rope rope = rope_of(model, frequencies);
    for (std::int32_t round = 0; round < 50; ++round) {
      std::array<float, 8> a{};
      for (float& x : a) { x = random.uniform(); }
      const auto original = a;
      auto b = a;
      const std::int32_t m = random.below(5000) - 2500;
      const std::int32_t n = random.below(5000) - 2500;
      rotate_key(rope, frequencies, m, a.data());
      rotate_key(rope, frequencies, n, a.data());
      rotate_key(rope, frequencies, m + n, b.data());
      double length_a = 0;
      double length = 0;
      for (std::size_t d = 0; d < 8; ++d) {
        CHECK(std::abs(a[d] - b[d]) < 2e-6F);
        length_a += std::pow(static_cast<double>(a[d]), 2);
        length += std::pow(static_cast<double>(original[d]), 2);
      }
      CHECK(std::abs(length - length_a) < 2e-6);
      rotate_key(rope, frequencies, -(m + n), b.data());
      for (std::size_t d = 0; d < 8; ++d) { CHECK(std::abs(b[d] - original[d]) < 2e-6F); }
    }
  }
}

TEST_CASE("rope: frequencies are base^(-2j/dim)", "[rope]") {
  const auto f = rope_frequencies(10000.0, 8);
  REQUIRE(f.size() == 4);
  CHECK(f[0] == 1.0);
  CHECK(std::abs(f[1] - 0.1) < 1e-15);
  CHECK(std::abs(f[2] - 0.01) < 1e-15);
  CHECK(std::abs(f[3] - 0.001) < 1e-15);
}
