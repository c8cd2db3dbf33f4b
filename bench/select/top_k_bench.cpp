// SPDX-License-Identifier: Apache-2.0
// Selection of the best rows of 8 KV heads: order keys, then the indices, ascending. Compared with std::nth_element on
// (key, index) and a sort of what is kept; one read of the scores is shown too.

#include <kvtrim/core/order_key.hpp>
#include <kvtrim/select/top_k.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvtrim_bench {
namespace {

constexpr std::int32_t heads = 8;

enum class Input : std::uint8_t { random, sorted, falling, all_equal, two_values, many_nan };
constexpr const char* names[] = {
    "random", "sorted", "falling", "all_equal", "two_values", "many_nan"};

std::vector<float> scores_of(Input input, std::size_t n) {
  std::vector<float> scores = normal_numbers(n, 4);
  for (std::size_t i = 0; i < n; ++i) {
    switch (input) {
      case Input::random:
      case Input::sorted:
      case Input::falling:
        break;
      case Input::all_equal:
        scores[i] = 0.25F;
        break;
      case Input::two_values:
        scores[i] = scores[i] > 0 ? 0.5F : 0.25F;
        break;
      case Input::many_nan:
        if (scores[i] > 0) { scores[i] = std::numeric_limits<float>::quiet_NaN(); }
        break;
    }
  }
  if (input == Input::sorted) { std::sort(scores.begin(), scores.end()); }
  if (input == Input::falling) { std::sort(scores.rbegin(), scores.rend()); }
  return scores;
}

void select(benchmark::State& state, Input input, std::int32_t tokens, std::int32_t budget) {
  const auto n = static_cast<std::size_t>(tokens);
  const auto k = static_cast<std::size_t>(budget);
  std::vector<std::vector<float>> scores;
  for (std::int32_t h = 0; h < heads; ++h) { scores.push_back(scores_of(input, n)); }
  std::vector<std::uint32_t> keys(n);
  std::vector<std::int32_t> kept(k);
  std::vector<std::uint64_t> pairs(n);
  const auto op = [&] {
    for (const auto& head : scores) {
      benchmark::DoNotOptimize(order_keys(head, keys));
      top_k(keys, kept);
      benchmark::DoNotOptimize(kept.data());
    }
  };
  const auto bound = [&] {
    for (const auto& head : scores) {
      for (std::size_t i = 0; i < n; ++i) {
        pairs[i] = ~row_key(head[i], Position{static_cast<std::int32_t>(i)});  // lowest: the best
      }
      std::nth_element(
          pairs.begin(), pairs.begin() + static_cast<std::ptrdiff_t>(k) - 1, pairs.end());
      for (std::size_t i = 0; i < k; ++i) {
        kept[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(pairs[i]));
      }
      std::sort(kept.begin(), kept.end());
      benchmark::DoNotOptimize(kept.data());
    }
  };
  const double all = static_cast<double>(n) * heads;
  const Pairs p = interleave(op, bound);
  report(state, p, {.items = all, .bytes = all * sizeof(float)});
  state.counters["ns_a_score"] = p.op / all * 1e9;
  const double read = quantile(
      [&] {
        std::vector<double> seconds;
        for (int i = 0; i < 20; ++i) {
          seconds.push_back(seconds_of([&] {
            for (const auto& head : scores) {
              std::uint32_t most = 0;
              for (const float x : head) { most = std::max(most, std::bit_cast<std::uint32_t>(x)); }
              benchmark::DoNotOptimize(most);
            }
          }));
        }
        return seconds;
      }(),
      0.5);
  state.counters["over_one_read"] = p.op / read;
}

void add(Input input, std::int32_t tokens, std::int32_t percent) {
  const auto budget = static_cast<std::int32_t>(std::int64_t{tokens} * percent / 100);
  line(std::string("select/top_k/") + names[static_cast<int>(input)] +
           "/tokens:" + std::to_string(tokens) + "/heads:8/budget:" + std::to_string(budget),
       [=](benchmark::State& state) { select(state, input, tokens, budget); });
}

const bool registered = [] {
  for (const Input input : {Input::random,
                            Input::sorted,
                            Input::falling,
                            Input::all_equal,
                            Input::two_values,
                            Input::many_nan}) {
    add(input, 32'768, 25);
  }
  for (const std::int32_t percent : {5, 10, 50}) { add(Input::random, 32'768, percent); }
  for (const std::int32_t tokens : {1024, 8192, 131'072}) { add(Input::random, tokens, 25); }
  return true;
}();

}  // namespace
}  // namespace kvtrim_bench
