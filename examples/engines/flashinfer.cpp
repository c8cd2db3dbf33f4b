// SPDX-License-Identifier: Apache-2.0
// FlashInfer: pages [pages, 2, H, N, D] (HND), tables in compressed rows.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

int main() {
  constexpr int pages = 16, page_size = 4, heads = 2, dim = 8;
  std::vector<float> cache(pages * 2 * heads * page_size * dim);
  std::iota(cache.begin(), cache.end(), 0.0F);
  // Two sequences of 18 and 7 rows.
  std::vector<std::int32_t> indptr{0, 5, 7}, indices{3, 9, 1, 12, 7, 2, 5}, last_page_len{2, 3};

  kvtrim::CacheView view = kvtrim::flashinfer::view(
      kvtrim::Tensor<5>::contiguous(
          cache.data(), {pages, 2, heads, page_size, dim}, kvtrim::DType::f32),
      kvtrim::flashinfer::KvLayout::hnd);
  kvtrim::flashinfer::set_tables(view,
                                 kvtrim::CsrTable{.indptr = indptr.data(),
                                                  .indices = indices.data(),
                                                  .last_page_len = last_page_len.data(),
                                                  .sequences = 2});
  kvtrim::check_layout(view);

  // Keys alone decide: nothing needs to be recorded.
  const kvtrim::KeyDiff policy({.budget = 10, .recent = 4});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view)));
  const auto plan = kvtrim::plan(policy, view, {}, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  std::vector<kvtrim::PageId> freed(pages);
  std::vector<std::int32_t> counts(2);
  kvtrim::CsrTables tables(
      view, indptr.data(), indices.data(), last_page_len.data(), nullptr, counts, freed);
  if (commit(plan, view, tables).status != kvtrim::Status::ok) { return 1; }
  // indptr, indices and last_page_len are what `plan()` of the wrapper takes for the next step.
  for (const kvtrim::PageId p : tables.freed()) { std::printf("free page %d\n", raw(p)); }
  return indptr == std::vector<std::int32_t>{0, 3, 5} && last_page_len[0] == 2 &&
                 last_page_len[1] == 3 && tables.freed().size() == 2
             ? 0
             : 1;
}
