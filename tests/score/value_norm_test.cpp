// SPDX-License-Identifier: Apache-2.0
#include "method_fixture.hpp"

#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/value_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <cmath>
#include <cstdint>
#include <vector>

using namespace score_test;

namespace {

std::int32_t rows_of(const MethodWorld& w, std::int32_t s, std::int32_t l, std::int32_t h) {
  return const_cast<MethodWorld&>(w).cache().live_rows(SequenceId{s}, LayerId{l}, HeadId{h});
}

template <class Scores>
ValueNormScorer<Scores> rescaled(const Scores& scores, float epsilon = 0) {
  return ValueNormScorer<Scores>({scores, epsilon});
}

}  // namespace

TEST_CASE("value_norm: equals a double reference for every size and dtype", "[value_norm]") {
  check_reference(ValueNormFactor{},
                  1e-6,
                  [](const MethodWorld& w, std::int32_t s, std::int32_t l, std::int32_t h) {
                    std::vector<double> out;
                    for (std::int32_t p = 0; p < rows_of(w, s, l, h); ++p) {
                      out.push_back(norm_of(w.value(s, l, h, p)));
                    }
                    return out;
                  });
  check_reference(
      rescaled(KeyNormParams{}, 0.75F),
      2e-6,
      [](const MethodWorld& w, std::int32_t s, std::int32_t l, std::int32_t h) {
        std::vector<double> out;
        for (std::int32_t p = 0; p < rows_of(w, s, l, h); ++p) {
          out.push_back((0.75 - norm_of(w.key(s, l, h, p))) * norm_of(w.value(s, l, h, p)));
        }
        return out;
      },
      48);
}

TEST_CASE("value_norm: no bit depends on page size, page place, batch, thread or old scratch",
          "[value_norm][property]") {
  check_bits(rescaled(KeyDiffParams{}, 1));
  check_bits(rescaled(WindowParams{.window = 4}));
  check_hole(rescaled(KeyDiffParams{}, 1));
  check_hole(rescaled(KeyNormParams{}, 1));
  check_scratch(rescaled(KeyDiffParams{}));
}

TEST_CASE("value_norm: row-local where the scorer is", "[value_norm]") {
  static_assert(RowLocalScorer<ValueNormScorer<KeyNormParams>>);
  static_assert(RowLocalScorer<ValueNormScorer<ValueNorm<RandomParams>>>);
  static_assert(!RowLocalScorer<ValueNormScorer<KeyDiffParams>>);
  static_assert(!RowLocalScorer<ValueNormScorer<WindowParams>>);
  check_ranges(rescaled(KeyNormParams{}, 0.5F));
  check_ranges(ValueNormFactor{});
}

TEST_CASE("value_norm: NaN where the score is, and where the value is not finite",
          "[value_norm][nan]") {
  MethodWorld world({});
  REQUIRE(world.append(0, 10) == Status::ok);
  const CacheView view = world.view();
  const SequenceId s{0};
  const LayerId l{0};
  const HeadId h{1};
  const float bad[] = {nan_f, inf_f, -inf_f};
  for (std::int32_t i = 0; i < 3; ++i) {
    std::memcpy(view.key(s, l, h, i), bad + i, 4);
    std::memcpy(view.value(s, l, h, 5 + i), bad + i, 4);
  }
  const auto got = scores_in(rescaled(KeyNormParams{}, 1), view, {}, 0, 0, 1);
  for (std::int32_t r = 0; r < 10; ++r) {
    CHECK(std::isnan(got[at(r)]) == (r < 3 || (r >= 5 && r < 8)));
  }
}

TEST_CASE("value_norm: values on pages of their own are read there", "[value_norm]") {
  // TensorRT-LLM's tables: a page id for K and one for V.
  MethodWorld world({.layers = 1});
  REQUIRE(world.append(0, 22) == Status::ok);
  const auto expected = scores_in(ValueNormFactor{}, world.view(), {}, 0, 0, 1);
  CacheView view = world.view();
  const std::int32_t pages = view.pages;
  std::vector<float> moved(at(view.v.page_stride / 4 * pages), nan_f);
  Plane values = view.v;
  values.base = reinterpret_cast<std::byte*>(moved.data());
  std::vector<std::int32_t> ids(at(2 * view.table.max_pages), -1);
  for (std::int32_t e = 0; e < 6; ++e) {
    const PageId from = view.v_page(SequenceId{0}, LayerId{0}, HeadId{0}, e);
    const PageId to{pages - 1 - e};
    ids[at(e)] = raw(from);
    ids[at(view.table.max_pages + e)] = raw(to);
    std::memcpy(values.row(LayerId{0}, to, HeadId{0}, Slot{0}),
                view.v.row(LayerId{0}, from, HeadId{0}, Slot{0}),
                at(view.v.page_stride));
  }
  view.v = values;
  view.table.ids = ids.data();
  view.table.v_offset = view.table.max_pages;
  CHECK(bits_of(scores_in(ValueNormFactor{}, view, {}, 0, 0, 1)) == bits_of(expected));
}

TEST_CASE("value_norm: values that cannot be read are a bad observation", "[value_norm][edge]") {
  MethodWorld world({});
  CacheView view = world.view();
  view.v.dtype = DType::i8;
  CHECK(rescaled(KeyNormParams{}).check(view, {}) == Status::bad_observation);
  view = world.view();
  view.k.dtype = DType::i8;
  CHECK(rescaled(KeyNormParams{}).check(view, {}) == Status::bad_observation);
}
