// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/output_norm.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

// Mean over the group of sum_c |sum_d v_d W[d][c]|; MethodWorld's W_O are its numbers of kind 4.
std::vector<double> reference(const MethodWorld& w,
                              std::int32_t s,
                              std::int32_t l,
                              std::int32_t h) {
  const MethodSetup& setup = w.setup();
  std::vector<double> out;
  const std::int32_t tokens =
      const_cast<MethodWorld&>(w).cache().live_rows(SequenceId{s}, LayerId{l}, HeadId{h});
  for (std::int32_t p = 0; p < tokens; ++p) {
    const auto value = w.value(s, l, h, p);
    double total = 0;
    for (std::int32_t g = 0; g < setup.group; ++g) {
      std::vector<double> projected(at(setup.hidden), 0.0);
      for (std::int32_t d = 0; d < setup.value_dim; ++d) {
        const auto row = MethodWorld::numbers(4, 0, l, h * setup.group + g, d, setup.hidden);
        for (std::int32_t c = 0; c < setup.hidden; ++c) {
          projected[at(c)] += static_cast<double>(value[at(d)]) * static_cast<double>(row[at(c)]);
        }
      }
      for (const double x : projected) { total += std::fabs(x); }
    }
    out.push_back(total / setup.group);
  }
  return out;
}

template <class Scores>
OutputNormScorer<Scores> rescaled(const Scores& scores, float epsilon = 1e-4F) {
  return OutputNormScorer<Scores>({scores, epsilon});
}

}  // namespace

TEST_CASE("output_norm: the factor equals a double reference for every size and dtype",
          "[output_norm]") {
  check_reference(OutputNormFactor{}, 2e-6, reference, 241);
}

TEST_CASE("output_norm: a score is rescaled by it, epsilon first", "[output_norm]") {
  check_reference(
      rescaled(KeyNormParams{}, 0.5F),
      3e-6,
      [](const MethodWorld& w, std::int32_t s, std::int32_t l, std::int32_t h) {
        auto out = reference(w, s, l, h);
        for (std::size_t p = 0; p < out.size(); ++p) {
          out[p] *= 0.5 - norm_of(w.key(s, l, h, static_cast<std::int32_t>(p)));
        }
        return out;
      },
      48);
}

TEST_CASE("output_norm: no bit depends on page size, page place, batch, thread or old scratch",
          "[output_norm][property]") {
  check_bits(OutputNormFactor{});
  check_bits(rescaled(KeyDiffParams{}, 1));
  check_hole(OutputNormFactor{});
  check_hole(rescaled(KeyDiffParams{}, 1));
  check_scratch(rescaled(KeyDiffParams{}));
}

TEST_CASE("output_norm: a value that is not finite scores NaN, the others as before",
          "[output_norm][nan]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 12) == Status::ok);
  const auto before = scores_in(OutputNormFactor{}, world.view(), world.observation(), 0, 1, 0);
  const float bad = inf_f;
  std::memcpy(world.view().value(SequenceId{0}, LayerId{1}, HeadId{0}, 7), &bad, 4);
  auto after = scores_in(OutputNormFactor{}, world.view(), world.observation(), 0, 1, 0);
  CHECK(std::isnan(after[7]));
  after[7] = before[7];
  CHECK(bits_of(after) == bits_of(before));
  CHECK(std::isnan(
      scores_in(rescaled(KeyNormParams{}), world.view(), world.observation(), 0, 1, 0)[7]));
  // Weights that are not finite say nothing about any row: NaN for all rows of the group's KV head.
  Observation obs = world.observation();
  std::vector<float> w(at(2 * 6 * 6 * 10), 1.0F);
  w[at((6 + 1) * 60 + 5)] = nan_f;  // layer 1, query head 1, which is of KV head 0
  obs.output.data = w.data();
  for (const float x : scores_in(OutputNormFactor{}, world.view(), obs, 0, 1, 0)) {
    CHECK(std::isnan(x));
  }
  for (const float x : scores_in(OutputNormFactor{}, world.view(), obs, 0, 1, 1)) {
    CHECK(!std::isnan(x));
  }
}

TEST_CASE("output_norm: a missing or mis-shaped W_O is a bad observation", "[output_norm][edge]") {
  MethodWorld world({});
  const CacheView view = world.view();
  const auto status = [&](auto&& edit) {
    Observation obs = world.observation();
    edit(obs);
    return OutputNormFactor{}.check(view, obs);
  };
  CHECK(status([](Observation&) {}) == Status::ok);
  CHECK(status([](Observation& o) { o.queries = {}; }) == Status::ok);
  CHECK(status([](Observation& o) { o.output.layer_stride = 0; }) == Status::ok);  // one layer's
  const auto bad = Status::bad_observation;
  CHECK(status([](Observation& o) { o.output = {}; }) == bad);
  CHECK(status([](Observation& o) { o.output.value_dim = 7; }) == bad);
  CHECK(status([](Observation& o) { o.output.value_dim = 5; }) == bad);
  CHECK(status([](Observation& o) { o.output.hidden = 0; }) == bad);
  CHECK(status([](Observation& o) { o.output.query_heads = 1; }) == bad);
  CHECK(status([](Observation& o) { o.output.query_heads = 5; }) == bad);
  CHECK(status([](Observation& o) { o.output.query_heads = 4; }) == bad);  // the queries have 6
  CHECK(status([](Observation& o) { o.output.layer_stride -= 1; }) == bad);
  CacheView opaque = view;
  opaque.v.dtype = DType::opaque;
  CHECK(OutputNormFactor{}.check(opaque, world.observation()) == bad);
}
