// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/page_scores.hpp>

#include <kvtrim/observe/observation.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

using namespace kvtrim;

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Finite scores only: rows into pages, a page into a number, all of it in double.
std::vector<double> reference(const PageScoreParams& params,
                              const std::vector<float>& rows,
                              std::int32_t first_row,
                              std::int32_t page_size,
                              std::size_t pages) {
  double norm = 0;
  for (const float x : rows) { norm += std::abs(static_cast<double>(x)); }
  if (params.norm == HeadNorm::none || norm == 0) { norm = 1; }
  std::vector<std::vector<double>> in(pages);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    in[(r + at(first_row)) / at(page_size)].push_back(static_cast<double>(rows[r]));
  }
  std::vector<double> out;
  for (auto& page : in) {
    std::sort(page.begin(), page.end(), std::greater<>());
    std::size_t n = page.size();
    if (params.reduction == PageReduction::max) { n = std::min<std::size_t>(n, 1); }
    if (params.reduction == PageReduction::top_m) { n = std::min(n, at(params.top_m)); }
    double sum = 0;
    for (std::size_t i = 0; i < n; ++i) { sum += page[i]; }
    out.push_back(n == 0 ? 0.0 : sum / static_cast<double>(n) / norm);
  }
  return out;
}

std::vector<float> pages_of(const PageScoreParams& params,
                            std::vector<float> rows,
                            std::int32_t first_row,
                            std::int32_t page_size,
                            bool in_place = false) {
  const auto extent = static_cast<std::int32_t>(rows.size()) + first_row;
  std::vector<float> out(at(rows.empty() ? 0 : pages_for(extent, page_size)), -77.0F);
  std::vector<float> scratch(at(page_size), nan_f);
  page_scores(params,
              rows,
              first_row,
              page_size,
              in_place ? std::span<float>(rows) : std::span<float>(scratch),
              out);
  return out;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& x) {
  std::vector<std::uint32_t> out;
  for (const float v : x) { out.push_back(std::bit_cast<std::uint32_t>(v)); }
  return out;
}

constexpr std::array reductions{PageReduction::max, PageReduction::mean, PageReduction::top_m};

}  // namespace

TEST_CASE("page_scores: the defaults are the measured ones", "[page_scores]") {
  constexpr PageScoreParams p;
  STATIC_REQUIRE(p.norm == HeadNorm::sum);
  STATIC_REQUIRE(p.reduction == PageReduction::max);
  STATIC_REQUIRE(p.top_m == 4);
  STATIC_REQUIRE(p.heads == Reduction::sum);
  STATIC_REQUIRE(std::is_trivially_copyable_v<PageScoreParams>);
}

TEST_CASE(
    "page_scores: equal a double reference for every size, padding and reduction, in place too",
    "[page_scores][property]") {
  test::Random random(2);
  double worst = 0;
  std::int32_t other_bits = 0;
  for (const std::int32_t page_size : {1, 3, 4, 16}) {
    for (std::int32_t n = 0; n <= 40; ++n) {
      for (const std::int32_t first_row : {0, 1, 2, 3, 5, 15, 16, 23}) {
        for (const PageReduction reduction : reductions) {
          for (const HeadNorm norm : {HeadNorm::sum, HeadNorm::none}) {
            for (const bool negative : {false, true}) {
              const PageScoreParams params{
                  .norm = norm, .reduction = reduction, .top_m = 1 + n % 5};
              std::vector<float> rows;
              for (std::int32_t i = 0; i < n; ++i) {
                const float x = random.uniform();
                rows.push_back(negative ? x - 0.5F : std::abs(x));
              }
              const auto got = pages_of(params, rows, first_row, page_size);
              const auto expected = reference(params, rows, first_row, page_size, got.size());
              for (std::size_t p = 0; p < got.size(); ++p) {
                const double error = std::abs(static_cast<double>(got[p]) - expected[p]);
                worst = std::max(worst, error / std::max(1e-3, std::abs(expected[p])));
              }
              other_bits +=
                  bits_of(pages_of(params, rows, first_row, page_size, true)) == bits_of(got) ? 0
                                                                                              : 1;
            }
          }
        }
      }
    }
  }
  CHECK(worst < 1e-6);
  CHECK(other_bits == 0);
}

TEST_CASE(
    "page_scores: with exact sums any ranks have the bits of one, within rows * 2^-41 of double",
    "[page_scores][property][nan]") {
  test::Random random(3);
  for (const std::int32_t n : {0, 1, 7, 200}) {
    for (const bool negative : {false, true}) {
      for (const bool fault : {false, true}) {
        for (const float size : {1e-6F, 1.0F, 1e30F}) {
          PageScoreParams params{.reduction = PageReduction::mean};
          std::vector<float> rows;
          for (std::int32_t i = 0; i < n; ++i) {
            const float x = random.uniform() * size;
            rows.push_back(negative ? x - 0.5F * size : std::abs(x));
          }
          const auto expected = reference(params, rows, 0, 4, at(pages_for(n, 4)));
          if (fault && n > 5) { rows[3] = nan_f, rows[4] = inf_f, rows[5] = -inf_f; }
          const auto floating = pages_of(params, rows, 0, 4);
          params.sums = Sums::exact;
          const auto got = pages_of(params, rows, 0, 4);
          for (std::size_t p = 0; p < got.size(); ++p) {
            const double wanted = fault ? static_cast<double>(floating[p]) : expected[p];
            const double error = std::abs(static_cast<double>(got[p]) - wanted);
            INFO(n << " rows, page " << p << ", fault " << fault << ", size " << size);
            CHECK((error <= std::abs(wanted) * (n * 0x1p-41 + 3e-7) || got[p] == floating[p]));
          }
          for (const std::size_t ranks : {2U, 3U}) {  // pages of 4 rows, dealt out in turn
            std::vector<HeadRows> of(ranks);
            std::vector<std::vector<float>> own(ranks);
            for (std::size_t r = 0; r < rows.size(); ++r) { own[r / 4 % ranks].push_back(rows[r]); }
            HeadRows all;
            for (const auto& x : own) {
              const HeadRows part = HeadRows::of(params, x);
              all.largest = std::max(all.largest, part.largest);
              all.lowest = std::max(all.lowest, part.lowest);
            }
            std::uint64_t units = 0;
            for (const auto& x : own) {
              HeadRows part = all;
              part.add_units(x);
              units += part.units;
            }
            all.units = units;
            std::vector<std::uint32_t> bits(got.size());
            for (std::size_t rank = 0; rank < ranks; ++rank) {
              std::vector<float> pages(
                  at(pages_for(static_cast<std::int32_t>(own[rank].size()), 4)));
              std::vector<float> scratch(4);
              page_scores(params, own[rank], 0, 4, all, scratch, pages);
              for (std::size_t p = 0; p < pages.size(); ++p) {
                bits[p * ranks + rank] = std::bit_cast<std::uint32_t>(pages[p]);
              }
            }
            CHECK(bits == bits_of(got));
          }
        }
      }
    }
  }
}

TEST_CASE("page_scores: a page of padding alone scores 0", "[page_scores][edge]") {
  for (const PageReduction reduction : reductions) {
    const PageScoreParams params{.norm = HeadNorm::none, .reduction = reduction};
    CHECK(pages_of(params, {2, 2, 2}, 9, 4) == std::vector<float>{0, 0, 2});
  }
}

TEST_CASE("page_scores: negative scores keep their order through the norm", "[page_scores]") {
  // KeyDiff's are next to -1 nearly always.
  for (const PageReduction reduction : reductions) {
    const auto got =
        pages_of({.reduction = reduction}, {-0.9F, -0.8F, -0.2F, -0.3F, -0.7F, -0.6F}, 0, 2);
    CHECK(got[1] > got[2]);
    CHECK(got[2] > got[0]);
    CHECK(got[1] < 0);
  }
}

TEST_CASE("page_scores: heads of any size weigh the same under HeadNorm::sum", "[page_scores]") {
  const std::vector<float> rows{1, 3, 2, 0, 0, 2};
  const auto expected = pages_of({}, rows, 0, 2);
  CHECK(expected == std::vector<float>{0.375F, 0.25F, 0.25F});
  for (const float scale : {0x1p-140F, 0x1p-60F, 0x1p60F, 0x1p125F}) {
    std::vector<float> scaled = rows;
    for (float& x : scaled) { x *= scale; }
    INFO("scale " << scale);
    CHECK(pages_of({}, scaled, 0, 2) == expected);
  }
  CHECK(pages_of({}, {0, 0, 0, -0.0F}, 0, 2) == std::vector<float>{0, 0});
}

TEST_CASE("page_scores: NaN and -inf count as the lowest score, and spoil no other page",
          "[page_scores][nan]") {
  const float minus_nan = std::bit_cast<float>(0xFFC0'0000U);
  for (const float bad : {nan_f, minus_nan, -inf_f}) {
    for (const PageReduction reduction : reductions) {
      for (const HeadNorm norm : {HeadNorm::sum, HeadNorm::none}) {
        const PageScoreParams params{.norm = norm, .reduction = reduction, .top_m = 2};
        INFO("reduction " << static_cast<int>(reduction) << ", norm " << static_cast<int>(norm));
        // Scores of 0 and more: as a 0 would.
        CHECK(bits_of(pages_of(params, {1, bad, 3, 4, bad, bad}, 0, 2)) ==
              bits_of(pages_of(params, {1, 0, 3, 4, 0, 0}, 0, 2)));
        // Negative ones: as the lowest of them, and not as a 0 that beats them all.
        const auto got = pages_of(params, {-0.5F, -0.25F, bad, bad, -1, -0.5F, bad, -0.75F}, 0, 2);
        CHECK(got[0] > got[1]);
        CHECK(got[2] >= got[1]);
        CHECK(got[3] >= got[1]);
        CHECK(std::isfinite(got[1]));
        for (const float x : pages_of(params, {bad, bad, bad}, 0, 2)) { CHECK(x == 0.0F); }
      }
    }
  }
}

TEST_CASE("page_scores: +inf is highest, and makes no other page equal", "[page_scores][nan]") {
  for (const HeadNorm norm : {HeadNorm::sum, HeadNorm::none}) {
    const auto got = pages_of({.norm = norm}, {1, 2, inf_f, 0, 3, 1}, 0, 2);
    CHECK(got[1] == inf_f);
    CHECK(got[2] > got[0]);
    CHECK(got[0] > 0);
  }
}

TEST_CASE("page_scores: heads are added, or the best one speaks", "[page_scores]") {
  std::vector<float> sum{1, 5, -1};
  const std::vector<float> head{2, 3, -2};
  add_page_scores({.heads = Reduction::sum}, head, sum);
  CHECK(sum == std::vector<float>{3, 8, -3});
  add_page_scores({.heads = Reduction::mean}, head, sum);  // the same order
  CHECK(sum == std::vector<float>{5, 11, -5});
  add_page_scores({.heads = Reduction::max}, std::vector<float>{6, 1, -6}, sum);
  CHECK(sum == std::vector<float>{6, 11, -5});
}

TEST_CASE("page_scores: an array is found by sequence and page set", "[page_scores]") {
  std::vector<float> data(2 * 3 * 7);
  for (std::size_t i = 0; i < data.size(); ++i) { data[i] = static_cast<float>(i); }
  const PageScoreArray array{data.data(), 21, 7};
  CHECK(array.of(SequenceId{0}, 0, 7).front() == 0);
  CHECK(array.of(SequenceId{1}, 2, 5).front() == 35);
  CHECK(array.of(SequenceId{1}, 2, 5).size() == 5);
  CHECK(array.of(SequenceId{1}, 0, 0).empty());
}
