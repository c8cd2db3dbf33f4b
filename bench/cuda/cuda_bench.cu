// SPDX-License-Identifier: Apache-2.0
// Times of the kernels on a device, each beside what the device can do at best, measured in the same run: a copy, a read of the
// keys, a graph of as many empty kernels; and beside CUB's segmented sort. Medians of 50 graph replays over data that rotates
// through at least 512 MiB, so that no figure comes from the second-level cache. Caches have what a real one has: positions,
// states, counts of owners, accumulated scores. Writes JSON to stdout and a table to stderr; exit code 77 without a device.

#include <kvtrim/cuda/evict/apply.cuh>
#include <kvtrim/cuda/evict/extend.cuh>
#include <kvtrim/cuda/evict/plan.cuh>
#include <kvtrim/cuda/evict/prepare.cuh>
#include <kvtrim/cuda/evict/step.cuh>
#include <kvtrim/cuda/evict/window_scorer.cuh>
#include <kvtrim/cuda/score/window.cuh>
#include <kvtrim/cuda/select/top_k.cuh>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/policy.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>

#include <cub/device/device_segmented_radix_sort.cuh>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

using namespace kvtrim;  // but not its `cuda`: CUB has a namespace of that name too

constexpr std::int64_t mib = 1024 * 1024;
constexpr std::int64_t rotated_bytes = 512 * mib;
constexpr int replays = 50;

void must(cudaError_t e, const char* what) {
  if (e != cudaSuccess) {
    std::fprintf(stderr, "cuda_bench: %s: %s\n", what, cudaGetErrorString(e));
    std::exit(1);
  }
}

/// Device memory, freed at the end of its scope.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count) : count_(count) {
    must(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc");
    must(cudaMemset(data_, 0, count * sizeof(T)), "cudaMemset");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    must(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
         "cudaMemcpy");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

/// What `queue(stream)` queues, as a graph that can be launched; `nodes`: how many kernels and copies it has.
template <class Queue>
cudaGraphExec_t captured(cudaStream_t stream, std::size_t& nodes, Queue queue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  queue(stream);
  must(cudaStreamEndCapture(stream, &graph), "capture");
  must(cudaGraphGetNodes(graph, nullptr, &nodes), "nodes");
  must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  must(cudaGraphDestroy(graph), "destroy");
  return exec;
}

struct Timed {
  double first;   // microseconds of the first launch
  double median;  // of the replays
  std::size_t nodes;
};

/// Microseconds of what `queue(stream, i)` queues, captured; `i` counts through the rotated copies.
template <class Queue>
Timed timed(int copies, Queue queue) {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  must(cudaEventCreate(&begin), "event");
  must(cudaEventCreate(&end), "event");
  std::vector<cudaGraphExec_t> graphs;
  Timed result{};
  for (int i = 0; i < copies; ++i) {
    graphs.push_back(captured(stream, result.nodes, [&](cudaStream_t on) { queue(on, i); }));
  }
  std::vector<double> times;
  for (int i = -5; i < replays; ++i) {
    must(cudaEventRecord(begin, stream), "record");
    must(cudaGraphLaunch(graphs[static_cast<std::size_t>((i + 5) % copies)], stream), "launch");
    must(cudaEventRecord(end, stream), "record");
    must(cudaEventSynchronize(end), "synchronize");
    float milliseconds = 0;
    must(cudaEventElapsedTime(&milliseconds, begin, end), "elapsed");
    const double microseconds = static_cast<double>(milliseconds) * 1000;
    if (i == -5) { result.first = microseconds; }
    if (i >= 0) { times.push_back(microseconds); }
  }
  for (const cudaGraphExec_t g : graphs) { must(cudaGraphExecDestroy(g), "destroy"); }
  must(cudaEventDestroy(begin), "destroy");
  must(cudaEventDestroy(end), "destroy");
  must(cudaStreamDestroy(stream), "destroy");
  std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
  result.median = times[replays / 2];
  return result;
}
/// The median alone.
template <class Queue>
double median_microseconds(int copies, Queue queue) {
  return timed(copies, queue).median;
}

template <class = void>
__global__ void empty_kernel() {}

/// Microseconds of a graph of `nodes` kernels that do nothing.
double empty_graph(std::size_t nodes) {
  return median_microseconds(1, [&](cudaStream_t stream, int) {
    for (std::size_t i = 0; i < nodes; ++i) { empty_kernel<><<<1, 32, 0, stream>>>(); }
  });
}

/// What a time is measured against, and what is asked of it.
struct Bound {
  std::string_view name;    // what the device did meanwhile
  double microseconds = 0;  // how long that takes
  double percent = 0;       // target: at least so much of the bound; 0: none
  double most = 0;          // target: at most so many microseconds; 0: none
  double cub = 0;           // microseconds of CUB's segmented sort; 0: nothing to compare
};

/// Results as lines of JSON, and as a table.
class Results {
 public:
  void add(const std::string& name, double microseconds, const Bound& bound) {
    const double percent = bound.microseconds > 0 ? 100 * bound.microseconds / microseconds : 0;
    std::string line = "    {\"name\": \"" + name + "\", \"microseconds\": " + number(microseconds);
    if (bound.microseconds > 0) {
      line += ", \"bound\": \"" + std::string(bound.name) +
              "\", \"bound_microseconds\": " + number(bound.microseconds) +
              ", \"percent_of_bound\": " + number(percent);
    }
    if (bound.cub > 0) { line += ", \"cub_segmented_sort\": " + number(bound.cub); }
    std::string target;
    if (bound.percent > 0) { target = "target_percent_of_bound\": " + number(bound.percent); }
    if (bound.most > 0) { target = "target_microseconds\": " + number(bound.most); }
    const bool pass = percent >= bound.percent && (bound.most <= 0 || microseconds <= bound.most);
    if (!target.empty()) {
      line += ", \"" + target + ", \"pass\": " + (pass ? "true" : "false");
      all_pass_ = all_pass_ && pass;
    }
    lines_.push_back(line + "}");
    std::fprintf(stderr,
                 "%-66s %10.1f us  %5.1f %% of %-14s %10.1f us%s%s%s\n",
                 name.c_str(),
                 microseconds,
                 percent,
                 std::string(bound.microseconds > 0 ? bound.name : "-").c_str(),
                 bound.microseconds,
                 bound.cub > 0 ? ("  CUB " + number(bound.cub) + " us").c_str() : "",
                 target.empty()   ? ""
                 : bound.most > 0 ? ("  at most " + number(bound.most) + " us: ").c_str()
                                  : ("  at least " + number(bound.percent) + " %: ").c_str(),
                 target.empty() ? ""
                 : pass         ? "pass"
                                : "MISSED");
  }
  /// Bytes that are read and written, by a copy.
  [[nodiscard]] double copy_of(std::int64_t bytes) const {
    return static_cast<double>(bytes) / copy_rate / 1000;
  }
  /// Bytes that are read.
  [[nodiscard]] double read_of(std::int64_t bytes) const {
    return static_cast<double>(bytes) / read_rate / 1000;
  }
  double copy_rate = 1;  // GB/s, both directions together
  double read_rate = 1;
  void print(const std::string& device) const {
    std::printf(
        "{\n  \"device\": \"%s\",\n  \"replays\": %d,\n  \"copy_gb_per_s\": %.1f,\n"
        "  \"read_gb_per_s\": %.1f,\n  \"all_pass\": %s,\n  \"results\": [\n",
        device.c_str(),
        replays,
        copy_rate,
        read_rate,
        all_pass_ ? "true" : "false");
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      std::printf("%s%s\n", lines_[i].c_str(), i + 1 < lines_.size() ? "," : "");
    }
    std::puts("  ]\n}");
  }

 private:
  static std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", x);
    return text;
  }
  std::vector<std::string> lines_;
  bool all_pass_ = true;
};

/// Keeps the rows with the best ready-made scores.
struct ByScore {
  static constexpr std::string_view name = "by_score";
  std::int32_t keep = 0;
  Removal way = Removal::stable_pack;
  [[nodiscard]] constexpr Demand demand(const DemandInput& in) const noexcept {
    return {keep < in.live ? keep : in.live, {}, 0, Status::ok};
  }
  [[nodiscard]] constexpr Removal removal() const noexcept { return way; }
  [[nodiscard]] constexpr ExternalParams scorer() const noexcept { return {}; }
};
static_assert(Policy<ByScore>);

/// Before a plan is applied once more: the states are those that it was made from.
__global__ void reset_kernel(kvtrim::cuda::detail::PlanControl* control,
                             kvtrim::cuda::DeviceReport* report,
                             SequenceState* states,
                             const SequenceState* planned) {
  states[threadIdx.x] = planned[threadIdx.x];
  if (threadIdx.x > 0) { return; }
  control->stage = kvtrim::cuda::detail::DeviceStage::planned;
  report->status = Status::ok;
}
/// Reads everything once.
__global__ void read_kernel(const uint4* from, std::int64_t count, unsigned* never) {
  unsigned all = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const uint4 x = __ldcs(from + i);
    all |= x.x | x.y | x.z | x.w;
  }
  if (all == 0x5A5A'5A5AU) { *never = all; }
}
/// What a first attempt looks like: one block per row, a table look-up in each thread.
__global__ void naive_gather_kernel(const uint4* from,
                                    const std::int32_t* rows,
                                    uint4* to,
                                    int units) {
  const std::int64_t source = rows[blockIdx.x];
  for (int u = static_cast<int>(threadIdx.x); u < units; u += static_cast<int>(blockDim.x)) {
    to[static_cast<std::int64_t>(blockIdx.x) * units + u] = from[source * units + u];
  }
}

/// A bf16 cache of d 128 with 8 KV heads in 16-token pages, one layer, half of the rows to be kept at random.
struct MoveBench {
  static constexpr std::int32_t heads = 8;
  static constexpr std::int32_t dim = 128;
  static constexpr std::int32_t page_size = 16;

  MoveBench(std::int32_t sequences_, std::int32_t rows_)
      : sequences(sequences_),
        rows(rows_),
        pages(2 * sequences_ * rows_ / page_size),
        pool(static_cast<std::size_t>(pages) * page_size * heads * dim * 2),
        ids(static_cast<std::size_t>(sequences_) * (rows_ / page_size)),
        lengths(std::vector<std::int32_t>(static_cast<std::size_t>(sequences_), rows_)),
        spares(static_cast<std::size_t>(pages)),
        spare_count(std::vector<std::int32_t>{pages / 2}),
        scores(random_scores()),
        states(prompt_states()),
        planned(prompt_states()),
        positions(row_positions()),
        sums(random_scores()),
        compensations(sums.size()),
        ref_counts(std::vector<std::int32_t>(static_cast<std::size_t>(pages), 1)) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    must(cudaMemcpy(ids.data(), order.data(), ids.size() * 4, cudaMemcpyHostToDevice), "ids");
    must(cudaMemcpy(spares.data(),
                    order.data() + ids.size(),
                    static_cast<std::size_t>(pages) * 2,
                    cudaMemcpyHostToDevice),
         "spares");
    const PlaneShape shape{page_size, heads, dim, DType::bf16};
    view.k = Plane::nhd(pool.data(), shape);
    view.v = Plane::nhd(pool.data() + pool.size() / 2, shape);
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.sequences = sequences;
    view.table.ids = ids.data();
    view.table.max_pages = rows / page_size;
    view.table.row_stride = rows / page_size;
    view.lengths = lengths.data();
    view.states = states.data();
    view.positions = SequencePlane::dense(positions.data(), 1, heads, rows);
    view.score_sums = SequencePlane::dense(sums.data(), 1, heads, rows);
    view.score_compensations = SequencePlane::dense(compensations.data(), 1, heads, rows);
    view.writable.ref_counts = ref_counts.data();
    bounds.sequences = sequences;
    bounds.kv_heads = heads;
    bounds.page_size = page_size;
    bounds.pages = pages;
    bounds.max_rows = rows;
  }
  [[nodiscard]] std::vector<float> random_scores() const {
    std::mt19937 random(2);
    std::vector<float> s(static_cast<std::size_t>(sequences) * heads *
                         static_cast<std::size_t>(rows));
    for (float& x : s) { x = static_cast<float>(random() % 1000003); }
    return s;
  }

  [[nodiscard]] std::vector<SequenceState> prompt_states() const {
    SequenceState state;
    state.live_rows = state.next_position = state.next_rope_position = rows;
    return std::vector<SequenceState>(static_cast<std::size_t>(sequences), state);
  }
  [[nodiscard]] std::vector<std::int32_t> row_positions() const {
    std::vector<std::int32_t> p(static_cast<std::size_t>(sequences) * heads *
                                static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < p.size(); ++i) {
      p[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(rows));
    }
    return p;
  }

  void run(Results& results,
           const std::string& name,
           Removal removal,
           bool out_of_place,
           double target) {
    const ByScore policy{rows / 2, removal};
    const kvtrim::cuda::GivenScores given(SequencePlane::dense(scores.data(), 1, heads, rows));
    const std::size_t bytes = kvtrim::cuda::plan_workspace_bytes(policy, bounds, given);
    const Buffer<std::byte> memory(bytes);
    const kvtrim::cuda::PlanWorkspace workspace{bounds, memory.data(), bytes};
    kvtrim::cuda::DevicePlanOptions options;
    options.out_of_place = out_of_place;
    options.spare_pages = spares.data();
    options.spare_count = spare_count.data();
    must(kvtrim::cuda::plan(policy, view, given, workspace, nullptr, options), "plan");
    must(cudaDeviceSynchronize(), "plan");
    const kvtrim::cuda::DevicePlan made = kvtrim::cuda::device_plan(workspace);
    kvtrim::cuda::DeviceReport report;
    must(cudaMemcpy(&report, made.report, sizeof report, cudaMemcpyDeviceToHost), "report");
    if (report.status != Status::ok) {
      std::fprintf(stderr,
                   "cuda_bench: %s of %s: status %s\n",
                   name.c_str(),
                   std::string(ByScore::name).c_str(),
                   std::string(to_string(report.status)).c_str());
      std::exit(1);
    }
    // The same plan again and again: the tables are never changed, so every replay moves the same rows.
    const double t = median_microseconds(1, [&](cudaStream_t stream, int) {
      reset_kernel<<<1, static_cast<unsigned>(sequences), 0, stream>>>(
          made.control, made.report, states.data(), planned.data());
      must(kvtrim::cuda::apply(workspace, view, stream), "apply");
    });
    const std::string shape =
        name + "/sequences:" + std::to_string(sequences) + "/rows:" + std::to_string(rows);
    results.add(shape, t, {"copy", results.copy_of(2 * report.bytes_moved), target});
    must(cudaMemcpy(states.data(),
                    planned.data(),
                    states.size() * sizeof(SequenceState),
                    cudaMemcpyDeviceToDevice),
         "states");
    const Timed made_again = timed(1, [&](cudaStream_t stream, int) {
      must(kvtrim::cuda::plan(policy, view, given, workspace, stream, options), "plan");
    });
    results.add("plan_" + shape, made_again.median, {"empty graph", empty_graph(made_again.nodes)});
  }

  std::int32_t sequences;
  std::int32_t rows;
  std::int32_t pages;
  Buffer<__nv_bfloat16> pool;
  Buffer<std::int32_t> ids;
  Buffer<std::int32_t> lengths;
  Buffer<std::int32_t> spares;
  Buffer<std::int32_t> spare_count;
  Buffer<float> scores;
  Buffer<SequenceState> states;
  Buffer<SequenceState> planned;
  Buffer<std::int32_t> positions;
  Buffer<float> sums;
  Buffer<float> compensations;
  Buffer<std::int32_t> ref_counts;
  CacheView view;
  PlanShape bounds;
};

/// A step of a batch that generates: a row for every sequence from a list of free pages, and what is evicted, in one call. One
/// table for all layers and KV heads.
void bench_decode(Results& results, std::int32_t sequences, std::int32_t budget, double target) {
  MoveBench cache(sequences, budget + MoveBench::page_size);
  const HeavyHitter policy({.heavy = budget / 2, .recent = budget / 2});
  // At the budget: each step appends one row and evicts one.
  std::vector<SequenceState> states = cache.prompt_states();
  for (SequenceState& state : states) {
    state.live_rows = state.next_position = state.next_rope_position = budget;
  }
  must(cudaMemcpy(cache.states.data(),
                  states.data(),
                  states.size() * sizeof(SequenceState),
                  cudaMemcpyHostToDevice),
       "states");
  CacheView view = cache.view;
  view.lengths = nullptr;  // the states have them
  const kvtrim::cuda::PlanBounds bounds(cache.bounds, 0, 1);
  const std::size_t bytes = kvtrim::cuda::plan_workspace_bytes(policy, bounds);
  const Buffer<std::byte> memory(bytes);
  const kvtrim::cuda::PlanWorkspace workspace{bounds, memory.data(), bytes};
  const Buffer<std::int32_t> free_count(std::vector<std::int32_t>{cache.pages / 2, 0});
  const Buffer<Status> statuses(static_cast<std::size_t>(sequences));
  kvtrim::cuda::DeviceTables tables;
  tables.ids = cache.ids.data();
  tables.ref_counts = cache.ref_counts.data();
  tables.free = {cache.spares.data(), free_count.data(), cache.pages};
  kvtrim::cuda::DeviceExtend next_token;
  next_token.statuses = statuses.data();
  kvtrim::cuda::DeviceStepOptions written;
  written.written = true;
  must(kvtrim::cuda::prepare(policy, view, {}, bounds), "prepare");
  const Timed step = timed(1, [&](cudaStream_t stream, int) {
    must(kvtrim::cuda::extend(view, tables, next_token, stream), "extend");
    must(kvtrim::cuda::step(policy, view, {}, workspace, tables, stream, written), "step");
  });
  kvtrim::cuda::DeviceReport report;
  must(cudaMemcpy(&report,
                  kvtrim::cuda::device_plan(workspace).report,
                  sizeof report,
                  cudaMemcpyDeviceToHost),
       "report");
  if (report.status != Status::ok || report.evicted != std::int64_t{sequences} * cache.heads) {
    std::fprintf(stderr,
                 "cuda_bench: decode: status %s, %lld rows went\n",
                 std::string(to_string(report.status)).c_str(),
                 static_cast<long long>(report.evicted));
    std::exit(1);
  }
  results.add("decode_step/heavy_hitter/sequences:" + std::to_string(sequences) +
                  "/budget:" + std::to_string(budget) + "/nodes:" + std::to_string(step.nodes),
              step.median,
              {"empty graph", empty_graph(step.nodes), 0, target});
}

/// SnapKV's plan of a long prompt whose very first call is a captured one.
void bench_first_call(Results& results, std::int32_t rows) {
  constexpr std::int32_t query_heads = 32;
  constexpr std::int32_t window = 32;
  MoveBench cache(1, rows);
  const SnapKVSelector policy({.window = window, .budget = 2048});
  PlanShape shape = cache.bounds;
  shape.query_heads = query_heads;
  shape.query_rows = window;
  shape.head_dim = MoveBench::dim;
  const Buffer<std::uint16_t> q(
      std::vector<std::uint16_t>(std::size_t{query_heads} * window * MoveBench::dim, 0x3F80));
  kvtrim::cuda::DeviceObservation seen;
  seen.query_dtype = DType::bf16;
  seen.queries.data = reinterpret_cast<const float*>(q.data());
  seen.queries.query_heads = query_heads;
  seen.queries.rows = window;
  seen.queries.row_stride = MoveBench::dim;
  seen.queries.head_stride = window * MoveBench::dim;
  seen.queries.layer_stride = seen.queries.sequence_stride =
      std::int64_t{query_heads} * window * MoveBench::dim;
  const std::size_t bytes = kvtrim::cuda::plan_workspace_bytes(policy, shape);
  const Buffer<std::byte> memory(bytes);
  const kvtrim::cuda::PlanWorkspace workspace{shape, memory.data(), bytes};
  must(kvtrim::cuda::prepare(policy, cache.view, seen, shape), "prepare");
  const Timed plan = timed(1, [&](cudaStream_t stream, int) {
    must(kvtrim::cuda::plan(policy, cache.view, seen, workspace, stream), "captured plan");
  });
  const std::int64_t key_bytes = std::int64_t{rows} * MoveBench::heads * MoveBench::dim * 2;
  const std::string name = "plan/snapkv/captured/rows:" + std::to_string(rows);
  results.add(name, plan.median, {"reading K", results.read_of(key_bytes)});
  results.add(name + "/first_launch", plan.first, {"reading K", results.read_of(key_bytes)});
}

void bench_copy(Results& results) {
  const Buffer<std::byte> from(rotated_bytes);
  const Buffer<std::byte> to(rotated_bytes);
  const double t = median_microseconds(1, [&](cudaStream_t stream, int) {
    must(cudaMemcpyAsync(to.data(), from.data(), rotated_bytes, cudaMemcpyDeviceToDevice, stream),
         "copy");
  });
  results.copy_rate = 2.0 * rotated_bytes / t / 1000;
  results.add("copy/cudaMemcpyAsync", t, {"copy", t});
  const Buffer<unsigned> never(1);
  const double read = median_microseconds(1, [&](cudaStream_t stream, int) {
    read_kernel<<<4U * static_cast<unsigned>(kvtrim::cuda::detail::multiprocessors()),
                  512,
                  0,
                  stream>>>(
        reinterpret_cast<const uint4*>(from.data()), rotated_bytes / 16, never.data());
  });
  results.read_rate = 1.0 * rotated_bytes / read / 1000;
  results.add("read", read, {"read", read});

  constexpr int units = 32;  // rows of 512 bytes
  const auto rows = static_cast<std::int32_t>(rotated_bytes / 512);
  std::vector<std::int32_t> keep(static_cast<std::size_t>(rows / 2));
  for (std::size_t i = 0; i < keep.size(); ++i) {
    keep[i] = static_cast<std::int32_t>(2 * i + (i * 7919) % 2);
  }
  const Buffer<std::int32_t> list(keep);
  const double naive = median_microseconds(1, [&](cudaStream_t stream, int) {
    naive_gather_kernel<<<static_cast<unsigned>(rows / 2), units, 0, stream>>>(
        reinterpret_cast<const uint4*>(from.data()),
        list.data(),
        reinterpret_cast<uint4*>(to.data()),
        units);
  });
  results.add("copy/naive_gather", naive, {"copy", results.copy_of(rotated_bytes)});
}

void bench_select(
    Results& results, std::int32_t heads, std::int32_t rows, std::int32_t keep, double target) {
  const std::int64_t each = std::int64_t{heads} * rows * 4;
  const int copies = static_cast<int>((rotated_bytes + each - 1) / each);
  std::mt19937 random(3);
  std::vector<float> values(static_cast<std::size_t>(heads) * static_cast<std::size_t>(rows));
  for (float& x : values) { x = static_cast<float>(random() % 1000003) * 1e-9F; }
  Buffer<float> scores(values.size() * static_cast<std::size_t>(copies));
  for (int i = 0; i < copies; ++i) {
    must(cudaMemcpy(scores.data() + static_cast<std::int64_t>(i) * heads * rows,
                    values.data(),
                    values.size() * 4,
                    cudaMemcpyHostToDevice),
         "scores");
  }
  kvtrim::cuda::SelectTask task;
  task.extent = rows;
  task.end = rows;
  task.keep = keep;
  task.active = 1;
  const Buffer<kvtrim::cuda::SelectTask> tasks(
      std::vector<kvtrim::cuda::SelectTask>(static_cast<std::size_t>(heads), task));
  const Buffer<std::int32_t> out(values.size());
  const Buffer<std::int32_t> nan(static_cast<std::size_t>(heads));
  const kvtrim::cuda::SelectBounds bounds{heads, 1, 1, rows};
  const Buffer<std::byte> workspace(kvtrim::cuda::top_k_workspace_bytes(bounds));
  const std::string shape = "/heads:" + std::to_string(heads) + "/rows:" + std::to_string(rows) +
                            "/keep:" + std::to_string(keep);
  const double t = median_microseconds(copies, [&](cudaStream_t stream, int i) {
    kvtrim::cuda::RowScores input;
    input.scores = SequencePlane::dense(
        scores.data() + static_cast<std::int64_t>(i) * heads * rows, 1, 1, rows);
    must(kvtrim::cuda::top_k(input,
                             tasks.data(),
                             bounds,
                             out.data(),
                             nan.data(),
                             workspace.data(),
                             workspace.size(),
                             stream),
         "top_k");
  });
  std::vector<int> borders(static_cast<std::size_t>(heads) + 1);
  for (std::size_t i = 0; i < borders.size(); ++i) { borders[i] = static_cast<int>(i) * rows; }
  const Buffer<int> offsets(borders);
  const Buffer<float> sorted(values.size());
  std::size_t bytes = 0;
  must(cub::DeviceSegmentedRadixSort::SortKeysDescending(nullptr,
                                                         bytes,
                                                         scores.data(),
                                                         sorted.data(),
                                                         heads * rows,
                                                         heads,
                                                         offsets.data(),
                                                         offsets.data() + 1),
       "cub");
  const Buffer<std::byte> temporary(bytes);
  const double cub_time = median_microseconds(copies, [&](cudaStream_t stream, int i) {
    must(cub::DeviceSegmentedRadixSort::SortKeysDescending(
             temporary.data(),
             bytes,
             scores.data() + static_cast<std::int64_t>(i) * heads * rows,
             sorted.data(),
             heads * rows,
             heads,
             offsets.data(),
             offsets.data() + 1,
             0,
             32,
             stream),
         "cub");
  });
  results.add("top_k" + shape, t, {"reading scores", results.read_of(each), 0, target, cub_time});
}

/// 32 queries x 32 heads over 32k keys of 8 KV heads, d 128.
void bench_window(Results& results,
                  DType dtype,
                  bool lse,
                  kvtrim::cuda::ScorePath path,
                  const std::string& name,
                  double times) {
  constexpr std::int32_t rows = 32768;
  constexpr std::int32_t heads = 8;
  constexpr std::int32_t query_heads = 32;
  constexpr std::int32_t queries = 32;
  constexpr std::int32_t dim = 128;
  constexpr std::int32_t page_size = 16;
  const std::int64_t key_bytes = std::int64_t{rows} * heads * dim * element_bytes(dtype);
  const int copies = static_cast<int>((rotated_bytes + key_bytes - 1) / key_bytes);
  const std::int32_t pages = copies * rows / page_size;
  const Buffer<std::byte> keys(static_cast<std::size_t>(key_bytes * copies));
  std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(4));
  const Buffer<std::int32_t> ids(order);
  const Buffer<std::int32_t> lengths(std::vector<std::int32_t>{rows});
  const DType query_dtype = dtype == DType::f16 ? DType::f16 : DType::bf16;
  const Buffer<std::uint16_t> q(
      std::vector<std::uint16_t>(static_cast<std::size_t>(query_heads) * queries * dim,
                                 query_dtype == DType::f16 ? 0x3C00 : 0x3F80));
  const Buffer<float> sums(
      std::vector<float>(static_cast<std::size_t>(query_heads) * queries, 10.4F));
  const Buffer<float> scores(static_cast<std::size_t>(heads) * rows);
  kvtrim::cuda::DeviceQueries input;
  input.dtype = query_dtype;
  input.block.data = reinterpret_cast<const float*>(q.data());
  input.block.query_heads = query_heads;
  input.block.rows = queries;
  input.block.row_stride = dim;
  input.block.head_stride = queries * dim;
  input.block.layer_stride = input.block.sequence_stride =
      std::int64_t{query_heads} * queries * dim;
  if (lse) {
    input.block.lse = sums.data();
    input.block.lse_head_stride = queries;
  }
  const WindowParams params;
  const kvtrim::cuda::ScoreBounds bounds{rows, 0};
  CacheView view;
  view.page_size = page_size;
  view.pages = pages;
  view.kv_heads = heads;
  view.sequences = 1;
  view.k = Plane::nhd(keys.data(), {page_size, heads, dim, dtype});
  view.v = view.k;
  view.lengths = lengths.data();
  view.table.ids = ids.data();
  view.table.max_pages = rows / page_size;
  view.table.row_stride = rows / page_size;
  const Buffer<std::byte> workspace(
      kvtrim::cuda::window_scores_workspace_bytes(params, view, input, bounds));
  const double t = median_microseconds(copies, [&](cudaStream_t stream, int i) {
    view.table.ids = ids.data() + static_cast<std::int64_t>(i) * (rows / page_size);
    must(kvtrim::cuda::window_scores(params,
                                     view,
                                     input,
                                     SequencePlane::dense(scores.data(), 1, heads, rows),
                                     bounds,
                                     workspace.data(),
                                     workspace.size(),
                                     stream,
                                     path),
         "window_scores");
  });
  results.add("window_scores/" + name,
              t,
              {"reading K", results.read_of(key_bytes), times > 0 ? 100 / times : 0});
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fputs("cuda_bench: skipped: there is no CUDA device, nothing was measured\n", stderr);
    return 77;
  }
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, 0), "properties");
  const std::string device = properties.name;
  Results results;
  bench_copy(results);
  {
    MoveBench many(64, 16384);  // 512 chains (sequence, KV head) for each plane, 2 GiB of K and V
    many.run(results, "fill_holes", Removal::fill_holes, false, 80);
    many.run(results, "stable_pack_out_of_place", Removal::stable_pack, true, 80);
    many.run(results, "stable_pack_in_place", Removal::stable_pack, false, 60);
  }
  bench_select(results, 64, 16384, 2048, 20);
  bench_select(results, 64, 12288, 2048, 0);  // as much shared memory as a block can have
  bench_select(results, 8, 131072, 4096, 0);
  bench_decode(results, 64, 2048, 30);
  bench_first_call(results, 32768);
  using kvtrim::cuda::ScorePath;
  bench_window(results, DType::bf16, true, ScorePath::tensor_cores, "bf16/lse/tensor_cores", 2);
  bench_window(results,
               DType::bf16,
               false,
               ScorePath::tensor_cores,
               "bf16/self_normalised/tensor_cores",
               4.5);
  bench_window(results, DType::bf16, true, ScorePath::fma, "bf16/lse/fma", 0);
  bench_window(results, DType::f8e4m3, true, ScorePath::fma, "f8e4m3/lse/fma", 0);
  results.print(device);
  return 0;
}
