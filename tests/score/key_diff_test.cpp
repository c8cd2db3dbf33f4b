// SPDX-License-Identifier: Apache-2.0
#include "golden/golden_file.hpp"
#include "score_fixture.hpp"

#include <kvtrim/budget/rows.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/score/key_diff.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

using namespace score_test;

namespace {

// Minus the cosine with the mean of the normalised keys; a row that is not finite takes no part.
std::vector<double> reference(const std::vector<std::vector<double>>& keys) {
  const std::size_t dim = keys.empty() ? 0 : keys.front().size();
  const auto norm_of = [](const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) { sum += v * v; }
    return std::sqrt(sum);
  };
  std::vector<double> mean(dim, 0.0);
  for (const auto& key : keys) {
    const double norm = norm_of(key);
    if (!all_finite(key) || norm == 0) { continue; }
    for (std::size_t d = 0; d < dim; ++d) {
      mean[d] += key[d] / norm;  // a sum: the cosine does not see the divisor
    }
  }
  std::vector<double> out;
  for (const auto& key : keys) {
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d) { dot += key[d] * mean[d]; }
    const double norms = norm_of(key) * norm_of(mean);
    out.push_back(!all_finite(key) ? std::nan("") : norms == 0 ? 0.0 : -dot / norms);
  }
  return out;
}

std::vector<double> reference(const Data& d, std::int32_t h, std::vector<std::int32_t> order = {}) {
  if (order.empty()) {
    order.resize(at(d.tokens));
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<std::vector<double>> keys;
  for (const std::int32_t t : order) { keys.push_back(doubles(d.key(t, h), d.dim)); }
  return reference(keys);
}

// Cosines are compared by their difference: some are next to 0.
double distance(const std::vector<float>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) { return HUGE_VAL; }
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(got[i]);
    if (std::isnan(x) != std::isnan(expected[i])) { return HUGE_VAL; }
    if (!std::isnan(x)) { worst = std::max(worst, std::fabs(x - expected[i])); }
  }
  return worst;
}

std::vector<float> scores_of(TestCache& c, std::int32_t h, unsigned char fill = 0xFF) {
  return score_test::scores_of(
      KeyDiffScorer(KeyDiffParams{}), c.view(), c.sequence(), HeadId{h}, {}, fill);
}

}  // namespace

TEST_CASE("key_diff: equals a double reference for every size and dtype", "[key_diff]") {
  for (const std::int32_t dim : {1, 2, 7, 16, 64, 80, 128, 256}) {
    for (const std::int32_t tokens : {1, 2, 5, 47, 48, 49, 239, 240, 241, 500}) {
      const Data d = make_data(2, 1, dim, tokens, static_cast<std::uint32_t>(dim + tokens));
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        TestCache c(d, {.dtype = dtype, .page_size = 16, .others = 1});
        for (std::int32_t h = 0; h < 2; ++h) {
          INFO("dim " << dim << ", tokens " << tokens << ", dtype " << to_string(dtype));
          CHECK(distance(scores_of(c, h), reference(d, h)) < 2e-6);
        }
      }
    }
  }
}

TEST_CASE("key_diff: scores and kept sets equal kvpress's KeyDiff", "[key_diff][golden][parity]") {
  std::int32_t compared = 0;
  for (const char* const shape : golden::all_shapes) {
    const golden::Layer l(shape);
    for (const std::int32_t page_size : {1, 4, 16}) {
      PagedCache cache = l.make_cache(page_size);
      l.extend(cache, 0, l.tokens);
      const CacheView view = cache.view();
      const KeyDiffScorer scorer(KeyDiffParams{});
      std::vector<std::vector<float>> scores;
      for (std::int32_t h = 0; h < l.kv_heads; ++h) {
        scores.push_back(score_test::scores_of(scorer, view, SequenceId{0}, HeadId{h}, {}));
        INFO(shape << ", head " << h << ", page size " << page_size);
        CHECK(distance(scores.back(), l.file["keydiff"].row(h)) < 1e-5);
      }
      for (const char* const removed : {"0.25", "0.5", "0.75"}) {
        const std::string name = std::string("kept_keydiff_") + removed;
        REQUIRE(l.file.has(name));
        const std::int32_t keep = kvpress_rows(l.tokens, std::stod(removed));
        for (std::int32_t h = 0; h < l.kv_heads; ++h) {
          const auto best = test::best(scores[at(h)], keep);
          INFO(shape << ' ' << name << ", head " << h);
          CHECK(std::vector<double>(best.begin(), best.end()) == l.file[name].row(h));
          ++compared;
        }
      }
    }
  }
  CHECK(compared == 3 * 3 * (2 + 2 + 1));
}

TEST_CASE("key_diff: no bit depends on page size, page place, batch, executor or old scratch",
          "[key_diff][property]") {
  const KeyDiffScorer scorer(KeyDiffParams{});
  for (const std::int32_t dim : {7, 16, 64, 80, 256}) {
    const std::int32_t tokens = dim == 256 ? 205 : 491;  // three tiles
    const Data d = make_data(2, 1, dim, tokens, static_cast<std::uint32_t>(dim));
    TestCache first(d, {.page_size = 16});
    const std::vector<std::vector<std::uint32_t>> expected{bits_of(scores_of(first, 0)),
                                                           bits_of(scores_of(first, 1))};
    for (const std::int32_t page_size : {1, 3, 4, 16, 32}) {
      for (const bool alone : {true, false}) {
        TestCache c(d, {.page_size = page_size, .shuffled_pages = !alone, .others = alone ? 0 : 2});
        INFO("dim " << dim << ", page size " << page_size << ", alone " << alone);
        for (std::int32_t h = 0; h < 2; ++h) {
          CHECK(bits_of(scores_of(c, h, alone ? 0xFF : 0x00)) == expected[at(h)]);
        }
      }
    }
    TestCache per_head(d, {.page_size = 16, .scope = TableScope::head});
    for (std::int32_t h = 0; h < 2; ++h) {
      CHECK(bits_of(scores_of(per_head, h, 0x7F)) == expected[at(h)]);
    }
    // Any alignment of the memory, used again and again, on threads.
    TestCache batch(d, {.page_size = 4, .others = 1});
    const CacheView view = batch.view();
    const std::size_t bytes = scorer.scratch_bytes(plan_shape(view));
    std::vector<std::vector<float>> out(6, std::vector<float>(at(tokens + 3)));
    std::vector<std::thread> threads;
    for (std::int32_t w = 0; w < 3; ++w) {
      threads.emplace_back([&, w] {
        std::vector<std::byte> memory(bytes + 64);
        for (std::int64_t n = w; n < 6; n += 3) {
          const SequenceId s{static_cast<std::int32_t>(n / 2)};
          const HeadId h{static_cast<std::int32_t>(n % 2)};
          out[at(n)].resize(at(view.live_rows(s, LayerId{0}, h)));
          scorer.score({view, s, LayerId{0}, h},
                       {},
                       std::span(memory).subspan(at(n * 7), bytes),
                       out[at(n)]);
        }
      });
    }
    for (auto& t : threads) { t.join(); }
    CHECK(bits_of(out[2]) == expected[0]);
    CHECK(bits_of(out[3]) == expected[1]);
  }
}

TEST_CASE("key_diff: a key that is not finite scores NaN and takes no part", "[key_diff][nan]") {
  Data d = make_data(1, 1, 16, 60, 5);
  d.key(3, 0)[2] = nan_f;
  d.key(17, 0)[0] = inf_f;
  d.key(59, 0)[15] = -inf_f;
  TestCache c(d);
  const auto got = scores_of(c, 0);
  CHECK(distance(got, reference(d, 0)) < 2e-6);
  for (const std::int32_t r : {3, 17, 59}) { CHECK(std::isnan(got[at(r)])); }
  // What else it holds does not change a bit.
  d.key(3, 0)[5] = 1e30F;
  TestCache other(d);
  CHECK(bits_of(scores_of(other, 0)) == bits_of(got));

  for (std::int32_t t = 0; t < 60; ++t) { d.key(t, 0)[1] = nan_f; }
  TestCache all(d);
  for (const float x : scores_of(all, 0)) { CHECK(std::isnan(x)); }
}

TEST_CASE("key_diff: a key of norm 0 scores 0, and so do all where directions cancel",
          "[key_diff][edge]") {
  Data d = make_data(1, 1, 16, 30, 6);
  std::fill_n(d.key(0, 0), 16, 0.0F);
  std::fill_n(d.key(12, 0), 16, -0.0F);
  TestCache c(d);
  const auto got = scores_of(c, 0);
  CHECK(distance(got, reference(d, 0)) < 2e-6);
  CHECK(got[0] == 0.0F);
  CHECK(got[12] == 0.0F);

  std::fill(d.keys.begin(), d.keys.end(), 0.0F);
  TestCache zero(d);
  for (const float x : scores_of(zero, 0)) { CHECK(x == 0.0F); }
  for (std::int32_t t = 0; t < 30; ++t) { d.key(t, 0)[4] = t % 2 == 0 ? 1.5F : -1.5F; }
  TestCache opposite(d);
  for (const float x : scores_of(opposite, 0)) { CHECK(x == 0.0F); }
}

TEST_CASE("key_diff: lengths do not matter, directions do", "[key_diff]") {
  Data d = make_data(1, 1, 8, 40, 7);
  TestCache c(d);
  const auto got = scores_of(c, 0);
  for (std::int32_t t = 0; t < 40; ++t) {
    for (std::int32_t i = 0; i < 8; ++i) { d.key(t, 0)[i] *= t % 2 == 0 ? 4.0F : 0.25F; }
  }
  TestCache scaled(d);
  CHECK(distance(scores_of(scaled, 0), reference(d, 0)) < 2e-6);
  CHECK(bits_of(scores_of(scaled, 0)) == bits_of(got));
  // All alike: minus one; the one that differs is best.
  for (std::int32_t t = 0; t < 40; ++t) {
    std::fill_n(d.key(t, 0), 8, 0.0F);
    d.key(t, 0)[t == 23 ? 1 : 0] = 2;
  }
  TestCache alike(d);
  const auto one = scores_of(alike, 0);
  CHECK(one[0] == Catch::Approx(-1).margin(1e-3));
  CHECK(test::best(one, 1) == std::vector<std::int32_t>{23});
}

TEST_CASE("key_diff: rows out of order keep their scores, a hole is left out and scores 0",
          "[key_diff][edge]") {
  const Data d = make_data(2, 1, 16, 50, 8);
  const auto order = shuffled(50, 3);
  TestCache c(d, {.order = order});
  for (std::int32_t h = 0; h < 2; ++h) {
    CHECK(distance(scores_of(c, h), reference(d, h, order)) < 2e-6);
  }
  TestCache holed(d, {.page_size = 4});
  const CacheView view = holed.view();
  view.states[0].append_row = 9;
  view.states[0].live_rows = 49;
  std::vector<std::int32_t> others(50);
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + 9);
  auto expected = reference(d, 1, others);
  expected.insert(expected.begin() + 9, 0.0);
  CHECK(distance(scores_of(holed, 1), expected) < 2e-6);
}

TEST_CASE("key_diff: keys that cannot be read are a bad observation", "[key_diff][edge]") {
  const Data d = make_data(1, 1, 8, 4, 9);
  TestCache c(d);
  CacheView view = c.view();
  const KeyDiffScorer scorer(KeyDiffParams{});
  CHECK(scorer.check(view, {}) == Status::ok);
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    view.k.dtype = dtype;
    CHECK(scorer.check(view, {}) == Status::ok);
  }
  for (const DType dtype : {DType::i8, DType::opaque}) {  // without scales, of no known format
    view.k.dtype = dtype;
    CHECK(scorer.check(view, {}) == Status::bad_observation);
  }
}

TEST_CASE("key_diff: scratch_bytes is no less for a larger shape", "[key_diff]") {
  const KeyDiffScorer scorer(KeyDiffParams{});
  PlanShape shape;
  shape.max_rows = 100;
  for (std::int32_t dim = 1; dim < 700; ++dim) {  // tiles get shorter: the sum must not
    PlanShape larger = shape;
    shape.head_dim = dim;
    larger.head_dim = dim + 1;
    if (scorer.scratch_bytes(larger) < scorer.scratch_bytes(shape)) {
      FAIL_CHECK("head_dim " << dim << ": " << scorer.scratch_bytes(shape) << ", then "
                             << scorer.scratch_bytes(larger));
      break;
    }
  }
  shape.head_dim = 64;
  PlanShape longer = shape;
  longer.max_rows = 1000;
  CHECK(scorer.scratch_bytes(longer) > scorer.scratch_bytes(shape));
}
