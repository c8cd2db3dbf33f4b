// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of a model's cache that one rank has: some layers, some KV heads, some tokens. Every number is a function of
// what it belongs to, so that the parts of all ranks are those of the whole, which is a part too.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/evict/evict.hpp>
#include <kvtrim/evict/kept_rows.hpp>
#include <kvtrim/parallel/agreement.hpp>
#include <kvtrim/parallel/placement.hpp>

#include "catch.hpp"
#include "parallel/ranks.hpp"
#include "support/instances.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace kvtrim::test {

/// What the scores of a test look like.
enum class Scores : std::uint8_t { random, few, equal, nan };

struct Model {
  std::int32_t layers = 2;
  std::int32_t kv_heads = 8;
  std::int32_t tokens = 64;
  std::int32_t page_size = 4;
  DType dtype = DType::f32;
  TableScope scope = TableScope::head;
  Scores scores = Scores::random;

  static constexpr std::int32_t dim = 4;
  static constexpr std::int32_t group = 2;
  static constexpr std::int32_t window = 8;

  /// `n` numbers of [-2, 2), exact in 16-bit floats.
  static std::vector<float> numbers(
      std::int32_t kind, std::int32_t l, std::int32_t h, std::int32_t position, std::int32_t n) {
    Random random((static_cast<std::uint64_t>(kind * 64 + l) * 64 + static_cast<std::uint64_t>(h)) *
                      65536 +
                  static_cast<std::uint64_t>(position));
    std::vector<float> out(static_cast<std::size_t>(n));
    for (float& x : out) { x = static_cast<float>(random.below(256) - 128) / 64; }
    return out;
  }
  /// A score made up for a row; `kind` makes other ones.
  float score(std::int32_t l, std::int32_t h, Position p, std::int32_t kind = 0) const {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    constexpr float inf = std::numeric_limits<float>::infinity();
    Random random(static_cast<std::uint64_t>(((raw(p) * 32 + l) * 32 + h) * 8 + kind));
    switch (scores) {
      case Scores::few:
        return static_cast<float>(random.below(3));
      case Scores::equal:
        return 1.5F;
      case Scores::nan: {
        const float special[]{nan, -nan, -inf, inf, 0.0F, -0.0F, 1e-40F};
        const std::int32_t i = random.below(9);
        return i < 7 ? special[i] : random.uniform();
      }
      default:
        return random.uniform();
    }
  }
};

/// Which part of it.
struct Part {
  std::int32_t first_layer = 0;
  std::int32_t layers = 0;
  std::int32_t first_head = 0;
  std::int32_t heads = 0;
  std::vector<std::int32_t> positions;  // ascending
};

inline Part whole(const Model& m) {
  Part part{
      0, m.layers, 0, m.kv_heads, std::vector<std::int32_t>(static_cast<std::size_t>(m.tokens))};
  std::iota(part.positions.begin(), part.positions.end(), 0);
  return part;
}
/// First of `n` things that rank r has, the ones before it having as many or one more.
inline std::int32_t first_of(Rank rank, std::int32_t n) {
  return rank.index * (n / rank.count) + std::min(rank.index, n % rank.count);
}
inline Part heads_of(const Model& m, Rank rank) {
  Part part = whole(m);
  part.first_head = first_of(rank, m.kv_heads);
  part.heads = first_of({rank.index + 1, rank.count}, m.kv_heads) - part.first_head;
  return part;
}
inline Part layers_of(const Model& m, Rank rank) {
  Part part = whole(m);
  part.first_layer = first_of(rank, m.layers);
  part.layers = first_of({rank.index + 1, rank.count}, m.layers) - part.first_layer;
  return part;
}
inline Part rows_of(const Model& m, Rank rank, const Placement& placement) {
  Part part = whole(m);
  std::erase_if(part.positions,
                [&](std::int32_t p) { return placement.owner(Position{p}) != rank.index; });
  return part;
}

class RankWorld {
 public:
  RankWorld(const Model& model, const Part& part)
      : model_(model),
        part_(part),
        cache_({.pages = tables_of(model.scope, part.layers, part.heads) *
                         (pages_for(model.tokens, model.page_size) + 2),
                .page_size = model.page_size,
                .layers = part.layers,
                .kv_heads = part.heads,
                .key_dim = Model::dim,
                .dtype = model.dtype,
                .scope = model.scope,
                .max_rows = model.tokens + 8,
                .scores = true}) {
    const auto s = cache_.try_create();
    const auto rows = static_cast<std::int32_t>(part.positions.size());
    REQUIRE(cache_.try_extend(*s, rows) == Status::ok);
    for (std::int32_t l = 0; rows > 0 && l < part.layers; ++l) {
      std::vector<float> keys, values;
      for (const std::int32_t p : part.positions) {
        for (std::int32_t h = 0; h < part.heads; ++h) {
          add(keys, 0, l, part.first_head + h, p);
          add(values, 1, l, part.first_head + h, p);
        }
      }
      REQUIRE(cache_.write(*s, LayerId{l}, {keys.data()}, {values.data()}) == Status::ok);
    }
    // A rank's own rows are not all rows: the engine tells it where they and the next token are.
    for_each_row([&](const HeadRef& head, std::int32_t r) {
      head.view.positions.at<Position>(head.sequence, head.layer, head.head, r) =
          Position{part.positions[static_cast<std::size_t>(r)]};
      head.view.score_sums.at<float>(head.sequence, head.layer, head.head, r) = score(head, r, 2);
      head.view.score_compensations.at<float>(head.sequence, head.layer, head.head, r) = 0;
    });
    const CacheView v = view();
    for (std::int32_t t = 0; t < v.tables_per_sequence(); ++t) {
      v.states[t].next_position = model.tokens;
    }
  }

  CacheView view() {
    CacheView v = cache_.view();
    v.layer_offset = part_.first_layer;
    v.model_layers = model_.layers;
    return v;
  }
  const Part& part() const { return part_; }
  PagedCache& cache() { return cache_; }

  /// Calls f(HeadRef, row) for each live row.
  template <class F>
  void for_each_row(F&& f) {
    for_each_head([&](const HeadRef& head) {
      const LiveRows rows(head);
      for (std::int32_t i = 0; i < rows.count(); ++i) { f(head, rows.row(i)); }
    });
  }
  template <class F>
  void for_each_head(F&& f) {
    const CacheView v = view();
    for (std::int32_t l = 0; l < part_.layers; ++l) {
      for (std::int32_t h = 0; h < part_.heads; ++h) {
        f(HeadRef{v, SequenceId{0}, LayerId{l}, HeadId{h}});
      }
    }
  }
  /// The made-up score of a row.
  float score(const HeadRef& head, std::int32_t r, std::int32_t kind = 0) const {
    return model_.score(layer(head), part_.first_head + raw(head.head), head.position(r), kind);
  }
  std::int32_t layer(const HeadRef& head) const { return part_.first_layer + raw(head.layer); }
  std::int32_t kv_head(const HeadRef& head) const { return part_.first_head + raw(head.head); }

  /// The window's queries, which every rank has, and scores that are `of(HeadRef, row)`; they live as long as the world.
  template <class ScoreOf>
  Observation scored(const ScoreOf& of) {
    Observation obs = observation();
    const std::int32_t rows = model_.tokens + 8;
    scores_.assign(static_cast<std::size_t>(part_.layers * part_.heads * rows), 0.0F);
    obs.scores = SequencePlane::dense(scores_.data(), part_.layers, part_.heads, rows);
    for_each_row([&](const HeadRef& head, std::int32_t r) {
      obs.scores.at<float>(head.sequence, head.layer, head.head, r) = of(head, r);
    });
    return obs;
  }
  Observation observation() {
    const std::int32_t heads = part_.heads * Model::group;
    const std::int32_t first = part_.first_head * Model::group;
    const std::int32_t dim = Model::dim;
    queries_.clear(), filters_.clear(), means_.clear(), output_.clear();
    for (std::int32_t l = 0; l < part_.layers; ++l) {
      for (std::int32_t h = 0; h < part_.heads; ++h) {
        add(filters_, 3, l, part_.first_head + h, 0);
      }
      for (std::int32_t h = first; h < first + heads; ++h) {
        add(means_, 4, l, h, 0);
        for (std::int32_t i = 0; i < dim; ++i) { add(output_, 5, l, h, i); }
        for (std::int32_t i = 0; i < Model::window; ++i) {
          add(queries_, 2, l, h, model_.tokens - Model::window + i);
        }
      }
    }
    Observation obs;
    QueryBlock& q = obs.queries;
    q.data = queries_.data();
    q.query_heads = heads;
    q.rows = Model::window;
    q.row_stride = dim;
    q.head_stride = Model::window * dim;
    q.layer_stride = heads * q.head_stride;
    obs.filters = {filters_.data(), dim, std::int64_t{part_.heads} * dim, dim};
    obs.statistics = {means_.data(), nullptr, heads, dim, part_.layers, false};
    obs.output = {output_.data(), heads, dim, dim, std::int64_t{heads} * dim * dim};
    return obs;
  }
  /// Scores by the library's own scorer, [layers * KV heads][row].
  template <class Params>
  std::vector<std::vector<float>> scores_by(const Params& params, const Observation& obs) {
    const typename ScorerOf<Params>::type scorer(params);
    std::vector<std::byte> scratch(scorer.scratch_bytes(plan_shape(view(), obs)));
    std::vector<std::vector<float>> out;
    for_each_head([&](const HeadRef& head) {
      out.emplace_back(static_cast<std::size_t>(LiveRows(head).extent()));
      scorer.score(head, obs, scratch, out.back());
    });
    return out;
  }
  /// Place of a head in such lists.
  static std::size_t pair(const HeadRef& head) {
    return static_cast<std::size_t>(raw(head.layer) * head.view.kv_heads + raw(head.head));
  }

  /// A plan in memory of this world's own.
  template <class P>
  PlanRef make(const P& policy, const Observation& obs, const PlanOptions& options = {}) {
    const CacheView v = view();
    workspace_.assign(plan_workspace_bytes(policy, plan_shape(v, obs)), std::byte{0});
    return plan(policy, v, obs, workspace_, options);
  }
  template <class Keep>
  PlanRef make_kept(Keep&& keep, const PlanOptions& options = {}) {
    kept_ = std::make_unique<KeptRows>(view(), keep);
    return make(KeptRows::policy(), kept_->observation(), options);
  }
  /// Applies and commits.
  Status execute(const PlanRef& plan) {
    const CacheView v = view();
    if (const Status status = apply(plan, v); status != Status::ok) { return status; }
    PagedCache::Sink sink = cache_.sink_for(v);
    return commit(plan, v, sink).status;
  }

  /// What each (layer, KV head, position) of the model has: key and value, byte for byte.
  using Rows = std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::string>;
  Rows rows() {
    Rows out;
    for_each_row([&](const HeadRef& head, std::int32_t r) {
      const auto& [v, s, l, h] = head;
      const auto bytes = static_cast<std::size_t>(v.k.row_bytes());
      std::string& row = out[{layer(head), kv_head(head), raw(head.position(r))}];
      row.assign(reinterpret_cast<const char*>(v.key(s, l, h, r)), bytes);
      row.append(reinterpret_cast<const char*>(v.value(s, l, h, r)), bytes);
    });
    return out;
  }

 private:
  // Numbers of a layer of this part, and a head of the model.
  void add(
      std::vector<float>& to, std::int32_t kind, std::int32_t l, std::int32_t h, std::int32_t p) {
    const auto x = Model::numbers(kind, part_.first_layer + l, h, p, Model::dim);
    to.insert(to.end(), x.begin(), x.end());
  }

  Model model_;
  Part part_;
  PagedCache cache_;
  std::vector<float> queries_, filters_, means_, output_, scores_;
  std::vector<std::byte> workspace_;
  std::unique_ptr<KeptRows> kept_;
};

/// The worlds of the ranks that are here.
template <class PartOf>
std::vector<std::unique_ptr<RankWorld>> worlds_of(const Ranks& ranks,
                                                  const Model& model,
                                                  const PartOf& part_of) {
  std::vector<std::unique_ptr<RankWorld>> out;
  for (const Rank& rank : ranks.here()) {
    out.push_back(std::make_unique<RankWorld>(model, part_of(rank)));
  }
  return out;
}

/// Has each rank plan, agree, and then apply: plan_of(world, i) -> PlanRef, and the fingerprint of each.
template <class PlanOf, class FingerprintOf>
Status evict_together(Ranks& ranks,
                      std::vector<std::unique_ptr<RankWorld>>& worlds,
                      const PlanOf& plan_of,
                      const FingerprintOf& fingerprint_of) {
  std::vector<PlanRef> plans;
  std::vector<PlanAgreement> agreements;
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    plans.push_back(plan_of(*worlds[i], i));
    agreements.emplace_back(ranks.here()[i], plans[i], fingerprint_of(plans[i], i));
  }
  if (const Status status = ranks.drive(agreements); status != Status::ok) { return status; }
  for (std::size_t i = 0; i < worlds.size(); ++i) {
    INFO(agreements[i].message());
    REQUIRE(agreements[i].status() == agreements[0].status());
    if (!usable(agreements[i].status())) { return agreements[i].status(); }
    REQUIRE(worlds[i]->execute(plans[i]) == Status::ok);
  }
  return agreements[0].status();
}

/// Requires that each rank has those rows of the one-rank run that are its own.
inline void require_same_rows(std::vector<std::unique_ptr<RankWorld>>& worlds, RankWorld& one) {
  const RankWorld::Rows all = one.rows();
  for (const auto& world : worlds) {
    const Part& part = world->part();
    RankWorld::Rows own;
    for (const auto& [at, row] : all) {
      const auto& [l, h, p] = at;
      if (l >= part.first_layer && l < part.first_layer + part.layers && h >= part.first_head &&
          h < part.first_head + part.heads && std::ranges::binary_search(part.positions, p)) {
        own[at] = row;
      }
    }
    REQUIRE((world->rows() == own));  // not printed
  }
}

}  // namespace kvtrim::test
