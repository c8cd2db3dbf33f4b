// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/observe/observation.hpp>

#include "catch.hpp"

#include <cstdint>
#include <type_traits>
#include <vector>

using namespace kvtrim;

TEST_CASE("observation: rows and LSE are found by strides, from each sequence's first row",
          "[observation]") {
  // [sequences 2, layers 3, heads 4, rows 5, dim 2]
  std::vector<float> data(2 * 3 * 4 * 5 * 2);
  std::vector<float> lse(2 * 3 * 4 * 5);
  const std::int32_t firsts[] = {0, 2};
  const std::int32_t counts[] = {5, 3};
  QueryBlock q;
  q.data = data.data();
  q.query_heads = 4;
  q.rows = 5;
  q.sequence_stride = 3 * 4 * 5 * 2;
  q.layer_stride = 4 * 5 * 2;
  q.head_stride = 5 * 2;
  q.row_stride = 2;
  q.lse = lse.data();
  q.lse_sequence_stride = 3 * 4 * 5;
  q.lse_layer_stride = 4 * 5;
  q.lse_head_stride = 5;
  for (const bool ragged : {false, true}) {
    q.row_firsts = ragged ? firsts : nullptr;
    q.row_counts = ragged ? counts : nullptr;
    for (std::int32_t s = 0; s < 2; ++s) {
      CHECK(q.count(SequenceId{s}) == (ragged ? counts[s] : 5));
      for (std::int32_t i = 0; i < q.count(SequenceId{s}); ++i) {
        const std::int32_t row = ((s * 3 + 2) * 4 + 1) * 5 + i + (ragged ? firsts[s] : 0);
        CHECK(q.row(SequenceId{s}, LayerId{2}, 1, i) == data.data() + row * 2);
        lse[static_cast<std::size_t>(row)] = static_cast<float>(row);
        CHECK(q.lse_of(SequenceId{s}, LayerId{2}, 1, i) == static_cast<float>(row));
      }
    }
  }
}

TEST_CASE("observation: without positions, rows are the last tokens of the sequence",
          "[observation]") {
  QueryBlock q;
  q.rows = 4;
  CHECK(q.position(SequenceId{0}, 0, 100) == Position{96});
  CHECK(q.position(SequenceId{0}, 3, 100) == Position{99});
  const std::int32_t counts[] = {4, 1};
  q.row_counts = counts;
  CHECK(q.position(SequenceId{1}, 0, 7) == Position{6});
  const Position positions[] = {Position{5}, Position{8}, Position{9}, Position{11}, Position{2}};
  q.positions = positions;
  CHECK(q.position(SequenceId{0}, 2, 100) == Position{9});
  const std::int32_t firsts[] = {0, 1};
  q.row_firsts = firsts;
  q.position_sequence_stride = 3;
  CHECK(q.position(SequenceId{1}, 0, 100) == Position{2});
}

TEST_CASE("observation: a budget is read by its map, and -1 where none is given", "[observation]") {
  Observation obs;
  CHECK(obs.budget(SequenceId{3}, LayerId{2}, HeadId{1}) == -1);
  const std::int32_t budgets[] = {10, 11, 12, 13, 14, 15};  // [sequences 1, layers 2, heads 3]
  obs.budgets = budgets;
  obs.budget_rows = {6, 3, 1};
  CHECK(obs.budget(SequenceId{0}, LayerId{1}, HeadId{2}) == 15);
  obs.budget_rows = {1, 0, 0};  // one per sequence
  CHECK(obs.budget(SequenceId{2}, LayerId{1}, HeadId{2}) == 12);
}

TEST_CASE("observation: can be given to a kernel", "[observation]") {
  STATIC_REQUIRE(std::is_trivially_copyable_v<QueryBlock>);
  STATIC_REQUIRE(std::is_trivially_copyable_v<Observation>);
}
