// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <vector>

int main() {
  // The engine's memory: 16 pages of 4 tokens, 2 KV heads of 8 features; 50 tokens of one sequence lie in 13 of them.
  const kvtrim::PlaneShape shape{.page_size = 4, .kv_heads = 2, .head_dim = 8};
  std::vector<float> keys(16 * 4 * 2 * 8, 0.5F), values = keys, queries(4 * 50 * 8, 1.0F);
  std::vector<std::int32_t> ids{3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 0, 10, 11, -1, -1, -1}, lengths{50};
  kvtrim::CacheView view{.k = kvtrim::Plane::nhd(keys.data(), shape),
                         .v = kvtrim::Plane::nhd(values.data(), shape)};
  view.page_size = 4, view.pages = 16, view.kv_heads = 2, view.sequences = 1;
  view.table = {.ids = ids.data(), .row_stride = 16, .max_pages = 16};
  view.lengths = lengths.data();
  kvtrim::check_layout(view);  // throws, with the numbers, if this cannot be a cache

  // Before the step: what the policy has to see is known from the policy alone; here the last 8 queries.
  const kvtrim::SnapKVSelector policy({.window = 8, .budget = 20});
  kvtrim::Recorder recorder(needs(policy), {.query_heads = 4, .kv_heads = 2, .head_dim = 8});
  // In the step, once per layer: its queries, [4 query heads, 50 rows, 8 features].
  const kvtrim::QueryBlock block{
      .data = queries.data(), .query_heads = 4, .rows = 50, .head_stride = 400, .row_stride = 8};
  if (recorder.record(view, {.queries = block}) != kvtrim::Status::ok) { return 1; }

  // After the step: plan, apply, commit.
  const kvtrim::Observation seen = recorder.observation();
  std::vector<std::byte> memory(
      kvtrim::plan_workspace_bytes(policy, kvtrim::plan_shape(view, seen)));
  const auto plan = kvtrim::plan(policy, view, seen, memory);         // changes nothing
  if (kvtrim::apply(plan, view) != kvtrim::Status::ok) { return 1; }  // moves what stays
  std::vector<kvtrim::PageId> freed(16);
  kvtrim::DenseTables tables(view, ids.data(), lengths.data(), nullptr, freed);
  const auto report = kvtrim::commit(plan, view, tables);  // tables, length, pages
  std::printf("%d rows stay, %d pages are free again\n", lengths[0], report.released_pages);
  return lengths[0] == 20 && report.released_pages == 8 ? 0 : 1;
}
