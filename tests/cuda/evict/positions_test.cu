// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/evict/rotation.cuh>

#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/step.cuh>
#include <kvtrim/policy/streaming_sink.hpp>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::ByScore;
using kvtrim::test::DeviceBuffer;
using kvtrim::test::DeviceSide;
using kvtrim::test::ok;
using kvtrim::test::World;
using kvtrim::test::WorldShape;

/// A model's RoPE on both sides, and the keys of the sinks before it.
struct Turning {
  Turning(const WorldShape& shape, PositionMode which, std::int32_t rotated, std::int32_t count)
      : mode(which), sinks(count) {
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      const auto mine = rope_frequencies(l == 0 ? 10'000.0 : 500'000.0, rotated);
      frequencies.insert(frequencies.end(), mine.begin(), mine.end());
    }
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    keys.resize(static_cast<std::size_t>(shape.sequences * shape.layers * shape.kv_heads *
                                         std::max(count, 1) * shape.k_dim));
    for (float& x : keys) { x = normal(random); }
    device_frequencies.upload(frequencies);
    device_keys.upload(keys);
    rope.inverse_frequencies = frequencies;
    rope.dim = rotated;
  }
  [[nodiscard]] Rerotator host(const CacheView& view) const {
    return Rerotator(view, rope, mode, {keys.data(), sinks});
  }
  [[nodiscard]] cuda::DeviceRotation device() const {
    cuda::DeviceRotation r;
    r.mode = mode;
    r.rope.inverse_frequencies = device_frequencies.data();
    r.rope.dim = rope.dim;
    if (mode == PositionMode::sinks_follow) { r.pristine = {device_keys.data(), sinks}; }
    return r;
  }

  PositionMode mode;
  std::int32_t sinks;
  Rope rope;
  std::vector<double> frequencies;
  std::vector<float> keys;
  DeviceBuffer<double> device_frequencies{64, "frequencies"};
  DeviceBuffer<float> device_keys{65536, "sinks"};
};

/// Largest difference between the pages of both sides, whose bytes are made the same then.
double pages_differ(World& world, DType dtype) {
  const auto got = world.device().pool.download();
  auto& want = world.host().pool;
  const auto element = static_cast<std::size_t>(element_bytes(dtype));
  double worst = 0;
  for (std::size_t i = 0; i + element <= got.size(); i += element) {
    const auto x = static_cast<double>(load_element(&got[i], dtype));
    const auto y = static_cast<double>(load_element(&want[i], dtype));
    worst = std::max(worst, std::fabs(x - y) / (1 + std::fabs(y)));
  }
  want = got;
  return worst;
}

struct Outcome {
  Status status = Status::ok;
  std::int64_t evicted = 0;
};

/// Pages that must not be written, on both sides, and spare ones.
struct Sharing {
  Sharing(World& world, std::vector<std::int32_t> held, SharedPages what)
      : counts(std::move(held)), way(what) {
    device_counts.upload(counts);
    for (const std::int32_t p : world.spares()) { spares.push_back(PageId{p}); }
    device_spares.upload(world.spares());
    spare_count.upload({static_cast<std::int32_t>(spares.size())});
  }
  std::vector<std::int32_t> counts;
  SharedPages way;
  std::vector<PageId> spares;
  DeviceBuffer<std::int32_t> device_counts{256, "ref counts"};
  DeviceBuffer<std::int32_t> device_spares{64, "spare pages"};
  DeviceBuffer<std::int32_t> spare_count{1, "spare count"};
};

/// Both sides evict, by three calls or in one step; no more than rounding of keys may differ afterwards.
template <class P>
Outcome evict_both(World& world,
                   const P& policy,
                   Removal removal,
                   const Rerotator& rerotator,
                   const cuda::DeviceRotation& rotation,
                   bool by_step,
                   DType dtype,
                   const Sharing* sharing = nullptr) {
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  cuda::DeviceStepOptions with;
  with.removal = removal;
  with.rotation = rotation;
  PlanOptions options;
  if (sharing != nullptr) {
    host.writable.ref_counts = sharing->counts.data();
    device.writable.ref_counts = sharing->device_counts.data();
    options.shared = with.shared = sharing->way;
    options.spare_pages = sharing->spares;
    with.spare_pages = sharing->device_spares.data();
    with.spare_count = sharing->spare_count.data();
  }
  DeviceSide side(policy, plan_shape(host), with);  // before the host evicts
  Observation obs;
  obs.scores = host.score_sums;
  options.removal = removal;
  options.rerotator = &rerotator;
  Plan wanted = kvtrim::test::host_plan(policy, host, obs, options);
  Outcome run{wanted.view().status(), 0};
  if (usable(run.status)) {
    CHECK(apply(wanted.ref(), host, rerotator) == Status::ok);
    std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
    DenseTables sink(host, world.host().ids.data(), nullptr, nullptr, freed);
    run.evicted = commit(wanted.ref(), host, sink).evicted_rows;
  }
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  const cuda::GivenScores given(device.score_sums);
  if (by_step) {
    ok(cuda::step(policy, device, given, side.workspace, tables, nullptr, with));
  } else {
    ok(cuda::plan(policy, device, given, side.workspace, nullptr, with));
    ok(cuda::apply(side.workspace, device, nullptr, rotation));
    ok(cuda::commit(side.workspace, device, tables, nullptr));
  }
  ok(kvtrim::test::finish());
  const cuda::DeviceReport report = side.report();
  CHECK(to_string(report.status) == to_string(run.status));
  if (usable(run.status)) { CHECK(report.evicted == run.evicted); }
  // A key's features are numbers of a normal distribution; 16-bit types round.
  CHECK(pages_differ(world, dtype) <= (dtype == DType::f32 ? 4e-6 : 1e-2));
  CHECK(world.difference() == "");
  return run;
}

}  // namespace

TEST_CASE("cuda::plan: rows are renumbered in the cache as on the host", "[cuda][parity]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  shape.scope = GENERATE(TableScope::group, TableScope::layer, TableScope::head);
  shape.shuffled = GENERATE(false, true);
  shape.holes = shape.shuffled;
  shape.padding = shape.scope == TableScope::layer;
  shape.unrotated = shape.scope == TableScope::head;
  shape.dtype = shape.unrotated ? DType::bf16 : DType::f32;
  const Removal removal = GENERATE(
      Removal::drop_pages, Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  if (shape.shuffled && removal == Removal::drop_pages) { return; }
  CAPTURE(static_cast<int>(shape.scope), shape.shuffled, static_cast<int>(removal));
  World world(shape);
  const Turning turning(shape, PositionMode::in_cache, 12, 0);
  const CacheView view = world.host_view();
  std::int64_t evicted = 0;
  // Several times: the second one finds rows that are numbered, and out of order where holes were filled.
  std::int32_t live = 0;
  for (const SequenceState& state : world.host().states) { live = std::max(live, state.live_rows); }
  for (std::int32_t round = 0; round < 4; ++round) {
    const std::int32_t keep =
        live - 1 - (round == 0 || removal == Removal::overwrite_slot ? round : 3 * round);
    const auto both = [&](const auto& policy) {
      return evict_both(world,
                        policy,
                        removal,
                        turning.host(view),
                        turning.device(),
                        round % 2 == 1,
                        shape.dtype);
    };
    const Outcome run = removal == Removal::drop_pages
                            ? both(StreamingSink({.sinks = 2, .recent = keep - 5 * round}))
                            : both(ByScore{keep, {2, 3}, removal});
    evicted += run.evicted;
  }
  CHECK(evicted > 0);
  // By position, in whole pages where order and holes permit.
  const Outcome last =
      evict_both(world,
                 StreamingSink({.sinks = 2, .recent = 5}),
                 removal == Removal::stable_pack && !shape.shuffled ? Removal::drop_pages
                                                                    : Removal::stable_pack,
                 turning.host(view),
                 turning.device(),
                 true,
                 shape.dtype);
  CHECK(last.evicted > 0);
}

TEST_CASE("cuda::plan: the sinks follow the window as on the host", "[cuda][parity]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = GENERATE(DType::f32, DType::bf16);
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.shuffled = GENERATE(false, true);
  shape.padding = !shape.shuffled;
  const Removal removal = GENERATE(
      Removal::drop_pages, Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  if (shape.shuffled && removal == Removal::drop_pages) { return; }
  CAPTURE(static_cast<int>(shape.scope), shape.shuffled, static_cast<int>(removal));
  World world(shape);
  const Turning turning(shape, PositionMode::sinks_follow, 16, 3);
  const CacheView view = world.host_view();
  std::int64_t evicted = 0;
  for (const std::int32_t keep : {27, 21, 12, 5, 4}) {
    const auto both = [&](const auto& policy) {
      return evict_both(
          world, policy, removal, turning.host(view), turning.device(), keep % 2 == 1, shape.dtype);
    };
    const Outcome run = removal == Removal::drop_pages
                            ? both(StreamingSink({.sinks = 3, .recent = keep - 3}))
                            : both(ByScore{keep, {3, 0}, removal});
    evicted += run.evicted;
  }
  CHECK(evicted > 0);
  // Fewer sinks are protected than follow: another row could come first.
  const Outcome run = evict_both(world,
                                 ByScore{2, {1, 0}, removal},
                                 removal,
                                 turning.host(view),
                                 turning.device(),
                                 false,
                                 shape.dtype);
  CHECK(run.status == Status::bad_options);
}

TEST_CASE("cuda::plan: a cache of keys before RoPE is renumbered, no key is touched",
          "[cuda][parity]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::bf16;
  World world(shape);
  cuda::DeviceRotation rotation;
  rotation.mode = PositionMode::in_cache;
  rotation.unrotated_cache = true;
  const auto before = world.host().ropes;
  const Outcome run = evict_both(world,
                                 ByScore{9, {2, 3}, Removal::fill_holes},
                                 Removal::fill_holes,
                                 Rerotator::unrotated_cache(world.host_view()),
                                 rotation,
                                 true,
                                 shape.dtype);
  CHECK(run.evicted > 0);
  CHECK(world.host().ropes != before);
}

TEST_CASE("cuda::plan: keys in shared pages turn in copies, or nowhere, as on the host",
          "[cuda][parity]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  shape.sequences = 1;
  shape.spare_pages = 32;
  shape.scope = GENERATE(TableScope::group, TableScope::head);
  shape.seed = GENERATE(1U, 2U);
  shape.padding = shape.seed == 2;
  const Removal removal = GENERATE(
      Removal::drop_pages, Removal::stable_pack, Removal::fill_holes, Removal::overwrite_slot);
  shape.shuffled = removal != Removal::drop_pages && GENERATE(false, true);
  const bool numbered = shape.shuffled || GENERATE(false, true);
  const auto mode = GENERATE(PositionMode::in_cache, PositionMode::sinks_follow);
  const auto way = GENERATE(SharedPages::leave, SharedPages::copy);
  const std::int32_t shared_entries = GENERATE(1, 3);
  World world(shape);
  auto& ropes = world.host().ropes;
  // The first rows stay: where they are numbered, they get no other number.
  for (std::size_t i = 0; i < ropes.size(); ++i) {
    if (numbered && !shape.shuffled) { ropes[i] -= 15; }
    if (static_cast<std::int32_t>(i) % world.capacity() < 4) { world.host().sums[i] += 9.0F; }
  }
  for (SequenceState& state : world.host().states) {
    if (numbered) { state.next_rope_position = state.live_rows; }
  }
  world.device().ropes.upload(ropes);
  world.device().sums.upload(world.host().sums);
  world.device().states.upload(world.host().states);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(world.pages()), 1);
  for (std::size_t e = 0; e < world.host().ids.size(); ++e) {
    const std::int32_t id = world.host().ids[e];
    const bool first = static_cast<std::int32_t>(e) % shape.max_pages < shared_entries;
    if (first && id >= 0) { counts[static_cast<std::size_t>(id)] = 2; }
  }
  const Sharing sharing(world, counts, way);
  const Turning turning(shape, mode, 16, 2);
  CAPTURE(static_cast<int>(removal),
          shape.shuffled,
          numbered,
          std::string(to_string(mode)),
          static_cast<int>(way),
          shared_entries);
  const std::int32_t live = world.host().states[0].live_rows;
  const auto both = [&](const auto& policy) {
    return evict_both(world,
                      policy,
                      removal,
                      turning.host(world.host_view()),
                      turning.device(),
                      shape.seed == 1,
                      shape.dtype,
                      &sharing);
  };
  const Outcome run =
      removal == Removal::drop_pages
          ? both(StreamingSink({.sinks = 2, .recent = 9}))
          : both(ByScore{removal == Removal::overwrite_slot ? live - 1 : 14, {2, 1}, removal});
  if (way == SharedPages::copy && removal != Removal::drop_pages) {
    CHECK(run.status == Status::ok);
    CHECK(run.evicted > 0);
  }
}

TEST_CASE("cuda::plan: rows out of order that were never numbered are refused", "[cuda][fault]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  shape.shuffled = true;
  World world(shape);
  for (SequenceState& state : world.host().states) { ++state.next_rope_position; }
  world.device().states.upload(world.host().states);
  const Turning turning(shape, PositionMode::in_cache, 16, 0);
  cuda::DeviceStepOptions options;
  options.rotation = turning.device();
  const ByScore policy{9};
  DeviceSide side(policy, plan_shape(world.host_view()), options);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  const CacheView view = world.device_view();
  ok(cuda::step(
      policy, view, cuda::GivenScores(view.score_sums), side.workspace, tables, nullptr, options));
  CHECK(to_string(side.report().status) == "rows_unordered");
  CHECK(side.report().evicted == 0);
  CHECK(world.difference() == "");
}

TEST_CASE("cuda::apply: another position mode than the plan's is refused, the plan stays",
          "[cuda][fault]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  World world(shape);
  const Turning turning(shape, PositionMode::in_cache, 16, 0);
  cuda::DevicePlanOptions options;
  options.rotation = turning.device();
  const ByScore policy{9};
  DeviceSide side(policy, plan_shape(world.host_view()), options);
  const CacheView view = world.device_view();
  ok(cuda::plan(
      policy, view, cuda::GivenScores(view.score_sums), side.workspace, nullptr, options));
  ok(cuda::apply(side.workspace, view, nullptr));
  CHECK(to_string(side.report().status) == "bad_plan");
  CHECK(world.difference() == "");
  ok(cuda::apply(side.workspace, view, nullptr, options.rotation));
  CHECK(to_string(side.report().status) == "ok");
  CHECK(world.difference() != "");
}

TEST_CASE("cuda::plan: a position mode that cannot be is refused before any launch",
          "[cuda][fault]") {
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  World world(shape);
  const Turning turning(shape, PositionMode::in_cache, 16, 2);
  const ByScore policy{9};
  DeviceSide side(policy, plan_shape(world.host_view()));
  const auto code = [&](auto&& change) {
    CacheView view = world.device_view();
    cuda::DevicePlanOptions options;
    options.rotation = turning.device();
    change(view, options.rotation);
    const cuda::GivenScores given(view.score_sums);
    const cudaError_t e = cuda::plan(policy, view, given, side.workspace, nullptr, options);
    CHECK(cuda::apply(side.workspace, view, nullptr, options.rotation) == e);
    return e;
  };
  const auto refused = [&](auto&& change) { return code(change) == cudaErrorInvalidValue; };
  using Rotation = cuda::DeviceRotation;
  CHECK(refused([](CacheView& v, Rotation&) { v.rope_positions = {}; }));
  CHECK(refused([](CacheView& v, Rotation&) { v.k.dtype = v.v.dtype = DType::bf16; }));
  CHECK(refused([](CacheView&, Rotation& r) { r.rope.inverse_frequencies = nullptr; }));
  CHECK(refused([](CacheView&, Rotation& r) { r.rope.kind = RopeKind::mrope; }));
  CHECK(refused([](CacheView&, Rotation& r) { r.mode = PositionMode::sinks_follow; }));
  CHECK(refused([](CacheView&, Rotation& r) {
    r.mode = PositionMode::sinks_follow;
    r.unrotated_cache = true;
  }));
  CHECK(world.difference() == "");
  CHECK(code([](CacheView&, Rotation&) {}) == cudaSuccess);
}

#if defined(KVTRIM_EMULATED)
TEST_CASE("cuda::step: a position mode is one launch more, and can be captured once prepared",
          "[cuda]") {
  namespace emulator = kvtrim::emulator;
  WorldShape shape;
  shape.rope = true;
  shape.dtype = DType::f32;
  World world(shape);
  const Turning turning(shape, PositionMode::in_cache, 16, 0);
  const StreamingSink policy({.sinks = 1, .recent = 4});
  cuda::DeviceStepOptions options;
  options.rotation = turning.device();
  DeviceSide side(policy, plan_shape(world.host_view()), options);
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  const CacheView view = world.device_view();
  const auto run = [&] {
    return cuda::step(
        policy, view, cuda::DeviceObservation{}, side.workspace, tables, nullptr, options);
  };
  emulator::unload_kernels();
  for (auto& known : cuda::detail::raised_limits) { known = 0; }
  ok(cuda::prepare(policy, view, cuda::DeviceObservation{}, side.workspace.shape));
  emulator::Graph graph;
  emulator::capture = &graph;
  ok(run());
  emulator::capture = nullptr;
  emulator::launches().clear();
  ok(run());
  CHECK(emulator::launches().size() == 5);
  CHECK(side.report().evicted > 0);
}
#endif
