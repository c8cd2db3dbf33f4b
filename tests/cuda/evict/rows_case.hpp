// SPDX-License-Identifier: Apache-2.0
#pragma once

// One case of plan_test.cu by itself: defects are seeded into what moves rows, and each compiles this again (tests/emulator).

#include <kvtrim/cuda/evict/apply.cuh>

#include <kvtrim/policy/heavy_hitter.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

TEST_CASE("cuda::plan: rows of any size, aligned or not", "[cuda][parity]") {
  using namespace kvtrim;
  using kvtrim::test::World;
  using kvtrim::test::WorldShape;
  WorldShape shape;
  const int which = GENERATE(0, 1, 2, 3, 4);
  const DType types[] = {DType::f32, DType::f16, DType::f8e4m3, DType::f8e5m2, DType::bf16};
  shape.dtype = types[which];
  shape.k_dim = which == 2 ? 20 : which == 4 ? 129 : 64;
  shape.v_dim = which == 3 ? 3 : 32;
  shape.page_size = which == 1 ? 1 : 5;
  shape.max_pages = which == 1 ? 40 : 8;
  World world(shape);
  kvtrim::test::same(world,
                     HeavyHitter({.heavy = 8, .recent = 3, .removal = Removal::stable_pack}));
}
