// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/budget/adaptive.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

using namespace kvtrim;

namespace {

struct World {
  std::vector<std::vector<float>> scores;  // of the candidates of each head, in position order
  std::vector<std::int32_t> fixed;
  std::vector<std::int32_t> budgets;
};

std::vector<std::int32_t> rows_of(const AdaptiveParams& params, const World& w) {
  std::vector<std::vector<std::uint64_t>> keys(w.scores.size());
  std::vector<AdaptiveHead> heads(w.scores.size());
  std::size_t longest = 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    for (std::size_t r = 0; r < w.scores[i].size(); ++r) {
      keys[i].push_back(row_key(w.scores[i][r], Position{static_cast<std::int32_t>(r)}));
    }
    heads[i] = {keys[i], w.fixed[i], w.budgets[i], 0};
    longest = std::max(longest, keys[i].size());
  }
  const auto count = static_cast<std::int64_t>(heads.size());
  Arena need;
  const auto unused = AdaptiveScratch::take(need, count, static_cast<std::int64_t>(longest));
  static_cast<void>(unused);
  std::vector<std::byte> memory(need.bytes());
  Arena arena(memory);
  adaptive_rows(
      params, heads, AdaptiveScratch::take(arena, count, static_cast<std::int64_t>(longest)));
  REQUIRE(arena.ok());
  std::vector<std::int32_t> rows;
  for (const AdaptiveHead& h : heads) { rows.push_back(h.rows); }
  return rows;
}

// The definition, by sorting everything: (score, lower position, lower head), with each head's safe rows taken out first.
std::vector<std::int32_t> sorted_reference(double safeguard, const World& w) {
  std::vector<std::int32_t> rows = w.fixed;
  std::vector<std::tuple<double, std::size_t, std::size_t>> all;
  std::int64_t total = 0;
  for (std::size_t h = 0; h < w.scores.size(); ++h) {
    total += w.budgets[h] - w.fixed[h];
    std::vector<std::tuple<double, std::size_t, std::size_t>> own;
    for (std::size_t r = 0; r < w.scores[h].size(); ++r) {
      own.emplace_back(-static_cast<double>(w.scores[h][r]), r, h);
    }
    std::sort(own.begin(), own.end());
    const auto safe = static_cast<std::int64_t>(w.budgets[h] * safeguard) - w.fixed[h];
    const auto n = static_cast<std::size_t>(
        std::clamp<std::int64_t>(safe, 0, static_cast<std::int64_t>(own.size())));
    rows[h] += static_cast<std::int32_t>(n);
    total -= static_cast<std::int64_t>(n);
    all.insert(all.end(), own.begin() + static_cast<std::ptrdiff_t>(n), own.end());
  }
  std::sort(all.begin(), all.end());
  for (std::size_t i = 0; i < all.size() && static_cast<std::int64_t>(i) < total; ++i) {
    ++rows[std::get<2>(all[i])];
  }
  return rows;
}

World random_world(std::mt19937& rng, bool ties) {
  World w;
  const auto heads = 1 + rng() % 5;
  const auto rows = static_cast<std::int32_t>(1 + rng() % 40);
  const auto fixed = static_cast<std::int32_t>(rng() % 6);
  const auto budget = fixed + static_cast<std::int32_t>(rng() % static_cast<unsigned>(rows + 1));
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<float> scores;
    for (std::int32_t r = 0; r < rows; ++r) {
      scores.push_back(ties ? static_cast<float>(rng() % 4)
                            : static_cast<float>(rng()) / static_cast<float>(1U << (h * 3)));
    }
    w.scores.push_back(scores);
    w.fixed.push_back(fixed);
    w.budgets.push_back(budget);
  }
  return w;
}

std::int64_t sum(const std::vector<std::int32_t>& x) {
  return std::accumulate(x.begin(), x.end(), std::int64_t{0});
}

}  // namespace

TEST_CASE("adaptive: a head whose scores are higher gets the others' rows", "[budget][adaptive]") {
  const World w{{{1, 2, 3, 4}, {50, 60, 70, 80}, {5, 6, 7, 90}}, {1, 1, 1}, {3, 3, 3}};
  CHECK(rows_of({.safeguard = 0}, w) == std::vector<std::int32_t>{1, 5, 3});
  // int(3 * 0.7) = 2: one candidate of each head besides its protected row.
  CHECK(rows_of({.safeguard = 0.7}, w) == std::vector<std::int32_t>{2, 5, 2});
  CHECK(rows_of({.safeguard = 1}, w) == std::vector<std::int32_t>{3, 3, 3});
}

TEST_CASE("adaptive: the floor forms mix what a head wins with its equal share",
          "[budget][adaptive][paper]") {
  const World w{{{1, 2, 3, 4}, {50, 60, 70, 80}, {5, 6, 7, 90}}, {1, 1, 1}, {3, 3, 3}};
  // Of 6 rows, 0, 4 and 2 are won; half of that + half of 2: 1, 3, 2.
  CHECK(rows_of({.safeguard = 0.5, .form = AdaptiveForm::floor}, w) ==
        std::vector<std::int32_t>{2, 4, 3});
  // 0.7 * won + 0.6 = 0.6, 3.4, 2.0: the remaining row goes to the largest remainder.
  CHECK(rows_of({.safeguard = 0.3, .form = AdaptiveForm::floor}, w) ==
        std::vector<std::int32_t>{2, 4, 3});
  // The authors' code: round(0.7 * won + int(0.6)) = 0, round(2.8), round(1.4): one row is lost.
  CHECK(rows_of({.safeguard = 0.3, .form = AdaptiveForm::floor_rounded}, w) ==
        std::vector<std::int32_t>{1, 4, 2});
}

TEST_CASE("C25 adaptive: floor_rounded may lose up to one and a half rows per head",
          "[budget][adaptive][fault]") {
  // Both heads win 15 of 30 rows: round(0.7 * 15 + int(4.5)) = round(14.5) = 14 each.
  World w{{{}, {}}, {0, 0}, {15, 15}};
  for (std::vector<float>& head : w.scores) {
    for (int r = 0; r < 20; ++r) { head.push_back(static_cast<float>(20 - r)); }
  }
  CHECK(rows_of({.safeguard = 0.3, .form = AdaptiveForm::floor_rounded}, w) ==
        std::vector<std::int32_t>{14, 14});
  std::mt19937 rng(25);
  double most = 0, least = 0;
  for (int i = 0; i < 3000; ++i) {
    const World any = random_world(rng, false);
    const double safeguard = static_cast<double>(rng() % 11) / 10;
    const auto rows = rows_of({.safeguard = safeguard, .form = AdaptiveForm::floor_rounded}, any);
    const auto exact = rows_of({.safeguard = safeguard, .form = AdaptiveForm::floor}, any);
    double off = 0;
    for (std::size_t h = 0; h < rows.size(); ++h) { off += rows[h] - exact[h]; }
    off /= static_cast<double>(rows.size());
    most = std::max(most, off);
    least = std::min(least, off);
  }
  CHECK(most <= 0.5);
  CHECK(least > -1.5);
  CHECK(least < -0.5);  // more than half a row per head was lost
}

TEST_CASE("adaptive: the safeguard form equals sorting all rows of all heads",
          "[budget][adaptive][property]") {
  std::mt19937 rng(5);
  for (int i = 0; i < 2000; ++i) {
    const World w = random_world(rng, i % 2 == 0);
    const double safeguard = static_cast<double>(rng() % 11) / 10;
    CHECK(rows_of({.safeguard = safeguard}, w) == sorted_reference(safeguard, w));
  }
}

TEST_CASE("adaptive: totals are exact, no head is below its protected rows or above what it has",
          "[budget][adaptive][property]") {
  std::mt19937 rng(6);
  for (int i = 0; i < 4000; ++i) {
    World w = random_world(rng, i % 3 == 0);
    for (std::size_t h = 0; h < w.scores.size(); ++h) {  // heads of different lengths
      w.scores[h].resize(rng() % (w.scores[h].size() + 1));
      w.budgets[h] = std::max(0, w.budgets[h] - static_cast<std::int32_t>(rng() % 3));
    }
    std::int64_t most = 0;
    std::int64_t least = 0;
    for (std::size_t h = 0; h < w.scores.size(); ++h) {
      most += w.fixed[h] + static_cast<std::int64_t>(w.scores[h].size());
      least += w.fixed[h];
    }
    for (const AdaptiveForm form : {AdaptiveForm::safeguard, AdaptiveForm::floor}) {
      const double safeguard = static_cast<double>(rng() % 11) / 10;
      const auto rows = rows_of({.safeguard = safeguard, .form = form}, w);
      INFO("world " << i << ", form " << static_cast<int>(form));
      CHECK(sum(rows) == std::clamp(sum(w.budgets), least, most));
      for (std::size_t h = 0; h < rows.size(); ++h) {
        CHECK(rows[h] >= w.fixed[h]);
        CHECK(rows[h] <= w.fixed[h] + static_cast<std::int32_t>(w.scores[h].size()));
      }
    }
  }
}

TEST_CASE("adaptive: a larger budget takes no row from any head", "[budget][adaptive][property]") {
  std::mt19937 rng(7);
  for (int i = 0; i < 300; ++i) {
    World w = random_world(rng, i % 2 == 0);
    const double safeguard = static_cast<double>(rng() % 2);
    std::vector<std::int32_t> before(w.scores.size(), 0);
    for (std::int32_t budget = w.fixed[0]; budget < w.fixed[0] + 40; ++budget) {
      std::fill(w.budgets.begin(), w.budgets.end(), budget);
      const auto rows = rows_of({.safeguard = safeguard}, w);
      for (std::size_t h = 0; h < rows.size(); ++h) { CHECK(rows[h] >= before[h]); }
      before = rows;
    }
  }
}

TEST_CASE("adaptive: the order in which a head lists its candidates does not matter",
          "[budget][adaptive][ties]") {
  std::mt19937 rng(8);
  for (int i = 0; i < 200; ++i) {
    const World w = random_world(rng, true);
    std::vector<std::vector<std::uint64_t>> keys(w.scores.size());
    std::vector<AdaptiveHead> heads;
    for (std::size_t h = 0; h < w.scores.size(); ++h) {
      for (std::size_t r = 0; r < w.scores[h].size(); ++r) {
        keys[h].push_back(row_key(w.scores[h][r], Position{static_cast<std::int32_t>(r)}));
      }
      std::shuffle(keys[h].begin(), keys[h].end(), rng);
      heads.push_back({keys[h], w.fixed[h], w.budgets[h], 0});
    }
    std::vector<std::byte> memory(1 << 16);
    Arena arena(memory);
    adaptive_rows({}, heads, AdaptiveScratch::take(arena, 5, 41));
    const auto expected = rows_of({}, w);
    for (std::size_t h = 0; h < heads.size(); ++h) { CHECK(heads[h].rows == expected[h]); }
  }
}

TEST_CASE("adaptive: equal scores go to the lower position, then to the lower head; NaN last",
          "[budget][adaptive][ties][nan]") {
  CHECK(rows_of({.safeguard = 0}, {{{1, 1}, {1, 1}, {1, 1}}, {0, 0, 0}, {1, 1, 2}}) ==
        std::vector<std::int32_t>{2, 1, 1});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(rows_of({.safeguard = 0}, {{{nan, nan}, {-5, -6}}, {0, 0}, {1, 1}}) ==
        std::vector<std::int32_t>{0, 2});
}
