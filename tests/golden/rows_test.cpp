// SPDX-License-Identifier: Apache-2.0
// Methods that are a score alone, against kvpress 0.5.5, computed in double. The files: tests/data/golden.
#include "golden_file.hpp"
#include "planned.hpp"

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

using namespace kvtrim;
using golden::kept_by;
using golden::layer;
using golden::Layer;
using golden::scores_of;
using golden::seq;

namespace {

// Largest |got - expected| / |expected| where both are scores.
double worst_of(const std::vector<float>& got,
                const std::vector<double>& expected,
                std::size_t first,
                std::size_t last) {
  double worst = 0;
  for (std::size_t i = first; i < last; ++i) {
    if (std::isinf(expected[i])) { continue; }  // a sentinel
    const double error =
        std::fabs(static_cast<double>(got[i]) - expected[i]) / std::fabs(expected[i]);
    worst = std::max(worst, std::isnan(error) ? HUGE_VAL : error);
  }
  return worst;
}

// Kept sets of a method that needs keys only; returns how many were compared.
template <class P>
std::int32_t check_kept(const std::string& method) {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      for (const char* const removed : {"0.25", "0.5", "0.75"}) {
        const std::string name = "kept_" + method + "_" + removed;
        const P policy({.budget = kvpress_rows(l.tokens, std::stod(removed))});
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
          INFO(shape << ' ' << name << ", head " << h << ", page size " << page_size);
          CHECK(kept_by(policy, cache.view(), HeadId{h}, {}) == l.file[name].row(h));
          ++compared;
        }
      }
    }
  }
  return compared;
}

}  // namespace

TEST_CASE("golden: key norms equal kvpress's Knorm", "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    PagedCache cache = l.make_cache(4);
    l.extend(cache, 0, l.tokens);
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
      const auto got = scores_of(KeyNormScorer(KeyNormParams{}), cache.view(), HeadId{h}, {});
      INFO(shape << ", head " << h);
      CHECK(worst_of(got, l.file["knorm"].row(h), 0, got.size()) < 1e-5);
    }
  }
}

TEST_CASE("golden: KeyNorm and KeyDiff keep kvpress's rows", "[golden][policy][parity]") {
  CHECK(check_kept<KeyNorm>("knorm") == 3 * 3 * (2 + 2 + 1));
  CHECK(check_kept<KeyDiff>("keydiff") == 3 * 3 * (2 + 2 + 1));
}

TEST_CASE("golden: Tova's scores equal kvpress's, with the engine's LSE and without",
          "[golden][score][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    PagedCache cache = l.make_cache(16);
    l.extend(cache, 0, l.tokens);
    for (const bool lse : {false, true}) {
      for (const std::int32_t rows : {1, 40}) {  // the last query alone votes
        const Sums sums = rows == 1 ? Sums::exact : Sums::floating;
        Observation obs;
        obs.queries = l.block(l.tokens - rows, rows, lse);
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
          const auto got =
              scores_of(TovaScorer(TovaParams{.sums = sums}), cache.view(), HeadId{h}, obs);
          INFO(shape << ", head " << h << ", LSE " << lse << ", rows " << rows);
          // The last entry is kvpress's way to protect it.
          CHECK(worst_of(got, l.file["tova"].row(h), 0, got.size() - 1) < 1e-5);
          CHECK(got.back() > 0);
        }
      }
    }
  }
}

TEST_CASE("golden: Tova keeps the best of kvpress's scores and the last row, in all heads",
          "[golden][policy][parity]") {
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    PagedCache cache = l.make_cache(4);
    l.extend(cache, 0, l.tokens);
    Observation obs;
    obs.queries = l.block(l.tokens - 1, 1, false);
    for (const double removed : {0.25, 0.5, 0.75}) {
      const std::int32_t keep = kvpress_rows(l.tokens, removed);
      const auto scores = l.file["tova"].row(0);  // the sentinel is its highest
      std::vector<double> order(scores.size());
      std::iota(order.begin(), order.end(), 0.0);
      const auto score = [&](double r) { return scores[static_cast<std::size_t>(r)]; };
      std::sort(
          order.begin(), order.end(), [&](double a, double b) { return score(a) > score(b); });
      const auto cut = order.begin() + keep;
      REQUIRE(score(*(cut - 1)) > score(*cut) * (1 + 4e-5));  // otherwise rounding may decide
      std::sort(order.begin(), cut);
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        INFO(shape << ", removed " << removed << ", head " << h);
        for (const Sums sums : {Sums::floating, Sums::exact}) {
          const Tova policy({.budget = keep, .scores = {.sums = sums}});
          CHECK(kept_by(policy, cache.view(), HeadId{h}, obs) ==
                std::vector<double>(order.begin(), cut));
        }
      }
    }
  }
}

TEST_CASE("golden: window scores rescaled by W_O equal CriticalKV's second stage",
          "[golden][score][parity]") {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const Layer l(shape);
    if (!l.file.has("critical_snapkv_w32")) { continue; }
    PagedCache cache = l.make_cache(16);
    l.extend(cache, 0, l.tokens);
    const auto w = l.file["W_O"].floats();
    Observation obs;
    obs.queries = l.block(l.tokens - 32, 32, false);
    obs.output = {w.data(), l.heads, l.dim, l.file["W_O"].shape[2], 0};
    const OutputNormScorer<WindowParams> scorer({.scores = {.window = 32, .kernel = 5}});
    for (std::int32_t h = 0; h < l.kv_heads; ++h) {
      const auto expected = l.file["critical_snapkv_w32"].row(h);
      const auto scored = static_cast<std::ptrdiff_t>(l.tokens - 32);
      INFO(shape << ", head " << h);
      // The first stage is `inf` there: about a half of the rest must be left to compare.
      CHECK(std::count_if(expected.begin(), expected.begin() + scored, [](double x) {
              return std::isfinite(x);
            }) > l.tokens / 4);
      CHECK(worst_of(scores_of(scorer, cache.view(), HeadId{h}, obs),
                     expected,
                     0,
                     static_cast<std::size_t>(scored)) < 1e-5);
      ++compared;
    }
  }
  CHECK(compared == 2 + 1);
}
