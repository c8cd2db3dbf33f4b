// SPDX-License-Identifier: Apache-2.0
#pragma once

// An eviction by one call, `step`, and by three: `plan`, `apply`, `commit`.

#include <kvtrim/cuda/evict/step.cuh>

#include "catch.hpp"
#include "cuda/evict/both_sides.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtrim::test {

/// A policy that can also be stepped with.
class AnyStep : public AnyPolicy {
 public:
  [[nodiscard]] virtual cudaError_t step(const CacheView& view,
                                         const cuda::PlanWorkspace& workspace,
                                         const cuda::DeviceTables& tables,
                                         const cuda::DeviceStepOptions& options,
                                         cudaStream_t stream) const = 0;
};
template <class P>
class StepOf : public PolicyOf<P, AnyStep> {
 public:
  using PolicyOf<P, AnyStep>::PolicyOf;
  [[nodiscard]] cudaError_t step(const CacheView& view,
                                 const cuda::PlanWorkspace& workspace,
                                 const cuda::DeviceTables& tables,
                                 const cuda::DeviceStepOptions& options,
                                 cudaStream_t stream) const override {
    return cuda::step(this->policy_, view, this->source(view), workspace, tables, stream, options);
  }
};

/// An engine's lists beside a world's own arrays.
struct EngineLists {
  explicit EngineLists(World& world, std::vector<std::int32_t> counts = {})
      : freed(static_cast<std::size_t>(world.pages()), "freed pages"),
        freed_count(std::vector<std::int32_t>{-1}, "freed count"),
        stack(static_cast<std::size_t>(world.pages()), "free pages"),
        stack_count(std::vector<std::int32_t>{0, 0}, "free count"),
        ref_counts(counts, "ref counts") {
    tables.ids = world.device().ids.data();
    tables.freed = freed.data();
    tables.freed_count = freed_count.data();
    tables.free = {stack.data(), stack_count.data(), world.pages()};
    if (!counts.empty()) { tables.ref_counts = ref_counts.data(); }
  }
  [[nodiscard]] std::vector<std::int32_t> free_pages() const {
    auto list = stack.download();
    list.resize(static_cast<std::size_t>(stack_count.download()[0]));
    return list;
  }
  [[nodiscard]] std::vector<std::int32_t> freed_pages() const {
    auto list = freed.download();
    list.resize(static_cast<std::size_t>(freed_count.download()[0]));
    return list;
  }
  DeviceBuffer<std::int32_t> freed, freed_count, stack, stack_count, ref_counts;
  cuda::DeviceTables tables;
};

inline cudaError_t three_calls(const AnyPolicy& policy,
                               const CacheView& view,
                               const DeviceSide& side,
                               const cuda::DeviceTables& tables,
                               const cuda::DevicePlanOptions& options = {}) {
  cudaError_t e = policy.plan(view, side.workspace, options);
  if (e == cudaSuccess) { e = cuda::apply(side.workspace, view, nullptr); }
  if (e == cudaSuccess) { e = cuda::commit(side.workspace, view, tables, nullptr); }
  return e;
}
template <Policy P>
cudaError_t three_calls(const P& policy,
                        const CacheView& view,
                        const DeviceSide& side,
                        const cuda::DeviceTables& tables,
                        const cuda::DevicePlanOptions& options = {}) {
  return three_calls(PolicyOf<P>(policy), view, side, tables, options);
}
template <Policy P>
cudaError_t one_step(const P& policy,
                     const CacheView& view,
                     const DeviceSide& side,
                     const cuda::DeviceTables& tables,
                     const cuda::DeviceStepOptions& options = {},
                     cudaStream_t stream = nullptr) {
  return StepOf<P>(policy).step(view, side.workspace, tables, options, stream);
}

inline void same_report(const cuda::DeviceReport& a, const cuda::DeviceReport& b) {
  CHECK(to_string(a.status) == to_string(b.status));
  CHECK(a.released == b.released);
  CHECK(a.spares_needed == b.spares_needed);
  CHECK(a.refused == b.refused);
  CHECK(a.first_refused == b.first_refused);
  CHECK(a.first_table == b.first_table);
  CHECK(a.nan_count == b.nan_count);
  CHECK(a.kept == b.kept);
  CHECK(a.evicted == b.evicted);
  CHECK(a.bytes_moved == b.bytes_moved);
}

/// A step leaves what the three calls leave, which is what the host leaves.
inline void same_step(const WorldShape& shape,
                      const AnyStep& policy,
                      Removal removal = Removal::automatic,
                      ReservedPages reserved = ReservedPages::follow) {
  World by_host(shape);
  same(by_host, policy, removal, 0, reserved);
  World by_calls(shape);
  World by_step(shape);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(by_calls.pages()), 1);
  EngineLists of_calls(by_calls, counts);
  EngineLists of_step(by_step, counts);
  const cuda::PlanBounds bounds(plan_shape(by_calls.host_view()));
  DeviceSide calls(policy.bytes(bounds, {}), bounds);
  DeviceSide step(policy.bytes(bounds, {}), bounds);
  cuda::DeviceStepOptions options;
  options.removal = removal;
  options.reserved = reserved;
  CacheView view = by_calls.device_view();
  ok(three_calls(policy, view, calls, of_calls.tables, options));
  view = by_step.device_view();
  ok(policy.step(view, step.workspace, of_step.tables, options, nullptr));
  ok(kvtrim::test::finish());
  same_report(step.report(), calls.report());
  CHECK(step.released(step.report().released) == calls.released(calls.report().released));
  CHECK(of_step.freed_pages() == of_calls.freed_pages());
  CHECK(of_step.free_pages() == of_step.freed_pages());
  CHECK(of_calls.free_pages() == of_calls.freed_pages());
  CHECK(of_step.ref_counts.download() == of_calls.ref_counts.download());
  for (World* const world : {&by_calls, &by_step}) {
    auto& mine = world->host();
    auto& theirs = by_host.host();
    mine.pool = theirs.pool;
    mine.scales = theirs.scales;
    mine.unrotated = theirs.unrotated;
    mine.ids = theirs.ids;
    mine.positions = theirs.positions;
    mine.sums = theirs.sums;
    mine.compensations = theirs.compensations;
    mine.states = theirs.states;
    mine.counters = theirs.counters;
    CHECK(world->difference() == "");
  }
}
template <Policy P>
void same_step(const WorldShape& shape,
               const P& policy,
               Removal removal = Removal::automatic,
               ReservedPages reserved = ReservedPages::follow) {
  same_step(shape, StepOf<P>(policy), removal, reserved);
}

}  // namespace kvtrim::test
