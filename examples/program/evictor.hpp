// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the engine calls kvtrim: during a step it hands over each layer's queries, between steps it lets a policy evict.

#include <kvtrim/evict/commit.hpp>
#include <kvtrim/evict/plan_options.hpp>
#include <kvtrim/observe/query_moments.hpp>
#include <kvtrim/observe/query_ring.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "engine/llama.hpp"
#include "engine/openmp.hpp"
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
  void add(const AnyPolicy& policy);

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
[[nodiscard]] std::vector<float> read_filters(const std::string& path,
                                              const engine::LlamaShape& shape);

/// Watches the steps of an engine and evicts between them.
class Evictor {
 public:
  /// \param filters  the result of `read_filters`, for policies that need it
  /// \throws std::invalid_argument if a policy needs filters and there are none
  Evictor(engine::LlamaModel& model,
          kvtrim::PagedCache& cache,
          const Needs& needs,
          std::vector<float> filters = {});

  /// The hook to pass to `LlamaModel::forward`. After Ctrl-C it throws Interrupted.
  [[nodiscard]] engine::Observer observer() {
    return [this](const engine::LayerObservation& seen) { observe(seen); };
  }

  /// Runs a prompt through the model and records what the policies need from it.
  kvtrim::Status prefill(engine::LlamaModel& model,
                         kvtrim::SequenceId s,
                         std::span<const std::int32_t> prompt);

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
  void prepare(const AnyPolicy& policy, kvtrim::SequenceId s);

  /// Lets `policy` keep `keep` rows of sequence `s`. Allocates unless `prepare` was called.
  /// \throws std::runtime_error if the library refuses
  kvtrim::Report evict(const AnyPolicy& policy,
                       kvtrim::SequenceId s,
                       std::int32_t keep,
                       const kvtrim::PlanOptions& options = {});

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
  void copy_output(const engine::LlamaModel& model);

  void observe(const engine::LayerObservation& seen);

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
