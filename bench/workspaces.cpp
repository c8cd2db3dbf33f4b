// SPDX-License-Identifier: Apache-2.0
// Bytes of every workspace, from the same pure functions that an engine calls: one layer, one sequence, pages of 16, head dim
// 128, 32 query heads over 8 KV heads, one worker.

#include <kvtrim/evict/planner.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/policy/heavy_hitter.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/snapkv_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/window.hpp>

#include <cstdio>

namespace kvtrim_bench {

void print_workspaces() {
  using namespace kvtrim;
  constexpr std::int32_t rows[] = {1024, 8192, 32'768, 131'072};
  std::printf("\n%-44s", "workspace, KiB, by rows");
  for (const std::int32_t n : rows) { std::printf(" %10d", n); }
  const auto line = [&](const char* name, auto bytes_of) {
    std::printf("\n%-44s", name);
    for (const std::int32_t n : rows) {
      PlanShape shape;
      shape.kv_heads = 8;
      shape.page_size = 16;
      shape.pages = (n + 15) / 16;
      shape.max_rows = n;
      shape.query_heads = 32;
      shape.query_rows = 32;
      shape.head_dim = 128;
      std::printf(" %10.0f", static_cast<double>(bytes_of(shape)) / 1024);
    }
  };
  const auto plan_line = [&](const char* name, const auto& policy) {
    line(name, [&](const PlanShape& s) { return plan_workspace_bytes(policy, s); });
  };
  plan_line("plan, StreamingSink", StreamingSink());
  plan_line("plan, HeavyHitter", HeavyHitter());
  plan_line("plan, SnapKVSelector", SnapKVSelector());
  plan_line("plan, PageSelector, window", PageSelector<>());
  plan_line("plan, PageSelector, KeyDiff", PageSelector<KeyDiffParams>());
  line("of it, WindowScorer (window 32)",
       [](const PlanShape& s) { return WindowScorer(WindowParams{}).scratch_bytes(s); });
  line("of it, KeyDiffScorer",
       [](const PlanShape& s) { return KeyDiffScorer(KeyDiffParams{}).scratch_bytes(s); });
  line("accumulate_column_sums",
       [](const PlanShape& s) { return column_sums_scratch_bytes(s.head_dim); });
  std::printf("\n");
}

}  // namespace kvtrim_bench
