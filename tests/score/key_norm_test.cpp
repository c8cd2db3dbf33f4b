// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/key_norm.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

const KeyNormScorer scorer(KeyNormParams{});

std::vector<double> reference(const MethodWorld& w,
                              std::int32_t s,
                              std::int32_t l,
                              std::int32_t h) {
  std::vector<double> out;
  const std::int32_t tokens =
      const_cast<MethodWorld&>(w).cache().live_rows(SequenceId{s}, LayerId{l}, HeadId{h});
  for (std::int32_t p = 0; p < tokens; ++p) { out.push_back(-norm_of(w.key(s, l, h, p))); }
  return out;
}

}  // namespace

TEST_CASE("key_norm: equals a double reference for every size and dtype", "[key_norm]") {
  check_reference(scorer, 1e-6, reference);
}

TEST_CASE("key_norm: no bit depends on page size, page place, batch, thread or old scratch",
          "[key_norm][property]") {
  check_bits(scorer);
  check_ranges(scorer);
  check_hole(scorer);
  check_scratch(scorer);
}

TEST_CASE("key_norm: a key that is not finite scores NaN, a zero key highest", "[key_norm][nan]") {
  Data d = make_data(1, 1, 16, 60, 5);
  d.key(3, 0)[2] = nan_f;
  d.key(17, 0)[0] = inf_f;
  d.key(59, 0)[15] = -inf_f;
  std::fill_n(d.key(20, 0), 16, -0.0F);
  TestCache c(d);
  const auto got = score_test::scores_of(scorer, c.view(), c.sequence(), HeadId{0}, {});
  for (std::int32_t r = 0; r < 60; ++r) {
    CHECK(std::isnan(got[at(r)]) == (r == 3 || r == 17 || r == 59));
  }
  CHECK(got[20] == 0.0F);
}

TEST_CASE("key_norm: large and tiny finite keys keep their order", "[key_norm][edge]") {
  // Squares of these overflow a float, or vanish.
  Data d = make_data(1, 1, 4, 4, 6);
  for (std::int32_t t = 0; t < 4; ++t) {
    const float scale = t == 0 ? 1e20F : t == 1 ? 2e20F : t == 2 ? 1e-30F : 2e-30F;
    std::fill_n(d.key(t, 0), 4, scale);
  }
  TestCache c(d);
  const auto got = score_test::scores_of(scorer, c.view(), c.sequence(), HeadId{0}, {});
  CHECK(got[0] == Catch::Approx(-2e20));
  CHECK(got[1] == Catch::Approx(-4e20));
  CHECK(got[2] > got[3]);
  CHECK(got[3] < 0);
}

TEST_CASE("key_norm: keys that cannot be read are a bad observation", "[key_norm][edge]") {
  MethodWorld world({});
  CacheView view = world.view();
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    view.k.dtype = dtype;
    CHECK(scorer.check(view, {}) == Status::ok);
  }
  for (const DType dtype : {DType::i8, DType::opaque}) {  // without scales, of no known format
    view.k.dtype = dtype;
    CHECK(scorer.check(view, {}) == Status::bad_observation);
  }
}
