// SPDX-License-Identifier: Apache-2.0
// kvtrim between the layers of an engine on a GPU: a paged bf16 cache, SnapKV at the end of a prompt, HeavyHitter during
// decode, the decode step captured into a CUDA graph, pages from a list on the device and back to it, handed on after an event.
//
// There is no model here: keys, values, queries and probabilities are made up by a kernel where an engine's attention
// would have left them. What is shown is the order of calls, who owns what, and when a page is free.

#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/commit.cuh>
#include <kvtrim/cuda/evict/extend.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/step.cuh>
#include <kvtrim/cuda/evict/window_scorer.cuh>
#include <kvtrim/cuda/observe/accumulate.cuh>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;

constexpr std::int32_t sequences = 4;
constexpr std::int32_t layers = 2;
constexpr std::int32_t kv_heads = 2;
constexpr std::int32_t query_heads = 8;
constexpr std::int32_t head_dim = 128;
constexpr std::int32_t page_size = 16;
constexpr std::int32_t prompt_rows = 1000;
constexpr std::int32_t budget = 256;
constexpr std::int32_t window = 32;
constexpr std::int32_t max_pages = (prompt_rows + page_size - 1) / page_size;
constexpr std::int32_t pages = sequences * max_pages;
constexpr std::int32_t decode_steps = 50;

void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) {
    std::fprintf(stderr, "cuda_step: %s: %s\n", what, cudaGetErrorString(e));
    std::exit(1);
  }
}

/// Device memory for the life of the program.
template <class T>
T* device_array(std::size_t count) {
  T* p = nullptr;
  must(cudaMalloc(reinterpret_cast<void**>(&p), count * sizeof(T)), "cudaMalloc");
  must(cudaMemset(p, 0, count * sizeof(T)), "cudaMemset");
  return p;
}
template <class T>
T* on_device(const std::vector<T>& values) {
  T* const p = device_array<T>(values.size());
  must(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
       "cudaMemcpy");
  return p;
}

/// Stands in for a model's numbers.
template <class T>
__global__ void make_up_kernel(T* data, std::int64_t count, float scale, std::uint32_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761U + seed;
    x ^= x >> 15U;
    x *= 2246822519U;
    x ^= x >> 13U;
    data[i] = static_cast<T>(static_cast<float>(x & 0xFFFFU) / 65536.0F * scale);
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no CUDA device");
    return 77;
  }
  cudaStream_t stream = nullptr;
  cudaEvent_t pages_are_free = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  must(cudaEventCreateWithFlags(&pages_are_free, cudaEventDisableTiming), "cudaEventCreate");

  // --- the engine's cache: [layers, 2, pages, page_size, kv_heads, head_dim], one table for all layers ---
  const PlaneShape shape{page_size, kv_heads, head_dim, DType::bf16};
  const std::int64_t plane_elements =
      static_cast<std::int64_t>(pages) * page_size * kv_heads * head_dim;
  auto* const pool =
      device_array<__nv_bfloat16>(static_cast<std::size_t>(2 * layers * plane_elements));
  make_up_kernel<<<256, 256, 0, stream>>>(pool, 2 * layers * plane_elements, 1.0F, 1U);
  std::vector<std::int32_t> ids(pages);
  std::iota(ids.begin(), ids.end(), 0);
  SequenceState prompt;
  prompt.live_rows = prompt.next_position = prompt.next_rope_position = prompt_rows;
  std::vector<std::int32_t> positions;
  for (std::int32_t i = 0; i < sequences * layers * kv_heads; ++i) {
    for (std::int32_t r = 0; r < prompt_rows; ++r) { positions.push_back(r); }
  }
  std::int32_t* const table = on_device(ids);
  std::int32_t* const row_positions = on_device(positions);
  const std::size_t rows = positions.size();

  CacheView view;
  view.k = Plane::nhd(pool, shape);
  view.v = Plane::nhd(pool + plane_elements, shape);
  view.k.layer_stride = view.v.layer_stride = 2 * plane_elements * 2;
  view.page_size = page_size;
  view.pages = pages;
  view.kv_heads = kv_heads;
  view.layers = layers;
  view.sequences = sequences;
  view.table.ids = table;
  view.table.max_pages = max_pages;
  view.table.row_stride = max_pages;
  view.states = on_device(std::vector<SequenceState>(sequences, prompt));
  view.positions = SequencePlane::dense(row_positions, layers, kv_heads, prompt_rows);
  view.score_sums = SequencePlane::dense(device_array<float>(rows), layers, kv_heads, prompt_rows);
  view.score_compensations =
      SequencePlane::dense(device_array<float>(rows), layers, kv_heads, prompt_rows);

  // --- bounds and workspace, once; nothing is allocated later ---
  PlanShape bounds;
  bounds.sequences = sequences;
  bounds.layers = layers;
  bounds.kv_heads = kv_heads;
  bounds.page_size = page_size;
  bounds.pages = pages;
  bounds.max_rows = prompt_rows;
  bounds.query_heads = query_heads;
  bounds.query_rows = window;
  bounds.head_dim = head_dim;
  const SnapKVSelector snapkv({.window = window, .budget = budget});
  const HeavyHitter heavy({.heavy = budget / 2, .recent = budget / 2});
  const std::size_t snapkv_bytes = cuda::plan_workspace_bytes(snapkv, bounds);
  const std::size_t heavy_bytes = cuda::plan_workspace_bytes(heavy, bounds);
  const std::size_t bytes = snapkv_bytes > heavy_bytes ? snapkv_bytes : heavy_bytes;
  const cuda::PlanWorkspace workspace{bounds, device_array<std::byte>(bytes), bytes};
  cuda::DeviceTables tables;
  tables.ids = table;
  tables.freed_count = device_array<std::int32_t>(1);
  tables.free = {device_array<std::int32_t>(pages), device_array<std::int32_t>(2), pages};
  cuda::DeviceExtend next_token;
  next_token.max_rows = prompt_rows;
  next_token.statuses = device_array<Status>(sequences);

  // --- end of the prompt: SnapKV by the last queries, as attention left them ---
  const std::int64_t query_elements =
      std::int64_t{sequences} * layers * query_heads * window * head_dim;
  auto* const queries = device_array<__nv_bfloat16>(static_cast<std::size_t>(query_elements));
  make_up_kernel<<<64, 256, 0, stream>>>(queries, query_elements, 1.0F, 2U);
  cuda::DeviceObservation observation;
  observation.query_dtype = DType::bf16;
  observation.queries.data = reinterpret_cast<const float*>(queries);
  observation.queries.query_heads = query_heads;
  observation.queries.rows = window;
  observation.queries.row_stride = head_dim;
  observation.queries.head_stride = window * head_dim;
  observation.queries.layer_stride = std::int64_t{query_heads} * window * head_dim;
  observation.queries.sequence_stride = layers * observation.queries.layer_stride;

  must(cuda::plan(snapkv, view, observation, workspace, stream), "plan(snapkv)");
  must(cuda::apply(workspace, view, stream), "apply");
  must(cuda::commit(workspace, view, tables, stream), "commit");
  must(cudaEventRecord(pages_are_free, stream), "cudaEventRecord");
  // Anyone who takes the pages on another stream waits for the event; so does the host, which prints them.
  must(cudaEventSynchronize(pages_are_free), "cudaEventSynchronize");
  const cuda::DevicePlan made = cuda::device_plan(workspace);
  cuda::DeviceReport report;
  std::int32_t freed = 0;
  must(cudaMemcpy(&report, made.report, sizeof report, cudaMemcpyDeviceToHost), "read the report");
  must(cudaMemcpy(&freed, tables.freed_count, sizeof freed, cudaMemcpyDeviceToHost),
       "read the count");
  std::printf("prompt: status %s, %lld rows stay, %lld go, %lld bytes moved, %d of %d pages free\n",
              std::string(to_string(report.status)).c_str(),
              static_cast<long long>(report.kept),
              static_cast<long long>(report.evicted),
              static_cast<long long>(report.bytes_moved),
              freed,
              pages);
  if (report.status != Status::ok || freed == 0) { return 1; }

  // --- decode: one graph for every step; lengths, holes and tables are read on the device ---
  const std::int64_t probability_elements =
      std::int64_t{sequences} * layers * query_heads * prompt_rows;
  float* const probabilities = device_array<float>(static_cast<std::size_t>(probability_elements));
  make_up_kernel<<<64, 256, 0, stream>>>(probabilities, probability_elements, 1.0F / budget, 3U);
  cuda::DeviceProbabilities observed;
  observed.data = probabilities;
  observed.query_heads = query_heads;
  observed.head_stride = prompt_rows;
  observed.layer_stride = std::int64_t{query_heads} * prompt_rows;
  observed.sequence_stride = layers * observed.layer_stride;
  std::byte* const accumulate_memory = device_array<std::byte>(1U << 20U);

  // Nothing may be loaded while the stream is captured: everything the step uses has been used once, or loaded, before.
  must(cuda::prepare(heavy, view, {}, bounds), "prepare");
  must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  cuda::DeviceStepOptions written;
  written.written = true;  // by the layers, all of them
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  must(cuda::extend(view, tables, next_token, stream), "extend");
  // Here the layers would write their keys and values, and attend.
  must(cuda::accumulate_probabilities(
           heavy.scorer(), view, observed, {}, prompt_rows, accumulate_memory, 1U << 20U, stream),
       "accumulate");
  must(cuda::step(heavy, view, {}, workspace, tables, stream, written), "step");
  must(cudaStreamEndCapture(stream, &graph), "end capture");
  must(cudaGraphInstantiate(&step, graph, 0), "instantiate");
  std::int64_t evicted = 0;
  for (std::int32_t i = 0; i < decode_steps; ++i) {
    must(cudaGraphLaunch(step, stream), "launch the graph");
    must(cudaEventRecord(pages_are_free, stream), "cudaEventRecord");
    must(cudaEventSynchronize(pages_are_free),
         "cudaEventSynchronize");  // an engine would not wait here
    must(cudaMemcpy(&report, made.report, sizeof report, cudaMemcpyDeviceToHost),
         "read the report");
    Status rows[sequences];
    must(cudaMemcpy(rows, next_token.statuses, sizeof rows, cudaMemcpyDeviceToHost),
         "read the statuses");
    for (const Status status : rows) {
      if (status == Status::ok) { continue; }
      std::fprintf(stderr, "step %d: no row: %s\n", i, std::string(to_string(status)).c_str());
      return 1;
    }
    if (report.status != Status::ok) {
      std::fprintf(
          stderr, "step %d: status %s\n", i, std::string(to_string(report.status)).c_str());
      return 1;
    }
    evicted += report.evicted;
  }
  SequenceState after;
  must(cudaMemcpy(&after, view.states, sizeof after, cudaMemcpyDeviceToHost), "read a state");
  std::printf("decode: %d steps by one graph, %lld rows went, %d live rows, next position %d\n",
              decode_steps,
              static_cast<long long>(evicted),
              after.live_rows,
              after.next_position);
  return after.live_rows <= budget && after.next_position == prompt_rows + decode_steps ? 0 : 1;
}
