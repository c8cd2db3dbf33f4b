// SPDX-License-Identifier: Apache-2.0
// From queries and keys to moved rows, compared with the host.

#if !defined(KVTRIM_CUDA_KERNELS_ELSEWHERE)
#  define KVTRIM_CUDA_KERNELS_ELSEWHERE
#endif
#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/key_scorer.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/window_scorer.cuh>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/plan_bytes.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/tova.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"
#include "cuda/evict/device_world.hpp"
#include "cuda/evict/host_reference.hpp"

#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

constexpr std::int32_t query_heads = 4;
constexpr std::int32_t query_rows = 6;

/// Keys that are numbers: the world's random bytes are not.
void write_keys(World& world, std::mt19937& random) {
  const CacheView view = world.host_view();
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        const std::int32_t live = view.live_rows(SequenceId{s}, LayerId{l}, HeadId{h});
        for (std::int32_t r = 0; r < live; ++r) {
          std::byte* const row = view.key(SequenceId{s}, LayerId{l}, HeadId{h}, r);
          for (std::int32_t d = 0; d < view.k.head_dim; ++d) {
            const float x = static_cast<float>(static_cast<int>(random() % 512) - 256) / 256.0F;
            std::memcpy(row + view.k.feature_offset(d), &x, 4);
          }
        }
      }
    }
  }
  world.device().pool.upload(world.host().pool);
}

/// The last queries of every sequence, on both sides.
struct Queries {
  Queries(const WorldShape& shape, std::mt19937& random)
      : values(make(shape, random)), device_values(values, "queries") {
    QueryBlock& block = host.queries;
    block.data = values.data();
    block.query_heads = query_heads;
    block.rows = query_rows;
    block.row_stride = shape.k_dim;
    block.head_stride = query_rows * block.row_stride;
    block.layer_stride = query_heads * block.head_stride;
    block.sequence_stride = shape.layers * block.layer_stride;
    device.queries = block;
    device.queries.data = device_values.data();
  }

  std::vector<float> values;
  DeviceBuffer<float> device_values;
  Observation host;
  cuda::DeviceObservation device;

 private:
  static std::vector<float> make(const WorldShape& shape, std::mt19937& random) {
    std::vector<float> values(static_cast<std::size_t>(shape.sequences * shape.layers *
                                                       query_heads * query_rows * shape.k_dim));
    for (float& x : values) {
      x = static_cast<float>(static_cast<int>(random() % 512) - 256) / 64.0F;
    }
    return values;
  }
};

}  // namespace

TEST_CASE("cuda::plan: SnapKVSelector from queries keeps the host's rows", "[cuda][parity]") {
  WorldShape shape;
  shape.dtype = DType::f32;
  shape.k_dim = 64;
  shape.v_dim = 8;
  shape.states = true;
  World world(shape);
  std::mt19937 random(3);
  write_keys(world, random);
  const CacheView host = world.host_view();
  const CacheView device = world.device_view();
  Queries queries(shape, random);
  Observation& obs = queries.host;
  cuda::DeviceObservation& device_obs = queries.device;
  std::vector<std::int32_t> slots;
  for (std::int32_t s = shape.sequences; s > 0; --s) { slots.push_back(s - 1); }
  const DeviceBuffer<std::int32_t> device_slots(slots, "slots");
  if (GENERATE(false, true)) {  // sequences lie in the reverse order
    obs.queries.slots = slots.data();
    device_obs.queries.slots = device_slots.data();
  }

  const bool bad_length = GENERATE(false, true);
  const SnapKVSelector policy({.window = 4, .budget = 11, .kernel = 3});
  const PlanShape bounds = plan_shape(host, obs);
  DeviceBuffer<std::byte> memory(cuda::plan_workspace_bytes(policy, bounds), "workspace");
  const cuda::PlanWorkspace workspace{bounds, memory.data(), memory.size()};
  if (bad_length) {  // neither scores nor moves may look at such a table
    world.host().states[0].live_rows = 1'000'000;
    world.device().states.upload(world.host().states);
  }
  const cudaError_t planned = cuda::plan(policy, device, device_obs, workspace, nullptr);
  INFO(kvtrim::test::device_message());
  REQUIRE(planned == cudaSuccess);
  REQUIRE(cuda::apply(workspace, device, nullptr) == cudaSuccess);
  REQUIRE(kvtrim::test::finish() == cudaSuccess);
  const auto all = memory.download();
  cuda::DeviceReport report;
  std::memcpy(
      &report, all.data(), sizeof report);  // the report is the first array of the workspace
  REQUIRE(reinterpret_cast<std::byte*>(cuda::device_plan(workspace).report) == memory.data());
  if (bad_length) {
    CHECK(report.status == Status::length_beyond_table);
    CHECK(report.refused == 1);
    CHECK(report.first_refused == 0);
    CHECK(report.evicted > 0);  // from the others
    const auto before = world.host().states;
    const auto after = world.device().states.download();
    for (std::size_t s = 0; s < after.size(); ++s) {
      CHECK(after[s].applied == (s > 0 && before[s].live_rows > 11));
    }
    return;
  }
  Plan wanted = kvtrim::test::host_plan(policy, host, obs, Removal::automatic);
  CHECK(report.status == Status::ok);
  CHECK(report.evicted == wanted.view().evicted_rows());
  CHECK(report.evicted > 0);
  REQUIRE(apply(wanted.ref(), host) == Status::ok);
  CHECK(world.difference() == "");
}

namespace {

/// Both sides score, plan, apply: the same rows stay.
template <class P>
void same_by_own_scores(const P& policy, const WorldShape& shape, std::uint32_t seed) {
  World world(shape);
  std::mt19937 random(seed);
  write_keys(world, random);
  const CacheView host = world.host_view();
  const CacheView device = world.device_view();
  Queries queries(shape, random);
  Observation& obs = queries.host;
  cuda::DeviceObservation& device_obs = queries.device;
  cuda::PlanBounds bounds(plan_shape(host, obs));
  if (seed % 2 == 0) {  // as tight as they can be: rows go where scores were made
    Plan known = kvtrim::test::host_plan(policy, host, obs, Removal::automatic);
    bounds.total_rows = kvtrim::test::total_rows(host);
    bounds.max_evicted =
        seed % 4 == 0 && usable(known.view().status()) && known.view().evicted_rows() > 0
            ? kvtrim::test::most_evicted(known.view(), host)
            : 0;
  }
  DeviceBuffer<std::byte> memory(cuda::plan_workspace_bytes(policy, bounds), "workspace");
  const cuda::PlanWorkspace workspace{bounds, memory.data(), memory.size()};
  const auto run = [&] {
    const cudaError_t planned = cuda::plan(policy, device, device_obs, workspace, nullptr);
    return planned == cudaSuccess ? cuda::apply(workspace, device, nullptr) : planned;
  };
  const auto report = [&] {
    const auto all = memory.download();
    cuda::DeviceReport r;
    std::memcpy(&r, all.data(), sizeof r);
    return r;
  };
  INFO(kvtrim::test::device_message());
  if (std::is_same_v<P, Tova>) {  // one set for a layer's heads
    // Heads that hold other tokens are refused as on the host.
    auto positions = world.host().positions;
    const auto sound = positions;
    std::swap(positions[static_cast<std::size_t>(world.capacity())],
              positions[static_cast<std::size_t>(world.capacity() + 1)]);
    world.device().positions.upload(positions);
    const cudaError_t ran = cuda::plan(policy, device, device_obs, workspace, nullptr);
    INFO(kvtrim::test::device_message());
    REQUIRE(ran == cudaSuccess);
    CHECK(to_string(report().status) == "bad_observation");
    world.device().positions.upload(sound);
  }
#if defined(KVTRIM_EMULATED)
  // What is not loaded cannot be captured; what was prepared can.
  emulator::unload_kernels();
  for (auto& known : cuda::detail::raised_limits) { known = 0; }
  REQUIRE(cuda::prepare(policy, device, device_obs, bounds) == cudaSuccess);
  emulator::Graph graph;
  emulator::capture = &graph;
  const cudaError_t captured = run();
  emulator::capture = nullptr;
  REQUIRE(captured == cudaSuccess);
  REQUIRE(graph.run() == cudaSuccess);
#else
  REQUIRE(run() == cudaSuccess);
#endif
  REQUIRE(kvtrim::test::finish() == cudaSuccess);
  Plan wanted = kvtrim::test::host_plan(policy, host, obs, Removal::automatic);
  CHECK(to_string(report().status) == to_string(wanted.view().status()));
  if (!usable(wanted.view().status())) {  // heads of different lengths: not for TOVA
    CHECK(report().refused > 0);
    return;
  }
  CHECK(report().refused == 0);
  CHECK(report().evicted == wanted.view().evicted_rows());
  CHECK(report().evicted > 0);
  CHECK(apply(wanted.ref(), host) == Status::ok);
  CHECK(world.difference() == "");
}

}  // namespace

TEST_CASE("cuda::plan: scores of the window and of keys keep the host's rows and pages",
          "[cuda][parity]") {
  WorldShape shape;
  shape.dtype = DType::f32;
  shape.k_dim = 64;
  shape.v_dim = 8;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  const std::uint32_t seed = GENERATE(3U, 4U, 6U);
  shape.seed = seed;
  CAPTURE(static_cast<int>(shape.scope), seed);
  KeyNorm::Params norm;
  norm.budget = 9;
  KeyDiff::Params diff;
  diff.budget = 9;
  Tova::Params tova;
  tova.budget = 9;
  PageSelector<>::Params pages;
  pages.budget = 12;
  pages.window = 4;
  pages.scores.window = 4;
  same_by_own_scores(KeyNorm(norm), shape, seed);
  same_by_own_scores(KeyDiff(diff), shape, seed);
  same_by_own_scores(Tova(tova), shape, seed);
  same_by_own_scores(PageSelector<>(pages), shape, seed);
  if (shape.scope != TableScope::group) {
    same_by_own_scores(PyramidKV({.snapkv = {.window = 4, .budget = 9, .kernel = 1}}), shape, seed);
  }
}

TEST_CASE("cuda::plan: scores of the window take memory by the rows that there are",
          "[cuda][edge]") {
  // 256 sequences, 8 KV heads of 4 query heads each; 1,048,576 tokens in all, none above 131,072; layer by layer.
  PlanShape shape;
  shape.sequences = 256;
  shape.kv_heads = 8;
  shape.page_size = 16;
  shape.max_rows = 131'072;
  shape.pages = 65'536 + 256;
  shape.query_heads = 32;
  shape.query_rows = 32;
  shape.head_dim = 128;
  constexpr std::size_t mebi = std::size_t{1} << 20U;
  const cuda::PlanBounds bounds(shape, 1'048'576);
  const SnapKVSelector policy;
  const std::size_t bytes = cuda::plan_workspace_bytes(policy, bounds);
  CHECK(bytes <= 128 * mebi);
  // Scores of whole pages; then 8 bytes per row or query and tile of 128 rows, of which each sequence may end within one.
  const std::size_t scores = std::size_t{4} * 8 * (1'048'576 + 256 * 16);
  const std::size_t tiles = std::size_t{8} * (8192 + 32 + 256);
  const std::size_t window = tiles * 128 * 8 + std::size_t{4} * 256 * 8 * 128 + 1280;
  const std::size_t tables = cuda::plan_workspace_bytes(StreamingSink(), bounds);
  const auto histograms = [](const PlanShape& x) {
    return cuda::top_k_workspace_bytes({x.sequences, x.layers, x.kv_heads, x.max_rows});
  };
  CHECK(bytes == tables + histograms(shape) + scores + window);
  // The longest length does not matter where there is a total; all layers at once take 32 times as much.
  PlanShape longer = shape;
  longer.max_rows = 1'048'576;
  CHECK(cuda::plan_workspace_bytes(policy, {longer, 1'048'576}) - histograms(longer) ==
        bytes - histograms(shape));
  PlanShape layers = shape;
  layers.layers = 32;
  const std::size_t all = cuda::plan_workspace_bytes(policy, {layers, 1'048'576});
  CHECK(all - cuda::plan_workspace_bytes(StreamingSink(), {layers, 1'048'576}) ==
        histograms(layers) + 32 * (scores + window - 1280) + 1280);
  for (std::int32_t PlanShape::* const field : {&PlanShape::sequences,
                                                &PlanShape::layers,
                                                &PlanShape::pages,
                                                &PlanShape::query_heads,
                                                &PlanShape::query_rows,
                                                &PlanShape::head_dim}) {
    PlanShape more = shape;
    more.*field *= 2;
    CHECK(cuda::plan_workspace_bytes(policy, {more, 1'048'576}) >= bytes);
  }
}

TEST_CASE("cuda::plan: SnapKVSelector without queries is refused", "[cuda]") {
  World world(WorldShape{});
  const SnapKVSelector policy;
  const PlanShape bounds = plan_shape(world.host_view());
  DeviceBuffer<std::byte> memory(cuda::plan_workspace_bytes(policy, bounds), "workspace");
  CHECK(cuda::plan(
            policy, world.device_view(), {}, {bounds, memory.data(), memory.size()}, nullptr) ==
        cudaErrorInvalidValue);
}
