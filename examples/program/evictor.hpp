// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the engine calls kvtrim: during a step it hands over each layer's queries, between steps it lets a policy evict.

#include <kvtrim/evict/evict.hpp>
#include <kvtrim/score/accumulate.hpp>
#include <kvtrim/score/column_sums.hpp>
#include <kvtrim/score/external.hpp>
#include <kvtrim/score/key_diff.hpp>
#include <kvtrim/score/pooling.hpp>
#include <kvtrim/score/query_ring.hpp>
#include <kvtrim/score/surprisal.hpp>
#include <kvtrim/score/window.hpp>

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

#include "console.hpp"
#include "engine/llama.hpp"
#include "engine/openmp.hpp"
#include "policy_spec.hpp"

namespace program {

/// What policies ask to be observed.
struct Needs {
  std::int32_t window = 0;                             ///< last queries to keep; 0: none
  std::optional<kvtrim::AccumulateParams> accumulate;  ///< attention to be accumulated
  bool surprisal = false;  ///< how unexpected each token of the prompt was
  kvtrim::TableScope scope =
      kvtrim::TableScope::group;  ///< the coarsest tables that let all of them choose

  /// Adds what `policy` asks for.
  /// \throws std::invalid_argument if it accumulates in another way than a policy before it
  void add(const AnyPolicy& policy) {
    std::visit(
        [&](const auto& p) {
          if constexpr (kvtrim::PagePolicy<std::remove_cvref_t<decltype(p)>>) {
            const kvtrim::TableScope asked =
                p.unit() == kvtrim::PageUnit::per_table   ? kvtrim::TableScope::head
                : p.unit() == kvtrim::PageUnit::per_layer ? kvtrim::TableScope::layer
                                                          : kvtrim::TableScope::group;
            scope = std::max(scope, asked);
          }
        },
        policy);
    if (const auto* page = std::get_if<kvtrim::PageSelector<kvtrim::WindowParams>>(&policy)) {
      window = std::max(window, page->scorer().window);
    }
    surprisal =
        surprisal || std::holds_alternative<kvtrim::PageSelector<kvtrim::ExternalParams>>(policy);
    if (const auto* page = std::get_if<kvtrim::PageSelector<kvtrim::AccumulateParams>>(&policy))
      add(page->scorer());
    if (const auto* snapkv = std::get_if<kvtrim::SnapKVSelector>(&policy)) {
      window = std::max(window, static_cast<std::int32_t>(snapkv->params().window));
    }
    if (const auto* heavy = std::get_if<kvtrim::HeavyHitter>(&policy)) add(heavy->scorer());
  }

 private:
  void add(const kvtrim::AccumulateParams& asked) {
    if (accumulate && (accumulate->decay != asked.decay || accumulate->squared != asked.squared)) {
      throw std::invalid_argument(
          "h2o policies of one run share one accumulated score: decay and squared must be the "
          "same");
    }
    accumulate = asked;
  }
};

/// Watches the steps of an engine and evicts between them.
class Evictor {
 public:
  Evictor(const engine::LlamaShape& shape, kvtrim::PagedCache& cache, const Needs& needs)
      : cache_(&cache), needs_(needs) {
    if (needs.window > 0) {
      ring_.emplace(kvtrim::QueryRing::Params{.sequences = cache.params().max_sequences,
                                              .layers = shape.layers,
                                              .query_heads = shape.heads,
                                              .head_dim = shape.head_dim,
                                              .window = needs.window,
                                              .lse = true});
    }
    scratch_.resize(kvtrim::column_sums_scratch_bytes(shape.head_dim) *
                    static_cast<std::size_t>(executor_.workers()));
    heads_ = shape.heads;
    head_dim_ = shape.head_dim;
  }

  /// The hook to give to `LlamaModel::forward`. After Ctrl-C it throws Interrupted.
  [[nodiscard]] engine::Observer observer() {
    return [this](const engine::LayerObservation& seen) { observe(seen); };
  }

  /// Runs a prompt through the model, and sees what the policies need of it.
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

  /// Copies what was seen of a sequence to its fork.
  void fork(kvtrim::SequenceId from, kvtrim::SequenceId to) {
    if (ring_) ring_->fork(from, to);
  }
  /// Forgets what was seen of a sequence.
  void reset(kvtrim::SequenceId s) {
    if (ring_) ring_->reset(s);
  }

  /// Makes the workspace large enough for `evict` of sequence `s` as it is now, so that the eviction allocates nothing.
  void prepare(const AnyPolicy& policy, kvtrim::SequenceId s) {
    const kvtrim::PlanShape shape =
        kvtrim::plan_shape(cache_->view(s), observation(s), executor_.workers());
    const std::size_t bytes =
        std::visit([&](const auto& p) { return kvtrim::plan_workspace_bytes(p, shape); }, policy);
    if (workspace_.size() < bytes) workspace_.resize(bytes);
  }

  /// Lets `policy` keep `keep` rows of sequence `s`. Allocates unless `prepare` was called.
  /// \throws std::runtime_error if the library refuses
  kvtrim::Report evict(const AnyPolicy& policy,
                       kvtrim::SequenceId s,
                       std::int32_t keep,
                       const kvtrim::PlanOptions& options = {}) {
    prepare(policy, s);
    kvtrim::Observation seen = observation(s);
    if (std::holds_alternative<kvtrim::PageSelector<kvtrim::ExternalParams>>(policy)) {
      if (surprisal_.size() != static_cast<std::size_t>(cache_->live_rows(s))) {
        throw std::runtime_error("score=surprisal acts once, at the end of the prompt");
      }
      // One score a token for all layers and KV heads.
      seen.scores = kvtrim::SequencePlane::dense(surprisal_.data(), 1, 1, cache_->live_rows(s));
      seen.scores.layer_stride = seen.scores.head_stride = seen.scores.sequence_stride = 0;
    }
    seen.budgets = &keep;
    seen.budget_rows = {0, 0, 0};
    const kvtrim::Report report = std::visit(
        [&](const auto& p) {
          return kvtrim::evict(p, *cache_, cache_->view(s), seen, workspace_, options, executor_);
        },
        policy);
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
    return seen;
  }

  void observe(const engine::LayerObservation& seen) {
    check_interrupt();  // a long prompt is left at once
    if (ring_) {
      ring_->push(seen.sequence,
                  seen.layer,
                  seen.tokens,
                  seen.queries.data(),
                  seen.positions.data(),
                  seen.lse.data());
    }
    if (!needs_.accumulate) return;
    kvtrim::QueryBlock block;
    block.data = seen.queries.data();
    block.query_heads = heads_;
    block.rows = seen.tokens;
    block.row_stride = static_cast<std::int64_t>(heads_) * head_dim_;
    block.head_stride = head_dim_;
    block.lse = seen.lse.data();
    block.lse_head_stride = seen.tokens;
    const kvtrim::CacheView view = cache_->view(seen.sequence);
    const std::size_t share = scratch_.size() / static_cast<std::size_t>(executor_.workers());
    executor_.for_each(view.kv_heads, [&](std::int64_t head, std::int32_t worker) {
      kvtrim::accumulate_column_sums(
          *needs_.accumulate,
          view,
          kvtrim::SequenceId{0},
          seen.layer,
          kvtrim::HeadId{static_cast<std::int32_t>(head)},
          block,
          kvtrim::LayerId{0},
          std::span(scratch_).subspan(static_cast<std::size_t>(worker) * share, share));
    });
  }

  kvtrim::PagedCache* cache_;
  Needs needs_;
  engine::OpenMp executor_;
  std::optional<kvtrim::QueryRing> ring_;
  std::vector<float> surprisal_;  // of the last prompt, pooled
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

/// Page tables of a sequence of a cache made with `params`.
[[nodiscard]] inline std::int32_t tables_of(const kvtrim::PagedCache::Params& params) {
  return kvtrim::tables_of(params.scope, params.layers, params.kv_heads);
}

/// Bytes of keys and values of the live rows of sequence `s`.
[[nodiscard]] inline std::int64_t live_bytes(kvtrim::PagedCache& cache, kvtrim::SequenceId s) {
  const auto& p = cache.params();
  std::int64_t rows = 0;
  for (std::int32_t l = 0; l < p.layers; ++l) {
    for (std::int32_t h = 0; h < p.kv_heads; ++h)
      rows += cache.live_rows(s, kvtrim::LayerId{l}, kvtrim::HeadId{h});
  }
  return rows * (p.key_dim + p.value_dim) * kvtrim::element_bytes(p.dtype);
}

}  // namespace program
