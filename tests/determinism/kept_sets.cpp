// SPDX-License-Identifier: Apache-2.0
// kept_sets SCORES: which rows stay by the given scores under several policies, ways of removal and numbers of threads, as one
// checksum. determinism.sh compiles it with every compiler and level; the checksum is the same everywhere.
//
// SCORES: one number a line, as C prints floats (nan, inf and -0 among them); rows of (layer, KV head) one after the other.
#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/planner.hpp>
#include <kvtrim/policy/ada_kv.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/policy/top_rows.hpp>
#include <kvtrim/score/external.hpp>

#include "support/threads.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

using namespace kvtrim;

constexpr std::int32_t layers = 2, heads = 2;

struct Checksum {
  std::uint64_t hash = 0xCBF2'9CE4'8422'2325U;  // FNV-1a
  void add(std::int64_t x) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ (static_cast<std::uint64_t>(x) >> (8 * byte) & 0xFFU)) * 0x100'0000'01B3U;
    }
  }
};

template <Policy P>
void add_kept(const P& policy,
              TableScope scope,
              std::vector<float>& scores,
              std::int32_t threads,
              Checksum& sum) {
  const auto rows = static_cast<std::int32_t>(scores.size()) / (layers * heads);
  PagedCache cache({.pages = layers * heads * (rows / 4 + 1),
                    .page_size = 4,
                    .layers = layers,
                    .kv_heads = heads,
                    .key_dim = 1,
                    .scope = scope,
                    .max_rows = rows});
  const SequenceId s = cache.try_create().value();
  bool written = cache.try_extend(s, rows) == Status::ok;
  for (std::int32_t l = 0; l < layers; ++l) {
    written = written && cache.written(s, LayerId{l}) == Status::ok;
  }
  if (!written) { std::abort(); }
  const CacheView view = cache.view();
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), layers, heads, rows);
  const test::Threads executor{threads};
  for (const Removal removal : {Removal::automatic, Removal::stable_pack, Removal::fill_holes}) {
    std::vector<std::byte> workspace(
        plan_workspace_bytes(policy, plan_shape(view, obs, executor.workers())));
    const PlanRef made = plan(policy, view, obs, workspace, {.removal = removal}, executor);
    sum.add(static_cast<std::int64_t>(made.status()));
    sum.add(made.nan_count());
    for (std::int32_t i = 0; i < layers * heads; ++i) {
      made.for_each_kept(
          s, LayerId{i / heads}, HeadId{i % heads}, [&](std::int32_t r) { sum.add(r); });
      sum.add(-1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<float> scores;
  std::ifstream in(argc > 1 ? argv[1] : "");
  for (std::string line; std::getline(in, line);) {
    scores.push_back(std::strtof(line.c_str(), nullptr));
  }
  if (scores.empty() || scores.size() % (layers * heads) != 0) {
    std::fprintf(stderr, "kept_sets: %zu scores are no rows of 4 heads\n", scores.size());
    return 1;
  }
  std::uint64_t first = 0;
  for (const std::int32_t threads : {1, 2, 8}) {
    Checksum sum;
    for (const std::int64_t budget : {8, 40, 100}) {
      for (const TableScope scope : {TableScope::group, TableScope::layer, TableScope::head}) {
        add_kept(
            External({.budget = budget, .sinks = 2, .recent = 3}), scope, scores, threads, sum);
        add_kept(HeavyHitter<ExternalParams>({.heavy = budget - 4, .recent = 4}),
                 scope,
                 scores,
                 threads,
                 sum);
        add_kept(PageSelector<ExternalParams>({.budget = budget, .window = 4}),
                 scope,
                 scores,
                 threads,
                 sum);
        add_kept(StreamingSink<SinkForm::exact>({.sinks = 3, .recent = budget - 3}),
                 scope,
                 scores,
                 threads,
                 sum);
      }
      add_kept(AdaKV<External>({.inner = {.budget = budget, .sinks = 2, .recent = 3}}),
               TableScope::head,
               scores,
               threads,
               sum);
    }
    if (threads == 1) { first = sum.hash; }
    if (sum.hash != first) {
      std::fprintf(stderr, "kept_sets: %d threads keep other rows than 1\n", threads);
      return 1;
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(first));
  return 0;
}
