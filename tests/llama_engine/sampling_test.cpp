// SPDX-License-Identifier: Apache-2.0
#include "llama_engine/sampling.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "catch.hpp"

using engine::greedy_token;
using engine::TopPSampler;

namespace {
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();
}  // namespace

TEST_CASE("greedy: equal logits give the lower id", "[sampling][ties]") {
  CHECK(greedy_token(std::vector<float>{1, 3, 2, 3}) == 1);
  CHECK(greedy_token(std::vector<float>{-infinity, -infinity}) == 0);
  CHECK(greedy_token(std::vector<float>{0, infinity}) == 1);
}

TEST_CASE("sampling: a NaN logit is an error wherever it is", "[sampling][nan]") {
  for (std::size_t at = 0; at < 3; ++at) {
    std::vector<float> logits{1, 2, 3};
    logits[at] = not_a_number;
    CHECK_THROWS_AS(greedy_token(logits), std::runtime_error);
    TopPSampler sampler({});
    CHECK_THROWS_AS(sampler(logits), std::runtime_error);
  }
  CHECK_THROWS_AS(greedy_token({}), std::invalid_argument);
}

TEST_CASE("log_sum_exp: large logits do not overflow", "[sampling][edge]") {
  CHECK(engine::log_sum_exp(std::vector<float>{1000, 1000}) ==
        Catch::Approx(1000 + std::log(2.0)).epsilon(1e-12));
}

TEST_CASE("top-p: tokens outside the set are never drawn, those inside as often as they are likely",
          "[sampling]") {
  // Probabilities 0.5, 0.3, 0.15, 0.05: the first three reach 0.9.
  const std::vector<float> logits{std::log(0.15F), std::log(0.5F), std::log(0.05F), std::log(0.3F)};
  TopPSampler sampler({.temperature = 1, .top_p = 0.9F, .seed = 11});
  std::array<double, 4> share{};
  constexpr int draws = 20000;
  for (int i = 0; i < draws; ++i)
    share.at(static_cast<std::size_t>(sampler(logits))) += 1.0 / draws;
  CHECK(share[2] == 0);
  CHECK(share[1] == Catch::Approx(0.5 / 0.95).margin(0.02));
  CHECK(share[3] == Catch::Approx(0.3 / 0.95).margin(0.02));
  CHECK(share[0] == Catch::Approx(0.15 / 0.95).margin(0.02));
}

TEST_CASE("top-p: the same seed draws the same tokens, another seed others", "[sampling]") {
  const std::vector<float> logits(100, 0.0F);
  const auto draw = [&](std::uint64_t seed) {
    TopPSampler sampler({.temperature = 1, .top_p = 1, .seed = seed});
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler(logits));
    return tokens;
  };
  CHECK(draw(1) == draw(1));
  CHECK(draw(1) != draw(2));
}

TEST_CASE("top-p: temperature 0 and a tiny top_p are greedy", "[sampling][edge]") {
  const std::vector<float> logits{1, 2, 2, 0};
  TopPSampler cold({.temperature = 0, .top_p = 1});
  TopPSampler narrow({.temperature = 1, .top_p = 1e-6F});
  for (int i = 0; i < 10; ++i) {
    CHECK(cold(logits) == 1);
    CHECK(narrow(logits) == 1);
  }
}

TEST_CASE("top-p: impossible parameters are refused", "[sampling][edge]") {
  for (const float bad : {-1.0F, not_a_number, infinity}) {
    CHECK_THROWS_AS(TopPSampler({.temperature = bad}), std::invalid_argument);
  }
  for (const float bad : {0.0F, -0.5F, 1.5F, not_a_number}) {
    CHECK_THROWS_AS(TopPSampler({.top_p = bad}), std::invalid_argument);
  }
  TopPSampler sampler({});
  CHECK_THROWS_AS(sampler(std::vector<float>{infinity, 0}), std::runtime_error);
  CHECK_THROWS_AS(sampler(std::vector<float>{-infinity}), std::runtime_error);
}
