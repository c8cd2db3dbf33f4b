// SPDX-License-Identifier: Apache-2.0
#include "runner.hpp"

#include <algorithm>
#include <cctype>
#include <optional>
#include <stdexcept>
#include <utility>

#include "llama_engine/sampling.hpp"
#include "program/console.hpp"

namespace evaluate {

using kvtrim::SequenceId;

kvtrim::Needs needs_of(std::span<const Variant> variants) {
  kvtrim::Needs needs;
  for (const Variant& v : variants)
    needs = kvtrim::merge(needs, program::needs_of(v.spec.make(1024, kvtrim::SinkForm::exact)));
  return needs;
}

bool has_word(const std::string& text, const std::string& word) {
  const auto inside = [&](std::size_t at) {
    return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at])) != 0;
  };
  for (std::size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    if ((at == 0 || !inside(at - 1)) && !inside(at + word.size())) return true;
  return false;
}

std::string bits_of(std::span<const std::int32_t> positions, std::size_t tokens) {
  std::vector<unsigned> digits((tokens + 3) / 4);
  for (const std::int32_t p : positions) {
    const auto at = static_cast<std::size_t>(p);
    // Live rows have no holes between steps: one would make the picture show fewer rows than there are.
    if (at >= tokens) {
      throw std::logic_error("a kept row has position " + std::to_string(p) + " of " +
                             std::to_string(tokens) + " tokens");
    }
    digits[at / 4] |= 8U >> at % 4;
  }
  std::string text;
  for (const unsigned d : digits) text += "0123456789abcdef"[d];
  return text;
}

Runner::Runner(const engine::GgufFile& file,
               const engine::Tokenizer& tokenizer,
               std::span<const Variant> variants,
               const RunnerParams& params)
    : variants_(variants),
      expect_full_(params.expect_full),
      tokenizer_(&tokenizer),
      model_(file),
      cache_(program::fork_cache(model_,
                                 needs_of(variants),
                                 params.cache_type,
                                 params.page_size,
                                 params.longest,
                                 std::min(together, variants.size()) + 2)),
      evictor_(model_,
               cache_,
               needs_of(variants),
               params.filters.empty() ? std::vector<float>{}
                                      : program::read_filters(params.filters, model_.shape())),
      forks_(model_, cache_, evictor_) {}

Cut Runner::uncut(SequenceId s) const {
  const auto rows = static_cast<double>(cache_.live_rows(s));
  return {rows, rows, cache_.live_bytes(s)};
}

Cut Runner::cut(SequenceId s, const Variant& variant) {
  const kvtrim::Report report = forks_.cut(s, variant.spec, variant.removed.value_or(0));
  const auto heads = static_cast<double>(cache_.params().layers * cache_.params().kv_heads);
  const auto kept = static_cast<double>(report.kept_rows);
  return {(kept + static_cast<double>(report.evicted_rows)) / heads,
          kept / heads,
          cache_.live_bytes(s)};
}

std::vector<std::vector<std::string>> Runner::kept_rows(SequenceId s, std::size_t tokens) {
  const kvtrim::CacheView view =
      cache_.view();  // of all sequences: rows are found by the number of this one
  std::vector<std::vector<std::string>> kept;
  for (std::int32_t l = 0; l < cache_.params().layers; ++l) {
    auto& layer = kept.emplace_back();
    for (std::int32_t h = 0; h < cache_.params().kv_heads; ++h) {
      std::vector<std::int32_t> positions;
      const std::int32_t rows = cache_.live_rows(s, kvtrim::LayerId{l}, kvtrim::HeadId{h});
      for (std::int32_t r = 0; r < rows; ++r)
        positions.push_back(
            kvtrim::raw(view.position(s, kvtrim::LayerId{l}, kvtrim::HeadId{h}, r)));
      layer.push_back(bits_of(positions, tokens));
    }
  }
  return kept;
}

// All forks read the cue and the passage in one step: what each position predicts is compared with what follows.
std::vector<Answer> Runner::copy(const Turn& turn,
                                 std::size_t index,
                                 const program::Forks::Ids& forks,
                                 std::span<const Token> rest) {
  std::vector<Token> read(rest.begin(), rest.end());
  read.insert(read.end(), turn.copy.begin(), turn.copy.end() - 1);
  std::vector<engine::Segment> segments;
  for (const SequenceId s : forks) segments.push_back({s, read});
  forks_.run(segments, engine::LogitRows::all);
  std::vector<Answer> answers;
  for (std::size_t f = 0; f < forks.size(); ++f) {
    std::vector<Token> predicted;
    for (std::size_t i = 0; i < turn.copy.size(); ++i) {
      const std::size_t row = f * read.size() + rest.size() - 1 + i;
      predicted.push_back(engine::greedy_token(model_.logits(static_cast<Eigen::Index>(row))));
    }
    if (expect_full_ && full_copies_.size() <= index) full_copies_.push_back(predicted);
    const std::vector<Token>& expected = expect_full_ ? full_copies_[index] : turn.copy;
    std::size_t right = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) right += predicted[i] == expected[i] ? 1 : 0;
    const double score = static_cast<double>(right) / static_cast<double>(expected.size());
    answers.push_back({"", score, score >= copy_share});
  }
  return answers;
}

// [fork][turn]
std::vector<std::vector<Answer>> Runner::answer(const Prompt& prompt,
                                                const program::Forks::Ids& forks,
                                                std::span<const Token> first) {
  std::vector<std::vector<Answer>> all(forks.size());
  for (std::size_t t = 0; t < prompt.turns.size(); ++t) {
    const Turn& turn = prompt.turns[t];
    const auto rest = t == 0 ? first : std::span<const Token>(turn.question);
    if (!turn.copy.empty()) {
      const auto copies = copy(turn, t, forks, rest);
      for (std::size_t f = 0; f < forks.size(); ++f) all[f].push_back(copies[f]);
      continue;
    }
    const auto generated = forks_.answer(*tokenizer_, forks, rest, turn.most);
    for (std::size_t f = 0; f < forks.size(); ++f) {
      std::vector<Token> tokens = generated[f];
      if (tokenizer_->ends_text(tokens.back())) tokens.pop_back();
      const std::string text = tokenizer_->decode(tokens);
      if (expect_full_ && full_texts_.size() <= t) full_texts_.push_back(text);
      const bool right = expect_full_ ? text == full_texts_[t] : has_word(text, turn.answer);
      all[f].push_back({text, right ? 1.0 : 0.0, right});
    }
    if (t + 1 == prompt.turns.size()) break;
    // What was generated goes, so that all go on from the same answer.
    std::vector<engine::Segment> segments;
    for (std::size_t f = 0; f < forks.size(); ++f) {
      const auto extra = static_cast<std::int32_t>(generated[f].size()) - 1;
      if (extra > 0)
        program::Forks::check(cache_.try_remove_last(forks[f], extra), "to remove an answer");
      segments.push_back({forks[f], turn.reference});
    }
    forks_.run(segments, engine::LogitRows::none);
  }
  return all;
}

void Runner::ask_variants(const Prompt& prompt,
                          SequenceId base,
                          std::span<const Token> first,
                          bool known,
                          const Missing& missing,
                          bool kept,
                          const Report& report) {
  std::vector<const Variant*> todo;
  for (const Variant& v : variants_)
    if (missing(v, known)) todo.push_back(&v);
  const auto tokens = static_cast<std::size_t>(cache_.live_rows(base));
  for (std::size_t begin = 0; begin < todo.size(); begin += together) {
    const std::size_t end = std::min(todo.size(), begin + together);
    program::Forks::Ids forks;
    std::vector<Outcome> outcomes;
    for (std::size_t i = begin; i < end; ++i) {
      forks.push_back(forks_.fork(base));
      outcomes.push_back({todo[i], known, cut(forks.back(), *todo[i]), {}, {}});
      if (kept) outcomes.back().kept = kept_rows(forks.back(), tokens);
    }
    const auto answers = answer(prompt, forks, first);
    for (std::size_t i = 0; i < forks.size(); ++i) {
      outcomes[i].answers = answers[i];
      report(outcomes[i]);
      cache_.destroy(forks[i]);
    }
  }
}

void Runner::ask(const Prompt& prompt, const Missing& missing, bool kept, const Report& report) {
  full_texts_.clear(), full_copies_.clear();
  const std::span<const Token> question(prompt.turns.front().question);
  const SequenceId base = forks_.read(prompt.context);
  const SequenceId full = forks_.fork(base);
  Outcome whole{nullptr, false, uncut(full), {}, {}};
  whole.answers = answer(prompt, {full}, question).front();
  cache_.destroy(full);
  report(whole);
  if (std::ranges::all_of(whole.answers, [](const Answer& a) { return a.correct; })) {
    ask_variants(prompt, base, question, false, missing, false, report);
    // With the question known, all but its last token are read before the cut: that one gives the first answer's logits.
    const auto early = question.first(question.size() - 1);
    program::Forks::check(evictor_.read(model_, base, early, std::nullopt, engine::LogitRows::none),
                          "prefill");
    ask_variants(prompt, base, question.last(1), true, missing, kept, report);
  }
  cache_.destroy(base);
}

std::vector<bool> Runner::long_range(const program::Sample& sample,
                                     const std::vector<double>& whole) {
  // In blocks: the first token of a block is predicted from near_tokens tokens, the others from those and the block's before them.
  constexpr std::size_t block = 64;
  const std::span<const Token> ids(sample.ids);
  std::vector<bool> far;
  while (far.size() < whole.size()) {
    const std::size_t next = sample.prefill + 1 + far.size();
    const std::size_t begin = next - std::min(near_tokens, next);
    const std::size_t count = std::min(block, whole.size() - far.size());
    const auto s = cache_.try_create();
    if (!s) throw std::runtime_error("no free sequence");
    const auto alone = forks_.log_probabilities(*s, ids.subspan(begin, next - begin + count));
    cache_.destroy(*s);
    for (std::size_t i = 0; i < count; ++i)
      far.push_back(whole[far.size()] - alone[alone.size() - count + i] >= long_range_nats);
  }
  return far;
}

void Runner::predict(
    const program::Sample& sample,
    const std::function<bool(const Variant&)>& missing,
    const std::function<void(const Predicted&, const std::vector<bool>&)>& report) {
  const std::span<const Token> ids(sample.ids);
  const auto scored = ids.subspan(sample.prefill);
  const SequenceId base = forks_.read(ids.first(sample.prefill));
  SequenceId s = forks_.fork(base);
  Predicted whole{nullptr, uncut(s), {}};
  whole.log_probability = forks_.log_probabilities(s, scored);
  cache_.destroy(s);
  const auto far = long_range(sample, whole.log_probability);
  report(whole, far);
  for (const Variant& v : variants_) {
    if (!missing(v)) continue;
    s = forks_.fork(base);
    Predicted one{&v, cut(s, v), {}};
    one.log_probability = forks_.log_probabilities(s, scored);
    cache_.destroy(s);
    report(one, far);
  }
  cache_.destroy(base);
}

}  // namespace evaluate
