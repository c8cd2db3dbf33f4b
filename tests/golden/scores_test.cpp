// SPDX-License-Identifier: Apache-2.0
// Scores and kept sets against kvpress 0.5.5, computed in double. The files: tests/data/golden.
#include "golden_file.hpp"
#include "planned.hpp"

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/core/exact_sum.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace kvtrim;
using golden::kept_by;
using golden::layer;
using golden::Layer;
using golden::scores_of;
using golden::seq;

namespace {

constexpr Sums both_sums[] = {Sums::floating, Sums::exact};

// Largest |got - expected| / |expected| of the first `n`. Exact sums are also rounded to units, which is not counted.
double worst_of(const std::vector<float>& got,
                const std::vector<double>& expected,
                std::size_t n,
                Sums sums) {
  const double allowed = sums == Sums::exact ? 2 / exact_one : 0;
  double worst = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double error =
        std::max(0.0, std::fabs(static_cast<double>(got[i]) - expected[i]) - allowed) /
        std::fabs(expected[i]);
    worst = std::max(worst, std::isnan(got[i]) || std::isnan(error) ? HUGE_VAL : error);
  }
  return worst;
}

enum class Lse { computed, natural, binary };

struct Window {
  const char* name;
  std::int32_t window;
  std::int32_t kernel;
};
constexpr Window windows[] = {{"snapkv_w32_k5", 32, 5}, {"snapkv_w16_k7", 16, 7}};

void accumulate(const Layer& l, PagedCache& cache, std::int32_t first, std::int32_t n, Sums sums) {
  l.extend(cache, first, n);
  std::vector<std::byte> scratch(column_sums_scratch_bytes(l.dim));
  for (std::int32_t h = 0; h < l.kv_heads; ++h) {
    accumulate_column_sums({.sums = sums},
                           {cache.view(), seq, layer, HeadId{h}},
                           l.block(first, n, true),
                           layer,
                           scratch);
  }
}

// Prompts as one chunk, and as chunks of every kind.
std::vector<std::vector<std::int32_t>> cuts_of(std::int32_t tokens) {
  return {{tokens},
          {1, tokens - 1},
          {tokens - 1, 1},
          {13, 32, 1, tokens - 46},
          std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 1)};
}

}  // namespace

TEST_CASE("golden: window scores equal kvpress's SnapKV, with any LSE and without",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    PagedCache cache = l.make_cache(16);
    l.extend(cache, 0, l.tokens);
    std::vector<float> binary = l.lse;
    for (float& x : binary) { x = static_cast<float>(static_cast<double>(x) / std::log(2.0)); }
    for (const Window& w : windows) {
      WindowParams params;
      params.window = w.window;
      params.kernel = w.kernel;
      for (const auto& [form, sums] : {std::pair(Lse::computed, Sums::floating),
                                       std::pair(Lse::natural, Sums::floating),
                                       std::pair(Lse::binary, Sums::floating),
                                       std::pair(Lse::computed, Sums::exact),
                                       std::pair(Lse::binary, Sums::exact)}) {
        params.sums = sums;
        for (const std::int32_t rows : {w.window, l.tokens}) {  // no more than the window vote
          Observation obs;
          obs.queries = l.block(l.tokens - rows, rows, form != Lse::computed);
          if (form == Lse::binary) {
            obs.queries.lse = binary.data() + (l.tokens - rows);
            obs.queries.lse_base = LseBase::two;
          }
          for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            const auto got = scores_of(WindowScorer(params), cache.view(), HeadId{h}, obs);
            const auto scored = static_cast<std::size_t>(l.tokens - w.window);
            INFO(shape << ' ' << w.name << ", LSE form " << static_cast<int>(form) << ", sums "
                       << static_cast<int>(sums) << ", head " << h);
            CHECK(worst_of(got, l.file[w.name].row(h), scored, sums) < 1e-5);
            CHECK(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(scored),
                              got.end(),
                              [](float x) { return x == 0; }));
          }
        }
      }
    }
  }
}

TEST_CASE("golden: SnapKVSelector keeps kvpress's rows", "[golden][policy][parity]") {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      for (const Window& w : windows) {
        for (const char* const removed : {"0.25", "0.5", "0.75"}) {
          const std::string name = std::string("kept_") + w.name + "_" + removed;
          if (!l.file.has(name)) { continue; }
          for (const Sums sums : both_sums) {
            const SnapKVSelector policy({.window = w.window,
                                         .budget = kvpress_rows(l.tokens, std::stod(removed)),
                                         .kernel = w.kernel,
                                         .sums = sums});
            Observation obs;
            obs.queries = l.block(l.tokens - w.window, w.window, page_size != 4);
            for (std::int32_t h = 0; h < l.kv_heads; ++h) {
              INFO(shape << ' ' << name << ", head " << h << ", page size " << page_size
                         << ", sums " << static_cast<int>(sums));
              CHECK(kept_by(policy, cache.view(), HeadId{h}, obs) == l.file[name].row(h));
              ++compared;
            }
          }
        }
      }
    }
  }
  CHECK(compared == 2 * 3 * (2 * 2 + 2 * 1 + 1 * 2));  // mha has no set at 0.75
}

TEST_CASE("golden: column sums equal H2O's sums over the prompt, however it is cut into chunks",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const auto& cut : cuts_of(l.tokens)) {
      for (const Sums sums : both_sums) {
        PagedCache cache = l.make_cache(4, true);
        std::int32_t first = 0;
        for (const std::int32_t n : cut) {
          accumulate(l, cache, first, n, sums);
          first += n;
        }
        REQUIRE(first == l.tokens);
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
          INFO(shape << ", head " << h << ", " << cut.size() << " chunks, sums "
                     << static_cast<int>(sums));
          CHECK(worst_of(scores_of(AccumulatedScorer({}), cache.view(), HeadId{h}, {}),
                         l.file["h2o_prefill_sum"].row(h),
                         static_cast<std::size_t>(l.tokens),
                         sums) < 1e-5);
        }
      }
    }
  }
}

TEST_CASE("golden: age-normalised sums equal kvpress's ObservedAttention",
          "[golden][score][parity]") {
  const AccumulatedScorer scorer({.age_normalised = true});
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const auto& cut : cuts_of(l.tokens)) {
      PagedCache cache = l.make_cache(16, true);
      std::int32_t first = 0;
      for (const std::int32_t n : cut) {
        accumulate(l, cache, first, n, cut.size() % 2 == 0 ? Sums::exact : Sums::floating);
        first += n;
      }
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        INFO(shape << ", head " << h << ", " << cut.size() << " chunks");
        CHECK(worst_of(scores_of(scorer, cache.view(), HeadId{h}, {}),
                       l.file["observed"].row(h),
                       static_cast<std::size_t>(l.tokens),
                       Sums::exact) < 1e-5);
      }
    }
  }
}

TEST_CASE("golden: HeavyHitter keeps the best of kvpress's scores", "[golden][policy][parity]") {
  // There are no golden sets for these: the best rows of the golden scores, lower row first among equals.
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const Sums sums : both_sums) {
      PagedCache cache = l.make_cache(16, true);
      accumulate(l, cache, 0, l.tokens, sums);
      for (const bool aged : {false, true}) {
        for (const double removed : {0.25, 0.5, 0.75}) {
          const std::int32_t keep = kvpress_rows(l.tokens, removed);
          const HeavyHitter<AccumulateParams, HeavyMode::greedy> policy(
              {.heavy = keep, .recent = 0, .age_normalised = aged, .sums = sums});
          for (std::int32_t h = 0; h < l.kv_heads; ++h) {
            const auto scores = l.file[aged ? "observed" : "h2o_prefill_sum"].row(h);
            std::vector<double> order(scores.size());
            std::iota(order.begin(), order.end(), 0.0);
            const auto score = [&](double r) { return scores[static_cast<std::size_t>(r)]; };
            std::sort(order.begin(), order.end(), [&](double a, double b) {
              return score(a) != score(b) ? score(a) > score(b) : a < b;
            });
            const auto cut = order.begin() + keep;
            REQUIRE(score(*(cut - 1)) > score(*cut) * (1 + 4e-5));  // otherwise rounding may decide
            std::sort(order.begin(), cut);
            INFO(shape << ", sums " << static_cast<int>(sums) << ", aged " << aged << ", removed "
                       << removed << ", head " << h);
            CHECK(kept_by(policy, cache.view(), HeadId{h}, {}) ==
                  std::vector<double>(order.begin(), cut));
            ++compared;
          }
        }
      }
    }
  }
  CHECK(compared == 2 * 2 * 3 * (2 + 2 + 1));
}
