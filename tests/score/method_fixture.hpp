// SPDX-License-Identifier: Apache-2.0
#pragma once

// What every scorer of a MethodWorld must obey, whatever its formula.

#include "score_fixture.hpp"

#include <kvtrim/score/row_local.hpp>
#include <kvtrim/score/scorer.hpp>

#include "catch.hpp"
#include "support/method_world.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace score_test {

using test::Keys;
using test::MethodSetup;
using test::MethodWorld;

/// Scores of one KV head, from scratch memory filled with `fill`.
template <class S>
std::vector<float> scores_in(const S& scorer,
                             const CacheView& view,
                             const Observation& obs,
                             std::int32_t s,
                             std::int32_t l,
                             std::int32_t h,
                             unsigned char fill = 0xFF) {
  REQUIRE(scorer.check(view, obs) == Status::ok);
  Scratch scratch(scorer.scratch_bytes(plan_shape(view, obs)), fill);
  const SequenceState state = view.state(SequenceId{s}, LayerId{l}, HeadId{h});
  std::vector<float> out(at(state.extent()), -7.0F);
  scorer.score({view, SequenceId{s}, LayerId{l}, HeadId{h}}, obs, scratch, out);
  return out;
}

/// Compares all heads with `reference(world, s, l, h) -> [tokens]`, in several shapes and dtypes.
template <class S, class Reference>
void check_reference(const S& scorer,
                     double bound,
                     Reference reference,
                     std::int32_t longest = 500) {
  struct Shape {
    std::int32_t kv_heads, group, dim, value_dim, hidden;
  };
  for (const Shape shape :
       {Shape{2, 3, 8, 6, 10}, Shape{3, 1, 64, 64, 131}, Shape{1, 2, 5, 1, 1}}) {
    for (const std::int32_t tokens : {1, 2, 48, 241, longest}) {
      if (tokens > longest) { continue; }
      for (const DType dtype : {DType::f32, DType::bf16}) {
        if (dtype == DType::bf16 && tokens != 48) { continue; }
        MethodWorld world({.kv_heads = shape.kv_heads,
                           .group = shape.group,
                           .dim = shape.dim,
                           .value_dim = shape.value_dim,
                           .hidden = shape.hidden,
                           .page_size = 16,
                           .sequences = 2,
                           .max_rows = 520,
                           .dtype = dtype});
        REQUIRE(world.append(0, 3) == Status::ok);
        REQUIRE(world.append(1, tokens) == Status::ok);
        const Observation obs = world.observation();
        for (std::int32_t l = 0; l < 2; ++l) {
          for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
            INFO("dim " << shape.dim << ", tokens " << tokens << ", layer " << l << ", head " << h);
            CHECK(error_of(scores_in(scorer, world.view(), obs, 1, l, h),
                           reference(world, 1, l, h)) < bound);
          }
        }
      }
    }
  }
}

/// No bit depends on page size, page place, batch, table scope, old scratch or thread.
template <class S>
void check_bits(const S& scorer) {
  for (const std::int32_t dim : {7, 64}) {
    const std::int32_t tokens = 253;  // two tiles
    const MethodSetup base{.dim = dim, .value_dim = dim + 1, .page_size = 16, .max_rows = 300};
    MethodWorld first(base);
    REQUIRE(first.append(0, tokens) == Status::ok);
    const auto expected = bits_of(scores_in(scorer, first.view(), first.observation(), 0, 1, 1));
    for (const std::int32_t page_size : {1, 3, 16}) {
      for (const TableScope scope : {TableScope::group, TableScope::head}) {
        MethodSetup setup = base;
        setup.page_size = page_size;
        setup.scope = scope;
        setup.shuffled = true;
        setup.sequences = 3;
        setup.first_name = -1;
        MethodWorld world(setup);
        for (const std::int32_t s : {0, 1, 2}) {
          REQUIRE(world.append(s, s == 1 ? tokens : 9 + s) == Status::ok);
        }
        const Observation obs = world.observation();
        const CacheView view = world.view();
        INFO("dim " << dim << ", page size " << page_size);
        CHECK(bits_of(scores_in(scorer, view, obs, 1, 1, 1, 0x00)) == expected);
        CHECK(bits_of(scores_in(scorer, view, obs, 1, 1, 1, 0x7F)) == expected);
        // Any alignment of the memory, on threads.
        const std::size_t bytes = scorer.scratch_bytes(plan_shape(view, obs));
        std::vector<std::vector<float>> out(3, std::vector<float>(at(tokens)));
        std::vector<std::thread> threads;
        for (std::size_t w = 0; w < 3; ++w) {
          threads.emplace_back([&, w] {
            std::vector<std::byte> memory(bytes + 64);
            scorer.score({view, SequenceId{1}, LayerId{1}, HeadId{1}},
                         obs,
                         std::span(memory).subspan(w * 7, bytes),
                         out[w]);
          });
        }
        for (auto& t : threads) { t.join(); }
        for (const auto& x : out) { CHECK(bits_of(x) == expected); }
      }
    }
  }
}

/// Rows of a hole score 0, the others what they score where there is no hole but the same rows.
template <class S>
void check_hole(const S& scorer) {
  MethodWorld world({});
  REQUIRE(world.append(0, 30) == Status::ok);
  const CacheView view = world.view();
  const Observation obs = world.observation();
  view.states[0].append_row = 9;
  view.states[0].live_rows = 29;
  const auto holed = scores_in(scorer, view, obs, 0, 1, 1);
  REQUIRE(holed.size() == 30);
  CHECK(holed[9] == 0.0F);
  // The rows behind it, moved up by one.
  view.states[0].append_row = -1;
  view.states[0].live_rows = 30;
  for (std::int32_t l = 0; l < 2; ++l) {
    for (std::int32_t h = 0; h < 2; ++h) {
      const SequenceId s{0};
      for (std::int32_t r = 9; r < 29; ++r) {
        std::memcpy(view.key(s, LayerId{l}, HeadId{h}, r),
                    view.key(s, LayerId{l}, HeadId{h}, r + 1),
                    at(view.k.row_bytes()));
        std::memcpy(view.value(s, LayerId{l}, HeadId{h}, r),
                    view.value(s, LayerId{l}, HeadId{h}, r + 1),
                    at(view.v.row_bytes()));
        view.positions.at<Position>(s, LayerId{l}, HeadId{h}, r) = Position{r + 1};
      }
    }
  }
  view.states[0].live_rows = 29;
  auto packed = scores_in(scorer, view, obs, 0, 1, 1);
  packed.insert(packed.begin() + 9, 0.0F);
  CHECK(bits_of(packed) == bits_of(holed));
}

/// Scores of any range of rows are those of `score`, bit for bit; a hole among them too.
template <RowLocalScorer S>
void check_ranges(const S& scorer) {
  MethodWorld world({.dim = 7, .value_dim = 9, .max_rows = 300});
  REQUIRE(world.append(0, 260) == Status::ok);
  const CacheView view = world.view();
  const Observation obs = world.observation();
  Scratch scratch(scorer.scratch_bytes(plan_shape(view, obs)));
  for (const std::int32_t hole : {-1, 0, 117, 259}) {
    view.states[0].append_row = hole;
    view.states[0].live_rows = hole >= 0 ? 259 : 260;
    const auto all = scores_in(scorer, view, obs, 0, 1, 0);
    for (const std::int32_t first : {0, 1, 5, 116, 117, 118, 239, 240, 259}) {
      for (const std::int32_t n : {0, 1, 3, 260 - first}) {
        if (first + n > 260) { continue; }
        std::vector<float> some(at(n), -7.0F);
        scorer.score_rows({view, SequenceId{0}, LayerId{1}, HeadId{0}}, obs, first, scratch, some);
        INFO("hole " << hole << ", rows " << first << " + " << n);
        CHECK(bits_of(some) == bits_of({all.begin() + first, all.begin() + first + n}));
      }
    }
  }
}

/// scratch_bytes is no less for a larger shape.
template <class S>
void check_scratch(const S& scorer) {
  PlanShape shape;
  shape.max_rows = 100;
  shape.query_heads = 4;
  shape.query_rows = 4;
  shape.hidden = 40;
  bool monotone = true;
  for (std::int32_t dim = 1; dim < 700; ++dim) {  // tiles get shorter: the sum must not
    PlanShape larger = shape;
    shape.head_dim = shape.value_dim = dim;
    larger.head_dim = larger.value_dim = dim + 1;
    monotone = monotone && scorer.scratch_bytes(larger) >= scorer.scratch_bytes(shape);
  }
  CHECK(monotone);
  PlanShape longer = shape;
  longer.max_rows = 1000;
  CHECK(scorer.scratch_bytes(longer) >= scorer.scratch_bytes(shape));
}

inline double norm_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) { sum += static_cast<double>(v) * static_cast<double>(v); }
  return std::sqrt(sum);
}

}  // namespace score_test
