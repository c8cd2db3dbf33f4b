// SPDX-License-Identifier: Apache-2.0
// That all scorers read quantised rows as if widened beforehand is a law of policies (tests/policy/laws_test.cpp).
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/core/block_format.hpp>
#include <kvtrim/engine/llama_cpp.hpp>
#include <kvtrim/engine/vllm.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/rerotate.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/score/key_norm.hpp>

#include "catch.hpp"
#include "support/by_score.hpp"
#include "support/instances.hpp"
#include "support/method_world.hpp"
#include "support/quantised.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

using namespace kvtrim;
using test::MethodWorld;
using test::Quantisation;
using test::QuantisedCache;
using test::ScaleKind;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::string refusal(const CacheView& view) {
  try {
    check_layout(view);
  } catch (const std::invalid_argument& e) { return e.what(); }
  return "not refused";
}

}  // namespace

TEST_CASE("quantised: every fp8 number is what its format says", "[quantised]") {
  for (std::int32_t i = 0; i < 256; ++i) {
    const auto x = static_cast<std::uint8_t>(i);
    for (const DType t : {DType::f8e4m3, DType::f8e5m2}) {
      const double wanted = test::plain_value(t, x);
      const float read = t == DType::f8e4m3 ? f8e4m3_to_float(x) : f8e5m2_to_float(x);
      INFO(to_string(t) << " " << i);
      if (std::isnan(wanted)) {
        CHECK(std::isnan(read));
      } else {
        CHECK(std::bit_cast<std::uint32_t>(read) ==
              std::bit_cast<std::uint32_t>(static_cast<float>(wanted)));
      }
    }
  }
}

TEST_CASE("quantised: rows that llama.cpp quantised widen to what it widens them to",
          "[quantised]") {
  for (const BlockFormat f :
       {BlockFormat::q8_0, BlockFormat::q4_0, BlockFormat::q4_1, BlockFormat::q5_1}) {
    const test::Blocks& blocks = test::blocks_of(f);
    REQUIRE(blocks.bytes.size() == 16);
    for (std::size_t b = 0; b < blocks.bytes.size(); ++b) {
      REQUIRE(blocks.bytes[b].size() == static_cast<std::size_t>(block_bytes(f)));
      std::array<float, 32> out{};
      widen_blocks(f, blocks.bytes[b].data(), 32, out.data());
      INFO(to_string(f) << " " << b);
      CHECK(std::memcmp(out.data(), blocks.values[b].data(), sizeof out) == 0);
    }
  }
}

TEST_CASE("quantised: attention summed up over quantised keys is that over widened ones",
          "[quantised]") {
  MethodWorld world({.dim = 32, .value_dim = 32, .max_rows = 44});
  REQUIRE(world.append(0, 37) == Status::ok);
  for (const Quantisation& q : test::quantisations()) {
    QuantisedCache cache(world.view(), q);
    const QueryBlock queries = world.observation().queries;
    std::vector<std::byte> scratch(column_sums_scratch_bytes(32));
    std::vector<float> sums;
    for (const CacheView* view : {&cache.quantised, &cache.widened}) {
      std::vector<float> plane(4 * 44), rounding(4 * 44), lse(12 * 8);
      CacheView v = *view;
      v.score_sums = SequencePlane::dense(plane.data(), 2, 2, 44);
      v.score_compensations = SequencePlane::dense(rounding.data(), 2, 2, 44);
      QueryBlock block = queries;
      block.lse = lse.data();
      block.lse_head_stride = 8;
      accumulate_column_sums({}, {v, {}, LayerId{1}, HeadId{1}}, block, LayerId{1}, scratch);
      sums.insert(sums.end(), plane.begin(), plane.end());
    }
    const std::size_t half = sums.size() / 2;
    CHECK(std::memcmp(sums.data(), sums.data() + half, half * 4) == 0);
    CHECK(sums[3 * 44] != 0);
  }
}

TEST_CASE("quantised: rows move as bytes, and their scales with them", "[quantised]") {
  MethodWorld world({.dim = 32, .value_dim = 32, .max_rows = 44, .shuffled = true});
  REQUIRE(world.append(0, 37) == Status::ok);
  const Observation obs = world.observation(true);
  const test::ByScore policy{.keep = 13};
  for (const Quantisation& q : test::quantisations()) {
    QuantisedCache cache(world.view(), q);
    const CacheView& view = cache.quantised;
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
    const PlanRef made = plan(policy, view, obs, workspace);
    REQUIRE(made.status() == Status::ok);
    std::vector<std::vector<std::byte>> wanted;
    std::vector<float> scales;
    for (std::int32_t i = 0; i < 4; ++i) {
      const HeadRef head{view, {}, LayerId{i / 2}, HeadId{i % 2}};
      made.for_each_kept({}, head.layer, head.head, [&](std::int32_t r) {
        const RowPlace at = place_of(head, r);
        for (const Plane* p : {&view.k, &view.v}) {
          const std::byte* const from = p->row(head.layer, at.k_page, head.head, at.slot);
          wanted.emplace_back(from, from + p->row_bytes());
          scales.push_back(p->scale(head.layer, at.k_page, head.head, at.slot));
        }
      });
    }
    REQUIRE((apply(made, view) == Status::ok));
    std::size_t next = 0, wrong = 0;
    for (std::int32_t i = 0; i < 4; ++i) {
      const HeadRef head{view, {}, LayerId{i / 2}, HeadId{i % 2}};
      for (std::int32_t r = 0; r < 13; ++r) {
        const RowPlace at = place_of(head, r);
        for (const Plane* p : {&view.k, &view.v}) {
          const std::byte* const from = p->row(head.layer, at.k_page, head.head, at.slot);
          wrong += std::memcmp(from, wanted[next].data(), wanted[next].size()) == 0 ? 0 : 1;
          wrong += p->scale(head.layer, at.k_page, head.head, at.slot) == scales[next] ? 0 : 1;
          ++next;
        }
      }
    }
    INFO(to_string(q.dtype) << " " << static_cast<int>(q.scales));
    CHECK(next == wanted.size());
    CHECK(wrong == 0);
    world.cache().view().states[0].applied = false;  // as if it had been committed
  }
}

TEST_CASE("quantised: a scale that is NaN makes its row one, a scale of zero a row of zeros",
          "[quantised][nan]") {
  MethodWorld world({.dim = 32, .value_dim = 32, .max_rows = 44});
  REQUIRE(world.append(0, 20) == Status::ok);
  QuantisedCache cache(world.view(), {DType::i8, BlockFormat::none, ScaleKind::token});
  const HeadRef head{cache.quantised, {}, LayerId{1}, HeadId{1}};
  const auto scale_of = [&](std::int32_t r) -> float& {
    const RowPlace at = place_of(head, r);
    const Scales& s = cache.quantised.k.scales;
    const std::int64_t bytes = s.layer_stride + raw(at.k_page) * s.page_stride + s.head_stride +
                               raw(at.slot) * s.token_stride;
    return cache.scales(false)[static_cast<std::size_t>(bytes / 4)];
  };
  scale_of(3) = not_a_number;
  scale_of(5) = 0;
  const KeyNorm policy({.budget = 10, .sinks = 0, .recent = 0});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.quantised)));
  const PlanRef made = plan(policy, cache.quantised, {}, workspace);
  REQUIRE(made.status() == Status::ok);
  CHECK(made.nan_count() == 1);
  std::vector<std::int32_t> kept;
  made.for_each_kept({}, head.layer, head.head, [&](std::int32_t r) { kept.push_back(r); });
  CHECK(std::find(kept.begin(), kept.end(), 3) == kept.end());
  CHECK(std::find(kept.begin(), kept.end(), 5) != kept.end());  // the lowest norm is the best
}

TEST_CASE("quantised: scales that would stay behind, or that nothing has room for, are refused",
          "[quantised][edge]") {
  MethodWorld world({.dim = 32, .value_dim = 32, .max_rows = 44});
  QuantisedCache beside(world.view(), {DType::i8, BlockFormat::none, ScaleKind::token});
  CHECK(refusal(beside.quantised) == "not refused");
  CacheView view = beside.quantised;
  view.page_plane_count = 1;  // those of the values
  CHECK(refusal(view).find("scales of values have a page stride") != std::string::npos);
  QuantisedCache inside(world.view(), {DType::f8e4m3, BlockFormat::none, ScaleKind::in_row});
  view = inside.quantised;
  view.k.scales.in_row = 31;
  CHECK(refusal(view).find("31 bytes behind the first") != std::string::npos);
  view.k.scales.in_row = 33;  // the next row begins at 36
  CHECK(refusal(view).find("keys overlap") != std::string::npos);
  view = world.view();
  view.k.scales.in_row = 32;
  CHECK(refusal(view).find("dtype f32") != std::string::npos);
  QuantisedCache blocks(world.view(), {DType::opaque, BlockFormat::q4_1, ScaleKind::none});
  view = blocks.quantised;
  view.v.opaque_row_bytes = 18;
  CHECK(refusal(view).find("rows of 18 bytes of 32 features") != std::string::npos);
  CHECK_THROWS_AS(Plane::blocks(nullptr, BlockFormat::q8_0, 2, 48), std::invalid_argument);
  CHECK_THROWS_AS(Plane::blocks(nullptr, BlockFormat::none, 2, 64), std::invalid_argument);
}

TEST_CASE("quantised: keys are never rotated in place, and what cannot be read is not scored",
          "[quantised][edge]") {
  MethodWorld world({.dim = 32, .value_dim = 32, .max_rows = 44});
  REQUIRE(world.append(0, 20) == Status::ok);
  const std::array<double, 4> frequencies{1, 0.5, 0.25, 0.125};
  const Rope rope{.inverse_frequencies = frequencies, .dim = 8, .same_for_all_layers = true};
  std::vector<std::int32_t> ropes(4 * 44);
  for (const Quantisation& q : test::quantisations()) {
    QuantisedCache cache(world.view(), q);
    cache.quantised.rope_positions = SequencePlane::dense(ropes.data(), 2, 2, 44);
    try {
      const Rerotator rerotator(cache.quantised, rope, PositionMode::in_cache);
      CHECK(false);
    } catch (const std::invalid_argument& e) {
      CHECK(std::string(e.what()).find("keys of dtype " + std::string(to_string(q.dtype))) !=
            std::string::npos);
    }
  }
  QuantisedCache cache(world.view(), {DType::i8, BlockFormat::none, ScaleKind::tensor});
  cache.quantised.k.scales = {};
  const KeyNorm policy({.budget = 8});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(cache.quantised)));
  CHECK((plan(policy, cache.quantised, {}, workspace).status() == Status::bad_observation));
}

TEST_CASE("quantised: llama.cpp's cells and vLLM's rows with scales behind them", "[quantised]") {
  // [cells, H, D] of q8_0: each row is two blocks.
  const auto& blocks = test::blocks_of(BlockFormat::q8_0);
  std::vector<std::byte> cells(6 * 2 * 2 * 34);
  for (std::size_t i = 0; i < 24; ++i) {
    std::memcpy(cells.data() + i * 34, blocks.bytes[i % 16].data(), 34);
  }
  const Plane keys = Plane::blocks(cells.data(), BlockFormat::q8_0, 2, 64);
  std::vector<std::byte> other = cells;
  CacheView view =
      llama_cpp::cells_view(keys, Plane::blocks(other.data(), BlockFormat::q8_0, 2, 64), 6, 2);
  std::vector<std::int32_t> rows{4, 1}, lengths{2};
  set_tables(view, DenseTable{rows.data(), lengths.data(), 1, 2, 2});
  check_layout(view);
  std::vector<float> out(64);
  const Plane& k = view.k;
  load_row(k, view.key({}, {}, HeadId{1}, 0), out.data());
  CHECK(std::memcmp(out.data(), blocks.values[(4 * 2 + 1) * 2 % 16].data(), 128) == 0);
  CHECK(std::memcmp(out.data() + 32, blocks.values[((4 * 2 + 1) * 2 + 1) % 16].data(), 128) == 0);

  // [L, pages, H, N, C] of bytes: key, its scale, value, its scale.
  constexpr std::int32_t dim = 8, content = 2 * (dim + 4);
  std::vector<std::byte> memory(2 * 3 * 2 * 4 * content);
  const auto kv = Tensor<5>::contiguous(memory.data(), {2, 3, 2, 4, content}, DType::i8);
  CacheView packed = vllm::packed_view(kv, dim, dim, dim + 4);
  vllm::set_scales_in_rows(packed);
  std::vector<std::int32_t> ids{2, 1};
  lengths = {6};
  vllm::set_tables(packed, DenseTable{ids.data(), lengths.data(), 1, 2, 2});
  check_layout(packed);
  const RowPlace at{PageId{1}, PageId{1}, Slot{1}};
  std::byte* const key = memory.data() + ((((1 * 3 + 1) * 2 + 1) * 4) + 1) * content;
  const float key_scale = 0.5F, value_scale = 0.25F;
  std::memcpy(key + dim, &key_scale, 4);
  std::memcpy(key + 2 * dim + 4, &value_scale, 4);
  CHECK(packed.k.scale(LayerId{1}, at.k_page, HeadId{1}, at.slot) == 0.5F);
  CHECK(packed.v.scale(LayerId{1}, at.v_page, HeadId{1}, at.slot) == 0.25F);
  CHECK(packed.k.row_bytes() == dim + 4);
}
