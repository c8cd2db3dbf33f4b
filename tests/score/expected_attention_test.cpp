// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/expected_attention.hpp>

#include <kvtrim/core/rope.hpp>

#include "catch.hpp"
#include "kv_fixture.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

using namespace score_test;

namespace {

using Matrix = std::vector<std::vector<double>>;

// Statistics of `heads` query heads, any symmetric positive matrix.
struct Statistics {
  Statistics(std::int32_t query_heads, std::int32_t head_dim, std::uint32_t seed)
      : heads(query_heads), dim(head_dim) {
    std::mt19937 rng(seed);
    const auto draw = [&] { return static_cast<float>(rng() % 1000) / 500 - 1; };
    mean.resize(at(heads * dim));
    for (float& x : mean) { x = draw(); }
    covariance.assign(at(static_cast<std::int64_t>(heads) * dim * dim), 0.0F);
    std::vector<float> factor(at(dim * 3));
    for (std::int32_t head = 0; head < heads; ++head) {
      for (float& x : factor) { x = draw(); }
      for (std::int32_t i = 0; i < dim; ++i) {
        for (std::int32_t j = 0; j < dim; ++j) {
          for (std::int32_t k = 0; k < 3; ++k) {
            covariance[at((head * dim + i) * dim + j)] +=
                factor[at(i * 3 + k)] * factor[at(j * 3 + k)] / 4;
          }
        }
      }
    }
  }
  QueryStatistics of(std::int32_t layers = 1) const {
    QueryStatistics q;
    q.mean = mean.data();
    q.covariance = covariance.data();
    q.query_heads = heads;
    q.dim = dim;
    q.layers = layers;
    return q;
  }
  Observation observation() const {
    Observation obs;
    obs.statistics = of();
    return obs;
  }
  std::int32_t heads;
  std::int32_t dim;
  std::vector<float> mean;        // [heads, dim]
  std::vector<float> covariance;  // [heads, dim, dim]
};

// The mean of the rotation matrices of positions first .. first + count - 1, one by one.
Matrix mean_rotation_of(const Rope& rope,
                        std::int32_t dim,
                        std::int32_t first,
                        std::int32_t count) {
  Matrix r(at(dim), std::vector<double>(at(dim), 0.0));
  for (std::int32_t p = first; p < first + count; ++p) {
    for (std::int32_t i = 0; i < dim; ++i) {
      if (i < rope.offset || i >= rope.offset + rope.dim) { r[at(i)][at(i)] += 1.0 / count; }
    }
    for (std::int32_t j = 0; j < rope.dim / 2; ++j) {
      const bool split = rope.pairs == RopePairs::half_split;
      const std::size_t a = at(rope.offset + (split ? j : 2 * j));
      const std::size_t b = at(rope.offset + (split ? j + rope.dim / 2 : 2 * j + 1));
      const double angle = p * rope.inverse_frequencies[at(j)];
      r[a][a] += std::cos(angle) / count;
      r[b][b] += std::cos(angle) / count;
      r[a][b] -= std::sin(angle) / count;
      r[b][a] += std::sin(angle) / count;
    }
  }
  return r;
}

std::vector<double> product(const Matrix& m, const std::vector<double>& x) {
  std::vector<double> out;
  for (const auto& row : m) {
    out.push_back(std::inner_product(row.begin(), row.end(), x.begin(), 0.0));
  }
  return out;
}
Matrix transposed(const Matrix& m) {
  Matrix out(m.front().size(), std::vector<double>(m.size()));
  for (std::size_t i = 0; i < m.size(); ++i) {
    for (std::size_t j = 0; j < m[i].size(); ++j) { out[j][i] = m[i][j]; }
  }
  return out;
}

// By token, as the formula is written; the next position is `next`.
std::vector<double> reference(const KvData& d,
                              std::int32_t h,
                              const Statistics& q,
                              const ExpectedAttentionParams& p,
                              std::int32_t next) {
  const std::int32_t group = q.heads / d.kv_heads;
  const Matrix rotation = mean_rotation_of(p.rope, d.dim, next, p.future);
  const double scale = p.scale != 0 ? static_cast<double>(p.scale) : 1 / std::sqrt(d.dim);
  const auto keys = keys_of(d, h);
  std::vector<double> attention(keys.size(), 0.0);
  for (std::int32_t g = 0; g < group; ++g) {
    const std::int32_t head = h * group + g;
    const auto mean = product(rotation, doubles(q.mean.data() + head * d.dim, d.dim));
    Matrix covariance;
    for (std::int32_t i = 0; i < d.dim; ++i) {  // rows times R^T, then R times the columns
      covariance.push_back(
          product(rotation, doubles(q.covariance.data() + (head * d.dim + i) * d.dim, d.dim)));
    }
    covariance = transposed(covariance);
    for (auto& row : covariance) { row = product(rotation, row); }
    std::vector<double> logits;
    double sum = 0;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const auto& k = keys[j];
      double z = scale * std::inner_product(k.begin(), k.end(), mean.begin(), 0.0);
      if (p.covariance) {
        const auto ck = product(covariance, k);
        z += scale * scale / 2 * std::inner_product(k.begin(), k.end(), ck.begin(), 0.0);
      }
      logits.push_back(z);
      if (static_cast<std::int32_t>(j) >= p.sinks && all_finite(k)) { sum += std::exp(z); }
    }
    for (std::size_t j = at(p.sinks); j < keys.size(); ++j) {
      attention[j] += std::exp(logits[j]) / sum / group;
    }
  }
  std::vector<double> out;
  const auto values = values_of(d, h);
  for (std::size_t j = 0; j < keys.size(); ++j) {
    const auto& v = values[j];
    const double norm = std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
    const double weight = p.value_norm ? norm : 1.0;
    const bool bad = !all_finite(keys[j]) || (p.value_norm && !all_finite(v));
    out.push_back(bad ? std::nan("") : (attention[j] + static_cast<double>(p.epsilon)) * weight);
  }
  return out;
}

Rope rope_of(const std::vector<double>& frequencies,
             RopePairs pairs = RopePairs::half_split,
             std::int32_t offset = 0) {
  Rope rope;
  rope.inverse_frequencies = frequencies;
  rope.dim = static_cast<std::int32_t>(frequencies.size()) * 2;
  rope.offset = offset;
  rope.pairs = pairs;
  rope.same_for_all_layers = true;
  return rope;
}

std::vector<float> scores_of(const ExpectedAttentionParams& p,
                             KvCache& c,
                             std::int32_t h,
                             const Observation& obs,
                             unsigned char fill = 0xFF) {
  return score_test::scores_of(
      ExpectedAttentionScorer(p), c.view(), c.sequence(), HeadId{h}, obs, fill);
}

}  // namespace

TEST_CASE("expected_attention: equals a double reference for every size, rotation and switch",
          "[expected_attention]") {
  for (const std::int32_t dim : {2, 6, 16, 80}) {
    for (const std::int32_t tokens : {5, 49, 245}) {
      const KvData d = make_kv(2, dim, dim == 6 ? 3 : dim, tokens, static_cast<std::uint32_t>(dim));
      const Statistics q(6, dim, 3);
      const auto frequencies = rope_frequencies(10'000.0, dim);
      const auto partial = rope_frequencies(500.0, dim / 2 / 2 * 2 == 0 ? 2 : dim / 2 / 2 * 2);
      KvCache c(d, {.others = 1});
      std::vector<ExpectedAttentionParams> cases(6);
      for (auto& p : cases) { p.rope = rope_of(frequencies); }
      cases[1].rope.pairs = RopePairs::interleaved;
      cases[1].future = 1;
      cases[2].covariance = false;
      cases[2].epsilon = 0.02F;
      cases[3].value_norm = false;
      cases[3].sinks = 0;
      cases[3].scale = 0.4F;
      cases[4].rope = rope_of(
          partial, RopePairs::half_split, dim - static_cast<std::int32_t>(partial.size()) * 2);
      cases[4].future = 64;
      cases[5].rope = rope_of(partial, RopePairs::interleaved);
      cases[5].sinks = 1;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        for (std::int32_t h = 0; h < 2; ++h) {
          INFO("dim " << dim << ", tokens " << tokens << ", case " << i << ", head " << h);
          CHECK(error_of(scores_of(cases[i], c, h, q.observation()),
                         reference(d, h, q, cases[i], tokens)) < 1e-5);
        }
      }
    }
  }
}

TEST_CASE("expected_attention: 16-bit keys and values are converted on load",
          "[expected_attention]") {
  const KvData d = make_kv(1, 16, 16, 60, 4);
  const Statistics q(2, 16, 5);
  const auto frequencies = rope_frequencies(10'000.0, 16);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  KvCache plain(d);
  const auto expected = bits_of(scores_of(p, plain, 0, q.observation()));
  for (const DType dtype : {DType::f16, DType::bf16}) {
    KvCache c(d, {.dtype = dtype});
    CHECK(bits_of(scores_of(p, c, 0, q.observation())) == expected);
  }
}

TEST_CASE("expected_attention: the closed form of the mean rotation equals the sum",
          "[expected_attention]") {
  for (const double f :
       {0.0, 1e-9, 1e-4, 0.3, 1.0, 3.1, 3.14159265358979, 6.283185307179586, 7.0}) {
    for (const std::int32_t first : {0, 1, 1000, 131'072}) {
      for (const std::int32_t count : {1, 2, 512}) {
        double cosine = 0;
        double sine = 0;
        for (std::int32_t p = first; p < first + count; ++p) {
          cosine += std::cos(p * f) / count;
          sine += std::sin(p * f) / count;
        }
        const auto mean = detail::mean_rotation(f, first, count);
        INFO(f << ", " << first << ", " << count);
        CHECK(mean.cosine == Catch::Approx(cosine).margin(1e-9));
        CHECK(mean.sine == Catch::Approx(sine).margin(1e-9));
      }
    }
  }
}

TEST_CASE("expected_attention: queries to come start at the next rope position",
          "[expected_attention]") {
  const KvData d = make_kv(1, 8, 8, 30, 6);
  const Statistics q(1, 8, 7);
  const auto frequencies = rope_frequencies(10.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  p.future = 3;
  KvCache c(d);
  c.view().states[0].next_position = 400;
  c.view().states[0].next_rope_position = 77;
  CHECK(error_of(scores_of(p, c, 0, q.observation()), reference(d, 0, q, p, 77)) < 1e-5);
  CHECK(error_of(scores_of(p, c, 0, q.observation()), reference(d, 0, q, p, 400)) > 1e-3);
}

TEST_CASE("expected_attention: without a covariance the mean alone counts",
          "[expected_attention][edge]") {
  const KvData d = make_kv(1, 8, 8, 20, 8);
  const Statistics q(2, 8, 9);
  const auto frequencies = rope_frequencies(10.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  KvCache c(d);
  Observation obs = q.observation();
  obs.statistics.covariance = nullptr;
  const auto got = scores_of(p, c, 0, obs);
  p.covariance = false;
  CHECK(bits_of(got) == bits_of(scores_of(p, c, 0, q.observation())));
}

TEST_CASE("expected_attention: statistics of each sequence and layer are its own",
          "[expected_attention]") {
  const KvData d = make_kv(1, 8, 8, 20, 10);
  const Statistics mine(1, 8, 11);
  const Statistics others(1, 8, 12);
  const auto frequencies = rope_frequencies(10.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  KvCache c(d, {.others = 1});
  REQUIRE(raw(c.sequence()) == 1);
  std::vector<float> mean, covariance;
  for (const Statistics* const q : {&others, &mine, &others}) {
    mean.insert(mean.end(), q->mean.begin(), q->mean.end());
    covariance.insert(covariance.end(), q->covariance.begin(), q->covariance.end());
  }
  Observation obs = mine.observation();
  const auto expected = bits_of(scores_of(p, c, 0, obs));
  obs.statistics.mean = mean.data();
  obs.statistics.covariance = covariance.data();
  obs.statistics.per_sequence = true;
  CHECK(bits_of(scores_of(p, c, 0, obs)) == expected);
  obs.statistics.per_sequence = false;
  CHECK(bits_of(scores_of(p, c, 0, obs)) != expected);
}

TEST_CASE("expected_attention: no bit depends on page size, page place, batch or old scratch",
          "[expected_attention][property]") {
  for (const std::int32_t dim : {6, 64, 80}) {
    const KvData d = make_kv(2, dim, dim, 300, 13);
    const Statistics q(4, dim, 14);
    const auto frequencies = rope_frequencies(10'000.0, dim);
    ExpectedAttentionParams p;
    p.rope = rope_of(frequencies);
    std::vector<std::vector<std::uint32_t>> expected;
    for_each_place(d, [&](KvCache& c) {
      for (std::int32_t h = 0; h < 2; ++h) {
        const auto got =
            bits_of(scores_of(p, c, h, q.observation(), expected.size() % 2 ? 0 : 0x7F));
        if (expected.size() < 2) { expected.push_back(got); }
        CHECK(got == expected[at(h)]);
      }
    });
  }
}

TEST_CASE("expected_attention: rows out of order keep their scores, a hole is left out",
          "[expected_attention][edge]") {
  const KvData d = make_kv(1, 8, 8, 40, 15);
  const Statistics q(2, 8, 16);
  const auto frequencies = rope_frequencies(100.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  const auto order = shuffled(40, 2);
  KvCache c(d, {.order = order});
  CHECK(error_of(scores_of(p, c, 0, q.observation()), in_order(reference(d, 0, q, p, 40), order)) <
        1e-5);

  KvCache holed(d);
  holed.view().states[0].append_row = 7;
  holed.view().states[0].live_rows = 39;
  KvData rest = d;
  rest.tokens = 39;
  rest.keys.erase(rest.keys.begin() + 7 * 8, rest.keys.begin() + 8 * 8);
  rest.values.erase(rest.values.begin() + 7 * 8, rest.values.begin() + 8 * 8);
  auto expected = reference(rest, 0, q, p, 40);
  expected.insert(expected.begin() + 7, 0.0);
  CHECK(error_of(scores_of(p, holed, 0, q.observation()), expected) < 1e-5);
}

TEST_CASE("expected_attention: what is not finite scores NaN and moves no other row",
          "[expected_attention][nan]") {
  KvData d = make_kv(1, 8, 8, 40, 17);
  d.key(9, 0)[2] = nan_f;
  d.key(1, 0)[0] = inf_f;  // a sink
  d.value(20, 0)[3] = inf_f;
  const Statistics q(2, 8, 18);
  const auto frequencies = rope_frequencies(100.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  KvCache c(d);
  CHECK(error_of(scores_of(p, c, 0, q.observation()), reference(d, 0, q, p, 40)) < 1e-5);
  p.value_norm = false;
  CHECK(error_of(scores_of(p, c, 0, q.observation()), reference(d, 0, q, p, 40)) < 1e-5);

  // A query head without statistics has no vote; with none at all nothing can be said.
  Statistics half = q;
  half.covariance[at(8 * 8 + 5)] = inf_f;
  Statistics one = q;
  one.heads = 1;
  CHECK(bits_of(scores_of(p, c, 0, half.observation())) ==
        bits_of(scores_of(p, c, 0, one.observation())));
  half.mean[3] = nan_f;
  for (const float x : scores_of(p, c, 0, half.observation())) { CHECK(std::isnan(x)); }
  Statistics huge = q;
  for (float& x : huge.mean) { x = 3e38F; }
  p.future = 1;  // the mean over many positions is a shorter vector
  for (const float x : scores_of(p, c, 0, huge.observation())) { CHECK(std::isnan(x)); }
}

TEST_CASE("expected_attention: short prompts, zero and constant rows have their scores",
          "[expected_attention][edge]") {
  const Statistics q(1, 8, 19);
  const auto frequencies = rope_frequencies(100.0, 8);
  ExpectedAttentionParams p;
  p.rope = rope_of(frequencies);
  for (const std::int32_t tokens : {1, 4, 5}) {
    const KvData d = make_kv(1, 8, 8, tokens, 20);
    KvCache c(d);
    CHECK(error_of(scores_of(p, c, 0, q.observation()), reference(d, 0, q, p, tokens)) < 1e-5);
  }
  KvData d = make_kv(1, 8, 8, 12, 21);
  std::fill(d.keys.begin(), d.keys.end(), 0.25F);
  std::fill_n(d.value(7, 0), 8, 0.0F);
  KvCache c(d);
  const auto got = scores_of(p, c, 0, q.observation());
  CHECK(got[7] == 0.0F);
  p.value_norm = false;
  for (std::int32_t t = 4; t < 12; ++t) {
    CHECK(scores_of(p, c, 0, q.observation())[at(t)] == Catch::Approx(1.0 / 8));
  }
}

TEST_CASE(
    "expected_attention: statistics of another shape and rotations that do not fit are refused",
    "[expected_attention][edge]") {
  const KvData d = make_kv(2, 8, 8, 12, 22);
  const Statistics q(4, 8, 23);
  const auto frequencies = rope_frequencies(100.0, 8);
  ExpectedAttentionParams good;
  good.rope = rope_of(frequencies);
  KvCache c(d);
  CacheView view = c.view();
  const auto check = [&](const ExpectedAttentionParams& p, const Observation& obs) {
    return ExpectedAttentionScorer(p).check(view, obs);
  };
  CHECK(check(good, q.observation()) == Status::ok);
  CHECK(check(good, {}) == Status::bad_observation);
  Observation obs = q.observation();
  obs.statistics.dim = 16;
  CHECK(check(good, obs) == Status::bad_observation);
  obs = q.observation();
  obs.statistics.query_heads = 3;
  CHECK(check(good, obs) == Status::bad_observation);
  obs.statistics.query_heads = 0;
  CHECK(check(good, obs) == Status::bad_observation);
  obs = q.observation();
  obs.statistics.layers = 0;
  CHECK(check(good, obs) == Status::bad_observation);
  const auto refused = [&](auto change) {
    ExpectedAttentionParams p = good;
    change(p.rope);
    return check(p, q.observation()) == Status::bad_observation;
  };
  CHECK(refused([](Rope& r) { r = {}; }));
  CHECK(refused([](Rope& r) { r.offset = 2; }));
  CHECK(refused([](Rope& r) { r.inverse_frequencies = r.inverse_frequencies.first(3); }));
  CHECK(refused([](Rope& r) { r.kind = RopeKind::dynamic_ntk; }));
  view.layers = 2;  // frequencies per layer, yet of one layer only
  CHECK(refused([](Rope& r) { r.same_for_all_layers = false; }));
  view.layers = 1;
  CHECK_FALSE(refused([](Rope& r) { r.same_for_all_layers = false; }));
  view.v.dtype = DType::opaque;
  CHECK(check(good, q.observation()) == Status::bad_observation);
  good.value_norm = false;
  CHECK(check(good, q.observation()) == Status::ok);
  view.k.dtype = DType::opaque;
  CHECK(check(good, q.observation()) == Status::bad_observation);
}

TEST_CASE("expected_attention: scratch_bytes is no less for a larger shape",
          "[expected_attention]") {
  const ExpectedAttentionScorer scorer{ExpectedAttentionParams{}};
  PlanShape shape;
  shape.max_rows = 100;
  shape.query_heads = 4;
  shape.value_dim = 8;
  for (std::int32_t dim = 1; dim < 700; ++dim) {
    PlanShape larger = shape;
    shape.head_dim = dim;
    larger.head_dim = dim + 1;
    if (scorer.scratch_bytes(larger) < scorer.scratch_bytes(shape)) {
      FAIL_CHECK("head_dim " << dim);
      break;
    }
  }
  PlanShape larger = shape;
  larger.query_heads = 8;
  CHECK(scorer.scratch_bytes(larger) > scorer.scratch_bytes(shape));
  larger = shape;
  larger.value_dim = 900;
  CHECK(scorer.scratch_bytes(larger) > scorer.scratch_bytes(shape));
}
