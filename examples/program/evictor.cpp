// SPDX-License-Identifier: Apache-2.0
#include "evictor.hpp"

#include <kvtrim/core/pooling.hpp>
#include <kvtrim/observe/column_sums.hpp>
#include <kvtrim/observe/plan_shape.hpp>
#include <kvtrim/observe/surprisal.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <ios>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

#include "console.hpp"
#include "evict_any.hpp"

namespace program {

void Needs::add(const AnyPolicy& policy) {
  std::visit([&](const auto& p) { add_policy(p); }, policy);
}

std::vector<float> read_filters(const std::string& path, const engine::LlamaShape& shape) {
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

Evictor::Evictor(engine::LlamaModel& model,
                 kvtrim::PagedCache& cache,
                 const Needs& needs,
                 std::vector<float> filters)
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

kvtrim::Status Evictor::prefill(engine::LlamaModel& model,
                                kvtrim::SequenceId s,
                                std::span<const std::int32_t> prompt) {
  if (!needs_.surprisal) return model.prefill(*cache_, s, prompt, observer());
  std::vector<float> seen(prompt.size(), 0.0F);
  constexpr std::size_t chunk = 256;  // rows of logits that are in memory at a time
  for (std::size_t begin = 0; begin < prompt.size(); begin += chunk) {
    const engine::Segment segment{s, prompt.subspan(begin, std::min(chunk, prompt.size() - begin))};
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

void Evictor::prepare(const AnyPolicy& policy, kvtrim::SequenceId s) {
  const kvtrim::PlanShape shape =
      kvtrim::plan_shape(cache_->view(s), observation(s), executor_.workers());
  const std::size_t bytes = workspace_bytes(policy, shape);
  if (workspace_.size() < bytes) workspace_.resize(bytes);
}

kvtrim::Report Evictor::evict(const AnyPolicy& policy,
                              kvtrim::SequenceId s,
                              std::int32_t keep,
                              const kvtrim::PlanOptions& options) {
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

void Evictor::copy_output(const engine::LlamaModel& model) {
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

void Evictor::observe(const engine::LayerObservation& seen) {
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
        {view, kvtrim::SequenceId{0}, seen.layer, kvtrim::HeadId{static_cast<std::int32_t>(head)}},
        block,
        kvtrim::LayerId{0},
        std::span(scratch_).subspan(static_cast<std::size_t>(worker) * share, share));
  });
}

}  // namespace program
