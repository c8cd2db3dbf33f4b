// SPDX-License-Identifier: Apache-2.0
// Every policy is compiled here, once for all programs.
#include "evictor.hpp"

#include <kvtrim/kvtrim.hpp>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

#include "console.hpp"

namespace program {

using namespace kvtrim;

namespace {

// The model's output projections as kvtrim reads them; none if they are not needed.
std::vector<float> output_of(const engine::LlamaModel& model, bool needed) {
  const engine::LlamaShape& shape = model.shape();
  const std::int64_t rows = std::int64_t{shape.heads} * shape.head_dim;
  std::vector<float> output(
      static_cast<std::size_t>(needed ? shape.layers * rows * shape.embedding : 0));
  for (std::int32_t l = 0; needed && l < shape.layers; ++l)
    Eigen::Map<engine::Matrix>(output.data() + l * rows * shape.embedding, rows, shape.embedding) =
        model.output_projection(LayerId{l}).transpose();
  return output;
}

}  // namespace

Needs needs_of(const AnyPolicy& policy) {
  return std::visit([](const auto& p) { return kvtrim::needs(p); }, policy);
}

PeakPages peak_pages_of(const AnyPolicy& policy,
                        std::int64_t prompt,
                        std::int64_t new_tokens,
                        std::int64_t page_size,
                        std::int64_t chunk,
                        const PeakOptions& options) {
  return std::visit(
      [&](const auto& p) {
        return kvtrim::peak_pages(p, prompt, new_tokens, page_size, chunk, options);
      },
      policy);
}

std::vector<float> read_filters(const std::string& path, const engine::LlamaShape& shape) {
  const std::string bytes = read_file(path);
  const auto count = static_cast<std::size_t>(shape.layers * shape.kv_heads * shape.head_dim);
  std::vector<float> filters(count);
  if (bytes.size() != count * sizeof(float)) {
    throw std::runtime_error("filters '" + path + "' must hold " + std::to_string(count) +
                             " floats (layers, KV heads, head dim), not " +
                             std::to_string(bytes.size()) + " bytes");
  }
  std::memcpy(filters.data(), bytes.data(), bytes.size());
  if (!std::all_of(filters.begin(), filters.end(), [](float x) { return std::isfinite(x); }))
    throw std::runtime_error("filters '" + path + "': a number is not finite");
  return filters;
}

Evictor::Evictor(engine::LlamaModel& model,
                 PagedCache& cache,
                 const Needs& needs,
                 std::vector<float> filters,
                 std::int32_t slots)
    : cache_(&cache),
      filters_(needs.filters && filters.empty()
                   ? throw std::invalid_argument("policy qfilter needs --filters FILE")
                   : std::move(filters)),
      output_(output_of(model, needs.output)),
      recorder_(needs, offered(model, slots)),
      slots_(static_cast<std::size_t>(cache.params().max_sequences), -1) {
  if (slots == 0) std::iota(slots_.begin(), slots_.end(), 0);
  model.observe_unrotated_queries(needs.moments.has_value());
}

Recorder::Params Evictor::offered(const engine::LlamaModel& model, std::int32_t slots) const {
  const engine::LlamaShape& shape = model.shape();
  const std::int64_t kv = std::int64_t{shape.kv_heads} * shape.head_dim;
  const std::int64_t w = std::int64_t{shape.heads} * shape.head_dim * shape.embedding;
  Recorder::Params p{.sequences = slots > 0 ? slots : cache_->params().max_sequences,
                     .layers = shape.layers,
                     .query_heads = shape.heads,
                     .kv_heads = shape.kv_heads,
                     .head_dim = shape.head_dim,
                     .workers = executor_.workers(),
                     .lse = true};
  if (!filters_.empty()) p.filters = {filters_.data(), shape.head_dim, kv, shape.head_dim};
  if (!output_.empty())
    p.output = {output_.data(), shape.heads, shape.head_dim, shape.embedding, w};
  return p;
}

Status Evictor::prefill(engine::LlamaModel& model,
                        SequenceId s,
                        std::span<const std::int32_t> prompt) {
  if (!recorder_.needs().token_scores) return model.prefill(*cache_, s, prompt, observer());
  constexpr std::size_t chunk = 256;  // rows of logits that are in memory at a time
  for (std::size_t begin = 0; begin < prompt.size(); begin += chunk) {
    const auto tokens = prompt.subspan(begin, std::min(chunk, prompt.size() - begin));
    const std::size_t end = begin + tokens.size();
    const Status status = read(model,
                               s,
                               tokens,
                               end < prompt.size() ? std::optional(prompt[end]) : std::nullopt,
                               engine::LogitRows::all);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

Status Evictor::read(engine::LlamaModel& model,
                     SequenceId s,
                     std::span<const std::int32_t> tokens,
                     std::optional<std::int32_t> after,
                     engine::LogitRows rows) {
  const bool scores = recorder_.needs().token_scores;
  const auto begin = static_cast<std::size_t>(raw(cache_->next_position(s)));
  const engine::Segment segment{s, tokens};
  const Status status =
      model.forward(*cache_, {&segment, 1}, scores ? engine::LogitRows::all : rows, observer());
  if (status != Status::ok || !scores) return status;
  seen_.resize(begin + 1);  // the first token's is 0, or was computed with the tokens before
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::optional<std::int32_t> next = i + 1 < tokens.size() ? tokens[i + 1] : after;
    if (next) seen_.push_back(surprisal(model.logits(static_cast<Eigen::Index>(i)), *next));
  }
  return Status::ok;
}

void Evictor::prepare(const AnyPolicy& policy, SequenceId s) {
  const std::int32_t slot = slot_of(s);
  const PlanShape shape =
      plan_shape(cache_->view(s), recorder_.observation({&slot, 1}), executor_.workers());
  const auto bytes_for = [&](const auto& p) { return plan_workspace_bytes(p, shape); };
  workspace_.resize(std::max(workspace_.size(), std::visit(bytes_for, policy)));
}

Report Evictor::evict(const AnyPolicy& policy,
                      SequenceId s,
                      std::int32_t keep,
                      const PlanOptions& options) {
  prepare(policy, s);
  const std::int32_t slot = slot_of(s);
  Observation seen = recorder_.observation({&slot, 1});
  if (needs_of(policy).token_scores) {
    if (seen_.size() != static_cast<std::size_t>(cache_->live_rows(s)))
      throw std::runtime_error("scores by surprisal act once, at the end of the prompt");
    surprisal_.resize(seen_.size());
    pool(seen_, Pooling::average, 7, surprisal_);
    // One score per token for all layers and KV heads.
    seen.scores = SequencePlane::dense(surprisal_.data(), 1, 1, cache_->live_rows(s));
    seen.scores.layer_stride = seen.scores.head_stride = seen.scores.sequence_stride = 0;
  }
  seen.budgets = &keep, seen.budget_rows = {0, 0, 0};
  const auto by = [&](const auto& p) {
    return kvtrim::evict(p, *cache_, cache_->view(s), seen, workspace_, options, executor_);
  };
  const Report report = std::visit(by, policy);
  if (!usable(report.status))
    throw std::runtime_error("the eviction was refused: " + std::string(to_string(report.status)));
  return report;
}

void Evictor::observe(const engine::LayerObservation& seen) {
  check_interrupt();  // stop at once, even in a long prompt
  const std::int32_t slot = slot_of(seen.sequence);
  const Needs& needs = recorder_.needs();
  if (slot < 0 || (needs.window == 0 && !needs.accumulate && !needs.moments)) return;
  const Recorder::Params& model = recorder_.params();
  LayerStep step{.layer = seen.layer, .sequences = {&slot, 1}};
  step.queries = {.data = seen.queries.data(),
                  .query_heads = model.query_heads,
                  .rows = seen.tokens,
                  .head_stride = model.head_dim,
                  .row_stride = std::int64_t{model.query_heads} * model.head_dim,
                  .positions = seen.positions.data(),
                  .lse = seen.lse.data(),
                  .lse_head_stride = seen.tokens};
  step.unrotated = step.queries;
  step.unrotated.data = seen.unrotated_queries.data();
  const CacheView view = cache_->view(seen.sequence);
  // To wake threads takes longer than to store a few rows.
  const bool alone = seen.tokens < 16 && !needs.accumulate;
  if ((alone ? recorder_.record(view, step) : recorder_.record(view, step, executor_)) !=
      Status::ok) {
    throw std::runtime_error("the step was not recorded: " + std::string(recorder_.fault().what) +
                             " " + std::to_string(recorder_.fault().value));
  }
}

}  // namespace program
