// SPDX-License-Identifier: Apache-2.0
// One view of all layers, and one view per layer: the same layers of the same model, so the same rows.
#include <kvtrim/cache/check_layout.hpp>
#include <kvtrim/policy/critical_kv.hpp>
#include <kvtrim/policy/decorators.hpp>
#include <kvtrim/policy/expected_attention.hpp>
#include <kvtrim/policy/external.hpp>
#include <kvtrim/policy/pyramid_kv.hpp>
#include <kvtrim/policy/q_filter.hpp>
#include <kvtrim/policy/random.hpp>
#include <kvtrim/score/expected_attention.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/window.hpp>

#include "../catch.hpp"
#include "fault_support.hpp"

#include <string>
#include <vector>

using namespace kvtrim;
using namespace kvtrim::fault;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::int32_t layers = 5, heads = 2, dim = 4, rows = 200, hidden = 3, page_size = 4;
constexpr std::int32_t pages = rows / page_size;

// What a model has by layer, and a cache of five layers with tables of their own.
struct Model {
  std::vector<float> keys, values, filters, means, output, scores;
  std::vector<double> frequencies;
  Rows ids, lengths;
  CacheView view;
  Observation obs;

  Model() {
    const auto fill = [](std::vector<float>& m, std::int32_t n, std::int32_t salt) {
      for (std::int32_t i = 0; i < n; ++i) { m.push_back(noise(salt, i)); }
      return m.data();
    };
    const PlaneShape shape{page_size, heads, dim, DType::f32};
    view.k = Plane::nhd(fill(keys, layers * rows * heads * dim, 1), shape);
    view.v = Plane::nhd(fill(values, layers * rows * heads * dim, 2), shape);
    view.k.layer_stride = view.v.layer_stride = pages * view.k.page_stride;
    view.page_size = page_size;
    view.pages = pages;
    view.kv_heads = heads;
    view.layers = layers;
    view.sequences = 1;
    view.scope = TableScope::layer;
    for (std::int32_t l = 0; l < layers; ++l) { ids = ids + range(0, pages); }
    lengths.assign(layers, rows);
    view.table.rows = {0, 1, 0};
    view.length_rows = {0, 1, 0};
    view.table.row_stride = view.table.max_pages = pages;
    bind();
    obs.filters = {fill(filters, layers * heads * dim, 3), dim, heads * dim, dim};
    obs.statistics.mean = fill(means, layers * heads * dim, 4);
    obs.statistics.query_heads = heads;
    obs.statistics.dim = dim;
    obs.statistics.layers = layers;
    obs.output = {
        fill(output, layers * heads * dim * hidden, 5), heads, dim, hidden, heads * dim * hidden};
    for (std::int32_t l = 0; l < layers; ++l) {
      for (std::int32_t j = 0; j < dim / 2; ++j) { frequencies.push_back(1.0 / (1 + j + l)); }
    }
    obs.scores = SequencePlane::dense(fill(scores, layers * heads * rows, 6), layers, heads, rows);
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void bind() {
    view.table.ids = ids.data();
    view.lengths = lengths.data();
  }
  // Layer `l` as a view of its own.
  [[nodiscard]] CacheView layer(std::int32_t l, bool numbered = true) const {
    CacheView one = view;
    one.layers = 1;
    one.scope = TableScope::group;
    one.k.base += l * view.k.layer_stride;
    one.v.base += l * view.v.layer_stride;
    one.table.ids += l * pages;
    one.table.rows = one.length_rows = {};
    one.lengths += l;
    if (numbered) {
      one.layer_offset = l;
      one.model_layers = layers;
    }
    return one;
  }
};

// Kept rows of each (layer, head).
template <Policy P>
std::vector<Rows> kept(const P& policy, const CacheView& view, const Observation& obs) {
  std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, obs)));
  const PlanRef plan = kvtrim::plan(policy, view, obs, workspace);
  REQUIRE(plan.status() == Status::ok);
  std::vector<Rows> out;
  for (std::int32_t l = 0; l < view.layers; ++l) {
    for (std::int32_t h = 0; h < heads; ++h) {
      Rows& list = out.emplace_back();
      plan.for_each_kept({}, LayerId{l}, HeadId{h}, [&](std::int32_t r) { list.push_back(r); });
    }
  }
  return out;
}

// The same, from a view per layer.
template <Policy P>
std::vector<Rows> kept_by_layer(const P& policy, const Model& m, Observation obs) {
  std::vector<Rows> out;
  const SequencePlane scores = obs.scores;
  for (std::int32_t l = 0; l < layers; ++l) {
    if (scores) { obs.scores.base = scores.row({}, LayerId{l}, {}, 0); }
    const std::vector<Rows> lists = kept(policy, m.layer(l), obs);
    obs.filters.data += obs.filters.layer_stride;  // the arrays begin with the view's first layer
    obs.statistics.mean += heads * dim;
    obs.output.data += obs.output.layer_stride;
    out.insert(out.end(), lists.begin(), lists.end());
  }
  return out;
}

Rows counts(const std::vector<Rows>& lists) {
  Rows out;
  for (std::size_t i = 0; i < lists.size(); i += heads) {
    out.push_back(static_cast<std::int32_t>(lists[i].size()));
  }
  return out;
}

}  // namespace

TEST_CASE("C12 PyramidKV layer by layer, with a budget at run time: 74 59 44 29 14",
          "[length][fault]") {
  Model m;
  const PyramidKV policy({.snapkv = {.window = 4, .budget = 100}, .beta = 4});
  const Rows average{44};
  m.obs.budgets = average.data();
  m.obs.budget_rows = {0, 0, 0};
  const Rows wanted{74, 59, 44, 29, 14};
  const std::vector<Rows> all = kept(policy, m.view, m.obs);
  CHECK(counts(all) == wanted);
  CHECK(kept_by_layer(policy, m, m.obs) == all);
  // Without a number of its own, a single layer is a model of one layer, which keeps the average.
  Observation first = m.obs;
  CHECK(counts(kept(policy, m.layer(0, false), first)) == Rows{44});
  // And with the policy's own budget.
  const PyramidKV own({.snapkv = {.window = 4, .budget = 44}, .beta = 4});
  m.obs.budgets = nullptr;
  CHECK(counts(kept_by_layer(own, m, m.obs)) == wanted);
  CHECK(kept_by_layer(own, m, m.obs) == kept(own, m.view, m.obs));
}

TEST_CASE("C12 a pyramid's forms are the same layer by layer, and for a view of some layers",
          "[length][fault]") {
  Model m;
  for (const PyramidForm form :
       {PyramidForm::exact, PyramidForm::kvpress, PyramidForm::kvcache_factory}) {
    const PyramidKV policy({.snapkv = {.window = 4, .budget = 44}, .beta = 4, .form = form});
    const std::vector<Rows> all = kept(policy, m.view, m.obs);
    CHECK(kept_by_layer(policy, m, m.obs) == all);
    CacheView middle = m.view;  // layers 1 to 3
    middle.layers = 3;
    middle.layer_offset = 1;
    middle.model_layers = layers;
    middle.k.base += m.view.k.layer_stride;
    middle.v.base += m.view.v.layer_stride;
    middle.table.ids += pages;
    Observation obs = m.obs;
    obs.scores.base = m.obs.scores.row({}, LayerId{1}, {}, 0);
    CHECK_NOTHROW(check_layout(middle));
    CHECK(kept(policy, middle, obs) == std::vector<Rows>(all.begin() + 2, all.end() - 2));
  }
}

TEST_CASE("C12 what a scorer knows by layer is the model's: the same rows layer by layer",
          "[length][fault]") {
  Model m;
  m.obs.scores = {};
  const auto same = [&](const auto& policy) {
    const std::vector<Rows> all = kept(policy, m.view, m.obs);
    CHECK(kept_by_layer(policy, m, m.obs) == all);
    CHECK(all[0] != all[2]);  // layers differ
  };
  same(Random({.budget = 50, .scores = {.seed = 3}}));
  same(QFilter({.budget = 50}));
  ExpectedAttentionParams expected;
  expected.rope.inverse_frequencies = m.frequencies;
  expected.rope.dim = dim;
  same(ExpectedAttention({.budget = 50, .scores = expected}));
  same(TopRows<OutputNorm<RandomParams>>({.budget = 50}));
}

TEST_CASE("C12 layers that the model does not have are refused with the numbers",
          "[length][fault]") {
  Model m;
  const auto refusal = [&](std::int32_t offset, std::int32_t model) {
    CacheView view = m.view;
    view.layers = 4;
    view.layer_offset = offset;
    view.model_layers = model;
    const std::string text = thrown_by([&] { check_layout(view); });
    const External policy({.budget = 50});
    std::vector<std::byte> workspace(plan_workspace_bytes(policy, plan_shape(view, m.obs)));
    const Status status = kvtrim::plan(policy, view, m.obs, workspace).status();
    CHECK(status == (text == "nothing thrown" ? Status::ok : Status::bad_observation));
    return text;
  };
  CHECK(refusal(0, 0) == "nothing thrown");
  CHECK(refusal(0, 4) == "nothing thrown");
  CHECK(refusal(28, 32) == "nothing thrown");
  CHECK_THAT(refusal(0, 2),
             ContainsSubstring("layer_offset 0 and 4 layers are beyond") &&
                 ContainsSubstring("model_layers 2"));
  CHECK_THAT(refusal(29, 32), ContainsSubstring("layer_offset 29 and 4 layers"));
  CHECK_THAT(refusal(1, 0), ContainsSubstring("model_layers 0 (those of the view)"));
  CHECK_THAT(refusal(-1, 32), ContainsSubstring("layer_offset -1"));
  CHECK_THAT(refusal(0, -1), ContainsSubstring("model_layers -1"));
  CHECK_THAT(refusal(2'147'483'647, 32), ContainsSubstring("layer_offset 2147483647"));

  // A scorer that has fewer layers than the view needs says so.
  m.obs.statistics.layers = 1;
  ExpectedAttentionParams expected;
  expected.rope = {.inverse_frequencies = m.frequencies, .dim = dim};
  const ExpectedAttentionScorer scorer(expected);
  CHECK(scorer.check(m.layer(3), m.obs) == Status::ok);
  CHECK(scorer.check(m.view, m.obs) == Status::bad_observation);
}

TEST_CASE("C12 keys of one layer are rotated by the model's frequencies for it",
          "[position][fault]") {
  Model m;
  std::vector<std::int32_t> ropes(index(heads * rows));
  CacheView view = m.layer(2);
  view.rope_positions = SequencePlane::dense(ropes.data(), 1, heads, rows);
  const Rope rope{.inverse_frequencies = m.frequencies, .dim = dim};
  const Rerotator rerotator(view, rope, PositionMode::in_cache);
  std::vector<float> before(dim), after(dim);
  load_row(view.k, view.key({}, {}, HeadId{1}, 0), before.data());
  rerotator.renumber({view, {}, {}, HeadId{1}}, place_of({view, {}, {}, HeadId{1}}, 0), 0, 0, 3);
  load_row(view.k, view.key({}, {}, HeadId{1}, 0), after.data());
  Rotation of_layer;
  of_layer.frequencies = m.frequencies;
  of_layer.dim = dim;
  of_layer.same_for_all_layers = false;
  CHECK(distance(of_layer.turn(to_double(before), 3, 2), after) < 1e-6);
  CHECK_THAT(thrown_by([&] { Rerotator(m.layer(2, false), rope, PositionMode::in_cache); }),
             ContainsSubstring("rope positions"));
  view.model_layers = 3;
  CHECK_THAT(thrown_by([&] { Rerotator(view, rope, PositionMode::in_cache); }),
             ContainsSubstring("10 frequencies for 3 layers of 2 pairs"));
}
