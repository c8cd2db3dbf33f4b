// SPDX-License-Identifier: Apache-2.0
// The budgets alone: tests/budget/pyramid_test.cpp.
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/score/window.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

using namespace kvtrim;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr SequenceId seq{0};
constexpr std::int32_t layers = 5;
constexpr std::int32_t heads = 2;

PyramidKV policy(std::int64_t budget, PyramidForm form = PyramidForm::exact) {
  return PyramidKV({.snapkv = {.window = 4, .budget = budget}, .beta = 4, .form = form});
}

class World {
 public:
  explicit World(TableScope scope)
      : cache_({.pages = 600,
                .page_size = 4,
                .layers = layers,
                .kv_heads = heads,
                .key_dim = 2,
                .scope = scope,
                .max_rows = 300}) {
    REQUIRE(cache_.try_create());
    scores_.resize(std::size_t{layers} * heads * 300);
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      scores_[i] = static_cast<float>(i * 7919 % 1000);
    }
  }
  PagedCache& cache() { return cache_; }
  void extend(std::int32_t tokens) {
    REQUIRE(cache_.try_extend(seq, tokens) == Status::ok);
    const std::vector<float> zeros(static_cast<std::size_t>(tokens * heads * 2));
    for (std::int32_t l = 0; l < layers; ++l) {
      REQUIRE(cache_.write(seq, LayerId{l}, {.data = zeros.data()}, {.data = zeros.data()}) ==
              kvtrim::Status::ok);
    }
  }
  Status evict(const PyramidKV& p, const std::int32_t* budget = nullptr) {
    Observation obs;
    obs.scores = SequencePlane::dense(scores_.data(), layers, heads, 300);
    obs.budgets = budget;
    obs.budget_rows = {0, 0, 0};
    std::vector<std::byte> workspace(plan_workspace_bytes(p, plan_shape(cache_.view(), obs)));
    return kvtrim::evict(p, cache_, cache_.view(), obs, workspace).status;
  }
  std::vector<std::int32_t> rows() {
    std::vector<std::int32_t> out;
    for (std::int32_t l = 0; l < layers; ++l) {
      CHECK(cache_.live_rows(seq, LayerId{l}, HeadId{0}) ==
            cache_.live_rows(seq, LayerId{l}, HeadId{1}));
      out.push_back(cache_.live_rows(seq, LayerId{l}, HeadId{0}));
    }
    return out;
  }

 private:
  PagedCache cache_;
  std::vector<float> scores_;
};

using Rows = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("pyramidkv: early layers keep more rows, the sum is what was asked for, pages are free",
          "[pyramidkv]") {
  for (const TableScope scope : {TableScope::layer, TableScope::head}) {
    World w(scope);
    w.extend(200);
    CHECK(w.evict(policy(44)) == Status::ok);
    // share 40, beta 4: from 70 to 10 in steps of 15, and the window.
    CHECK(w.rows() == Rows{74, 59, 44, 29, 14});
    std::int32_t pages = 0;
    for (const std::int32_t rows : w.rows()) {
      pages += pages_for(rows, 4) * (scope == TableScope::head ? heads : 1);
    }
    CHECK(w.cache().pool().in_use() == pages);
  }
}

TEST_CASE("pyramidkv: a second eviction takes nothing, and tokens that follow are cut by layer",
          "[pyramidkv]") {
  World w(TableScope::layer);
  w.extend(100);
  CHECK(w.evict(policy(44)) == Status::ok);
  const Rows before = w.rows();
  CHECK(w.evict(policy(44)) == Status::ok);
  CHECK(w.rows() == before);
  w.extend(3);
  CHECK(w.evict(policy(44)) == Status::ok);
  CHECK(w.rows() == before);
}

TEST_CASE("pyramidkv: a budget given at run time is the layers' average", "[pyramidkv]") {
  World w(TableScope::layer);
  w.extend(200);
  const std::int32_t budget = 44;
  CHECK(w.evict(policy(20), &budget) == Status::ok);
  CHECK(w.rows() == Rows{74, 59, 44, 29, 14});
}

TEST_CASE("pyramidkv: below the window a layer keeps the window, and the plan says so",
          "[pyramidkv][edge]") {
  World w(TableScope::layer);
  w.extend(50);
  const std::int32_t budget = 3;
  CHECK(w.evict(policy(20), &budget) == Status::over_budget);
  CHECK(w.rows() == Rows{4, 4, 4, 4, 4});
}

TEST_CASE("pyramidkv: one table for all layers cannot hold it: refused, nothing changed",
          "[pyramidkv][edge]") {
  World w(TableScope::group);
  w.extend(200);
  CHECK(w.evict(policy(44)) == Status::unequal_budget);
  CHECK(w.rows() == Rows(5, 200));
}

TEST_CASE("pyramidkv: the constructor refuses what cannot work, with the numbers",
          "[pyramidkv][edge]") {
  CHECK_THROWS_WITH(PyramidKV({.beta = 0}), ContainsSubstring("beta 0"));
  CHECK_THROWS_WITH(PyramidKV({.snapkv = {.window = 8, .budget = 7}}),
                    ContainsSubstring("budget 7"));
  constexpr PyramidKV defaults;
  CHECK(defaults.params().beta == 20);
  CHECK(defaults.params().form == PyramidForm::exact);
}
