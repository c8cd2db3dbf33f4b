// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/cuda/select/top_k.cuh>

#include "device_buffer.hpp"

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim::test::DeviceBuffer;

// Scores, positions and tasks of some KV heads, and what must come out.
struct Case {
  cuda::SelectBounds bounds;
  std::vector<float> scores;
  std::vector<std::int32_t> positions;
  std::vector<cuda::SelectTask> tasks;
  bool with_positions = false;

  [[nodiscard]] std::size_t items() const { return tasks.size(); }
  [[nodiscard]] std::size_t at(std::size_t item, std::int32_t e) const {
    return item * static_cast<std::size_t>(bounds.max_rows) + static_cast<std::size_t>(e);
  }
};

bool lower(float a, float b) {  // NaN and -inf are one class below all
  const auto low = [](float x) {
    return std::isnan(x) || x == -std::numeric_limits<float>::infinity();
  };
  if (low(a) || low(b)) { return low(a) && !low(b); }
  return a < b;
}

struct Want {
  std::vector<std::int32_t> rows;
  std::int32_t nan = 0;
};

Want want(const Case& c, std::size_t item) {
  const cuda::SelectTask& task = c.tasks[item];
  std::vector<std::int32_t> order;
  for (std::int32_t e = 0; e < task.extent; ++e) {
    if (e != task.hole) { order.push_back(e); }
  }
  const auto position = [&](std::int32_t e) {
    return c.with_positions ? c.positions[c.at(item, e)] : e;
  };
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return position(a) < position(b); });
  std::vector<std::int32_t> kept(order.begin(), order.begin() + task.begin);
  kept.insert(kept.end(), order.begin() + task.end, order.end());
  std::vector<std::int32_t> rest(order.begin() + task.begin, order.begin() + task.end);
  Want w;
  const bool asked = task.keep > static_cast<std::int32_t>(kept.size());
  for (const auto e : rest) { w.nan += asked && std::isnan(c.scores[c.at(item, e)]) ? 1 : 0; }
  std::sort(rest.begin(), rest.end(), [&](auto a, auto b) {
    const float x = c.scores[c.at(item, a)];
    const float y = c.scores[c.at(item, b)];
    if (lower(x, y) != lower(y, x)) { return lower(y, x); }
    return position(a) < position(b);
  });
  const auto more = task.keep - static_cast<std::int32_t>(kept.size());
  if (more > 0) { kept.insert(kept.end(), rest.begin(), rest.begin() + more); }
  std::sort(kept.begin(), kept.end());
  std::vector<std::int32_t> gone;
  for (std::int32_t e = 0; e < task.extent; ++e) {
    if (!std::binary_search(kept.begin(), kept.end(), e)) { gone.push_back(e); }
  }
  w.rows = kept;
  w.rows.insert(w.rows.end(), gone.begin(), gone.end());
  return w;
}

enum class Values { few, all_equal, continuous, hard };

Case make(std::uint32_t seed,
          std::int32_t sequences,
          std::int32_t kv_heads,
          std::int32_t max_rows,
          Values values,
          bool shuffled,
          bool holes) {
  std::mt19937 random(seed);
  Case c;
  c.bounds = {sequences, 1, kv_heads, max_rows};
  c.with_positions = shuffled;
  const auto items = static_cast<std::size_t>(sequences * kv_heads);
  c.scores.resize(items * static_cast<std::size_t>(max_rows));
  c.positions.resize(c.scores.size());
  for (float& x : c.scores) {
    switch (values) {
      case Values::few:
        x = static_cast<float>(static_cast<int>(random() % 7) - 3);
        break;
      case Values::all_equal:
        x = 0.25F;
        break;
      case Values::continuous:
        x = std::ldexp(static_cast<float>(random() % 1000003), -static_cast<int>(random() % 30));
        break;
      case Values::hard: {
        const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                             -std::numeric_limits<float>::quiet_NaN(),
                             std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity(),
                             0.0F,
                             -0.0F,
                             std::numeric_limits<float>::denorm_min(),
                             -1.5F};
        x = odd[random() % 8];
        break;
      }
    }
  }
  for (std::size_t item = 0; item < items; ++item) {
    cuda::SelectTask t;
    t.active = item % 5 != 3;
    t.extent = item == 0
                   ? max_rows
                   : 1 + static_cast<std::int32_t>(random() % static_cast<unsigned>(max_rows));
    t.hole = holes && t.extent > 1 && item % 2 == 0
                 ? static_cast<std::int32_t>(random() % static_cast<unsigned>(t.extent))
                 : -1;
    const std::int32_t live = t.extent - (t.hole >= 0 ? 1 : 0);
    t.begin = static_cast<std::int32_t>(random() % 5);
    t.begin = std::min(t.begin, live);
    t.end = live - std::min<std::int32_t>(static_cast<std::int32_t>(random() % 9), live - t.begin);
    const std::int32_t fixed = live - (t.end - t.begin);
    t.keep = fixed + static_cast<std::int32_t>(random() % static_cast<unsigned>(live - fixed + 1));
    if (item == 1) { t.keep = fixed; }
    if (item == 2) { t.keep = live; }
    t.ordered = shuffled && item % 3 != 2 ? 0 : 1;
    std::vector<std::int32_t> p(static_cast<std::size_t>(t.extent));
    std::iota(p.begin(), p.end(), 100);
    if (t.ordered == 0) { std::shuffle(p.begin(), p.end(), random); }
    std::copy(p.begin(), p.end(), c.positions.begin() + static_cast<std::ptrdiff_t>(c.at(item, 0)));
    c.tasks.push_back(t);
  }
  return c;
}

void check(const Case& c) {
  const DeviceBuffer<float> scores(c.scores, "scores");
  const DeviceBuffer<std::int32_t> positions(c.positions, "positions");
  const DeviceBuffer<cuda::SelectTask> tasks(c.tasks, "tasks");
  DeviceBuffer<std::int32_t> out(c.scores.size(), "rows");
  out.fill(0xEE);
  DeviceBuffer<std::int32_t> nan(c.items(), "nan counts");
  nan.fill(0);
  DeviceBuffer<std::byte> workspace(cuda::top_k_workspace_bytes(c.bounds), "workspace");
  cuda::RowScores rows;
  rows.scores = SequencePlane::dense(scores.data(), 1, c.bounds.kv_heads, c.bounds.max_rows);
  if (c.with_positions) {
    rows.positions =
        SequencePlane::dense(positions.data(), 1, c.bounds.kv_heads, c.bounds.max_rows);
  }
  const cudaError_t e = cuda::top_k(rows,
                                    tasks.data(),
                                    c.bounds,
                                    out.data(),
                                    nan.data(),
                                    workspace.data(),
                                    workspace.size(),
                                    nullptr);
  INFO(kvtrim::test::device_message());
  REQUIRE(e == cudaSuccess);
  REQUIRE(kvtrim::test::finish() == cudaSuccess);
  const auto got = out.download();
  const auto got_nan = nan.download();
  for (std::size_t item = 0; item < c.items(); ++item) {
    CAPTURE(item,
            c.tasks[item].extent,
            c.tasks[item].begin,
            c.tasks[item].end,
            c.tasks[item].keep,
            c.tasks[item].hole,
            c.tasks[item].ordered);
    const auto begin = got.begin() + static_cast<std::ptrdiff_t>(c.at(item, 0));
    if (c.tasks[item].active == 0) {
      CHECK(std::all_of(begin, begin + c.bounds.max_rows, [](auto x) {
        return x == static_cast<std::int32_t>(0xEEEEEEEE);
      }));
      continue;
    }
    const Want w = want(c, item);
    CHECK(std::vector<std::int32_t>(begin, begin + c.tasks[item].extent) == w.rows);
    CHECK(got_nan[item] == w.nan);
  }
}

}  // namespace

TEST_CASE("cuda::top_k: keeps the rows that the host keeps", "[cuda][parity][ties][nan]") {
  const auto values = GENERATE(Values::few, Values::all_equal, Values::continuous, Values::hard);
  const bool shuffled = GENERATE(false, true);
  check(make(7, 3, 2, 300, values, shuffled, true));
}

TEST_CASE("cuda::top_k: one row, and rows around a tile's border", "[cuda][edge]") {
  const std::int32_t rows = GENERATE(1, 2, 31, 512, 513, 2048, 2049);
  check(make(11, 2, 1, rows, Values::few, rows % 2 == 0, false));
}

TEST_CASE("cuda::top_k: few long heads are shared by several blocks", "[cuda][parity]") {
  const auto values = GENERATE(Values::few, Values::hard);
  const Case c = make(13, 1, 3, 20000, values, values == Values::hard, true);
  REQUIRE(cuda::top_k_workspace_bytes(c.bounds) > 0);
  check(c);
}

TEST_CASE("cuda::top_k: rows that do not fit shared memory", "[cuda][parity][every]") {
  check(make(17, 2, 2, 50000, Values::continuous, true, false));
  check(make(19, 5, 1, 60000, Values::few, false, true));
}

TEST_CASE("cuda::top_k: sums with compensation are ranked by age", "[cuda][parity]") {
  // Two rows with one sum: the younger has had fewer queries, so it is the heavier.
  const std::vector<float> sums{8, 8, 8, 1};
  const std::vector<float> rest{0, 0, 0, 0};
  const DeviceBuffer<float> s(sums);
  const DeviceBuffer<float> r(rest);
  cuda::SelectTask task;
  task.extent = 4;
  task.end = 4;
  task.keep = 2;
  task.active = 1;
  task.next_position = 5;
  const DeviceBuffer<cuda::SelectTask> tasks(std::vector<cuda::SelectTask>{task});
  DeviceBuffer<std::int32_t> out(4);
  DeviceBuffer<std::int32_t> nan(1);
  cuda::RowScores rows;
  rows.scores = SequencePlane::dense(s.data(), 1, 1, 4);
  rows.compensations = SequencePlane::dense(r.data(), 1, 1, 4);
  rows.age_normalised = GENERATE(false, true);
  REQUIRE(
      cuda::top_k(rows, tasks.data(), {1, 1, 1, 4}, out.data(), nan.data(), nullptr, 0, nullptr) ==
      cudaSuccess);
  REQUIRE(kvtrim::test::finish() == cudaSuccess);
  const auto got = out.download();
  CHECK(got[0] == (rows.age_normalised ? 1 : 0));
  CHECK(got[1] == (rows.age_normalised ? 2 : 1));
}

TEST_CASE("cuda::top_k: refuses impossible bounds before any launch", "[cuda]") {
  cuda::RowScores rows;
  const DeviceBuffer<cuda::SelectTask> tasks(std::vector<cuda::SelectTask>(3));
  DeviceBuffer<std::int32_t> out(3);
  CHECK(
      cuda::top_k(rows, tasks.data(), {-1, 1, 1, 8}, out.data(), out.data(), nullptr, 0, nullptr) ==
      cudaErrorInvalidValue);
  CHECK(cuda::top_k(rows, nullptr, {1, 1, 1, 8}, out.data(), out.data(), nullptr, 0, nullptr) ==
        cudaErrorInvalidValue);
  // Several blocks per head need a workspace.
  CHECK(cuda::top_k(
            rows, tasks.data(), {1, 1, 3, 20000}, out.data(), out.data(), nullptr, 0, nullptr) ==
        cudaErrorInvalidValue);
  CHECK(cuda::top_k(rows, nullptr, {0, 1, 1, 8}, nullptr, nullptr, nullptr, 0, nullptr) ==
        cudaSuccess);
}

namespace {

/// The selection of 40 rows out of a head of up to `max_rows`.
cudaError_t select_few(std::int32_t max_rows, cudaStream_t stream = nullptr) {
  static const DeviceBuffer<float> scores(std::vector<float>(200'000, 1.0F), "scores");
  cuda::SelectTask task;
  task.extent = task.end = 40;
  task.keep = 7;
  task.active = 1;
  static const DeviceBuffer<cuda::SelectTask> tasks(std::vector<cuda::SelectTask>(8, task));
  static DeviceBuffer<std::int32_t> out(8 * 200'000, "rows");
  static DeviceBuffer<std::int32_t> nan(8, "nan counts");
  cuda::RowScores rows;
  rows.scores.base = reinterpret_cast<std::byte*>(scores.data());
  rows.scores.row_stride = 4;
  const cudaError_t e = cuda::top_k(
      rows, tasks.data(), {8, 1, 1, max_rows}, out.data(), nan.data(), nullptr, 0, stream);
  return e == cudaSuccess ? kvtrim::test::finish() : e;
}

}  // namespace

TEST_CASE("cuda::top_k: every bound can be launched, static shared memory counts", "[cuda][edge]") {
  // 48 KiB less the static arrays, 48 KiB, the most keys; the last but one and the first that need more than before.
  for (const std::int32_t rows : {10'000, 10'219, 10'221, 12'287, 12'288, 12'289, 49'152, 49'153}) {
    CAPTURE(rows);
    CHECK(select_few(rows) == cudaSuccess);
    INFO(kvtrim::test::device_message());
  }
}

#if defined(KVTRIM_EMULATED)
namespace {

namespace emulator = kvtrim::emulator;

/// A process that has not launched anything yet.
void begin_anew() {
  emulator::unload_kernels();
  for (auto& known : cuda::detail::raised_limits) { known = 0; }
  emulator::launches().clear();
}
template <class... P>
emulator::Kernel state_of(void (*kernel)(P...)) {
  return emulator::kernel_state(reinterpret_cast<const void*>(kernel));
}

}  // namespace

TEST_CASE("cuda::top_k: a device with less shared memory keeps fewer keys there", "[cuda][edge]") {
  begin_anew();
  emulator::block_shared_bytes = 163U * 1024U;  // sm_80
  for (const std::int32_t rows : {39'600, 39'616, 39'617, 49'152}) {
    CAPTURE(rows);
    CHECK(select_few(rows) == cudaSuccess);
    INFO(emulator::message());
  }
  emulator::block_shared_bytes = 227U * 1024U;
  begin_anew();
}

TEST_CASE("cuda::launch: a limit is raised once per device, and no bound lowers it", "[cuda]") {
  begin_anew();
  const auto kernel = cuda::detail::select_kernel<true>;
  const std::size_t fixed = cuda::detail::SharedBytes(0, sizeof(cuda::detail::SelectShared)).fixed;
  const int all = static_cast<int>(emulator::block_shared_bytes - fixed);
  REQUIRE(select_few(1'000) == cudaSuccess);
  CHECK(state_of(kernel).times_set == 0);
  REQUIRE(select_few(40'000) == cudaSuccess);
  REQUIRE(select_few(12'000) == cudaSuccess);
  REQUIRE(select_few(45'000) == cudaSuccess);
  CHECK(state_of(kernel).times_set == 1);
  CHECK(state_of(kernel).shared_limit == all);
  // What the record says of the last launch: the static arrays are what they were said to be.
  const emulator::Launch& last = emulator::launches().back();
  CHECK(last.dynamic_bytes == 180'000);
  CHECK(last.static_bytes == sizeof(cuda::detail::SelectShared));
  CHECK(last.parameter_bytes <= 4096);
  emulator::device = 1;
  CHECK_FALSE(state_of(kernel).loaded);
  REQUIRE(select_few(20'000) == cudaSuccess);
  CHECK(state_of(kernel).shared_limit == all);
  emulator::device = 0;
}

TEST_CASE("cuda::launch: host threads with different bounds do not disturb each other", "[cuda]") {
  begin_anew();
  const auto kernel = cuda::detail::select_kernel<true>;
  std::vector<std::thread> threads;
  std::vector<cudaError_t> status(8, cudaErrorUnknown);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&status, kernel, i] {
      for (int n = 0; n < 50; ++n) {
        const std::int32_t rows = 11'000 + 4'000 * ((i + n) % 8);
        status[static_cast<std::size_t>(i)] =
            cuda::detail::load(kernel, cuda::detail::key_bytes({1, 1, 1, rows}));
      }
    });
  }
  for (std::thread& t : threads) { t.join(); }
  CHECK(status == std::vector<cudaError_t>(8, cudaSuccess));
  CHECK(state_of(kernel).times_set <= 8);
  CHECK(select_few(49'000) == cudaSuccess);
}

TEST_CASE("cuda::launch: a graph runs whatever was launched since it was captured", "[cuda]") {
  begin_anew();
  emulator::Graph graph;
  emulator::capture = &graph;
  CHECK(select_few(40'000) == cudaErrorStreamCaptureUnsupported);  // it was not prepared
  emulator::capture = nullptr;
  CHECK(graph.nodes.empty());
  REQUIRE(select_few(45'000) == cudaSuccess);
  emulator::capture = &graph;
  CHECK(select_few(40'000) == cudaSuccess);
  emulator::capture = nullptr;
  CHECK(graph.nodes.size() == 1);
  REQUIRE(select_few(11'000) == cudaSuccess);
  CHECK(graph.run() == cudaSuccess);
}
#endif
