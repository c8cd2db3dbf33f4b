// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the engine calls kvtrim: during a step it hands over each layer's queries, between steps it lets a policy evict.

#include <kvtrim/core/pooling.hpp>
#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>
#include <kvtrim/observe/surprisal.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <ios>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "console.hpp"
#include "engine/llama.hpp"
#include "engine/openmp.hpp"
#include "evict_any.hpp"
#include "policy_spec.hpp"

namespace program {

/// What policies need to have observed.
struct Needs {
  std::int32_t window = 0;                             ///< last queries to keep; 0: none
  std::optional<kvtrim::AccumulateParams> accumulate;  ///< attention to be accumulated
  bool surprisal = false;   ///< how unexpected each token of the prompt was
  bool filters = false;     ///< directions of the queries, from a file
  bool statistics = false;  ///< mean and covariance of the prompt's queries before RoPE
  bool output = false;      ///< the output projection
  kvtrim::TableScope scope =
      kvtrim::TableScope::group;  ///< the coarsest tables that let all of them choose

  /// Adds what `policy` needs.
  /// \throws std::invalid_argument if it accumulates differently from a policy added before
  void add(const AnyPolicy& policy) {
    std::visit([&](const auto& p) { add_policy(p); }, policy);
  }

 private:
  using Scope = kvtrim::TableScope;

  template <class P>
  void add_policy(const P& p) {
    if constexpr (kvtrim::PagePolicy<P>) {
      scope = std::max(scope,
                       p.unit() == kvtrim::PageUnit::per_table   ? Scope::head
                       : p.unit() == kvtrim::PageUnit::per_layer ? Scope::layer
                                                                 : Scope::group);
    }
    if constexpr (std::is_same_v<P, kvtrim::PyramidKV>) scope = std::max(scope, Scope::layer);
    if constexpr (kvtrim::AdaptivePolicy<P>) scope = Scope::head;
    if constexpr (kvtrim::TwoStagePolicy<P>) output = true;
    add_scores(p.scorer());
  }

  template <class Scores>
  void add_scores(const Scores&) {}
  template <class Scores>
    requires requires(const Scores& p) { p.scores; }  // of a decorator
  void add_scores(const Scores& decorated) {
    add_scores(decorated.scores);
  }
  void add_scores(const kvtrim::WindowParams& p) { window = std::max(window, p.window); }
  void add_scores(const kvtrim::RKVParams& p) { window = std::max(window, p.window); }
  void add_scores(const kvtrim::TovaParams&) { window = std::max(window, 1); }
  void add_scores(const kvtrim::ExpectedAttentionParams&) { statistics = true; }
  void add_scores(const kvtrim::QFilterParams&) { filters = true; }
  void add_scores(const kvtrim::ExternalParams&) { surprisal = true; }
  void add_scores(const kvtrim::AccumulateParams& asked) {
    if (accumulate && (accumulate->decay != asked.decay || accumulate->squared != asked.squared)) {
      throw std::invalid_argument(
          "h2o policies of one run share one accumulated score: decay and squared must be the "
          "same");
    }
    accumulate = asked;
  }
};

/// How this engine's model rotates, for policies that need to know; the shape must outlive them.
[[nodiscard]] inline kvtrim::Rope rope_of(const engine::LlamaShape& shape) noexcept {
  return {.inverse_frequencies = shape.frequencies,
          .dim = shape.rope_dims,
          .pairs = kvtrim::RopePairs::interleaved,
          .same_for_all_layers = true};
}

/// Reads QFilter's directions: fp32, little endian, [layers, kv_heads, head_dim].
/// \throws std::runtime_error if the file cannot be read, has another size, or a number is not finite
[[nodiscard]] inline std::vector<float> read_filters(const std::string& path,
                                                     const engine::LlamaShape& shape) {
  const std::size_t count = static_cast<std::size_t>(shape.layers) *
                            static_cast<std::size_t>(shape.kv_heads) *
                            static_cast<std::size_t>(shape.head_dim);
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("filters '" + path + "' cannot be opened");
  std::vector<float> filters(count + 1);
  in.read(reinterpret_cast<char*>(filters.data()),
          static_cast<std::streamsize>(filters.size() * sizeof(float)));
  if (static_cast<std::size_t>(in.gcount()) != count * sizeof(float)) {
    throw std::runtime_error("filters '" + path + "' must hold " + std::to_string(shape.layers) +
                             " layers x " + std::to_string(shape.kv_heads) + " KV heads x " +
                             std::to_string(shape.head_dim) + " floats, " +
                             std::to_string(count * sizeof(float)) + " bytes");
  }
  filters.pop_back();
  if (!std::all_of(filters.begin(), filters.end(), [](float x) { return std::isfinite(x); })) {
    throw std::runtime_error("filters '" + path + "': a number is not finite");
  }
  return filters;
}

/// Watches the steps of an engine and evicts between them.
class Evictor {
 public:
  /// \param filters  the result of `read_filters`, for policies that need it
  /// \throws std::invalid_argument if a policy needs filters and there are none
  Evictor(engine::LlamaModel& model,
          kvtrim::PagedCache& cache,
          const Needs& needs,
          std::vector<float> filters = {})
      : cache_(&cache), needs_(needs), filters_(std::move(filters)) {
    const engine::LlamaShape& shape = model.shape();
    if (needs.filters && filters_.empty()) {
      throw std::invalid_argument("policy qfilter needs --filters FILE: calibrated directions of " +
                                  std::to_string(shape.layers) + " layers x " +
                                  std::to_string(shape.kv_heads) + " KV heads");
    }
    if (needs.window > 0) {
      ring_.emplace(kvtrim::QueryRing::Params{.sequences = cache.params().max_sequences,
                                              .layers = shape.layers,
                                              .query_heads = shape.heads,
                                              .head_dim = shape.head_dim,
                                              .window = needs.window,
                                              .lse = true});
    }
    if (needs.statistics) {
      model.observe_unrotated_queries(true);
      moments_.emplace(kvtrim::QueryMoments::Params{.sequences = cache.params().max_sequences,
                                                    .layers = shape.layers,
                                                    .query_heads = shape.heads,
                                                    .head_dim = shape.head_dim});
    }
    if (needs.output) copy_output(model);
    filter_vectors_ = {.data = filters_.empty() ? nullptr : filters_.data(),
                       .dim = shape.head_dim,
                       .layer_stride = static_cast<std::int64_t>(shape.kv_heads) * shape.head_dim,
                       .head_stride = shape.head_dim};
    scratch_.resize(kvtrim::column_sums_scratch_bytes(shape.head_dim) *
                    static_cast<std::size_t>(executor_.workers()));
    heads_ = shape.heads;
    head_dim_ = shape.head_dim;
  }

  /// The hook to pass to `LlamaModel::forward`. After Ctrl-C it throws Interrupted.
  [[nodiscard]] engine::Observer observer() {
    return [this](const engine::LayerObservation& seen) { observe(seen); };
  }

  /// Runs a prompt through the model and records what the policies need from it.
  kvtrim::Status prefill(engine::LlamaModel& model,
                         kvtrim::SequenceId s,
                         std::span<const std::int32_t> prompt) {
    if (!needs_.surprisal) return model.prefill(*cache_, s, prompt, observer());
    std::vector<float> seen(prompt.size(), 0.0F);
    constexpr std::size_t chunk = 256;  // rows of logits that are in memory at a time
    for (std::size_t begin = 0; begin < prompt.size(); begin += chunk) {
      const engine::Segment segment{s,
                                    prompt.subspan(begin, std::min(chunk, prompt.size() - begin))};
      const kvtrim::Status status =
          model.forward(*cache_, {&segment, 1}, engine::LogitRows::all, observer());
      if (status != kvtrim::Status::ok) return status;
      for (std::size_t i = 0; i < segment.tokens.size() && begin + i + 1 < prompt.size(); ++i) {
        seen[begin + i + 1] =
            kvtrim::surprisal(model.logits(static_cast<Eigen::Index>(i)), prompt[begin + i + 1]);
      }
    }
    surprisal_.resize(seen.size());
    kvtrim::pool(seen, kvtrim::Pooling::average, 7, surprisal_);
    return kvtrim::Status::ok;
  }

  /// Copies what was recorded for a sequence to its fork.
  void fork(kvtrim::SequenceId from, kvtrim::SequenceId to) {
    if (ring_) ring_->fork(from, to);
    if (moments_) {
      bases_.resize(static_cast<std::size_t>(cache_->params().max_sequences));
      bases_[static_cast<std::size_t>(kvtrim::raw(to))] = base_of(from);
    }
  }
  /// Forgets what was recorded for a sequence.
  void reset(kvtrim::SequenceId s) {
    if (ring_) ring_->reset(s);
    if (moments_) {
      bases_.resize(static_cast<std::size_t>(cache_->params().max_sequences));
      bases_[static_cast<std::size_t>(kvtrim::raw(s))] = s;
      moments_->reset(s);
    }
  }

  /// Makes the workspace large enough for `evict` of sequence `s` as it is now, so that the eviction allocates nothing.
  void prepare(const AnyPolicy& policy, kvtrim::SequenceId s) {
    const kvtrim::PlanShape shape =
        kvtrim::plan_shape(cache_->view(s), observation(s), executor_.workers());
    const std::size_t bytes = workspace_bytes(policy, shape);
    if (workspace_.size() < bytes) workspace_.resize(bytes);
  }

  /// Lets `policy` keep `keep` rows of sequence `s`. Allocates unless `prepare` was called.
  /// \throws std::runtime_error if the library refuses
  kvtrim::Report evict(const AnyPolicy& policy,
                       kvtrim::SequenceId s,
                       std::int32_t keep,
                       const kvtrim::PlanOptions& options = {}) {
    prepare(policy, s);
    if (moments_) moments_->finish(base_of(s));
    kvtrim::Observation seen = observation(s);
    const bool by_surprisal = std::visit(
        [](const auto& p) {
          return std::is_same_v<std::remove_cvref_t<decltype(p.scorer())>, kvtrim::ExternalParams>;
        },
        policy);
    if (by_surprisal) {
      if (surprisal_.size() != static_cast<std::size_t>(cache_->live_rows(s))) {
        throw std::runtime_error("scores by surprisal act once, at the end of the prompt");
      }
      // One score per token for all layers and KV heads.
      seen.scores = kvtrim::SequencePlane::dense(surprisal_.data(), 1, 1, cache_->live_rows(s));
      seen.scores.layer_stride = seen.scores.head_stride = seen.scores.sequence_stride = 0;
    }
    seen.budgets = &keep;
    seen.budget_rows = {0, 0, 0};
    const kvtrim::Report report =
        evict_any(policy, *cache_, cache_->view(s), seen, workspace_, options, executor_);
    if (!kvtrim::usable(report.status)) {
      throw std::runtime_error("the eviction was refused: " +
                               std::string(kvtrim::to_string(report.status)));
    }
    return report;
  }

 private:
  [[nodiscard]] kvtrim::Observation observation(kvtrim::SequenceId s) const {
    kvtrim::Observation seen;
    if (ring_) seen.queries = ring_->queries(s);
    if (moments_) seen.statistics = moments_->statistics(base_of(s));
    seen.filters = filter_vectors_;
    seen.output = projection_;
    return seen;
  }

  // The sequence whose prompt `s` has: moments stay where they were gathered.
  [[nodiscard]] kvtrim::SequenceId base_of(kvtrim::SequenceId s) const {
    const auto i = static_cast<std::size_t>(kvtrim::raw(s));
    return i < bases_.size() ? bases_[i] : s;
  }

  // W_O of every query head, transposed: from [hidden, heads * head_dim] to [heads, head_dim, hidden].
  void copy_output(const engine::LlamaModel& model) {
    const engine::LlamaShape& shape = model.shape();
    const std::int64_t layer =
        static_cast<std::int64_t>(shape.heads) * shape.head_dim * shape.embedding;
    output_.resize(static_cast<std::size_t>(layer * shape.layers));
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      Eigen::Map<engine::Matrix>(
          output_.data() + l * layer, shape.heads * shape.head_dim, shape.embedding) =
          model.output_projection(kvtrim::LayerId{l}).transpose();
    }
    projection_ = {.data = output_.data(),
                   .query_heads = shape.heads,
                   .value_dim = shape.head_dim,
                   .hidden = shape.embedding,
                   .layer_stride = layer};
  }

  void observe(const engine::LayerObservation& seen) {
    check_interrupt();  // stop at once, even in a long prompt
    if (ring_) {
      ring_->push(seen.sequence,
                  seen.layer,
                  seen.tokens,
                  seen.queries.data(),
                  seen.positions.data(),
                  seen.lse.data());
    }
    kvtrim::QueryBlock block;
    block.data = seen.unrotated_queries.data();
    block.query_heads = heads_;
    block.rows = seen.tokens;
    block.row_stride = static_cast<std::int64_t>(heads_) * head_dim_;
    block.head_stride = head_dim_;
    if (moments_) { moments_->accumulate(seen.sequence, seen.layer, block, kvtrim::LayerId{0}); }
    if (!needs_.accumulate) return;
    block.data = seen.queries.data();
    block.lse = seen.lse.data();
    block.lse_head_stride = seen.tokens;
    const kvtrim::CacheView view = cache_->view(seen.sequence);
    const std::size_t share = scratch_.size() / static_cast<std::size_t>(executor_.workers());
    executor_.for_each(view.kv_heads, [&](std::int64_t head, std::int32_t worker) {
      kvtrim::accumulate_column_sums(
          *needs_.accumulate,
          {view,
           kvtrim::SequenceId{0},
           seen.layer,
           kvtrim::HeadId{static_cast<std::int32_t>(head)}},
          block,
          kvtrim::LayerId{0},
          std::span(scratch_).subspan(static_cast<std::size_t>(worker) * share, share));
    });
  }

  kvtrim::PagedCache* cache_;
  Needs needs_;
  engine::OpenMp executor_;
  std::vector<float> filters_;
  kvtrim::HeadVectors filter_vectors_;
  std::vector<float> output_;
  kvtrim::OutputProjection projection_;
  std::optional<kvtrim::QueryRing> ring_;
  std::optional<kvtrim::QueryMoments> moments_;
  std::vector<kvtrim::SequenceId> bases_;  // of each sequence, while moments are gathered
  std::vector<float> surprisal_;           // of the last prompt, pooled
  std::vector<std::byte> scratch_;
  std::vector<std::byte> workspace_;
  std::int32_t heads_ = 0;
  std::int32_t head_dim_ = 0;
};

/// The dtype that `--cache-type` names: f32, f16 or bf16.
[[nodiscard]] inline kvtrim::DType cache_dtype(const std::string& name) {
  return name == "f16"    ? kvtrim::DType::f16
         : name == "bf16" ? kvtrim::DType::bf16
                          : kvtrim::DType::f32;
}

/// Page tables per sequence of a cache made with `params`.
[[nodiscard]] inline std::int32_t tables_of(const kvtrim::PagedCache::Params& params) {
  return kvtrim::tables_of(params.scope, params.layers, params.kv_heads);
}

/// Live rows of sequence `s`, summed over layers and KV heads.
[[nodiscard]] inline std::int64_t live_rows(const kvtrim::PagedCache& cache, kvtrim::SequenceId s) {
  const auto& p = cache.params();
  std::int64_t rows = 0;
  for (std::int32_t l = 0; l < p.layers; ++l) {
    for (std::int32_t h = 0; h < p.kv_heads; ++h)
      rows += cache.live_rows(s, kvtrim::LayerId{l}, kvtrim::HeadId{h});
  }
  return rows;
}

/// Bytes of keys and values of the live rows of sequence `s`.
[[nodiscard]] inline std::int64_t live_bytes(const kvtrim::PagedCache& cache,
                                             kvtrim::SequenceId s) {
  const auto& p = cache.params();
  return live_rows(cache, s) * (p.key_dim + p.value_dim) * kvtrim::element_bytes(p.dtype);
}

/// Rope position of the next token in the head that is furthest along.
[[nodiscard]] inline std::int32_t next_rope_position(const kvtrim::PagedCache& cache,
                                                     kvtrim::SequenceId s) {
  const auto& p = cache.params();
  std::int32_t next = 0;
  for (std::int32_t l = 0; l < p.layers; ++l) {
    for (std::int32_t h = 0; h < p.kv_heads; ++h)
      next = std::max(next, cache.next_rope_position(s, kvtrim::LayerId{l}, kvtrim::HeadId{h}));
  }
  return next;
}

}  // namespace program
