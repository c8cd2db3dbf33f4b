// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/rkv.hpp>

#include "catch.hpp"
#include "score_fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace score_test;

namespace {

// Softmax over the entries that are not NaN; those stay NaN.
std::vector<double> softmax(const std::vector<double>& x) {
  double maximum = -std::numeric_limits<double>::infinity();
  for (const double v : x) { maximum = std::fmax(maximum, v); }
  double sum = 0;
  for (const double v : x) { sum += std::isnan(v) ? 0.0 : std::exp(v - maximum); }
  std::vector<double> out;
  for (const double v : x) { out.push_back(std::exp(v - maximum) / sum); }
  return out;
}

// By row, rows in position order.
std::vector<double> redundancy_of(const Head& p, double threshold) {
  const std::size_t n = p.keys.size();
  std::vector<std::vector<double>> similar(n, std::vector<double>(n, 0.0));
  double finite = 0;
  for (std::size_t i = 0; i < n; ++i) {
    finite += all_finite(p.keys[i]) ? 1 : 0;
    for (std::size_t j = 0; j < n; ++j) {
      const auto& a = p.keys[i];
      const auto& b = p.keys[j];
      const double norms = std::inner_product(a.begin(), a.end(), a.begin(), 0.0) *
                           std::inner_product(b.begin(), b.end(), b.begin(), 0.0);
      if (i == j || !all_finite(a) || !all_finite(b) || norms == 0) { continue; }
      similar[i][j] = std::inner_product(a.begin(), a.end(), b.begin(), 0.0) / std::sqrt(norms);
    }
    for (std::size_t j = n; j-- > 0;) {
      if (similar[i][j] > threshold) {
        similar[i][j] = 0;  // the newest copy
        break;
      }
    }
  }
  std::vector<double> mean(n, 0.0);
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t i = 0; i < n; ++i) { mean[j] += similar[i][j] / finite; }
    if (!all_finite(p.keys[j])) { mean[j] = std::nan(""); }
  }
  return softmax(mean);
}

std::vector<double> reference(const Head& p, const RKVParams& params) {
  const auto n = static_cast<std::int32_t>(p.keys.size());
  const std::int32_t columns = std::max(0, n - params.window);
  std::vector<double> attention(at(columns), 0.0);
  double voters = 0;
  for (std::size_t i = 0; i < p.query_positions.size(); ++i) {
    std::vector<std::vector<double>> heads;
    for (std::size_t g = 0; g < p.queries.size(); ++g) {
      if (!all_finite(p.queries[g][i])) { continue; }
      std::vector<double> logits;
      for (std::int32_t j = 0; j < columns; ++j) {
        logits.push_back(all_finite(p.keys[at(j)]) ? logit_of(p, g, i, at(j)) : std::nan(""));
      }
      heads.push_back(params.group == RKVGroup::logits ? logits : softmax(logits));
    }
    if (heads.empty()) { continue; }
    ++voters;
    std::vector<double> strongest = heads.front();
    for (const auto& head : heads) {
      for (std::size_t j = 0; j < head.size(); ++j) {
        strongest[j] = std::max(strongest[j], head[j]);
      }
    }
    if (params.group == RKVGroup::logits) { strongest = softmax(strongest); }
    for (std::size_t j = 0; j < strongest.size(); ++j) { attention[j] += strongest[j]; }
  }
  const auto redundancy = redundancy_of(p, static_cast<double>(params.threshold));
  std::vector<double> out;
  for (std::int32_t j = 0; j < n; ++j) {
    double best = j < columns ? -1.0 : 0.0;
    for (std::int32_t k = j - params.kernel / 2; k <= j + params.kernel / 2 && j < columns; ++k) {
      if (k >= 0 && k < columns) { best = std::fmax(best, attention[at(k)] / voters); }
    }
    const double lambda = static_cast<double>(params.lambda);
    const bool bad = !all_finite(p.keys[at(j)]) || (columns > 0 && voters == 0);
    out.push_back(bad ? std::nan("") : lambda * best - (1 - lambda) * redundancy[at(j)]);
  }
  return out;
}

// Largest difference, in units of an even share.
double distance(const std::vector<float>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) { return HUGE_VAL; }
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto x = static_cast<double>(got[i]);
    if (std::isnan(x) != std::isnan(expected[i])) { return HUGE_VAL; }
    if (!std::isnan(x)) {
      worst = std::max(worst, std::fabs(x - expected[i]) * static_cast<double>(got.size()));
    }
  }
  return worst;
}

std::vector<float> scores_of(const RKVParams& p,
                             TestCache& c,
                             std::int32_t h,
                             const QueryBlock& queries,
                             unsigned char fill = 0xFF) {
  Observation obs;
  obs.queries = queries;
  return score_test::scores_of(RKVScorer(p), c.view(), c.sequence(), HeadId{h}, obs, fill);
}

std::vector<RKVParams> variants() {
  return {{},
          RKVParams::authors_code(),
          {.window = 3, .kernel = 1, .lambda = 0.5F, .threshold = 0.2F},
          {.window = 5, .kernel = 3, .lambda = 1.0F},
          {.window = 5, .kernel = 9, .lambda = 0.0F, .threshold = 0.0F, .group = RKVGroup::logits}};
}

}  // namespace

TEST_CASE("rkv: equals a double reference for every size and variant", "[rkv]") {
  for (const std::int32_t dim : {1, 4, 16, 80}) {
    for (const std::int32_t tokens : {1, 3, 8, 9, 60, 245}) {
      const Data d = make_data(2, 3, dim, tokens, static_cast<std::uint32_t>(dim + tokens));
      TestCache c(d, {.others = 1});
      for (const RKVParams& p : variants()) {
        const std::int32_t votes = std::min(p.window, tokens);
        const Queries q(d, tokens - votes, votes, LseForm::computed);
        for (std::int32_t h = 0; h < 2; ++h) {
          INFO("dim " << dim << ", tokens " << tokens << ", window " << p.window << ", head " << h);
          CHECK(distance(scores_of(p, c, h, q.block),
                         reference(head_of(d, h, tokens - votes, votes), p)) < 2e-5);
        }
      }
    }
  }
}

TEST_CASE("rkv: of equal keys the newest is spared, so the older ones go first", "[rkv]") {
  Data d = make_data(1, 1, 16, 60, 3);
  for (const std::int32_t t : {5, 20, 33}) { std::copy_n(d.key(40, 0), 16, d.key(t, 0)); }
  TestCache c(d);
  const Queries q(d, 52, 8, LseForm::computed);
  const auto got = scores_of({.lambda = 0.0F}, c, 0, q.block);
  for (const std::int32_t t : {5, 20, 33}) { CHECK(got[at(t)] < got[at(40)]); }
}

TEST_CASE("rkv: only the last window of the queries votes, soft cap and scale are theirs",
          "[rkv]") {
  const Data d = make_data(1, 2, 16, 40, 4);
  TestCache c(d);
  const Queries last(d, 32, 8, LseForm::computed);
  Queries more(d, 20, 20, LseForm::computed);
  CHECK(bits_of(scores_of({}, c, 0, more.block)) == bits_of(scores_of({}, c, 0, last.block)));
  more.block.scale = 0.5F;
  more.block.soft_cap = 3.0F;
  Head p = head_of(d, 0, 32, 8);
  p.scale = 0.5;
  p.soft_cap = 3;
  CHECK(distance(scores_of({.lambda = 0.9F}, c, 0, more.block), reference(p, {.lambda = 0.9F})) <
        2e-5);
}

TEST_CASE("rkv: no bit depends on page size, page place, batch or old scratch", "[rkv][property]") {
  const Data d = make_data(2, 3, 64, 300, 5);
  const Queries q(d, 292, 8, LseForm::computed);
  for (const RKVParams& p : {RKVParams{}, RKVParams::authors_code()}) {
    std::vector<std::vector<std::uint32_t>> expected;
    for (const std::int32_t page_size : {16, 1, 3, 32}) {
      for (const bool alone : {true, false}) {
        TestCache c(d, {.page_size = page_size, .shuffled_pages = !alone, .others = alone ? 0 : 2});
        for (std::int32_t h = 0; h < 2; ++h) {
          const auto got = bits_of(scores_of(p, c, h, q.block, expected.size() % 2 ? 0 : 0x7F));
          if (expected.size() < 2) { expected.push_back(got); }
          INFO("page size " << page_size << ", alone " << alone);
          CHECK(got == expected[at(h)]);
        }
      }
    }
    TestCache half(d, {.dtype = DType::bf16});
    CHECK(bits_of(scores_of(p, half, 1, q.block)) == expected[1]);
  }
}

TEST_CASE("rkv: rows out of order keep their scores, a hole is left out", "[rkv][edge]") {
  const Data d = make_data(1, 2, 8, 50, 6);
  const Queries q(d, 42, 8, LseForm::computed);
  const auto order = shuffled(50, 7);
  TestCache c(d, {.order = order});
  const auto by_token = reference(head_of(d, 0, 42, 8), {});
  std::vector<double> expected;
  for (const std::int32_t t : order) { expected.push_back(by_token[at(t)]); }
  CHECK(distance(scores_of({}, c, 0, q.block), expected) < 2e-5);

  TestCache holed(d);
  holed.view().states[0].append_row = 9;
  holed.view().states[0].live_rows = 49;
  Head rest = head_of(d, 0, 42, 8);
  rest.keys.erase(rest.keys.begin() + 9);
  rest.positions.erase(rest.positions.begin() + 9);
  expected = reference(rest, {});
  expected.insert(expected.begin() + 9, 0.0);
  CHECK(distance(scores_of({}, holed, 0, q.block), expected) < 2e-5);
}

TEST_CASE("rkv: what is not finite scores NaN or has no vote", "[rkv][nan]") {
  Data d = make_data(1, 2, 8, 50, 8);
  d.key(7, 0)[1] = nan_f;
  d.key(30, 0)[0] = inf_f;
  d.key(48, 0)[3] = -inf_f;
  d.query(0, 45)[2] = nan_f;
  d.query(0, 47)[2] = inf_f;
  d.query(1, 47)[2] = inf_f;
  TestCache c(d);
  const Queries q(d, 42, 8, LseForm::computed);
  for (const RKVParams& p : variants()) {
    const std::int32_t votes = std::min(p.window, 8);
    CHECK(distance(scores_of(p, c, 0, q.block), reference(head_of(d, 0, 50 - votes, votes), p)) <
          2e-5);
  }
  for (std::int32_t t = 42; t < 50; ++t) {
    for (std::int32_t head = 0; head < 2; ++head) { d.query(head, t)[0] = t % 2 ? nan_f : 3e38F; }
  }
  for (std::int32_t t = 0; t < 50; ++t) { d.key(t, 0)[0] = 3e38F; }
  TestCache none(d);
  const Queries no_votes(d, 42, 8, LseForm::computed);
  for (const float x : scores_of({}, none, 0, no_votes.block)) { CHECK(std::isnan(x)); }
}

TEST_CASE("rkv: keys of norm 0 are like no other, constant keys are all alike", "[rkv][edge]") {
  Data d = make_data(1, 1, 8, 30, 9);
  std::fill_n(d.key(4, 0), 8, 0.0F);
  TestCache c(d);
  const Queries q(d, 22, 8, LseForm::computed);
  CHECK(distance(scores_of({}, c, 0, q.block), reference(head_of(d, 0, 22, 8), {})) < 2e-5);
  std::fill(d.keys.begin(), d.keys.end(), 0.5F);
  TestCache constant(d);
  const auto got = scores_of({}, constant, 0, q.block);
  CHECK(distance(got, reference(head_of(d, 0, 22, 8), {})) < 2e-5);
  CHECK(bits_of({got[0]}) == bits_of({got[20]}));
}

TEST_CASE("rkv: queries that are missing or fit no KV head are refused", "[rkv][edge]") {
  const Data d = make_data(2, 2, 8, 20, 10);
  TestCache c(d);
  CacheView view = c.view();
  const RKVScorer scorer{RKVParams{}};
  Observation obs;
  obs.queries = Queries(d, 12, 8, LseForm::computed).block;
  CHECK(scorer.check(view, obs) == Status::ok);
  obs.queries.query_heads = 3;
  CHECK(scorer.check(view, obs) == Status::bad_observation);
  obs.queries.query_heads = 4;
  obs.queries.data = nullptr;
  CHECK(scorer.check(view, obs) == Status::bad_observation);
  obs.queries.data = d.queries.data();
  view.k.dtype = DType::opaque;
  CHECK(scorer.check(view, obs) == Status::bad_observation);
}

TEST_CASE("rkv: scratch grows with rows, not with their square", "[rkv]") {
  const RKVScorer scorer{RKVParams{}};
  PlanShape shape;
  shape.query_heads = 3;
  shape.query_rows = 8;
  for (std::int32_t dim = 1; dim < 700; ++dim) {
    PlanShape larger = shape;
    shape.head_dim = dim;
    larger.head_dim = dim + 1;
    if (scorer.scratch_bytes(larger) < scorer.scratch_bytes(shape)) {
      FAIL_CHECK("head_dim " << dim);
      break;
    }
  }
  shape.head_dim = 64;
  const auto bytes = [&](std::int32_t rows) {
    shape.max_rows = rows;
    return scorer.scratch_bytes(shape);
  };
  CHECK(bytes(2000) > bytes(1000));
  CHECK(bytes(100'000) < 200 * 100'000);
}
