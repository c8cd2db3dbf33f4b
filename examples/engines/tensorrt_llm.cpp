// SPDX-License-Identifier: Apache-2.0
// TensorRT-LLM's C++ manager: one pool [blocks, layers, 2, H, N, D], offsets [sequences, 2, max_blocks] that count its pieces.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  constexpr int blocks = 12, layers = 2, heads = 2, block_size = 4, dim = 8, rows = 26,
                max_blocks = 8;
  std::vector<float> pool(blocks * layers * 2 * heads * block_size * dim);
  std::iota(pool.begin(), pool.end(), 0.0F);
  std::vector<std::int32_t> offsets(2 * max_blocks, kvtrim::tensorrt_llm::no_block), lengths{rows};
  for (int e = 0; e < 7; ++e) {
    const int block = 11 - e;
    offsets[static_cast<std::size_t>(e)] = block * 2 * layers;
    offsets[static_cast<std::size_t>(max_blocks + e)] = block * 2 * layers + 1;
  }

  kvtrim::CacheView view = kvtrim::tensorrt_llm::pool_view(kvtrim::Tensor<6>::contiguous(
      pool.data(), {blocks, layers, 2, heads, block_size, dim}, kvtrim::DType::f32));
  kvtrim::tensorrt_llm::set_offsets(view,
                                    {.ids = offsets.data(),
                                     .lengths = lengths.data(),
                                     .sequences = 1,
                                     .row_stride = 2 * max_blocks,
                                     .max_pages = max_blocks});
  kvtrim::check_layout(view);

  // Sinks and a window, in whole blocks: no byte moves.
  const kvtrim::StreamingSink policy({.sinks = 4, .recent = 8});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view)));
  const auto plan = kvtrim::plan(policy, view, {}, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  std::vector<kvtrim::PageId> freed(2 * blocks);
  kvtrim::DenseTables tables(view, offsets.data(), lengths.data(), nullptr, freed);
  const kvtrim::Report report = commit(plan, view, tables);
  // Ids of K and V leave in pairs: a block goes back once.
  for (const kvtrim::PageId p : tables.freed()) {
    if (raw(p) % (2 * layers) == 0) { std::printf("free block %d\n", raw(p) / (2 * layers)); }
  }
  return report.bytes_moved == 0 && report.released_pages == 6 && lengths[0] == 14 ? 0 : 1;
}
