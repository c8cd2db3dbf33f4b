// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/accumulate.hpp>

#include <kvtrim/score/accumulated.hpp>

#include "catch.hpp"
#include "score/score_fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace score_test;

namespace {

// `rows` live rows of one KV head, keys of no interest.
PagedCache cache_of(std::int32_t rows, std::int32_t page_size = 4) {
  PagedCache cache(
      {.pages = pages_for(rows, page_size), .page_size = page_size, .key_dim = 1, .scores = true});
  REQUIRE(cache.try_create().has_value());
  REQUIRE(cache.try_extend(SequenceId{0}, rows) == Status::ok);
  return cache;
}

void add(const AccumulateParams& params, const CacheView& view, const Probabilities& p) {
  accumulate_probabilities(params, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, p);
}

std::vector<float> totals_of(const CacheView& view, const AccumulateParams& params = {}) {
  return scores_of(AccumulatedScorer(params), view, SequenceId{0}, HeadId{0}, {});
}

// Softmax-like: most of them small.
float draw(std::mt19937& rng) {
  const float u = static_cast<float>(rng() % 4096) / 4096;
  return u * u * u * u;
}

}  // namespace

TEST_CASE("accumulate: a million adds behind one heavy row stay within 1e-6 of double",
          "[accumulate][property]") {
  constexpr std::int32_t rows = 5;
  for (const bool squared : {false, true}) {
    PagedCache cache = cache_of(rows);
    const CacheView view = cache.view();
    const AccumulateParams params{.squared = squared};
    std::mt19937 rng(1);
    std::vector<double> expected(rows, 0.0);
    std::vector<float> plain(rows, 0.0F);  // what the compensation replaces
    for (std::int32_t step = 0; step < 1'000'000; ++step) {
      std::vector<float> p(rows);
      for (float& x : p) { x = draw(rng); }
      p[4] = 0.3F;
      if (step == 0) {
        p[1] = squared ? 256.0F : 65536.0F;
      }  // heavy and early: a prompt's column sum
      add(params, view, {p.data(), 1, 0});
      for (std::size_t r = 0; r < rows; ++r) {
        const auto x = static_cast<double>(p[r]);
        expected[r] += squared ? static_cast<double>(p[r] * p[r]) : x;
        plain[r] += squared ? p[r] * p[r] : p[r];
      }
    }
    CHECK(error_of(totals_of(view), expected) < 1e-6);
    CHECK(error_of(plain, expected) > 1e-5);
  }
}

TEST_CASE("accumulate: decayed sums stay within 1e-6 of double over a million steps",
          "[accumulate][property]") {
  constexpr std::int32_t rows = 3;
  for (const float decay : {0.5F, 0.99F, 0.999F, 0.9999F, 0.999999F}) {
    PagedCache cache = cache_of(rows);
    const CacheView view = cache.view();
    std::mt19937 rng(2);
    std::vector<double> expected(rows, 0.0);
    for (std::int32_t step = 0; step < 1'000'000; ++step) {
      std::vector<float> p(rows);
      for (float& x : p) { x = draw(rng); }
      p[2] = step == 0 ? 4096.0F : 0.3F;
      add({.decay = decay}, view, {p.data(), 1, 0});
      for (std::size_t r = 0; r < rows; ++r) {
        expected[r] = expected[r] * static_cast<double>(decay) + static_cast<double>(p[r]);
      }
    }
    INFO("decay " << decay);
    CHECK(error_of(totals_of(view), expected) < 1e-6);
  }
}

TEST_CASE("accumulate: the group's mean, decay and squares follow the formula", "[accumulate]") {
  constexpr std::int32_t rows = 11;
  for (const std::int32_t group : {1, 3, 8}) {
    for (const AccumulateParams params : {AccumulateParams{},
                                          AccumulateParams{.squared = true},
                                          AccumulateParams{.decay = 0.75F},
                                          AccumulateParams{.decay = 0.75F, .squared = true}}) {
      for (const std::int32_t page_size : {1, 4, 16}) {
        PagedCache cache = cache_of(rows, page_size);
        const CacheView view = cache.view();
        std::mt19937 rng(3);
        std::vector<double> expected(rows, 0.0);
        for (std::int32_t step = 0; step < 50; ++step) {
          std::vector<float> p(at(group * 20), nan_f);  // a stride beyond the rows, never read
          for (std::size_t r = 0; r < rows; ++r) {
            double mean = 0;
            for (std::int32_t g = 0; g < group; ++g) {
              float& x = p[at(g * 20) + r];
              x = draw(rng);
              const auto y = static_cast<double>(x);
              mean += (params.squared ? y * y : y) / group;
            }
            expected[r] = expected[r] * static_cast<double>(params.decay) + mean;
          }
          add(params, view, {p.data(), group, 20});
        }
        INFO("group " << group << ", decay " << params.decay << ", squared " << params.squared);
        CHECK(error_of(totals_of(view), expected) < 1e-6);
      }
    }
  }
}

TEST_CASE("accumulate: probabilities that are multiples of 2^-12 are summed exactly",
          "[accumulate]") {
  PagedCache cache = cache_of(2);
  const CacheView view = cache.view();
  std::mt19937 rng(4);
  std::vector<double> expected(2, 0.0);
  for (std::int32_t step = 0; step < 2000; ++step) {
    std::vector<float> p(8);  // a group of 4: the mean is exact too
    for (std::int32_t i = 0; i < 8; ++i) {
      p[at(i)] = static_cast<float>(rng() % 4097) / 4096;
      expected[at(i % 2)] += static_cast<double>(p[at(i)]) / 4;
    }
    add({}, view, {p.data(), 4, 2});
  }
  const auto got = totals_of(view);
  CHECK(static_cast<double>(got[0]) == expected[0]);
  CHECK(static_cast<double>(got[1]) == expected[1]);
}

TEST_CASE(
    "accumulate: a probability that is not finite makes its row NaN for good, and no other row",
    "[accumulate][nan]") {
  for (const float poison : {nan_f, inf_f, -inf_f}) {
    PagedCache cache = cache_of(3);
    const CacheView view = cache.view();
    const std::vector<float> good{0.25F, 0.25F, 0.5F};
    std::vector<float> bad = good;
    bad[1] = poison;
    add({}, view, {good.data(), 1, 0});
    add({}, view, {bad.data(), 1, 0});
    add({}, view, {good.data(), 1, 0});
    const auto got = totals_of(view);
    CHECK(got[0] == 0.75F);
    CHECK(order_key(got[1]) == 0);
    CHECK(got[2] == 1.5F);
  }
}

TEST_CASE("accumulate: exact sums have the same bits in any order of heads, within 1e-6 of double",
          "[accumulate][property]") {
  constexpr std::int32_t rows = 37, group = 6, steps = 200;
  for (const AccumulateParams params : {AccumulateParams{.sums = Sums::exact},
                                        AccumulateParams{.squared = true, .sums = Sums::exact},
                                        AccumulateParams{.decay = 0.9F, .sums = Sums::exact}}) {
    std::vector<std::vector<std::uint32_t>> bits;
    for (const std::uint32_t order : {0U, 1U, 2U}) {
      PagedCache cache = cache_of(rows);
      std::mt19937 rng(4);
      std::vector<double> expected(rows, 0.0);
      for (std::int32_t step = 0; step < steps; ++step) {
        std::vector<float> p(group * rows), shown(group * rows);
        for (float& x : p) { x = draw(rng); }
        const auto heads = shuffled(group, order);
        for (std::int32_t g = 0; g < group; ++g) {
          std::copy_n(p.data() + heads[at(g)] * rows, rows, shown.data() + g * rows);
        }
        add(params, cache.view(), {shown.data(), group, rows});
        for (std::int32_t r = 0; r < rows; ++r) {
          double mean = 0;
          for (std::int32_t g = 0; g < group; ++g) {
            const auto x = static_cast<double>(p[at(g * rows + r)]);
            mean += (params.squared ? x * x : x) / group;
          }
          expected[at(r)] = expected[at(r)] * static_cast<double>(params.decay) + mean;
        }
      }
      CHECK(error_of(totals_of(cache.view()), expected) < 1e-6);
      bits.push_back(bits_of(totals_of(cache.view())));
    }
    CHECK(bits[0] == bits[1]);
    CHECK(bits[0] == bits[2]);
  }
}

TEST_CASE("accumulate: what is no probability counts as 0, or as 1 above it, where sums are exact",
          "[accumulate][nan]") {
  PagedCache cache = cache_of(4);
  const std::vector<float> p{nan_f, inf_f, -1.0F, 3.0F};
  add({.sums = Sums::exact}, cache.view(), {p.data(), 1, 0});
  CHECK(totals_of(cache.view()) == std::vector<float>{0, 1, 0, 1});
}

TEST_CASE("accumulate: no page is written", "[accumulate]") {
  const Data d = make_data(1, 1, 8, 9, 5);
  TestCache cache(d, {.scores = true});
  const CacheView view = cache.view();
  const std::vector<std::byte> before(view.k.base, view.k.base + view.k.page_stride * view.pages);
  const std::vector<float> p(9, 0.125F);
  accumulate_probabilities({}, {view, SequenceId{0}, LayerId{0}, HeadId{0}}, {p.data(), 1, 0});
  CHECK(std::equal(before.begin(), before.end(), view.k.base));
}
