// SPDX-License-Identifier: Apache-2.0
// Hugging Face's DynamicCache, mlx: tensors [B, H, S, D] a layer, a left-padded batch; rows close up and S shrinks.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  constexpr int batch = 2, heads = 2, context = 24, dim = 8;
  std::vector<float> keys(batch * heads * context * dim), values(keys.size());
  std::iota(keys.begin(), keys.end(), 0.0F);
  std::vector<std::int32_t> padding{0, 6}, lengths{context, context - 6}, ids(batch);

  kvtrim::CacheView view = kvtrim::dense::view(
      kvtrim::Tensor<4>::contiguous(keys.data(), {batch, heads, context, dim}, kvtrim::DType::f32),
      kvtrim::Tensor<4>::contiguous(
          values.data(), {batch, heads, context, dim}, kvtrim::DType::f32));
  kvtrim::dense::set_batch(view, ids, lengths.data(), padding.data());
  kvtrim::check_layout(view);

  const kvtrim::KeyNorm policy({.budget = 10, .recent = 4});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view)));
  const auto plan = kvtrim::plan(policy, view, {}, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  kvtrim::DenseTables tables(view, ids.data(), lengths.data(), nullptr, {});
  if (commit(plan, view, tables).status != kvtrim::Status::ok) { return 1; }
  // Slice the tensors to [:, :, :S]; the next position of each sequence goes on counting.
  const std::int32_t rows = kvtrim::dense::extent(lengths, padding);
  std::printf("S is %d\n", rows);
  return rows == 16 && lengths[0] == 10 && lengths[1] == 10 ? 0 : 1;
}
