// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sequences of one context of llama.cpp from which kvtrim evicts. Keys and values stay where they are: what is evicted is
// forgotten by `llama_memory_seq_rm`.

#include <kvtrim/engine/llama_cpp.hpp>
#include <kvtrim/engine/row_table.hpp>
#include <kvtrim/observe/recorder.hpp>
#include <kvtrim/policy/needs.hpp>
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>
#include <kvtrim/score/accumulated.hpp>
#include <kvtrim/score/window.hpp>

#include <algorithm>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "context.hpp"
#include "prompt_window.hpp"
#include "score_tap.hpp"

namespace llama_example {

using kvtrim::Status;

/// A token to decode, at the next position of its sequence.
struct Token {
  llama_token id = 0;
  llama_seq_id sequence = 0;
  bool logits = false;  ///< wanted
};

/// A context, and what kvtrim has to know about its sequences.
class Session {
 public:
  struct Params {
    kvtrim::Needs needs;         ///< of all policies, merged
    std::int32_t page_size = 1;  ///< positions that stay or go together
    bool in_cache = false;       ///< renumber after each eviction
  };

  /// \param context  as `context_params` made it, changed as you like
  /// \throws std::invalid_argument with the field that is wrong
  Session(llama_model* model, llama_context_params context, const Params& params)
      : model_(model), p_(params), use_{reads_scores(params.needs), params.in_cache} {
    check_context(context, model, use_);
    if (use_.scores) {
      tap_.emplace(static_cast<std::int32_t>(context.n_ctx + 255) / 256 * 256,
                   static_cast<std::int32_t>(context.n_seq_max),
                   llama_model_n_layer(model));
      context.cb_eval = ScoreTap::callback, context.cb_eval_user_data = &*tap_;
      if (params.needs.window > static_cast<std::int32_t>(context.n_ubatch)) {
        throw std::invalid_argument("n_ubatch: is " + std::to_string(context.n_ubatch) +
                                    ", but the window's " + std::to_string(params.needs.window) +
                                    " queries must be in one micro-batch");
      }
    }
    context_ = make_context(model, context, use_);
    if (use_.scores) listen();
    const kvtrim::RowTable::Params rows{
        .layers = tap_ ? static_cast<std::int32_t>(tap_->layers().size()) : 1,
        .kv_heads = tap_ ? llama_model_n_head_kv(model) : 1,
        .page_size = p_.page_size,
        .max_rows = cells(),
        .sums = p_.needs.accumulate.has_value()};
    for (std::uint32_t s = 0; s < llama_n_seq_max(context_.get()); ++s)
      tables_.push_back(std::make_unique<kvtrim::RowTable>(rows));
    if (rows.sums) {
      recorder_.emplace(
          kvtrim::Needs{.accumulate = p_.needs.accumulate},
          kvtrim::Recorder::Params{.sequences = static_cast<std::int32_t>(tables_.size()),
                                   .layers = rows.layers,
                                   .query_heads = llama_model_n_head(model),
                                   .kv_heads = rows.kv_heads,
                                   .head_dim = 1,  // queries are not looked at
                                   .probabilities = true});
    }
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] llama_context* context() noexcept { return context_.get(); }
  [[nodiscard]] const llama_vocab* vocab() const noexcept { return llama_model_get_vocab(model_); }
  /// What kvtrim knows of a sequence.
  /// \throws std::invalid_argument if there is no such sequence
  [[nodiscard]] const kvtrim::RowTable& table(llama_seq_id s) const { return *tables_[checked(s)]; }
  /// Cells and scores; none where no policy reads scores.
  [[nodiscard]] ScoreTap* tap() noexcept { return tap_ ? &*tap_ : nullptr; }
  /// Cells of the cache.
  [[nodiscard]] std::int32_t cells() const noexcept {
    return static_cast<std::int32_t>(llama_n_ctx(context_.get()));
  }
  /// Rows of all sequences: cells in use, where none are shared.
  [[nodiscard]] std::int32_t rows() const noexcept {
    std::int32_t sum = 0;
    for (const auto& t : tables_) sum += t->live_rows();
    return sum;
  }

  /// Decodes tokens at the next positions of their sequences.
  ///
  /// \param scores  all are of one sequence, and policies see what they attend to
  /// \returns what `llama_decode` does: 0; 1: no room, and nothing was changed
  /// \throws std::runtime_error for any other number; the session is then of no use
  int try_decode(std::span<const Token> tokens, bool scores = false) {
    if (tokens.size() > llama_n_batch(context_.get())) {
      throw std::invalid_argument("n_batch: is " + std::to_string(llama_n_batch(context_.get())) +
                                  ", but " + std::to_string(tokens.size()) + " tokens are decoded");
    }
    std::vector<std::int32_t> next(tables_.size());
    for (std::size_t s = 0; s < next.size(); ++s) next[s] = tables_[s]->next_position();
    const std::size_t n = tokens.size();
    std::vector<llama_token> ids(n);
    std::vector<llama_pos> positions(n);
    std::vector<std::int32_t> counts(n, 1);
    std::vector<llama_seq_id> sequences(n);
    std::vector<llama_seq_id*> lists(n);
    std::vector<std::int8_t> logits(n);
    std::vector<Written> written(n);
    for (std::size_t i = 0; i < n; ++i) {
      ids[i] = tokens[i].id, sequences[i] = tokens[i].sequence, lists[i] = &sequences[i];
      positions[i] = next[checked(tokens[i].sequence)]++, logits[i] = tokens[i].logits ? 1 : 0;
      written[i] = {sequences[i], kvtrim::Position{positions[i]}};
    }
    if (tap_) tap_->expect(written, scores && use_.scores);
    const int rc = llama_decode(context_.get(),
                                {.n_tokens = static_cast<std::int32_t>(n),
                                 .token = ids.data(),
                                 .embd = nullptr,
                                 .pos = positions.data(),
                                 .n_seq_id = counts.data(),
                                 .seq_id = lists.data(),
                                 .logits = logits.data()});
    if (tap_) tap_->finish(rc);
    if (rc != 0 && rc != 1) throw std::runtime_error("llama_decode returned " + std::to_string(rc));
    if (rc == 0 && !tap_) append(written);
    return rc;
  }
  /// The same, where room is expected.
  /// \throws std::runtime_error if there is none, with the numbers
  void decode(std::span<const Token> tokens, bool scores = false) {
    if (try_decode(tokens, scores) == 0) return;
    throw std::runtime_error("n_ctx: " + std::to_string(tokens.size()) +
                             " tokens need as many free cells, but of " + std::to_string(cells()) +
                             " cells " + std::to_string(rows()) + " hold rows");
  }

  /// Reads a prompt into an empty sequence, and what its policies need from it. Logits of the last token.
  /// \throws std::runtime_error if it does not fit
  void prompt(llama_seq_id s, std::span<const llama_token> ids) {
    if (ids.empty()) throw std::invalid_argument("the prompt has no token");
    if (ids.size() > static_cast<std::size_t>(cells())) {
      throw std::runtime_error("n_ctx: the prompt has " + std::to_string(ids.size()) +
                               " tokens, but there are " + std::to_string(cells()) + " cells");
    }
    const auto window = std::min(ids.size(), static_cast<std::size_t>(p_.needs.window));
    const bool sums = p_.needs.accumulate.has_value();
    for (std::size_t begin = 0, end = 0; begin < ids.size(); begin = end) {
      const bool last =
          begin >= ids.size() - window;  // the window's queries come in one micro-batch
      end =
          std::min(last ? ids.size() : ids.size() - window, begin + llama_n_ubatch(context_.get()));
      std::vector<Token> tokens;
      for (std::size_t i = begin; i < end; ++i) tokens.push_back({ids[i], s, i + 1 == ids.size()});
      in_window_ = last;
      decode(tokens, sums || last);
    }
    in_window_ = false;
  }

  /// Lets `to` be a copy of sequence `from`: cells are shared until they are evicted.
  void fork(llama_seq_id from, llama_seq_id to) {
    end(to);
    llama_memory_seq_cp(memory(), from, to, 0, table(from).next_position());
    if (tap_) tap_->map().copy(from, to);
    tables_[checked(to)]->assign(*tables_[checked(from)]);
  }
  /// Forgets a sequence.
  void end(llama_seq_id s) {
    remove(s, {0, table(s).next_position()});
    tables_[checked(s)]->clear();
  }

  /// Lets `policy` evict from a sequence.
  ///
  /// \param budget  rows to keep instead of the policy's own
  /// \returns the report; `over_budget` where protected rows exceed the budget
  /// \throws std::invalid_argument if the policy cannot serve a cache whose cells hold all layers and heads
  /// \throws std::runtime_error if kvtrim or llama.cpp refuses
  template <kvtrim::Policy P>
  kvtrim::Report evict(const P& policy,
                       llama_seq_id s,
                       std::int32_t budget = kvtrim::policy_budget) {
    kvtrim::RowTable& table = *tables_[checked(s)];
    kvtrim::Observation seen;
    if constexpr (requires {
                    { policy.scorer() } -> std::convertible_to<const kvtrim::WindowParams&>;
                  })
      seen.scores = window_.scores(policy.scorer(), table);
    const kvtrim::PlanRef plan = table.plan(policy, seen, budget);
    keep_newest(plan, table, P::name);
    if (plan.status() == Status::ok || plan.status() == Status::over_budget) {
      const Status status = lc::for_each_evicted_range(
          plan, kvtrim::SequenceId{0}, [&](lc::PositionRange range) { remove(s, range); });
      if (status != Status::ok) refuse(P::name, status);
    }
    const kvtrim::Report report = table.commit(plan);
    if (!usable(report.status)) refuse(P::name, report.status);
    if (p_.in_cache) renumber(s);
    return report;
  }

 private:
  static bool reads_scores(const kvtrim::Needs& needs) {
    if (needs.moments || needs.filters || needs.output) {
      throw std::invalid_argument(
          "the policy needs queries, filters or projections, and llama.cpp shows probabilities "
          "only");
    }
    return needs.window > 0 || needs.accumulate || needs.token_scores;
  }
  // `llama_decode` goes on at the sequence's highest position + 1, and knows no other end of it.
  static void keep_newest(const kvtrim::PlanView& plan,
                          const kvtrim::RowTable& table,
                          std::string_view policy) {
    if (!usable(plan.status()) || plan.empty()) return;
    const auto gone = plan.evicted(kvtrim::SequenceId{0}, kvtrim::LayerId{0}, kvtrim::HeadId{0});
    const std::int32_t newest = table.next_position() - 1;
    if (gone.empty() || raw(gone.back()) < newest) return;
    throw std::runtime_error("policy " + std::string(policy) + " would evict the newest position " +
                             std::to_string(newest) +
                             ", from which llama_decode goes on: let it protect recent rows");
  }
  [[noreturn]] static void refuse(std::string_view policy, Status status) {
    throw std::runtime_error("kvtrim refused policy " + std::string(policy) + ": " +
                             std::string(to_string(status)));
  }
  [[nodiscard]] llama_memory_t memory() const noexcept { return llama_get_memory(context_.get()); }
  [[nodiscard]] std::size_t checked(llama_seq_id s) const {
    if (s >= 0 && static_cast<std::size_t>(s) < tables_.size()) return static_cast<std::size_t>(s);
    throw std::invalid_argument("n_seq_max: is " + std::to_string(tables_.size()) +
                                ", but there is a sequence " + std::to_string(s));
  }

  void append(std::span<const Written> written) {
    for (const Written& w : written) {
      if (tables_[checked(w.sequence)]->append(1) != Status::ok)
        throw std::runtime_error("sequence " + std::to_string(w.sequence) + " has too many rows");
    }
  }
  void remove(llama_seq_id s, lc::PositionRange range) {
    if (!llama_memory_seq_rm(memory(), s, range.begin, range.end)) {
      throw std::runtime_error("llama_memory_seq_rm refused positions " +
                               std::to_string(range.begin) + " to " + std::to_string(range.end) +
                               " of sequence " + std::to_string(s));
    }
    if (tap_) tap_->map().remove(s, range);
  }
  void renumber(llama_seq_id s) {
    kvtrim::RowTable& table = *tables_[checked(s)];
    lc::for_each_shift(table.positions(), [&](lc::PositionRange range, std::int32_t delta) {
      llama_memory_seq_add(memory(), s, range.begin, range.end, delta);
      if (tap_) tap_->map().shift(s, range, delta);
    });
    table.renumber();
  }

  void listen() {
    tap_->on_written = [this](std::span<const Written> written) { append(written); };
    tap_->on_scores = [this](const LayerScores& scores) { observe(scores); };
    find_scored_layers(*tap_, model_, context_.get());
  }

  // Sums go to the table; a window's probabilities are kept for the policies that score by them.
  void observe(const LayerScores& s) {
    kvtrim::RowTable& table = *tables_[checked(s.sequence)];
    const std::int64_t queries = static_cast<std::int64_t>(s.queries) * s.rows;
    if (recorder_) {
      kvtrim::LayerStep step{.layer = kvtrim::LayerId{s.layer}, .sequences = {&s.sequence, 1}};
      step.queries = {.query_heads = s.heads, .rows = s.queries};
      step.probabilities = {.data = s.data, .head_stride = queries, .row_stride = s.rows};
      if (recorder_->record(table.view(), step) != Status::ok) {
        const kvtrim::RecordFault& fault = recorder_->fault();
        throw std::runtime_error("the step was not recorded: " + std::string(fault.what) + " is " +
                                 std::to_string(fault.value) + ", not " +
                                 std::to_string(fault.expected));
      }
    }
    if (in_window_) window_.keep(s);
  }

  llama_model* model_;
  Params p_;
  Use use_;
  std::optional<ScoreTap> tap_;
  llama_context_ptr context_;
  std::vector<std::unique_ptr<kvtrim::RowTable>> tables_;  // [sequences]
  std::optional<kvtrim::Recorder> recorder_;
  PromptWindow window_;
  bool in_window_ = false;  // the prompt's last queries are being decoded
};

}  // namespace llama_example
