// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/lag_kv.hpp>

#include "catch.hpp"
#include "kv_fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace score_test;

namespace {

using Rows = std::vector<std::vector<double>>;

// Softmax inside each partition, as the formula is written; NaN for a row that is not finite; empty behind the last scored.
std::vector<double> softmaxes(const Rows& rows, std::int32_t begin, std::int32_t lag) {
  const auto n = static_cast<std::int32_t>(rows.size());
  const std::int32_t partitions = (n - begin) / lag;
  const std::size_t dim = rows.front().size();
  std::vector<double> out(rows.size(), 0.0);
  for (std::int32_t p = 0; p + 1 < partitions; ++p) {
    const std::int32_t first = begin + p * lag;
    std::vector<double> deviations;
    for (std::int32_t t = first; t < first + lag; ++t) {
      std::vector<double> u;
      for (std::size_t c = 0; c < dim; ++c) {
        double low = std::numeric_limits<double>::infinity();
        double high = -low;
        for (std::int32_t j = first + lag; j < first + 2 * lag; ++j) {
          if (!all_finite(rows[at(j)])) { continue; }
          low = std::min(low, rows[at(j)][c]);
          high = std::max(high, rows[at(j)][c]);
        }
        if (high < low) { low = high = 0; }
        u.push_back((rows[at(t)][c] - low) / (high > low ? high - low : 1.0));
      }
      double mean = 0;
      for (const double x : u) { mean += x / static_cast<double>(dim); }
      double sum = 0;
      for (const double x : u) { sum += (x - mean) * (x - mean); }
      deviations.push_back(!all_finite(rows[at(t)]) ? std::nan("")
                           : dim == 1               ? 0.0
                                      : std::sqrt(sum / (static_cast<double>(dim) - 1)));
    }
    double total = 0;
    for (const double x : deviations) { total += std::isnan(x) ? 0.0 : std::exp(x); }
    for (std::int32_t i = 0; i < lag; ++i) {
      out[at(first + i)] = std::exp(deviations[at(i)]) / total;
    }
  }
  return out;
}

std::vector<double> reference(const KvData& d, std::int32_t h, const LagKVParams& p) {
  const std::int32_t begin = std::min(p.sinks, d.tokens);
  const std::int32_t partitions = (d.tokens - begin) / p.lag;
  std::vector<double> out(at(d.tokens), 0.0);
  if (partitions < 2) {
    for (std::int32_t t = 0; t < d.tokens; ++t) {
      out[at(t)] = t < begin ? 1.0 : static_cast<double>(t - begin) / (d.tokens - begin);
    }
    return out;
  }
  const auto k = softmaxes(keys_of(d, h), begin, p.lag);
  const auto v = softmaxes(values_of(d, h), begin, p.lag);
  for (std::int32_t q = 0; q + 1 < partitions; ++q) {
    const std::int32_t first = begin + q * p.lag;
    for (std::int32_t t = first; t < first + p.lag; ++t) {
      const double mine = (k[at(t)] + v[at(t)]) / 2;
      std::int32_t below = 0;
      for (std::int32_t j = first; j < first + p.lag; ++j) {
        const double other = (k[at(j)] + v[at(j)]) / 2;
        const double gap = other - mine;
        // Equal except for rounding: the lower position has the higher rank.
        const bool equal = std::fabs(gap) < 1e-12;
        below += std::isnan(other) || (equal ? j > t : gap < 0) ? 1 : 0;
      }
      out[at(t)] = std::isnan(mine)  ? mine
                   : p.cross_scoring ? mine
                                     : static_cast<double>(below) / p.lag;
    }
  }
  return out;
}

std::vector<float> scores_of(const LagKVParams& p,
                             KvCache& c,
                             std::int32_t h = 0,
                             unsigned char fill = 0xFF) {
  return score_test::scores_of(LagKVScorer(p), c.view(), c.sequence(), HeadId{h}, {}, fill);
}

}  // namespace

TEST_CASE("lag_kv: equals a double reference for every size", "[lag_kv]") {
  for (const std::int32_t dim : {1, 2, 16}) {
    for (const std::int32_t tokens : {1, 3, 4, 18, 19, 20, 21, 26, 27, 150}) {
      const KvData d =
          make_kv(2, dim, dim == 2 ? 5 : dim, tokens, static_cast<std::uint32_t>(tokens));
      for (const std::int32_t lag : {1, 8, 64}) {
        for (const bool cross : {false, true}) {
          const LagKVParams p{3, lag, cross, false};
          KvCache c(d);
          for (std::int32_t h = 0; h < 2; ++h) {
            INFO("dim " << dim << ", tokens " << tokens << ", lag " << lag << ", cross " << cross);
            CHECK(error_of(scores_of(p, c, h), reference(d, h, p)) < 1e-6);
          }
        }
      }
    }
  }
}

TEST_CASE("lag_kv: fewer rows than sinks and two partitions score by their order alone",
          "[lag_kv][edge]") {
  const KvData d = make_kv(1, 4, 4, 11, 3);
  KvCache c(d);
  const auto got = scores_of({2, 5, false, false}, c);  // one row less than 2 + 10
  CHECK(got[1] == 1.0F);
  for (std::int32_t t = 2; t < 11; ++t) {
    CHECK(got[at(t)] == Catch::Approx(static_cast<double>(t - 2) / 9));
  }
  for (const float x : scores_of({2, 5, false, true}, c)) { CHECK(x == 0.0F); }
}

TEST_CASE("lag_kv: constant channels are shifted, not divided by zero", "[lag_kv][edge]") {
  KvData d = make_kv(1, 4, 4, 26, 4);
  for (std::int32_t t = 0; t < 26; ++t) { d.key(t, 0)[1] = 0.5F; }
  std::fill_n(d.value(12, 0), 8 * 4, 1.25F);  // a partition of equal values behind the first one
  KvCache c(d);
  for (const bool cross : {false, true}) {
    const LagKVParams p{2, 8, cross, false};
    CHECK(error_of(scores_of(p, c), reference(d, 0, p)) < 1e-6);
  }
  std::fill(d.keys.begin(), d.keys.end(), 3.0F);
  std::fill(d.values.begin(), d.values.end(), -1.0F);
  KvCache constant(d);
  const auto got = scores_of({2, 8, false, false}, constant);
  for (std::int32_t i = 0; i < 16; ++i) {  // all alike: the lower position is better
    CHECK(got[at(2 + i)] == static_cast<float>(7 - i % 8) / 8);
  }
}

TEST_CASE("lag_kv: what is not finite scores NaN and sets no range", "[lag_kv][nan]") {
  KvData d = make_kv(1, 4, 4, 30, 5);
  d.key(5, 0)[1] = nan_f;
  d.value(13, 0)[2] = inf_f;
  d.key(20, 0)[0] = -inf_f;
  for (std::int32_t t = 22; t < 30; ++t) { d.value(t, 0)[0] = nan_f; }  // a partition without any
  for (const bool cross : {false, true}) {
    const LagKVParams p{2, 4, cross, false};
    KvCache c(d);
    const auto got = scores_of(p, c);
    CHECK(error_of(got, reference(d, 0, p)) < 1e-6);
    CHECK(std::isnan(got[5]));
    CHECK(std::isnan(got[13]));
  }
}

TEST_CASE("lag_kv: no bit depends on page size, page place, batch or old scratch",
          "[lag_kv][property]") {
  const KvData d = make_kv(2, 20, 12, 200, 6);
  for (const bool cross : {false, true}) {
    const LagKVParams p{4, 30, cross, false};
    std::vector<std::vector<std::uint32_t>> expected;
    for_each_place(d, [&](KvCache& c) {
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto got = bits_of(scores_of(p, c, h, expected.size() % 2 ? 0 : 0x7F));
        if (expected.size() < 2) { expected.push_back(got); }
        CHECK(got == expected[at(h)]);
      }
    });
    KvCache half(d, {.dtype = DType::f16});
    CHECK(bits_of(scores_of(p, half)) == expected[0]);
  }
}

TEST_CASE("lag_kv: partitions follow positions, not slots, and a hole is left out",
          "[lag_kv][edge]") {
  const KvData d = make_kv(1, 6, 6, 50, 7);
  const LagKVParams p{2, 8, false, false};
  const auto order = shuffled(50, 8);
  KvCache c(d, {.order = order});
  CHECK(error_of(scores_of(p, c), in_order(reference(d, 0, p), order)) < 1e-6);
  KvCache holed(d);
  holed.view().states[0].append_row = 7;
  holed.view().states[0].live_rows = 49;
  KvData rest = d;
  rest.tokens = 49;
  rest.keys.erase(rest.keys.begin() + 7 * 6, rest.keys.begin() + 8 * 6);
  rest.values.erase(rest.values.begin() + 7 * 6, rest.values.begin() + 8 * 6);
  auto expected = reference(rest, 0, p);
  expected.insert(expected.begin() + 7, 0.0);
  CHECK(error_of(scores_of(p, holed), expected) < 1e-6);
}

TEST_CASE("lag_kv: rows that cannot be read are a bad observation", "[lag_kv][edge]") {
  const KvData d = make_kv(1, 4, 4, 4, 9);
  KvCache c(d);
  CacheView view = c.view();
  const LagKVScorer scorer{LagKVParams{}};
  CHECK(scorer.check(view, {}) == Status::ok);
  view.v.dtype = DType::opaque;
  CHECK(scorer.check(view, {}) == Status::bad_observation);
  view = c.view();
  view.k.dtype = DType::f8e4m3;
  CHECK(scorer.check(view, {}) == Status::ok);
  view.k.dtype = DType::opaque;
  CHECK(scorer.check(view, {}) == Status::bad_observation);
}
