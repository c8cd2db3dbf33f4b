// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/query_moments.hpp>

#include "catch.hpp"
#include "score/score_fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

using namespace score_test;

namespace {

QueryBlock block_of(const Data& d, std::int32_t first, std::int32_t n) {
  QueryBlock b;
  b.data = d.queries.data() + static_cast<std::ptrdiff_t>(first) * d.dim;
  b.query_heads = d.heads();
  b.rows = n;
  b.head_stride = static_cast<std::int64_t>(d.tokens) * d.dim;
  b.row_stride = d.dim;
  return b;
}

// Two passes in double.
void check_against_reference(const QueryStatistics& got, const Data& d, std::int32_t sinks) {
  for (std::int32_t head = 0; head < d.heads(); ++head) {
    std::vector<std::vector<double>> rows;
    for (std::int32_t t = sinks; t < d.tokens; ++t) {
      const auto q = doubles(d.query(head, t), d.dim);
      if (all_finite(q)) { rows.push_back(q); }
    }
    const double n = std::max<double>(1, static_cast<double>(rows.size()));
    std::vector<double> mean(at(d.dim), 0.0);
    for (const auto& q : rows) {
      for (std::size_t i = 0; i < q.size(); ++i) { mean[i] += q[i] / n; }
    }
    for (std::size_t i = 0; i < mean.size(); ++i) {
      CHECK(static_cast<double>(got.mean_of(SequenceId{0}, LayerId{0}, head)[i]) ==
            Catch::Approx(mean[i]).epsilon(1e-7).margin(1e-12));
      for (std::size_t j = 0; j < mean.size(); ++j) {
        double sum = 0;
        for (const auto& q : rows) { sum += (q[i] - mean[i]) * (q[j] - mean[j]); }
        CHECK(static_cast<double>(
                  got.covariance_of(SequenceId{0}, LayerId{0}, head)[i * mean.size() + j]) ==
              Catch::Approx(sum / n).epsilon(1e-7).margin(1e-12));
      }
    }
  }
}

QueryMoments moments_of(const Data& d, std::int32_t sinks, const std::vector<std::int32_t>& cut) {
  QueryMoments m({.query_heads = d.heads(), .head_dim = d.dim, .sinks = sinks});
  std::int32_t first = 0;
  for (const std::int32_t n : cut) {
    m.accumulate(SequenceId{0}, LayerId{0}, block_of(d, first, n), LayerId{0});
    first += n;
  }
  m.finish(SequenceId{0});
  return m;
}

std::vector<std::uint32_t> bits_of(const QueryStatistics& q, std::int32_t s = 0) {
  std::vector<float> all;
  for (std::int32_t head = 0; head < q.query_heads; ++head) {
    const float* const mean = q.mean_of(SequenceId{s}, LayerId{0}, head);
    const float* const covariance = q.covariance_of(SequenceId{s}, LayerId{0}, head);
    all.insert(all.end(), mean, mean + q.dim);
    all.insert(all.end(), covariance, covariance + q.dim * q.dim);
  }
  return score_test::bits_of(all);
}

}  // namespace

TEST_CASE("query_moments: equal the mean and covariance of two passes", "[query_moments]") {
  for (const std::int32_t dim : {1, 3, 16}) {
    for (const std::int32_t tokens : {1, 4, 5, 6, 70}) {
      Data d = make_data(2, 3, dim, tokens, static_cast<std::uint32_t>(tokens));
      for (float& x : d.queries) { x += 100; }  // a mean far from 0: squares alone would cancel
      for (const std::int32_t sinks : {0, 4}) {
        INFO("dim " << dim << ", tokens " << tokens << ", sinks " << sinks);
        check_against_reference(
            moments_of(d, sinks, {tokens}).statistics(), d, std::min(sinks, tokens));
      }
    }
  }
}

TEST_CASE("query_moments: no bit depends on how the prompt is cut", "[query_moments][property]") {
  const Data d = make_data(1, 3, 16, 50, 3);
  const auto expected = bits_of(moments_of(d, 4, {50}).statistics());
  CHECK(bits_of(moments_of(d, 4, {1, 49}).statistics()) == expected);
  CHECK(bits_of(moments_of(d, 4, {3, 2, 0, 45}).statistics()) == expected);
  CHECK(bits_of(moments_of(d, 4, std::vector<std::int32_t>(50, 1)).statistics()) == expected);
}

TEST_CASE("query_moments: a query that is not finite is left out, of its head alone",
          "[query_moments][nan]") {
  Data d = make_data(1, 2, 8, 30, 4);
  d.query(0, 12)[3] = nan_f;
  d.query(1, 29)[0] = -inf_f;
  d.query(0, 2)[0] = nan_f;  // among the first ones, which do not count anyway
  check_against_reference(moments_of(d, 4, {30}).statistics(), d, 4);
}

TEST_CASE("query_moments: sequences and layers do not mix, and reset starts anew",
          "[query_moments]") {
  const Data a = make_data(1, 2, 8, 20, 5);
  const Data b = make_data(1, 2, 8, 20, 6);
  QueryMoments m({.sequences = 2, .layers = 2, .query_heads = 2, .head_dim = 8});
  QueryBlock both = block_of(a, 0, 20);  // sequence 1 is the other data, by the stride
  both.sequence_stride = b.queries.data() - a.queries.data();
  m.accumulate(SequenceId{0}, LayerId{0}, both, LayerId{0});
  m.accumulate(SequenceId{0}, LayerId{1}, block_of(b, 0, 20), LayerId{0});
  m.accumulate(SequenceId{1}, LayerId{0}, both, LayerId{0});
  m.finish(SequenceId{0});
  m.finish(SequenceId{1});
  CHECK(bits_of(m.statistics(), 0) == bits_of(moments_of(a, 4, {20}).statistics()));
  CHECK(bits_of(m.statistics(), 1) == bits_of(moments_of(b, 4, {20}).statistics()));
  CHECK(bits_of(m.statistics(SequenceId{1})) == bits_of(m.statistics(), 1));
  CHECK(m.statistics().layers == 2);
  const QueryStatistics all = m.statistics();
  CHECK(all.mean_of(SequenceId{0}, LayerId{1}, 0)[0] ==
        moments_of(b, 4, {20}).statistics().mean_of(SequenceId{0}, LayerId{0}, 0)[0]);

  m.reset(SequenceId{0});
  m.accumulate(SequenceId{0}, LayerId{0}, block_of(b, 0, 20), LayerId{0});
  m.finish(SequenceId{0});
  CHECK(bits_of(m.statistics(), 0) == bits_of(moments_of(b, 4, {20}).statistics()));
}

TEST_CASE("query_moments: a fork goes on from what its sequence has seen", "[query_moments]") {
  const Data d = make_data(1, 2, 8, 20, 7);
  QueryMoments m({.sequences = 3, .query_heads = 2, .head_dim = 8, .sinks = 9});
  m.accumulate(SequenceId{1}, LayerId{0}, block_of(d, 0, 7), LayerId{0});
  m.fork(SequenceId{1}, SequenceId{2});
  m.accumulate(SequenceId{2}, LayerId{0}, block_of(d, 7, 13), LayerId{0});
  m.finish(SequenceId{2});
  CHECK(bits_of(m.statistics(), 2) == bits_of(moments_of(d, 9, {20}).statistics()));
  m.fork(SequenceId{2}, SequenceId{0});
  CHECK(bits_of(m.statistics(), 0) == bits_of(m.statistics(), 2));
}

TEST_CASE("query_moments: impossible extents are refused with their values",
          "[query_moments][edge]") {
  CHECK_THROWS_WITH(QueryMoments(QueryMoments::Params{}),
                    "kvtrim::QueryMoments: head_dim 0 must be at least 1 "
                    "(sequences 1, layers 1, query_heads 1, head_dim 0, sinks 4)");
  CHECK_THROWS_AS(QueryMoments({.head_dim = 8, .sinks = -1}), std::invalid_argument);
}

TEST_CASE(
    "query_moments: heads added one by one, in any order, and layers finished one by one leave "
    "the same bits",
    "[query_moments][property]") {
  const Data d = make_data(2, 3, 8, 30, 77);
  QueryMoments whole({.layers = 2, .query_heads = 6, .head_dim = 8, .sinks = 4});
  QueryMoments parts({.layers = 2, .query_heads = 6, .head_dim = 8, .sinks = 4});
  const SequenceId s{0};
  std::int32_t first = 0;
  for (const std::int32_t n : {3, 5, 1, 21}) {
    const QueryBlock b = block_of(d, first, n);
    for (const LayerId l : {LayerId{0}, LayerId{1}}) {
      whole.accumulate(s, l, b, LayerId{0});
      for (const std::int32_t head : {4, 0, 2}) {
        parts.add_heads(s, l, b, SequenceId{0}, LayerId{0}, head, 2);
      }
      parts.advance(s, l, n);
    }
    first += n;
  }
  whole.finish(s);
  const auto equal = [&](LayerId l) {
    bool same = true;
    const QueryStatistics a = whole.statistics(), b = parts.statistics();
    for (std::int32_t head = 0; head < 6; ++head) {
      same = same &&
             std::equal(a.mean_of(s, l, head), a.mean_of(s, l, head) + 8, b.mean_of(s, l, head));
      same = same && std::equal(a.covariance_of(s, l, head),
                                a.covariance_of(s, l, head) + 64,
                                b.covariance_of(s, l, head));
    }
    return same;
  };
  parts.finish(s, LayerId{1});
  CHECK(equal(LayerId{1}));
  CHECK_FALSE(equal(LayerId{0}));
  parts.finish(s, LayerId{0});
  CHECK(equal(LayerId{0}));
}
