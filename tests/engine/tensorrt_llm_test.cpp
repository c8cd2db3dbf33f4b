// SPDX-License-Identifier: Apache-2.0
// Layouts and evictions: layouts_test.cpp.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/cache/check_tables.hpp>
#include <kvtrim/engine/tensorrt_llm.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

using namespace kvtrim;

namespace {

struct Pool {
  std::vector<float> memory = std::vector<float>(6 * 2 * 2 * 2 * 4 * 3);
  Tensor<6> tensor = Tensor<6>::contiguous(memory.data(), {6, 2, 2, 2, 4, 3}, DType::f32);
  // Two layers: block b has the ids 4 b (K) and 4 b + 1 (V).
  std::vector<std::int32_t> offsets{4, 12, tensorrt_llm::no_block, 5, 13, tensorrt_llm::no_block};
  std::vector<std::int32_t> lengths{6};
  CacheView view = tensorrt_llm::pool_view(tensor);

  Status status() {
    tensorrt_llm::set_offsets(view, table());
    check_layout(view);
    std::vector<std::uint64_t> scratch(static_cast<std::size_t>(check_tables_words(view.pages)));
    return check_tables(view, scratch).status;
  }
  DenseTable table() const {
    return {.ids = offsets.data(),
            .lengths = lengths.data(),
            .sequences = 1,
            .row_stride = 6,
            .max_pages = 3};
  }
};

}  // namespace

TEST_CASE("tensorrt_llm: an offset of the secondary pool names other memory and is refused",
          "[tensorrt_llm][edge]") {
  Pool p;
  CHECK(p.status() == Status::ok);
  p.offsets[1] |= std::numeric_limits<std::int32_t>::min();
  p.offsets[4] |= std::numeric_limits<std::int32_t>::min();
  CHECK(p.status() == Status::page_out_of_range);
}

TEST_CASE(
    "tensorrt_llm: an offset that is no block's, of V among K's or beyond the pool is refused",
    "[tensorrt_llm][edge]") {
  for (const std::int32_t wrong : {5, 6, 7, 24, -4, tensorrt_llm::no_block}) {
    Pool p;
    p.offsets[0] = wrong;
    CHECK(p.status() == Status::page_out_of_range);
  }
  for (const std::int32_t wrong : {4, 6, 25}) {
    Pool p;
    p.offsets[3] = wrong;
    CHECK(p.status() == Status::page_out_of_range);
  }
  Pool twice;
  twice.offsets[1] = 4;
  CHECK(twice.status() == Status::page_twice);
}

TEST_CASE("tensorrt_llm: pools with gaps, and rows without room for V, are refused",
          "[tensorrt_llm][edge]") {
  Pool p;
  p.tensor.strides[0] += 3;
  CHECK_THROWS_AS(tensorrt_llm::pool_view(p.tensor), std::invalid_argument);
  Pool q;
  DenseTable table = q.table();
  table.row_stride = 5;
  CHECK_THROWS_AS(tensorrt_llm::set_offsets(q.view, table), std::invalid_argument);
}
