// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of the random-operation test: as a policy's own scorer makes them, which is what the model selects from, and once
// more in double, from the keys as they lie in the cache.

#include <kvtrim/evict/detail/open.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/chunked.hpp>
#include <kvtrim/score/cur.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/key_norm.hpp>
#include <kvtrim/score/lag_kv.hpp>
#include <kvtrim/score/output_norm.hpp>
#include <kvtrim/score/q_filter.hpp>
#include <kvtrim/score/random.hpp>
#include <kvtrim/score/rkv.hpp>
#include <kvtrim/score/tova.hpp>
#include <kvtrim/score/window.hpp>

#include "random/model.hpp"
#include "score/score_fixture.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvtrim::random_test {

constexpr std::int32_t group = 2;  // query heads of a KV head

/// Queries, filters and W_O for one plan.
struct Observed {
  static constexpr std::int32_t hidden = 3;
  std::vector<float> queries, filters, output;
  Ints counts;

  Observed(Random& random, const CacheView& view, std::int32_t most, const Ints& next) {
    const std::int32_t heads = view.kv_heads * group;
    queries.resize(at(std::int64_t{view.sequences} * view.layers * heads * most * key_dim));
    filters.resize(at(std::int64_t{view.layers} * view.kv_heads * key_dim));
    output.resize(at(std::int64_t{view.layers} * heads * value_dim * hidden));
    for (std::vector<float>* list : {&queries, &filters, &output}) {
      for (float& x : *list) { x = 3 * random.uniform(); }
    }
    for (const std::int32_t n : next) { counts.push_back(std::min(n, most)); }
    QueryBlock& q = block_;
    q.data = queries.data(), q.query_heads = heads, q.rows = most, q.row_counts = counts.data();
    q.row_stride = key_dim, q.head_stride = std::int64_t{most} * key_dim;
    q.layer_stride = heads * q.head_stride, q.sequence_stride = view.layers * q.layer_stride;
  }
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;

  void add_to(Observation& obs, const CacheView& view) const {
    obs.queries = block_;
    obs.filters = {filters.data(), key_dim, std::int64_t{view.kv_heads} * key_dim, key_dim};
    const std::int32_t heads = view.kv_heads * group;
    obs.output = {
        output.data(), heads, value_dim, hidden, std::int64_t{heads} * value_dim * hidden};
  }

 private:
  QueryBlock block_;
};

/// Whether the policy of `rule` can score this view.
inline Status check_scores(const Rule& rule, const CacheView& view, const Observation& obs) {
  return rule.with_policy([&](const auto& policy) {
    using Scores = detail::PolicyScorer<std::remove_cvref_t<decltype(policy)>>;
    return Scores(policy.scorer()).check(view, obs);
  });
}

/// The policy's own answer for all that the head's table serves; none if it has several.
inline std::optional<Cut> asked_cut(const Rule& rule, const HeadRef& head, const Observation& obs) {
  std::optional<Cut> cut;
  bool same = true;
  for_each_head(head.view, head.sequence, head.table(), [&](const HeadRef& of) {
    const Demand demand = rule.with_policy(
        [&](const auto& policy) { return policy.demand(detail::stage::demand_input(of, obs)); });
    const Cut one =
        demand.keep >= of.live_rows()
            ? Cut{}
            : cut_to(
                  demand.keep, demand.protection.sinks, demand.protection.recent, of.live_rows());
    same = same && cut.value_or(one) == one;
    cut = one;
  });
  return same ? cut : std::nullopt;
}

/// Scores of a head by table row, as the policy of `rule` makes them.
inline std::vector<float> own_scores(const Rule& rule, HeadRef head, const Observation& obs) {
  std::vector<float> out(at(LiveRows(head).extent()));
  rule.with_policy([&](const auto& policy) {
    using Scores = detail::PolicyScorer<std::remove_cvref_t<decltype(policy)>>;
    const Scores scorer(policy.scorer());
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(head.view, obs)));
    if constexpr (LayerScorer<Scores>) {
      scorer.score({head.view, head.sequence, head.layer, HeadId{0}}, obs, scratch, out);
    } else {
      scorer.score(head, obs, scratch, out);
    }
  });
  return out;
}

/// What the second stage of two multiplies scores with, as the library makes it.
inline std::vector<float> own_factors(const HeadRef& head, const Observation& obs) {
  std::vector<float> out(at(LiveRows(head).extent()));
  const OutputNormFactor scorer;
  std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(head.view, obs)));
  scorer.score(head, obs, scratch, out);
  return out;
}
/// The same of the row of token `tag` in double, and how far off floats may be.
inline std::pair<double, double> reference_factor(const HeadRef& head,
                                                  const Observation& obs,
                                                  std::int32_t tag) {
  const Value value = value_of(tag, raw(head.layer), raw(head.head));
  double sum = 0, magnitudes = 0;
  for (std::int32_t g = 0; g < group; ++g) {
    const float* const w = obs.output.of(head.layer, raw(head.head) * group + g);
    for (std::int32_t c = 0; c < obs.output.hidden; ++c) {
      double product = 0;
      for (std::int32_t d = 0; d < value_dim; ++d) {
        const double part =
            static_cast<double>(value[at(d)]) * static_cast<double>(w[d * obs.output.hidden + c]);
        product += part, magnitudes += std::abs(part) / group;
      }
      sum += std::abs(product) / group;
    }
  }
  return {sum, 1e-6 * magnitudes};
}

/// A head's scores in double; empty: there is no other way to say them. The scorer may be off by `error` times the larger of a score
/// and `floor`.
struct Reference {
  std::vector<double> scores;
  double error = 0, floor = 0;
};
/// \param rows  table rows of the head by rank
inline Reference reference_scores(const Rule& rule,
                                  const HeadRef& head,
                                  const Observation& obs,
                                  const Ints& rows,
                                  const Rows& model) {
  const auto head_of = [&](HeadId h) {
    score_test::Head p;
    p.scale = 1 / std::sqrt(static_cast<double>(key_dim));
    const auto& [view, s, l, asked] = head;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      auto& key = p.keys.emplace_back();
      const std::byte* const from = view.key(s, l, h, rows[i]);
      for (std::int32_t d = 0; d < key_dim; ++d) {
        key.push_back(load_element(from + d * view.k.feature_stride, view.k.dtype));
      }
      p.positions.push_back(raw(view.position(s, l, h, rows[i])));
    }
    p.queries.resize(at(group));
    const std::int32_t n =
        std::min(obs.queries.count(s), rule.kind == Rule::tova ? 1 : rule.recent);
    for (std::int32_t i = obs.queries.count(s) - n; i < obs.queries.count(s); ++i) {
      p.query_positions.push_back(raw(obs.queries.position(s, i, head.state().next_position)));
      for (std::int32_t g = 0; g < group; ++g) {
        p.queries[at(g)].push_back(
            score_test::doubles(obs.queries.row(s, l, raw(h) * group + g, i), key_dim));
      }
    }
    return p;
  };
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  Reference out;
  const score_test::Head p = head_of(head.head);
  std::vector<double> anchor(key_dim, 0.0);
  switch (rule.kind) {
    case Rule::heavy:
    case Rule::greedy:
    case Rule::promote:
      for (const Row& row : model) { out.scores.push_back(row.score); }
      out.error = 1e-6;
      break;
    case Rule::key_norm:
    case Rule::critical_kv:
      for (const auto& key : p.keys) { out.scores.push_back(-std::sqrt(dot(key, key))); }
      out.error = 1e-6;
      break;
    case Rule::key_diff:
    case Rule::page_set:
      for (const auto& key : p.keys) {
        for (std::size_t d = 0; d < anchor.size(); ++d) {
          anchor[d] += key[d] / std::sqrt(dot(key, key));
        }
      }
      for (const auto& key : p.keys) {
        out.scores.push_back(-dot(key, anchor) / std::sqrt(dot(key, key) * dot(anchor, anchor)));
      }
      // The shorter the sum of directions, the less certain is its own.
      out.error = 1e-6,
      out.floor = static_cast<double>(rows.size()) / std::sqrt(dot(anchor, anchor));
      break;
    case Rule::q_filter: {
      const auto filter = score_test::doubles(obs.filters.of(head.layer, head.head), key_dim);
      for (const auto& key : p.keys) { out.scores.push_back(-dot(key, filter)); }
      out.error = 1e-6;
      break;
    }
    case Rule::window:
    case Rule::pyramid_kv:
    case Rule::ada_kv:
    case Rule::critical_ada_kv:
    case Rule::page_window:
      out.scores = score_test::window_scores(p, score_test::probabilities_of(p), rule.votes);
      out.error = 1e-5;
      if (rule.votes.sums == Sums::exact) { out.floor = 1e-5; }
      break;
    case Rule::tova:
      out.scores.assign(rows.size(), 0.0);
      for (std::int32_t h = 0; h < head.view.kv_heads; ++h) {
        for (const auto& of_head : score_test::probabilities_of(head_of(HeadId{h}))) {
          for (std::size_t i = 0; i < rows.size(); ++i) {
            out.scores[i] += of_head.back().empty()
                                 ? std::numeric_limits<double>::quiet_NaN()
                                 : of_head.back()[i] / (group * head.view.kv_heads);
          }
        }
      }
      out.error = 1e-5;
      break;
    default:
      break;
  }
  return out;
}

}  // namespace kvtrim::random_test
