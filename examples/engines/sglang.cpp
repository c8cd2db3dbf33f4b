// SPDX-License-Identifier: Apache-2.0
// SGLang: buffers [slots, H, D] a layer, `req_to_token` names the slot of each token of each request.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  constexpr int slots = 64, heads = 2, dim = 8, max_context = 40, rows = 20;
  std::vector<float> keys(slots * heads * dim), values(slots * heads * dim);
  std::iota(keys.begin(), keys.end(), 0.0F);
  std::vector<std::int32_t> req_to_token(3 * max_context, 0);
  std::vector<std::int32_t> req_pool_indices{2}, seq_lens{rows};
  for (int i = 0; i < rows; ++i) {
    req_to_token[static_cast<std::size_t>(2 * max_context + i)] = 1 + (i * 5) % 63;
  }

  kvtrim::CacheView view = kvtrim::sglang::view(
      kvtrim::Tensor<3>::contiguous(keys.data(), {slots, heads, dim}, kvtrim::DType::f32),
      kvtrim::Tensor<3>::contiguous(values.data(), {slots, heads, dim}, kvtrim::DType::f32));
  const kvtrim::sglang::Requests batch{
      req_to_token.data(), max_context, req_pool_indices, seq_lens};
  std::vector<std::int32_t> gathered(static_cast<std::size_t>(kvtrim::sglang::max_pages(batch, 1)));
  if (kvtrim::sglang::set_tables(view, batch, gathered) != kvtrim::Status::ok) { return 1; }
  kvtrim::check_layout(view);

  const kvtrim::KeyNorm policy({.budget = 12, .sinks = 2, .recent = 4});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view)));
  const auto plan = kvtrim::plan(policy, view, {}, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  std::vector<std::int32_t> freed(slots);
  kvtrim::sglang::SlotTables tables(view, batch, seq_lens.data(), nullptr, freed);
  if (commit(plan, view, tables).status != kvtrim::Status::ok) { return 1; }
  // What `token_to_kv_pool_allocator.free` takes.
  for (const std::int32_t slot : tables.freed()) { std::printf("free slot %d\n", slot); }
  return seq_lens[0] == 12 && tables.freed().size() == 8 ? 0 : 1;
}
