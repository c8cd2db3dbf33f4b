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

TEST_CASE("observation: a sequence is found where its slot lies", "[observation]") {
  // [slots 3, layers 2, heads 2, rows 2, dim 1]
  std::vector<float> data(3 * 2 * 2 * 2);
  const std::int32_t firsts[] = {0, 1, 0};
  const std::int32_t counts[] = {2, 1, 0};
  const Position positions[] = {
      Position{4}, Position{5}, Position{9}, Position{7}, Position{0}, Position{0}};
  const std::int32_t slots[] = {2, 0, 1, 0};
  QueryBlock plain;
  plain.data = plain.lse = data.data();
  plain.query_heads = 2;
  plain.row_firsts = firsts;
  plain.row_counts = counts;
  plain.sequence_stride = plain.lse_sequence_stride = 8;
  plain.layer_stride = plain.lse_layer_stride = 4;
  plain.head_stride = plain.lse_head_stride = 2;
  plain.row_stride = 1;
  plain.positions = positions;
  plain.position_sequence_stride = 2;
  QueryBlock turned = plain;
  turned.slots = slots;
  for (std::size_t i = 0; i < data.size(); ++i) { data[i] = static_cast<float>(i); }
  for (std::int32_t s = 0; s < 4; ++s) {
    const SequenceId here{s}, there{slots[s]};
    CHECK(turned.slot(here) == slots[s]);
    CHECK(turned.count(here) == plain.count(there));
    for (std::int32_t i = 0; i < turned.count(here); ++i) {
      CHECK(turned.row(here, LayerId{1}, 1, i) == plain.row(there, LayerId{1}, 1, i));
      CHECK(turned.lse_of(here, LayerId{1}, 1, i) == plain.lse_of(there, LayerId{1}, 1, i));
      CHECK(turned.position(here, i, 50) == plain.position(there, i, 50));
    }
  }
  turned.positions = nullptr;
  CHECK(turned.position(SequenceId{1}, 0, 50) == Position{48});

  QueryStatistics all;  // [slots 3, layers 4, heads 2, dim 1]; shown from layer 1 on
  all.mean = data.data() + 1 * 2;
  all.covariance = data.data() + 1 * 2;
  all.query_heads = 2;
  all.dim = 1;
  all.layers = 2;
  all.per_sequence = true;
  all.slot_layers = 4;
  all.slots = slots;
  CHECK(all.mean_of(SequenceId{0}, LayerId{1}, 1) == data.data() + (2 * 4 + 1 + 1) * 2 + 1);
  CHECK(all.covariance_of(SequenceId{2}, LayerId{0}, 1) == data.data() + (1 * 4 + 1) * 2 + 1);
  all.per_sequence = false;
  CHECK(all.mean_of(SequenceId{2}, LayerId{0}, 1) == all.mean + 1);
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
