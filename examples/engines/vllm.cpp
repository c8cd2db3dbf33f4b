// SPDX-License-Identifier: Apache-2.0
// vLLM with FlashAttention: a tensor [2, blocks, N, H, D] a layer, one block table for all layers.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  constexpr int layers = 2, blocks = 16, block_size = 4, heads = 2, dim = 8, rows = 30,
                max_blocks = 10;
  // What the engine has: a tensor a layer, block 0 is null, a block table, seq_lens and ref counts.
  std::vector<std::vector<float>> caches(layers,
                                         std::vector<float>(2 * blocks * block_size * heads * dim));
  for (auto& cache : caches) { std::iota(cache.begin(), cache.end(), 0.0F); }
  std::vector<std::int32_t> block_table(max_blocks, kvtrim::vllm::null_block), seq_lens{rows};
  std::vector<std::int32_t> ref_counts(blocks, 0);
  for (std::size_t i = 0; i < 8; ++i) {
    block_table[i] = 15 - static_cast<std::int32_t>(i), ref_counts[15 - i] = 1;
  }

  // Once: the view of all layers. `check_layout` says, with numbers, what cannot be.
  std::vector<kvtrim::CacheView> each;
  for (auto& cache : caches) {
    each.push_back(kvtrim::vllm::split_view(kvtrim::Tensor<5>::contiguous(
        cache.data(), {2, blocks, block_size, heads, dim}, kvtrim::DType::f32)));
  }
  std::vector<std::byte*> bases(2 * layers);
  kvtrim::CacheView view = kvtrim::stack_layers(each, bases);
  // Each step: this batch's rows of the block table.
  kvtrim::vllm::set_tables(view,
                           {.ids = block_table.data(),
                            .lengths = seq_lens.data(),
                            .sequences = 1,
                            .row_stride = max_blocks,
                            .max_pages = max_blocks});
  view.writable.ref_counts = ref_counts.data();  // blocks of a common prefix are not written
  kvtrim::check_layout(view);

  // In the step, layer by layer: the queries of the prompt's last rows, here all alike.
  const kvtrim::SnapKVSelector policy({.window = 8, .budget = 12});
  kvtrim::Recorder recorder(
      needs(policy), {.layers = layers, .query_heads = 4, .kv_heads = heads, .head_dim = dim});
  std::vector<float> queries(4 * rows * dim, 0.01F);
  for (int l = 0; l < layers; ++l) {
    const kvtrim::LayerStep step{.layer = kvtrim::LayerId{l},
                                 .queries = {.data = queries.data(),
                                             .query_heads = 4,
                                             .rows = rows,
                                             .head_stride = rows * dim,
                                             .row_stride = dim}};
    if (recorder.record(view, step) != kvtrim::Status::ok) { return 1; }
  }

  // After the step, before the next is scheduled.
  const kvtrim::Observation seen = recorder.observation();
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view, seen)));
  const auto plan = kvtrim::plan(policy, view, seen, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  std::vector<kvtrim::PageId> freed(blocks);
  kvtrim::DenseTables tables(view, block_table.data(), seq_lens.data(), ref_counts.data(), freed);
  const kvtrim::Report report = commit(plan, view, tables);
  // What `BlockPool.free_blocks` is told, and what the scheduler could have known before.
  for (const kvtrim::PageId p : tables.freed()) { std::printf("free block %d\n", raw(p)); }
  return seq_lens[0] == 12 && report.released_pages == released_pages(policy, rows, block_size) ? 0
                                                                                                : 1;
}
