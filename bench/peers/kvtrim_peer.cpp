// SPDX-License-Identifier: Apache-2.0
// kvtrim's side of compare.py: reads one layer from raw files, lays it out in shuffled pages, and evicts once for each line
// "run" on its standard input, from the same state each time.

#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/key_diff.hpp>
#include <kvtrim/policy/key_norm.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/window.hpp>

#include "../engine_cache.hpp"
#include "../harness.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;
using kvtrim_bench::EngineCache;
using kvtrim_bench::Shape;
using kvtrim_bench::Threads;

template <class T>
std::vector<T> read(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) { throw std::runtime_error("cannot read " + path); }
  std::vector<T> out(static_cast<std::size_t>(in.tellg()) / sizeof(T));
  in.seekg(0);
  in.read(reinterpret_cast<char*>(out.data()),
          static_cast<std::streamsize>(out.size() * sizeof(T)));
  return out;
}

// Rows of [kv_heads, tokens, dim] into their pages.
void scatter(const CacheView& view,
             const Shape& shape,
             const Plane& plane,
             const std::vector<std::byte>& from) {
  const std::byte* row = from.data();
  for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
    for (std::int32_t r = 0; r < shape.tokens; ++r, row += plane.row_bytes()) {
      const PageId page = view.k_page(SequenceId{0}, LayerId{0}, HeadId{h}, r / shape.page_size);
      std::memcpy(plane.row(LayerId{0}, page, HeadId{h}, Slot{r % shape.page_size}),
                  row,
                  static_cast<std::size_t>(plane.row_bytes()));
    }
  }
}

template <Policy P>
int serve(const P& policy, const std::string& folder, const Shape& shape, std::int32_t threads) {
  EngineCache cache(shape, {});
  const CacheView view = cache.view();
  const auto keys = read<std::byte>(folder + "/keys.bin");
  const auto values = read<std::byte>(folder + "/values.bin");
  const auto queries = read<float>(folder + "/queries.bin");  // [query heads, 32, dim]
  Observation obs;
  obs.queries = {.data = queries.data(), .query_heads = shape.query_heads, .rows = 32};
  obs.queries.row_stride = shape.dim;
  obs.queries.head_stride = 32 * static_cast<std::int64_t>(shape.dim);
  const Threads executor{threads};
  std::vector<std::byte> workspace(
      plan_workspace_bytes(policy, plan_shape(view, obs, executor.workers())));
  std::vector<PageId> freed(static_cast<std::size_t>(view.pages));
  std::printf("ready %zu\n", workspace.size());
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line) && line == "run";) {
    cache.reset();
    scatter(view, shape, view.k, keys);
    scatter(view, shape, view.v, values);
    // One thread: its CPU time, so that other work on the core does not count. kvpress's time is read in the same way.
    const auto now = [&] {
      return kvtrim_bench::now(threads > 1 ? kvtrim_bench::Clock::wall
                                           : kvtrim_bench::Clock::thread);
    };
    const double begin = now();
    const PlanRef made = plan(policy, view, obs, workspace, {}, executor);
    const double planned = now();
    if (apply(made, view, {}, executor) != Status::ok) { return 1; }
    kvtrim::DenseTables sink(view, cache.ids(), nullptr, nullptr, freed);
    const Report report = commit(made, view, sink);
    const double end = now();
    std::ofstream kept(folder + "/kept.bin", std::ios::binary);
    for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
      const auto rows = made.kept_list(SequenceId{0}, LayerId{0}, HeadId{h});
      kept.write(reinterpret_cast<const char*>(rows.data()),
                 static_cast<std::streamsize>(rows.size() * sizeof(std::int32_t)));
    }
    kept.close();
    std::printf("%f %f %d\n", end - begin, planned - begin, report.released_pages);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fputs("usage: kvtrim_peer FOLDER snapkv|keydiff|knorm f32|bf16 TOKENS KEEP THREADS\n",
               stderr);
    return 2;
  }
  const std::string method = argv[2];
  Shape shape;
  shape.dtype = std::string(argv[3]) == "bf16" ? DType::bf16 : DType::f32;
  shape.tokens = std::stoi(argv[4]);
  const std::int32_t keep = std::stoi(argv[5]);
  const std::int32_t threads = std::stoi(argv[6]);
  try {
    if (method == "keydiff") { return serve(KeyDiff({.budget = keep}), argv[1], shape, threads); }
    if (method == "knorm") { return serve(KeyNorm({.budget = keep}), argv[1], shape, threads); }
    if (method == "snapkv") {
      return serve(SnapKVSelector({.window = 32, .budget = keep}), argv[1], shape, threads);
    }
    std::fprintf(stderr, "kvtrim_peer: unknown method '%s'\n", argv[2]);
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "kvtrim_peer: %s\n", e.what());
    return 1;
  }
}
