// SPDX-License-Identifier: Apache-2.0
// llama.cpp with its tensors in hand: q8_0 cells [cells, H, D], rows leave by `llama_memory_seq_rm`. Without them:
// examples/llama_cpp, which scores by the attention alone.
#include <kvtrim/kvtrim.hpp>

#include <cstdio>
#include <vector>

int main() {
  constexpr int cells = 48, heads = 2, dim = 64, rows = 24;
  // Blocks of 34 bytes: an f16 scale, 32 numbers.
  std::vector<std::byte> keys(cells * heads * dim / 32 * 34), values = keys;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<std::byte>(i % 34 == 0 ? 0 : i % 34 == 1 ? 0x2C : i * 29 % 251);
  }
  kvtrim::llama_cpp::CellMap map(cells, 1);  // told of every write
  for (int p = 0; p < rows; ++p) {
    if (map.write(cells - 1 - p, 0, kvtrim::Position{p}) != kvtrim::Status::ok) { return 1; }
  }

  using kvtrim::Plane, kvtrim::BlockFormat;
  kvtrim::CacheView view =
      kvtrim::llama_cpp::cells_view(Plane::blocks(keys.data(), BlockFormat::q8_0, heads, dim),
                                    Plane::blocks(values.data(), BlockFormat::q8_0, heads, dim),
                                    cells,
                                    heads);
  std::vector<std::int32_t> table(map.rows(0).begin(), map.rows(0).end()), lengths{rows};
  set_tables(view,
             kvtrim::DenseTable{.ids = table.data(),
                                .lengths = lengths.data(),
                                .sequences = 1,
                                .row_stride = cells,
                                .max_pages = rows});
  kvtrim::check_layout(view);

  // Cells do not move, and all heads share them: whole "pages" of one cell leave.
  const kvtrim::PageSelector<kvtrim::KeyDiffParams> policy({.budget = 10, .sinks = 2, .window = 4});
  std::vector<std::byte> memory(plan_workspace_bytes(policy, plan_shape(view)));
  const auto plan = kvtrim::plan(policy, view, {}, memory);
  if (apply(plan, view) != kvtrim::Status::ok) { return 1; }
  const kvtrim::Status listed = kvtrim::llama_cpp::for_each_evicted_range(
      plan, kvtrim::SequenceId{0}, [&](kvtrim::llama_cpp::PositionRange range) {
        std::printf("llama_memory_seq_rm(memory, 0, %d, %d)\n", range.begin, range.end);
        map.remove(0, range);
      });
  kvtrim::DenseTables tables(view, table.data(), lengths.data(), nullptr, {});
  if (listed != kvtrim::Status::ok || commit(plan, view, tables).status != kvtrim::Status::ok) {
    return 1;
  }
  return map.used() == 10 && lengths[0] == 10 && table[0] == map.rows(0)[0] ? 0 : 1;
}
