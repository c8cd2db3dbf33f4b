// SPDX-License-Identifier: Apache-2.0
// Layouts and evictions: layouts_test.cpp.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/engine/dense.hpp>
#include <kvtrim/evict/apply.hpp>
#include <kvtrim/evict/commit.hpp>

#include "catch.hpp"
#include "support/instances.hpp"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

using namespace kvtrim;

TEST_CASE("dense: a left-padded batch is packed behind its padding and sliced", "[dense]") {
  // [B = 2, H = 1, S = 8, D = 1]; a value says its row.
  std::vector<float> keys(16), values(16);
  for (std::size_t i = 0; i < 16; ++i) { keys[i] = values[i] = static_cast<float>(i % 8); }
  CacheView view = dense::view(Tensor<4>::contiguous(keys.data(), {2, 1, 8, 1}, DType::f32),
                               Tensor<4>::contiguous(values.data(), {2, 1, 8, 1}, DType::f32));
  std::vector<std::int32_t> ids(2), lengths{8, 5}, padding{0, 3};
  dense::set_batch(view, ids, lengths.data(), padding.data());
  check_layout(view);
  CHECK(dense::extent(lengths, padding) == 8);
  const StreamingSink<SinkForm::exact> policy({.sinks = 1, .recent = 2});
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view)));
  const PlanRef made = plan(policy, view, {}, workspace);
  REQUIRE((apply(made, view) == Status::ok));
  DenseTables tables(view, ids.data(), lengths.data(), nullptr, {});
  const Report report = commit(made, view, tables);
  CHECK(report.status == Status::ok);
  CHECK(report.released_pages == 0);
  CHECK((lengths == std::vector<std::int32_t>{3, 3}));
  CHECK(dense::extent(lengths, padding) == 6);
  CHECK((std::vector<float>(keys.begin(), keys.begin() + 3) == std::vector<float>{0, 6, 7}));
  CHECK((std::vector<float>(values.begin() + 11, values.begin() + 14) ==
         std::vector<float>{3, 6, 7}));
  CHECK_THROWS_AS(dense::set_batch(view, std::span<std::int32_t>(ids).first(1), lengths.data()),
                  std::invalid_argument);
}
