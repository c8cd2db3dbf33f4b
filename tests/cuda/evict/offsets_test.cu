// SPDX-License-Identifier: Apache-2.0
// A pool of 16 GiB, sparse: rows beyond 2^31, 2^32, 2^33 and 2^34 bytes are moved on the device as on the host.

#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>

#include "catch.hpp"
#include "cuda/evict/host_reference.hpp"
#include "device_buffer.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

// A GPU has no sparse memory, and the race checker follows what a device_buffer holds alone.
#if defined(KVTRIM_EMULATED) && !defined(__SANITIZE_THREAD__)
#  include <sys/mman.h>

namespace kvtrim::test {
namespace {

constexpr std::int32_t page_size = 16;
constexpr std::int32_t kv_heads = 2;
constexpr std::int32_t head_dim = 64;
constexpr std::int32_t last_page = (1 << 18) + 1;  // of 64 KiB each

class Sparse {
 public:
  explicit Sparse(std::size_t bytes) : bytes_(bytes) {
    void* const p = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  ~Sparse() {
    if (base_ != nullptr) { munmap(base_, bytes_); }
  }
  [[nodiscard]] std::byte* base() const { return base_; }

 private:
  std::size_t bytes_;
  std::byte* base_ = nullptr;
};

// A sequence in pages on both sides of each power of two. Where all offsets agree modulo 2^32, a difference that wraps shows.
struct Side {
  explicit Side(std::size_t bytes) : pool(bytes) {
    for (std::int32_t bit = 15; bit <= 18; ++bit) {
      for (const std::int32_t id : {(1 << bit) - 1, 1 << bit, (1 << bit) + 1}) {
        ids.push_back(id);
      }
    }
    ids.insert(ids.end(), {0, 1, 2});
    const std::size_t rows = ids.size() * page_size - 5;
    state.live_rows = static_cast<std::int32_t>(rows);
    state.next_position = state.live_rows;
    for (std::size_t i = 0; i < kv_heads * ids.size() * page_size; ++i) {
      sums.push_back(static_cast<float>(i * 2654435761U % 1009));
      positions.push_back(static_cast<std::int32_t>(i % (ids.size() * page_size)));
    }
    compensations.resize(sums.size());
  }
  [[nodiscard]] CacheView view(bool nhd) {
    CacheView v;
    const PlaneShape shape{page_size, kv_heads, head_dim, DType::f32};
    v.k = nhd ? Plane::nhd(pool.base(), shape) : Plane::hnd(pool.base(), shape);
    v.k.page_stride = 1 << 16;  // keys in the first half of a page, values in the second
    v.v = v.k;
    v.v.base += 1 << 15;
    v.page_size = page_size;
    v.pages = last_page + 1;
    v.kv_heads = kv_heads;
    v.sequences = 1;
    v.table.ids = ids.data();
    v.table.max_pages = static_cast<std::int32_t>(ids.size());
    v.states = &state;
    const auto capacity = static_cast<std::int64_t>(ids.size()) * page_size;
    v.score_sums = {.base = reinterpret_cast<std::byte*>(sums.data()),
                    .sequence_stride = kv_heads * capacity * 4,
                    .head_stride = capacity * 4,
                    .row_stride = 4};
    v.score_compensations = v.score_sums;
    v.score_compensations.base = reinterpret_cast<std::byte*>(compensations.data());
    v.positions = v.score_sums;
    v.positions.base = reinterpret_cast<std::byte*>(positions.data());
    return v;
  }
  Sparse pool;
  std::vector<std::int32_t> ids;
  SequenceState state;
  std::vector<float> sums, compensations;
  std::vector<std::int32_t> positions;
};

std::vector<std::byte> bytes_of(const CacheView& view, const std::vector<std::int32_t>& ids) {
  std::vector<std::byte> all;
  for (const std::int32_t id : ids) {
    const std::byte* const page = view.k.base + std::int64_t{id} * view.k.page_stride;
    all.insert(all.end(), page, page + view.k.page_stride);
  }
  return all;
}

}  // namespace

TEST_CASE("B129 plan, apply: rows beyond 2^33 bytes are moved as on the host",
          "[cuda][evict][fault]") {
  const std::size_t bytes = std::size_t{last_page + 1} << 16;
  for (const bool nhd : {true, false}) {
    for (const Removal removal : {Removal::stable_pack, Removal::fill_holes}) {
      CAPTURE(nhd, to_string(removal));
      Side host(bytes), device(bytes);
      if (host.pool.base() == nullptr || device.pool.base() == nullptr) {
        WARN("no sparse mapping of 2^34 bytes: not tested");
        return;
      }
      const CacheView on_host = host.view(nhd), on_device = device.view(nhd);
      const std::vector<std::int32_t> ids = host.ids;
      for (const std::int32_t id : ids) {
        for (std::int64_t i = 0; i < on_host.k.page_stride; i += 4) {
          const auto word = static_cast<std::uint32_t>(id) * 40503U + static_cast<std::uint32_t>(i);
          std::memcpy(on_host.k.base + id * on_host.k.page_stride + i, &word, 4);
          std::memcpy(on_device.k.base + id * on_host.k.page_stride + i, &word, 4);
        }
      }
      const HeavyHitter policy({.heavy = 70, .recent = 20});
      Plan wanted = host_plan(policy, on_host, {}, removal);
      const PlanRef want = wanted.ref();
      REQUIRE(want.status() == Status::ok);
      REQUIRE(want.bytes_moved() > 0);
      REQUIRE(apply(want, on_host) == Status::ok);

      const PlanShape shape = plan_shape(on_device);
      DeviceBuffer<std::byte> memory(cuda::plan_workspace_bytes(policy, shape), "workspace");
      const cuda::PlanWorkspace workspace{shape, memory.data(), memory.size()};
      cuda::DevicePlanOptions options;
      options.removal = removal;
      REQUIRE(cuda::plan(policy, on_device, {}, workspace, nullptr, options) == cudaSuccess);
      REQUIRE(cuda::apply(workspace, on_device, nullptr) == cudaSuccess);
      CHECK(cuda::device_plan(workspace).report->bytes_moved == want.bytes_moved());
      CHECK(bytes_of(on_device, ids) == bytes_of(on_host, ids));
    }
  }
}

}  // namespace kvtrim::test
#endif
