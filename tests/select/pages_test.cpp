// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/select/pages.hpp>

#include "catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace kvtrim;

namespace {

constexpr float nan_f = std::numeric_limits<float>::quiet_NaN();
constexpr float inf_f = std::numeric_limits<float>::infinity();

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// Which page each row lies in, by counting.
std::vector<std::vector<std::int32_t>> rows_of_pages(const PageSpan& span) {
  std::vector<std::vector<std::int32_t>> pages;
  for (std::int32_t r = 0; r < span.live; ++r) {
    const std::size_t page = at((r + span.first_row) / span.page_size);
    if (page >= pages.size()) { pages.resize(page + 1); }
    pages[page].push_back(r);
  }
  return pages;
}

struct Expected {
  std::vector<std::uint8_t> stays;
  std::int32_t rows = 0;
  std::int32_t fixed_rows = 0;
};

// The rule in words: pages with a protected row or with an empty slot stay; then the best, while a whole page fits.
Expected reference(const PageSpan& span,
                   const std::vector<float>& scores,
                   std::int32_t keep,
                   const Protection& protection) {
  const auto pages = rows_of_pages(span);
  Expected e;
  e.stays.assign(pages.size(), 0);
  std::vector<std::size_t> others;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const bool guarded = std::any_of(pages[p].begin(), pages[p].end(), [&](std::int32_t r) {
      return r < protection.sinks || r >= span.live - protection.recent;
    });
    const auto rows = static_cast<std::int32_t>(pages[p].size());
    if (guarded || rows < span.page_size) {
      e.stays[p] = 1;
      e.fixed_rows += rows;
    } else {
      others.push_back(p);
    }
  }
  std::sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) {
    const auto value = [&](std::size_t p) { return std::isnan(scores[p]) ? -inf_f : scores[p]; };
    return value(a) != value(b) ? value(a) > value(b) : a < b;
  });
  e.rows = e.fixed_rows;
  for (const std::size_t p : others) {
    if (e.rows + span.page_size > keep) { break; }
    e.stays[p] = 1;
    e.rows += span.page_size;
  }
  return e;
}

struct Chosen {
  Status status = Status::ok;
  std::vector<std::uint8_t> stays;
};

Chosen chosen_by(const PageSpan& span,
                 const std::vector<float>& scores,
                 std::int32_t keep,
                 const Protection& protection) {
  const std::size_t pages = scores.size();
  std::vector<std::uint32_t> keys(pages, 77);
  std::vector<std::int32_t> picked(pages, -9);
  Chosen c;
  c.stays.assign(pages, 9);
  c.status = choose_pages(span, scores, keep, protection, keys, picked, c.stays);
  return c;
}

std::string text(const PageSpan& s, std::int32_t keep, const Protection& p) {
  return "live " + std::to_string(s.live) + " padding " + std::to_string(s.first_row) + " page " +
         std::to_string(s.page_size) + " keep " + std::to_string(keep) + " sinks " +
         std::to_string(p.sinks) + " recent " + std::to_string(p.recent);
}

}  // namespace

TEST_CASE("pages: a span's pages and borders are those that counting rows gives", "[pages][edge]") {
  for (const std::int32_t page_size : {1, 3, 4, 16}) {
    for (std::int32_t live = 0; live <= 40; ++live) {
      for (const std::int32_t first_row : {0, 1, 2, 3, 4, 7, 15, 16, 17, 40}) {
        const PageSpan span{live, first_row, page_size};
        const auto pages = rows_of_pages(span);
        INFO(text(span, 0, {}));
        REQUIRE(span.pages() == static_cast<std::int32_t>(pages.size()));
        for (std::int32_t p = 0; p < span.pages(); ++p) {
          const auto& rows = pages[at(p)];
          REQUIRE(span.end(p) - span.begin(p) == static_cast<std::int32_t>(rows.size()));
          if (!rows.empty()) { REQUIRE(span.begin(p) == rows.front()); }
        }
      }
    }
  }
}

TEST_CASE("pages: every size, padding, protection and budget keeps what the plain rule keeps",
          "[pages][property][ties][nan]") {
  test::Random random(1);
  std::int64_t seen = 0;
  std::int64_t over = 0;
  std::string wrong;
  for (const std::int32_t page_size : {1, 3, 4, 16}) {
    for (std::int32_t live = 0; live <= 40; ++live) {
      for (const std::int32_t first_row : {0, 1, 3, 5, 16, 21}) {
        for (const Protection protection : {Protection{0, 0},
                                            Protection{1, 0},
                                            Protection{0, 1},
                                            Protection{1, 4},
                                            Protection{4, 8},
                                            Protection{5, 3},
                                            Protection{30, 30}}) {
          for (std::int32_t keep = 0; keep <= live + 1; ++keep) {
            const PageSpan span{live, first_row, page_size};
            std::vector<float> scores(at(span.pages()));
            for (float& x : scores) {  // few values: many ties
              const std::int32_t i = random.below(8);
              x = i == 0 ? nan_f : i == 1 ? -inf_f : i == 2 ? inf_f : static_cast<float>(i % 3) - 1;
            }
            const Expected e = reference(span, scores, keep, protection);
            const Chosen c = chosen_by(span, scores, keep, protection);
            ++seen;
            over += c.status == Status::over_budget ? 1 : 0;
            const auto pages = rows_of_pages(span);
            std::int32_t rows = 0;
            for (std::size_t p = 0; p < pages.size(); ++p) {
              rows += c.stays[p] != 0 ? static_cast<std::int32_t>(pages[p].size()) : 0;
            }
            const bool right =
                c.stays == e.stays && rows == e.rows &&
                c.status == (e.fixed_rows > keep ? Status::over_budget : Status::ok) &&
                (c.status == Status::over_budget ? rows == e.fixed_rows : rows <= keep);
            if (!right && wrong.empty()) { wrong = text(span, keep, protection); }
          }
        }
      }
    }
  }
  CHECK(wrong == "");
  CHECK(seen > 100'000);
  CHECK(over > 10'000);
}

TEST_CASE("pages: as many rows stay as whole pages allow, by trying every set of pages",
          "[pages][property]") {
  // No scores, no order: only the count that the documentation promises.
  for (const std::int32_t page_size : {3, 4}) {
    for (std::int32_t live = 0; live <= 24; ++live) {
      for (const std::int32_t first_row : {0, 2}) {
        for (const Protection protection : {Protection{0, 0}, Protection{1, 4}}) {
          const PageSpan span{live, first_row, page_size};
          const auto pages = rows_of_pages(span);
          std::uint32_t must = 0;
          for (std::size_t p = 0; p < pages.size(); ++p) {
            const auto rows = static_cast<std::int32_t>(pages[p].size());
            bool fixed = rows < page_size;
            for (const std::int32_t r : pages[p]) {
              fixed = fixed || r < protection.sinks || r >= live - protection.recent;
            }
            if (fixed) { must |= 1U << p; }
          }
          for (std::int32_t keep = 0; keep <= live; ++keep) {
            std::int32_t most = -1;
            for (std::uint32_t set = 0; set < 1U << pages.size(); ++set) {
              if ((set & must) != must) { continue; }
              std::int32_t rows = 0;
              for (std::size_t p = 0; p < pages.size(); ++p) {
                if ((set >> p & 1U) != 0) { rows += static_cast<std::int32_t>(pages[p].size()); }
              }
              if (rows <= keep) { most = std::max(most, rows); }
            }
            const Chosen c =
                chosen_by(span, std::vector<float>(pages.size(), 0.5F), keep, protection);
            std::int32_t rows = 0;
            for (std::size_t p = 0; p < pages.size(); ++p) {
              rows += c.stays[p] != 0 ? static_cast<std::int32_t>(pages[p].size()) : 0;
            }
            INFO(text(span, keep, protection));
            REQUIRE((c.status == Status::over_budget) == (most < 0));
            if (most >= 0) { REQUIRE(rows == most); }
          }
        }
      }
    }
  }
}

TEST_CASE("pages: equal scores keep the lower page", "[pages][ties]") {
  const PageSpan span{24, 0, 4};
  CHECK(chosen_by(span, {1, 1, 1, 1, 1, 1}, 12, {}).stays ==
        std::vector<std::uint8_t>{1, 1, 1, 0, 0, 0});
  CHECK(chosen_by(span, {0, 2, 1, 1, 2, 1}, 16, {}).stays ==
        std::vector<std::uint8_t>{0, 1, 1, 1, 1, 0});
  CHECK(chosen_by(span, {-0.0F, 0.0F, -0.0F, 0.0F, 0.0F, 0.0F}, 8, {}).stays ==
        std::vector<std::uint8_t>{1, 1, 0, 0, 0, 0});
}

TEST_CASE("pages: NaN of either sign and -inf are one lowest class", "[pages][nan]") {
  const PageSpan span{24, 0, 4};
  const float minus_nan = std::bit_cast<float>(0xFFC0'0000U);
  CHECK(chosen_by(span, {nan_f, -1e30F, minus_nan, inf_f, -inf_f, -2e30F}, 12, {}).stays ==
        std::vector<std::uint8_t>{0, 1, 0, 1, 0, 1});
  CHECK(chosen_by(span, {-inf_f, nan_f, minus_nan, inf_f, nan_f, -inf_f}, 12, {}).stays ==
        std::vector<std::uint8_t>{1, 1, 0, 1, 0, 0});
  CHECK(chosen_by(span, {nan_f, nan_f, nan_f, nan_f, nan_f, nan_f}, 8, {}).stays ==
        std::vector<std::uint8_t>{1, 1, 0, 0, 0, 0});
}

TEST_CASE("pages: a partly filled page stays at either end, whatever its score", "[pages][edge]") {
  // Padding 3, 18 rows: pages of 1, 4, 4, 4, 4 and 1 rows.
  const PageSpan span{18, 3, 4};
  const std::vector<float> scores{-9, 1, 2, 3, 4, -9};
  CHECK(chosen_by(span, scores, 10, {}).stays == std::vector<std::uint8_t>{1, 0, 0, 1, 1, 1});
  CHECK(chosen_by(span, scores, 9, {}).stays == std::vector<std::uint8_t>{1, 0, 0, 0, 1, 1});
  const Chosen none = chosen_by(span, scores, 1, {});
  CHECK(none.status == Status::over_budget);
  CHECK(none.stays == std::vector<std::uint8_t>{1, 0, 0, 0, 0, 1});
}

TEST_CASE("pages: one page, two pages, none", "[pages][edge]") {
  CHECK(chosen_by({0, 0, 4}, {}, 0, {1, 1}).status == Status::ok);
  CHECK(chosen_by({0, 9, 4}, {}, 0, {1, 1}).status == Status::ok);
  for (std::int32_t keep = 0; keep < 4; ++keep) {
    const Chosen bare = chosen_by({4, 0, 4}, {1}, keep, {});
    CHECK(bare.status == Status::ok);  // a whole page without protection goes
    CHECK(bare.stays == std::vector<std::uint8_t>{0});
    const Chosen guarded = chosen_by({4, 0, 4}, {1}, keep, {1, 0});
    CHECK(guarded.status == Status::over_budget);
    CHECK(guarded.stays == std::vector<std::uint8_t>{1});
  }
  CHECK(chosen_by({8, 0, 4}, {1, 2}, 4, {}).stays == std::vector<std::uint8_t>{0, 1});
  CHECK(chosen_by({8, 0, 4}, {1, 2}, 7, {}).stays == std::vector<std::uint8_t>{0, 1});
  CHECK(chosen_by({8, 0, 4}, {1, 2}, 4, {1, 0}).stays == std::vector<std::uint8_t>{1, 0});
  CHECK(chosen_by({8, 0, 4}, {2, 1}, 4, {0, 1}).stays == std::vector<std::uint8_t>{0, 1});
  CHECK(chosen_by({8, 0, 4}, {2, 1}, 7, {1, 1}).status == Status::over_budget);
}

TEST_CASE("pages: a window that ends on a page border protects no page before it",
          "[pages][edge]") {
  const PageSpan span{24, 0, 4};
  const std::vector<float> scores{6, 5, 4, 3, 2, 1};
  // The last 8 rows are pages 4 and 5 exactly; one row more is page 3 too.
  CHECK(chosen_by(span, scores, 8, {0, 8}).stays == std::vector<std::uint8_t>{0, 0, 0, 0, 1, 1});
  CHECK(chosen_by(span, scores, 12, {0, 9}).stays == std::vector<std::uint8_t>{0, 0, 0, 1, 1, 1});
  CHECK(chosen_by(span, scores, 8, {0, 7}).stays == std::vector<std::uint8_t>{0, 0, 0, 0, 1, 1});
  // Sinks likewise: 4 rows are page 0, 5 rows page 1 too.
  const std::vector<float> rising{1, 2, 3, 4, 5, 6};
  CHECK(chosen_by(span, rising, 8, {4, 0}).stays == std::vector<std::uint8_t>{1, 0, 0, 0, 0, 1});
  CHECK(chosen_by(span, rising, 8, {5, 0}).stays == std::vector<std::uint8_t>{1, 1, 0, 0, 0, 0});
}
