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

/// A policy on both sides, without its type: what compares two caches is compiled once, not for each policy. Scores that are
/// given are those of the view's `score_sums`.
class AnyPolicy {
 public:
  AnyPolicy() = default;
  AnyPolicy(const AnyPolicy&) = delete;
  AnyPolicy& operator=(const AnyPolicy&) = delete;
  virtual ~AnyPolicy() = default;

  [[nodiscard]] virtual std::size_t bytes(const cuda::PlanBounds& bounds,
                                          const cuda::DevicePlanOptions& options) const = 0;
  [[nodiscard]] virtual cudaError_t plan(const CacheView& view,
                                         const cuda::PlanWorkspace& workspace,
                                         const cuda::DevicePlanOptions& options) const = 0;
  [[nodiscard]] virtual Plan on_host(const CacheView& view,
                                     Removal removal,
                                     ReservedPages reserved) const = 0;
};

/// \tparam Base  `AnyPolicy`, or what adds to it
template <class P, class Base = AnyPolicy>
class PolicyOf : public Base {
 public:
  explicit PolicyOf(const P& policy) : policy_(policy) {}

  [[nodiscard]] std::size_t bytes(const cuda::PlanBounds& bounds,
                                  const cuda::DevicePlanOptions& options) const override {
    if constexpr (by_given_scores<P>) {
      return cuda::plan_workspace_bytes(
          policy_, bounds, cuda::GivenScores(SequencePlane{}), options);
    } else {
      return cuda::plan_workspace_bytes(policy_, bounds, options);
    }
  }
  [[nodiscard]] cudaError_t plan(const CacheView& view,
                                 const cuda::PlanWorkspace& workspace,
                                 const cuda::DevicePlanOptions& options) const override {
    return cuda::plan(policy_, view, source(view), workspace, nullptr, options);
  }
  [[nodiscard]] Plan on_host(const CacheView& view,
                             Removal removal,
                             ReservedPages reserved) const override {
    Observation obs;
    if (by_given_scores<P>) { obs.scores = view.score_sums; }
    return host_plan(policy_, view, obs, removal, reserved);
  }

 protected:
  [[nodiscard]] static auto source(const CacheView& view) {
    if constexpr (by_given_scores<P>) {
      return cuda::GivenScores(view.score_sums);
    } else {
      static_cast<void>(view);
      return cuda::DeviceObservation{};
    }
  }
  P policy_;
};

/// A device plan's memory and its report.
struct DeviceSide {
  template <class P>
  DeviceSide(World& world, const P& policy) : DeviceSide(policy, plan_shape(world.host_view())) {}
  template <class P>
  DeviceSide(const P& policy,
             const cuda::PlanBounds& bounds,
             const cuda::DevicePlanOptions& options = {})
      : DeviceSide(PolicyOf<P>(policy).bytes(bounds, options), bounds) {}
  DeviceSide(std::size_t bytes, const cuda::PlanBounds& bounds) : memory(bytes, "workspace") {
    workspace = {bounds, memory.data(), memory.size()};
  }
  /// `count` values that lie at `from` in the workspace.
  template <class T>
  [[nodiscard]] std::vector<T> read(const T* from, std::int64_t count) const {
    const std::vector<std::byte> all = memory.download();
    std::vector<T> values(static_cast<std::size_t>(count));
    if (count > 0) {
      std::memcpy(static_cast<void*>(values.data()),
                  all.data() + (reinterpret_cast<const std::byte*>(from) - memory.data()),
                  values.size() * sizeof(T));
    }
    return values;
  }
  [[nodiscard]] cuda::DeviceReport report() const {
    return read(cuda::device_plan(workspace).report, 1)[0];
  }
  [[nodiscard]] std::vector<std::int32_t> released(std::int32_t count) const {
    return read(cuda::device_plan(workspace).released, count);
  }
  DeviceBuffer<std::byte> memory;
  cuda::PlanWorkspace workspace;
};

inline void ok(cudaError_t e) {
  INFO(device_message());
  REQUIRE(e == cudaSuccess);
}

/// What the host does to a cache.
struct HostRun {
  Status status = Status::ok;
  Status applied = Status::ok;
  std::int64_t evicted = 0;
  std::int64_t kept = 0;
  std::int64_t bytes_moved = 0;
  std::int64_t nan_count = 0;
  std::vector<std::int32_t> freed;
};

/// Plans, applies and commits on the host; `applied` is called before the commit. Numbers are added to those of `run`.
template <class Applied>
void host_run(World& world,
              const AnyPolicy& policy,
              const CacheView& host,
              Removal removal,
              ReservedPages reserved,
              HostRun& run,
              Applied&& applied) {
  Plan wanted = policy.on_host(host, removal, reserved);
  const PlanRef want = wanted.ref();
  run.status = want.status();
  run.evicted += want.evicted_rows();
  run.kept = want.kept_rows();
  run.bytes_moved += want.bytes_moved();
  run.nan_count += want.nan_count();
  run.applied = apply(want, host);
  applied();
  // The host's tables are written by its own sink, the device's by `commit`.
  std::vector<PageId> freed(static_cast<std::size_t>(world.pages()));
  DenseTables sink(host, const_cast<std::int32_t*>(host.table.ids), nullptr, nullptr, freed);
  const Report report = commit(want, host, sink);
  if (run.applied == Status::ok) { CHECK(usable(report.status)); }
  for (const PageId p : sink.freed()) { run.freed.push_back(raw(p)); }
}

/// A view of sequence `s` alone.
inline CacheView one_sequence(const CacheView& all, std::int32_t s) {
  CacheView one = all;
  const SequenceId q{s};
  const std::int64_t tables = s * std::int64_t{all.tables_per_sequence()};
  one.sequences = 1;
  one.table.ids += all.table.rows(q, LayerId{0}, HeadId{0}) * all.table.row_stride;
  if (all.first_rows != nullptr) { one.first_rows += s; }
  if (all.states != nullptr) { one.states += tables; }
  if (all.generations != nullptr) { one.generations += tables; }
  if (all.reserved_pages != nullptr) { one.reserved_pages += tables; }
  for (SequencePlane* const p : {&one.positions, &one.score_sums, &one.score_compensations}) {
    if (*p) { p->base = p->row(q, LayerId{0}, HeadId{0}, 0); }
  }
  return one;
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
inline void same(World& world,
                 const AnyPolicy& policy,
                 Removal removal = Removal::automatic,
                 std::int32_t layer_offset = 0,
                 ReservedPages reserved = ReservedPages::follow,
                 std::int32_t max_evicted = 0) {
  CacheView host = world.host_view();
  CacheView device = world.device_view();
  host.layer_offset = device.layer_offset = layer_offset;
  host.model_layers = device.model_layers = layer_offset == 0 ? 0 : layer_offset + host.layers + 1;
  cuda::DevicePlanOptions options;
  options.removal = removal;
  options.reserved = reserved;
  cuda::PlanBounds bounds(plan_shape(world.host_view()));
  if (max_evicted != 0) {
    bounds.total_rows = total_rows(host);
    bounds.max_evicted = std::max(max_evicted, 1);
  }
  for (std::int32_t s = 0; max_evicted == as_many_as_go && s < host.sequences; ++s) {
    const CacheView one = one_sequence(host, s);
    Plan alone = policy.on_host(one, removal, reserved);
    const PlanRef plan = alone.ref();
    bounds.max_evicted = std::max(
        bounds.max_evicted, usable(plan.status()) ? most_evicted(plan, one) : bounds.max_rows);
  }
  DeviceSide side(policy.bytes(bounds, options), bounds);
  ok(policy.plan(device, side.workspace, options));
  ok(finish());
  const cuda::DeviceReport planned = side.report();
  ok(cuda::apply(side.workspace, device, nullptr));
  HostRun want;
  host_run(world, policy, host, removal, reserved, want, [&] {
    if (usable(want.status)) { CHECK(world.difference() == ""); }
  });
  const bool refused = !usable(want.status);
  const Status status = want.status;
  for (std::int32_t s = 0; refused && s < host.sequences; ++s) {  // each sequence by itself
    const CacheView one = one_sequence(host, s);
    host_run(world, policy, one, removal, reserved, want, [] {});
  }
  want.status = status;
  CHECK(to_string(planned.status) == to_string(want.status));
  CHECK((planned.refused > 0) == refused);
  CHECK(planned.nan_count == want.nan_count);
  if (!refused) { CHECK(planned.kept == want.kept); }
  CHECK(planned.evicted == want.evicted);
  CHECK(planned.bytes_moved == want.bytes_moved);

  DeviceBuffer<std::int32_t> device_freed(static_cast<std::size_t>(world.pages()), "freed pages");
  DeviceBuffer<std::int32_t> count(1, "freed count");
  cuda::DeviceTables tables;
  tables.ids = world.device().ids.data();
  tables.freed = device_freed.data();
  tables.freed_count = count.data();
  ok(cuda::commit(side.workspace, device, tables, nullptr));
  ok(finish());
  CHECK(world.difference() == "");
  CHECK(side.released(planned.released) == want.freed);
  CHECK(count.download()[0] == static_cast<std::int32_t>(want.freed.size()));
}

template <Policy P>
void same(World& world,
          const P& policy,
          Removal removal = Removal::automatic,
          std::int32_t layer_offset = 0,
          ReservedPages reserved = ReservedPages::follow,
          std::int32_t max_evicted = 0) {
  same(world, PolicyOf<P>(policy), removal, layer_offset, reserved, max_evicted);
}

}  // namespace kvtrim::test
