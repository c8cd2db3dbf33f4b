// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/cur.hpp>

#include "catch.hpp"
#include "kv_fixture.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

std::vector<double> shares(const std::vector<std::vector<double>>& rows, std::int32_t window) {
  std::vector<double> out;
  for (const auto& x : rows) {
    out.push_back(all_finite(x) ? std::inner_product(x.begin(), x.end(), x.begin(), 0.0)
                                : std::nan(""));
  }
  const std::vector<double> squares = out;
  const auto n = static_cast<std::int32_t>(out.size());
  for (std::int32_t t = 0; t < n; ++t) {
    const std::int32_t first = window == 0 ? 0 : t / window * window;
    double sum = 0;
    for (std::int32_t j = first; j < (window == 0 ? n : std::min(n, first + window)); ++j) {
      sum += std::isnan(squares[at(j)]) ? 0.0 : squares[at(j)];
    }
    if (sum > 0) { out[at(t)] /= sum; }
  }
  return out;
}

std::vector<double> reference(const KvData& d, std::int32_t h, const CurParams& p) {
  const auto k = shares(keys_of(d, h), p.window);
  const auto v = shares(values_of(d, h), p.window);
  std::vector<double> out;
  double total = 0;
  for (std::size_t t = 0; t < k.size(); ++t) {
    const double forms[] = {k[t] * v[t], (k[t] + v[t]) / 2, k[t], v[t]};
    out.push_back(forms[static_cast<std::size_t>(p.form)]);
    total += std::isnan(out.back()) ? 0.0 : out.back();
  }
  for (double& x : out) { x = total > 0 ? x / total : x; }
  return out;
}

std::vector<float> scores_of(const CurParams& p,
                             KvCache& c,
                             std::int32_t h = 0,
                             unsigned char fill = 0xFF) {
  return score_test::scores_of(CurScorer(p), c.view(), c.sequence(), HeadId{h}, {}, fill);
}

constexpr CurForm forms[] = {CurForm::product, CurForm::average, CurForm::keys, CurForm::values};

}  // namespace

TEST_CASE("cur: equals a double reference for every form and size", "[cur]") {
  for (const std::int32_t tokens : {1, 15, 16, 17, 70}) {
    const KvData d = make_kv(2, 16, 5, tokens, static_cast<std::uint32_t>(tokens));
    KvCache c(d);
    for (const CurForm form : forms) {
      for (const std::int32_t window : {0, 1, 7, 16}) {
        for (std::int32_t h = 0; h < 2; ++h) {
          INFO("tokens " << tokens << ", form " << static_cast<int>(form) << ", window " << window);
          CHECK(error_of(scores_of({window, form}, c, h), reference(d, h, {window, form})) < 1e-6);
        }
      }
    }
  }
}

TEST_CASE("cur: a window of zeros scores 0 and makes no NaN", "[cur][edge]") {
  KvData d = make_kv(1, 4, 4, 40, 3);
  std::fill_n(d.key(16, 0), 16 * 4, 0.0F);
  KvCache c(d);
  const auto got = scores_of({}, c);
  CHECK(error_of(got, reference(d, 0, {})) < 1e-6);
  for (std::int32_t t = 16; t < 32; ++t) { CHECK(got[at(t)] == 0.0F); }
  std::fill(d.values.begin(), d.values.end(), 0.0F);
  KvCache zero(d);
  for (const float x : scores_of({}, zero)) { CHECK(x == 0.0F); }
}

TEST_CASE("cur: constant rows share their windows evenly", "[cur][edge]") {
  KvData d = make_kv(1, 4, 4, 32, 4);
  std::fill(d.keys.begin(), d.keys.end(), 2.0F);
  std::fill(d.values.begin(), d.values.end(), -1.0F);
  KvCache c(d);
  for (const float x : scores_of({}, c)) { CHECK(x == Catch::Approx(1.0 / 32)); }
}

TEST_CASE("cur: what is not finite scores NaN and takes no part", "[cur][nan]") {
  KvData d = make_kv(1, 4, 4, 40, 5);
  d.key(3, 0)[1] = nan_f;
  d.value(20, 0)[0] = inf_f;
  KvCache c(d);
  for (const CurForm form : forms) {
    INFO(static_cast<int>(form));
    CHECK(error_of(scores_of({16, form}, c), reference(d, 0, {16, form})) < 1e-6);
  }
}

TEST_CASE("cur: no bit depends on page size, page place, batch or old scratch", "[cur][property]") {
  const KvData d = make_kv(2, 20, 12, 150, 6);
  std::vector<std::vector<std::uint32_t>> expected;
  for_each_place(d, [&](KvCache& c) {
    for (std::int32_t h = 0; h < 2; ++h) {
      const auto got = bits_of(scores_of({}, c, h, expected.size() % 2 ? 0 : 0x7F));
      if (expected.size() < 2) { expected.push_back(got); }
      CHECK(got == expected[at(h)]);
    }
  });
}

TEST_CASE("cur: windows follow positions, not slots, and a hole is left out", "[cur][edge]") {
  const KvData d = make_kv(1, 6, 6, 50, 7);
  const auto order = shuffled(50, 8);
  KvCache c(d, {.order = order});
  CHECK(error_of(scores_of({}, c), in_order(reference(d, 0, {}), order)) < 1e-6);
  KvCache holed(d);
  holed.view().states[0].append_row = 7;
  holed.view().states[0].live_rows = 49;
  KvData rest = d;
  rest.tokens = 49;
  rest.keys.erase(rest.keys.begin() + 7 * 6, rest.keys.begin() + 8 * 6);
  rest.values.erase(rest.values.begin() + 7 * 6, rest.values.begin() + 8 * 6);
  auto expected = reference(rest, 0, {});
  expected.insert(expected.begin() + 7, 0.0);
  CHECK(error_of(scores_of({}, holed), expected) < 1e-6);
}

TEST_CASE("cur: what a form needs must be readable, and nothing else", "[cur][edge]") {
  const KvData d = make_kv(1, 4, 4, 4, 9);
  KvCache c(d);
  CacheView view = c.view();
  view.v.dtype = DType::opaque;
  CHECK(CurScorer({}).check(view, {}) == Status::bad_observation);
  CHECK(CurScorer({16, CurForm::keys}).check(view, {}) == Status::ok);
  view = c.view();
  view.k.dtype = DType::opaque;
  CHECK(CurScorer({16, CurForm::keys}).check(view, {}) == Status::bad_observation);
  CHECK(CurScorer({16, CurForm::values}).check(view, {}) == Status::ok);
}
