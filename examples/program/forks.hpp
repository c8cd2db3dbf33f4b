// SPDX-License-Identifier: Apache-2.0
#pragma once

// One prefill for many policies: the sequence is forked, each fork is cut by its own policy, and all go on together.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/status.hpp>
#include <kvtrim/evict/commit.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "console.hpp"
#include "eval_data.hpp"
#include "evictor.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/sampling.hpp"
#include "llama_engine/tokenizer.hpp"
#include "policy_spec.hpp"

namespace program {

/// The cache for `sequences` at a time of up to `rows` rows each.
[[nodiscard]] inline kvtrim::PagedCache::Params fork_cache(const engine::LlamaModel& model,
                                                           const kvtrim::Needs& needs,
                                                           const std::string& cache_type,
                                                           std::int32_t page_size,
                                                           std::size_t rows,
                                                           std::size_t sequences) {
  kvtrim::PagedCache::Params p = model.cache_params();
  p.page_size = page_size;
  p.dtype = cache_dtype(cache_type);
  p.max_rows = static_cast<std::int32_t>(rows);
  p.max_sequences = static_cast<std::int32_t>(sequences);
  p.scope = needs.scope;
  p.pages = p.max_sequences * kvtrim::pages_for(p.max_rows, p.page_size) *
            kvtrim::tables_of(p.scope, p.layers, p.kv_heads);
  p.scores = true;
  return p;
}

/// Forks of sequences, and steps over several of them at once.
///
/// \par Thread-safety
/// one thread, which uses all OpenMP threads
class Forks {
 public:
  using Ids = std::vector<kvtrim::SequenceId>;

  /// All must outlive it.
  Forks(engine::LlamaModel& model, kvtrim::PagedCache& cache, Evictor& evictor)
      : model_(&model), cache_(&cache), evictor_(&evictor) {}

  /// A new sequence that has read `tokens` and is recorded.
  /// \throws std::runtime_error if the cache has no room
  kvtrim::SequenceId read(std::span<const Token> tokens) {
    const auto s = cache_->try_create();
    if (!s) throw std::runtime_error("no free sequence");
    evictor_->recorder().reset(kvtrim::raw(*s));
    check(evictor_->prefill(*model_, *s, tokens), "prefill");
    return *s;
  }

  /// A copy that owns its pages, so that those it frees are really free.
  /// \throws std::runtime_error if the cache has no room
  kvtrim::SequenceId fork(kvtrim::SequenceId base) {
    check_interrupt();
    const auto s = cache_->try_fork(base);
    if (!s || cache_->try_make_private(*s) != kvtrim::Status::ok)
      throw std::runtime_error("the cache has no room for a fork");
    evictor_->recorder().fork(kvtrim::raw(base), kvtrim::raw(*s));
    return *s;
  }

  /// Cuts a sequence as `spec` says, by `removed` if that names no size.
  kvtrim::Report cut(kvtrim::SequenceId s, const PolicySpec& spec, double removed) {
    const std::int32_t keep = spec.rows_to_keep(cache_->live_rows(s), removed);
    const AnyPolicy policy = spec.make(keep, kvtrim::SinkForm::exact, model_->rope());
    return evictor_->evict(policy, s, keep);
  }

  /// A step; afterwards the model has its logits.
  void run(const std::vector<engine::Segment>& segments, engine::LogitRows rows) {
    const auto interruptible = [](const engine::LayerObservation&) { check_interrupt(); };
    check(model_->forward(*cache_, segments, rows, interruptible), "forward");
  }

  /// Every fork reads `rest` and generates the likeliest tokens, at most `most`, up to one that ends the text, which is included.
  /// The last token of an answer is not in the cache.
  std::vector<std::vector<Token>> answer(const engine::Tokenizer& tokenizer,
                                         const Ids& forks,
                                         std::span<const Token> rest,
                                         std::size_t most) {
    std::vector<std::vector<Token>> answers(forks.size());
    std::vector<std::size_t> active(forks.size());
    for (std::size_t i = 0; i < active.size(); ++i) active[i] = i;
    for (std::size_t step = 0; step < most && !active.empty(); ++step) {
      std::vector<engine::Segment> segments;
      for (const std::size_t i : active) {
        segments.push_back(
            {forks[i], step == 0 ? rest : std::span<const Token>(&answers[i].back(), 1)});
      }
      run(segments, engine::LogitRows::last);
      std::vector<std::size_t> going;
      for (std::size_t a = 0; a < active.size(); ++a) {
        answers[active[a]].push_back(
            engine::greedy_token(model_->logits(static_cast<Eigen::Index>(a))));
        if (!tokenizer.ends_text(answers[active[a]].back())) going.push_back(active[a]);
      }
      active = going;
    }
    return answers;
  }

  /// Log-probability of each of `tokens` but the first, which sequence `s` reads with all others but the last.
  std::vector<double> log_probabilities(kvtrim::SequenceId s, std::span<const Token> tokens) {
    run({{s, tokens.first(tokens.size() - 1)}}, engine::LogitRows::all);
    std::vector<double> result;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto row = model_->logits(static_cast<Eigen::Index>(i));
      result.push_back(static_cast<double>(row[static_cast<std::size_t>(tokens[i + 1])]) -
                       engine::log_sum_exp(row));
    }
    return result;
  }

  static void check(kvtrim::Status status, const char* what) {
    if (status != kvtrim::Status::ok)
      throw std::runtime_error(std::string(what) + ": " + std::string(kvtrim::to_string(status)));
  }

 private:
  engine::LlamaModel* model_;
  kvtrim::PagedCache* cache_;
  Evictor* evictor_;
};

}  // namespace program
