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

#include <algorithm>
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
  DeviceSide(World& world, const P& policy) : DeviceSide(policy, plan_shape(world.host_view())) {}
  template <class P>
  DeviceSide(const P& policy,
             const cuda::PlanBounds& bounds,
             const cuda::DevicePlanOptions& options = {})
      : memory(bytes(policy, bounds, options), "workspace") {
    workspace = {bounds, memory.data(), memory.size()};
  }
  template <class P>
  static std::size_t bytes(const P& policy,
                           const cuda::PlanBounds& bounds,
                           const cuda::DevicePlanOptions& options) {
    if constexpr (by_given_scores<P>) {
      return cuda::plan_workspace_bytes(
          policy, bounds, cuda::GivenScores(SequencePlane{}), options);
    } else {
      return cuda::plan_workspace_bytes(policy, bounds, options);
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

/// Rows of all sequences, each by its longest table; reserved pages included.
inline std::int64_t total_rows(const CacheView& view) {
  std::int64_t total = 0;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    CacheView one = view;
    one.sequences = 1;
    one.states += static_cast<std::int64_t>(s) * view.tables_per_sequence();
    if (view.first_rows != nullptr) { one.first_rows += s; }
    if (view.reserved_pages != nullptr) {
      one.reserved_pages += static_cast<std::int64_t>(s) * view.tables_per_sequence();
    }
    total += plan_shape(one).max_rows;
  }
  return total;
}
/// The most rows of a KV head that a plan lists as gone, a hole included.
inline std::int32_t most_evicted(const PlanView& plan, const CacheView& view) {
  std::int32_t most = 0;
  for (std::int32_t s = 0; s < view.sequences; ++s) {
    for (std::int32_t l = 0; l < view.layers; ++l) {
      for (std::int32_t h = 0; h < view.kv_heads; ++h) {
        const auto gone =
            static_cast<std::int32_t>(plan.head(SequenceId{s}, LayerId{l}, HeadId{h}).evicted);
        const bool hole = view.state(SequenceId{s}, LayerId{l}, HeadId{h}).append_row >= 0;
        most = std::max(most, gone == 0 ? 0 : gone + (hole ? 1 : 0));
      }
    }
  }
  return most;
}

inline constexpr std::int32_t as_many_as_go = -1;

/// Both sides plan, apply and commit; afterwards not a byte may differ.
///
/// \param max_evicted  not 0: bounds that are as tight as can be, with so many rows that go
template <class P>
void same(World& world,
          const P& policy,
          Removal removal = Removal::automatic,
          std::int32_t layer_offset = 0,
          ReservedPages reserved = ReservedPages::follow,
          std::int32_t max_evicted = 0) {
  Observation obs;
  if (by_given_scores<P>) { obs.scores = world.host_view().score_sums; }
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  host.layer_offset = device.layer_offset = layer_offset;
  host.model_layers = device.model_layers = layer_offset == 0 ? 0 : layer_offset + host.layers + 1;
  Plan wanted = host_plan(policy, host, obs, removal, reserved);
  const PlanRef want = wanted.ref();

  cuda::DevicePlanOptions options;
  options.removal = removal;
  options.reserved = reserved;
  cuda::PlanBounds bounds(plan_shape(world.host_view()));
  if (max_evicted != 0) {
    bounds.total_rows = total_rows(host);
    bounds.max_evicted = max_evicted > 0         ? max_evicted
                         : usable(want.status()) ? most_evicted(want, host)
                                                 : 1;
  }
  DeviceSide side(policy, bounds, options);
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
