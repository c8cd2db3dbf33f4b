// SPDX-License-Identifier: Apache-2.0
#pragma once

// An eviction by both sides: afterwards not a byte may differ.

#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_bytes.hpp>

#include "catch.hpp"
#include "cuda/evict/device_world.hpp"
#include "cuda/evict/host_reference.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace kvtrim::test {

/// Whether a policy is planned by scores that are given: what makes its own is not included here.
template <class P>
inline constexpr bool by_given_scores =
    !cuda::detail::DevicePolicy<P>::by_position &&
    !std::is_same_v<typename cuda::detail::DevicePolicy<P>::Scores, AccumulateParams>;

/// A device plan's memory and its report.
struct DeviceSide {
  template <class P>
  DeviceSide(World& world, const P& policy)
      : memory(bytes(policy, plan_shape(world.host_view())), "workspace") {
    workspace = {plan_shape(world.host_view()), memory.data(), memory.size()};
  }
  template <class P>
  static std::size_t bytes(const P& policy, const PlanShape& shape) {
    if constexpr (by_given_scores<P>) {
      return cuda::plan_workspace_bytes(policy, shape, cuda::GivenScores(SequencePlane{}));
    } else {
      return cuda::plan_workspace_bytes(policy, shape);
    }
  }
  [[nodiscard]] cuda::DeviceReport report() const {
    std::vector<std::byte> all = memory.download();
    cuda::DeviceReport r;
    std::memcpy(&r,
                all.data() + (reinterpret_cast<std::byte*>(cuda::device_plan(workspace).report) -
                              memory.data()),
                sizeof r);
    return r;
  }
  [[nodiscard]] std::vector<std::int32_t> released(std::int32_t count) const {
    std::vector<std::byte> all = memory.download();
    std::vector<std::int32_t> list(static_cast<std::size_t>(count));
    if (count > 0) {
      std::memcpy(
          list.data(),
          all.data() +
              (reinterpret_cast<std::byte*>(cuda::device_plan(workspace).released) - memory.data()),
          list.size() * 4);
    }
    return list;
  }
  DeviceBuffer<std::byte> memory;
  cuda::PlanWorkspace workspace;
};

inline void ok(cudaError_t e) {
  INFO(device_message());
  REQUIRE(e == cudaSuccess);
}

/// Both sides plan, apply and commit; afterwards not a byte may differ.
template <class P>
void same(World& world,
          const P& policy,
          Removal removal = Removal::automatic,
          std::int32_t layer_offset = 0,
          ReservedPages reserved = ReservedPages::follow) {
  Observation obs;
  if (by_given_scores<P>) { obs.scores = world.host_view().score_sums; }
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  host.layer_offset = device.layer_offset = layer_offset;
  host.model_layers = device.model_layers = layer_offset == 0 ? 0 : layer_offset + host.layers + 1;
  Plan wanted = host_plan(policy, host, obs, removal, reserved);
  const PlanRef want = wanted.ref();

  DeviceSide side(world, policy);
  cuda::DevicePlanOptions options;
  options.removal = removal;
  options.reserved = reserved;
  if constexpr (by_given_scores<P>) {
    const cuda::GivenScores given(world.device_view().score_sums);
    ok(cuda::plan(policy, device, given, side.workspace, nullptr, options));
  } else {
    ok(cuda::plan(policy, device, {}, side.workspace, nullptr, options));
  }
  ok(finish());
  const cuda::DeviceReport planned = side.report();
  CHECK(to_string(planned.status) == to_string(want.status()));
  CHECK(planned.nan_count == want.nan_count());
  CHECK(planned.kept == want.kept_rows());
  CHECK(planned.evicted == want.evicted_rows());
  CHECK(planned.bytes_moved == want.bytes_moved());

  ok(cuda::apply(side.workspace, device, nullptr));
  const Status applied = apply(want, host);
  CHECK(world.difference() == "");

  // The host's tables are written by its own sink, the device's by `commit`.
  std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
  DenseTables sink(host, world.host().ids.data(), nullptr, nullptr, freed);
  const Report report = commit(want, host, sink);
  DeviceBuffer<std::int32_t> device_freed(static_cast<std::size_t>(world.pages()), "freed pages");
  DeviceBuffer<std::int32_t> count(1, "freed count");
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  tables.freed = device_freed.data();
  tables.freed_count = count.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  ok(finish());
  CHECK(world.difference() == "");
  if (applied != Status::ok) { return; }
  CHECK(usable(report.status));
  const auto list = side.released(planned.released);
  REQUIRE(list.size() == sink.freed().size());
  for (std::size_t i = 0; i < list.size(); ++i) { CHECK(list[i] == raw(sink.freed()[i])); }
  CHECK(count.download()[0] == planned.released);
}

}  // namespace kvtrim::test
