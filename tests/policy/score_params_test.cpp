// SPDX-License-Identifier: Apache-2.0
// What parameters of scores say about themselves, and that every policy made from them obeys it.
#include <kvtrim/policy/accumulate_params.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/chunk_kv.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/cur_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/lag_kv.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/policy/rkv.hpp>
#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/policy/tova.hpp>
#include <kvtrim/policy/window_params.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <vector>

using namespace kvtrim;

namespace {

// Parameters of which one is out of range, in every way there is.
template <class S>
std::vector<S> wrong();
template <>
std::vector<WindowParams> wrong() {
  return {{.window = 0}, {.window = -3}, {.kernel = 4}, {.kernel = 0}, {.kernel = -5}};
}
template <>
std::vector<RKVParams> wrong() {
  return {{.window = 0},
          {.window = -3},
          {.kernel = 4},
          {.kernel = 0},
          {.lambda = 1.5F},
          {.lambda = -0.5F},
          {.threshold = std::nanf("")},
          {.group = static_cast<RKVGroup>(7)}};
}
template <>
std::vector<CurParams> wrong() {
  return {{.window = -1}, {.form = static_cast<CurForm>(9)}};
}
Rope rope(RopeKind kind, std::int32_t offset, std::int32_t dim) {
  Rope r;
  r.kind = kind;
  r.offset = offset;
  r.dim = dim;
  return r;
}
template <>
std::vector<ExpectedAttentionParams> wrong() {
  return {{.sinks = -1},
          {.future = 0},
          {.epsilon = -1},
          {.epsilon = std::nanf("")},
          {.scale = -1},
          {.scale = std::numeric_limits<float>::infinity()},
          {.rope = rope(RopeKind::mrope, 0, 0)},
          {.rope = rope(RopeKind::standard, 0, 3)},
          {.rope = rope(RopeKind::standard, -1, 2)}};
}
template <>
std::vector<AccumulateParams> wrong() {
  return {{.decay = -5}, {.decay = 0}, {.decay = 1.5F}, {.decay = std::nanf("")}};
}
template <>
std::vector<LagKVParams> wrong() {
  return {
      {.lag = 0}, {.lag = -1}, {.sinks = -1}, {.lag = std::numeric_limits<std::int32_t>::max()}};
}

template <class P>
void refuses(const decltype(P().params().scores)& scores) {
  typename P::Params p;
  p.scores = scores;
  CHECK_THROWS_AS(P(p), std::invalid_argument);
}

// Every way to make a policy of scores, wrong ones inside.
template <class S>
void every_policy_refuses(const S& scores) {
  refuses<TopRows<S>>(scores);
  refuses<PageSelector<S>>(scores);
  refuses<ChunkKV<S>>(scores);
  refuses<TopRows<PerLayer<S>>>(PerLayer<S>{scores});
  refuses<TopRows<ValueNorm<S>>>(ValueNorm<S>{scores});
  refuses<TopRows<OutputNorm<S>>>(OutputNorm<S>{scores});
  refuses<TopRows<Chunked<S>>>(Chunked<S>{scores});
  refuses<PageSelector<PerLayer<S>>>(PerLayer<S>{scores});
  refuses<PageSelector<Chunked<S>>>(Chunked<S>{scores});
  refuses<ChunkKV<ValueNorm<S>>>(ValueNorm<S>{scores});
  refuses<TopRows<ValueNorm<PerLayer<S>>>>(ValueNorm<PerLayer<S>>{{scores}});
  typename TopRows<S>::Params inner;
  inner.scores = scores;
  CHECK_THROWS_AS(AdaKV<TopRows<S>>({.inner = inner}), std::invalid_argument);
  CHECK_THROWS_AS(CriticalKV<TopRows<S>>({.inner = inner}), std::invalid_argument);
}

}  // namespace

TEMPLATE_TEST_CASE("score params: no policy takes parameters that are out of range",
                   "[score_params][fault]",
                   WindowParams,
                   RKVParams,
                   CurParams,
                   ExpectedAttentionParams,
                   AccumulateParams,
                   LagKVParams) {
  for (const TestType& scores : wrong<TestType>()) { every_policy_refuses(scores); }
  CHECK_NOTHROW(TopRows<TestType>());
  CHECK_NOTHROW(PageSelector<TestType>());
  CHECK_NOTHROW(ChunkKV<TestType>());
}

TEST_CASE("score params: decorators check their own parameters wherever they stand",
          "[score_params][fault]") {
  for (const float epsilon : {-1.0F, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refuses<TopRows<ValueNorm<KeyNormParams>>>({{}, epsilon});
    refuses<PageSelector<ValueNorm<KeyNormParams>>>({{}, epsilon});
    refuses<ChunkKV<OutputNorm<KeyNormParams>>>({{}, epsilon});
    refuses<PageSelector<PerLayer<OutputNorm<KeyNormParams>>>>({{{}, epsilon}});
  }
  for (const std::int32_t chunk : {0, -1}) {  // a chunk of 0 rows was a division by 0 in a plan
    refuses<PageSelector<Chunked<WindowParams>>>({{}, chunk});
    refuses<TopRows<Chunked<KeyDiffParams>>>({{}, chunk});
    refuses<PageSelector<ValueNorm<Chunked<KeyDiffParams>>>>({{{}, chunk}});
  }
}

TEST_CASE("score params: rows without a score must be protected by whoever takes them",
          "[score_params]") {
  CHECK_THROWS_WITH(TopRows<WindowParams>({.recent = 31}),
                    "kvtrim::Window: recent 31 must be at least 32: the scores leave so many of "
                    "the last rows without one");
  CHECK_NOTHROW(TopRows<WindowParams>({.recent = 0, .scores = {.own_columns = true}}));
  using Deep = TopRows<ValueNorm<PerLayer<Chunked<WindowParams>>>>;
  CHECK_THROWS_AS(Deep({.recent = 31}), std::invalid_argument);
  CHECK(Deep().params().recent == 32);
  CHECK_THROWS_WITH(ChunkKV<WindowParams>({.recent = 31}),
                    "kvtrim::ChunkKV: recent 31 must be at least 32: the scores leave so many of "
                    "the last rows without one");
  CHECK_THROWS_AS(ChunkKV<ValueNorm<WindowParams>>({.recent = 31}), std::invalid_argument);
  CHECK_THROWS_AS(TopRows<LagKVParams>({.recent = 254}), std::invalid_argument);
}

TEST_CASE("score params: names are unique", "[score_params]") {
  const std::vector<std::string_view> names{WindowParams::name,
                                            RKVParams::name,
                                            CurParams::name,
                                            ExpectedAttentionParams::name,
                                            AccumulateParams::name,
                                            LagKVParams::name,
                                            ExternalParams::name,
                                            KeyDiffParams::name,
                                            KeyNormParams::name,
                                            QFilterParams::name,
                                            RandomParams::name,
                                            TovaParams::name,
                                            PerLayer<TovaParams>::name,
                                            ValueNorm<TovaParams>::name,
                                            OutputNorm<TovaParams>::name,
                                            Chunked<TovaParams>::name,
                                            LagKV::name,
                                            RecursiveLagKV::name,
                                            ChunkKV<>::name,
                                            PageSelector<>::name};
  CHECK(std::set<std::string_view>(names.begin(), names.end()).size() == names.size());
}
