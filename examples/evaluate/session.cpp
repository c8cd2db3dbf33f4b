// SPDX-License-Identifier: Apache-2.0
#include "session.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace evaluate {

namespace {

// Which rows were kept is written for the first used prompt of these tasks, at this size.
constexpr std::array<std::string_view, 2> pictured_tasks{"needle_number", "multi_turn"};
constexpr double pictured_removed = 0.75;

Json removed_of(const Variant* v) {
  if (v == nullptr) return 0.0;
  return v->removed ? Json(*v->removed) : Json();
}
std::string policy_of(const Variant* v) {
  return v == nullptr ? "full" : v->spec.text();
}
const char* question_of(bool known) {
  return known ? "known" : "later";
}

// The part of a line that says what it is a result of.
Json answer_identity(const Prompt& prompt, std::size_t turn, const Variant* v, bool known) {
  Json line;
  line["kind"] = "answer";
  line["task"] = prompt.task;
  line["prompt"] = prompt.id;
  line["turn"] = prompt.turns.size() > 1 ? turn + 1 : 0;
  line["length"] = prompt.length;
  line["depth"] = prompt.turns[turn].depth;
  line["policy"] = policy_of(v);
  line["removed"] = removed_of(v);
  line["question"] = question_of(known);
  return line;
}
Json kept_identity(const Prompt& prompt, const Variant& v) {
  Json line;
  line["kind"] = "kept";
  line["prompt"] = prompt.id;
  line["question"] = "known";
  line["policy"] = policy_of(&v);
  line["removed"] = removed_of(&v);
  return line;
}
Json sample_identity(const char* task,
                     const std::string& id,
                     std::int32_t length,
                     const Variant* v) {
  Json line;
  line["kind"] = "perplexity";
  line["task"] = task;
  line["prompt"] = id;
  line["length"] = length;
  line["policy"] = policy_of(v);
  line["removed"] = removed_of(v);
  return line;
}
void add_cut(Json& line, const Cut& cut) {
  line["rows_before"] = cut.rows_before;
  line["rows"] = cut.rows;
}

std::string clock(double seconds) {
  const long s = std::lround(seconds);
  return s < 100 ? std::to_string(s) + " s" : std::to_string((s + 30) / 60) + " min";
}

}  // namespace

std::size_t longest(const Suite& suite) {
  std::size_t most = 0;
  for (const Size& size : suite.sizes)
    most = std::max(most, static_cast<std::size_t>(size.length) + sample_next);
  return most;
}

Session::Session(const Suite& suite,
                 const Generator& generator,
                 const engine::Tokenizer& tokenizer,
                 std::span<const Variant> variants,
                 Runner& runner,
                 Results& results)
    : suite_(&suite),
      generator_(&generator),
      tokenizer_(&tokenizer),
      variants_(variants),
      runner_(&runner),
      results_(&results) {
  for (const Json& line : results.lines()) {
    if (line["kind"] != "answer" || line["policy"] != "full") continue;
    const auto [it, fresh] = full_.emplace(line["prompt"].get<std::string>(), true);
    it->second = it->second && line["correct"].get<bool>();
  }
  for (const Size& size : suite.sizes)
    total_ += size.length * (static_cast<double>(suite.tasks.size()) * size.prompts +
                             (suite.perplexity ? size.samples : 0));
}

void Session::show(const std::string& what) {
  std::string text = what + ", " + std::to_string(std::lround(100 * done_ / total_)) + " %, " +
                     clock(watch_.seconds());
  if (worked_ > 0)
    text += ", about " + clock(watch_.seconds() / worked_ * (total_ - done_)) + " left";
  progress_.show(text);
}

void Session::say(const std::string& line) {
  progress_.clear();
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Session::run() {
  for (const Size& size : suite_->sizes) {
    pictures_ = &size == &suite_->sizes.front() ? 0 : pictured_tasks.size();
    for (const std::string& task : suite_->tasks) run_task(task, size);
    if (suite_->perplexity) run_samples(size);
  }
  progress_.clear();
}

bool Session::pictured(const Variant& v) const {
  double best = 2;
  for (const Variant& other : variants_)
    if (other.removed && other.spec.text() == v.spec.text() &&
        std::abs(*other.removed - pictured_removed) < std::abs(best - pictured_removed))
      best = *other.removed;
  return !v.removed || *v.removed == best;
}

bool Session::missing(const Prompt& prompt, const Variant& v, bool known, bool picture) const {
  for (std::size_t t = 0; t < prompt.turns.size(); ++t)
    if (!results_->has(answer_identity(prompt, t, &v, known))) return true;
  return known && picture && pictured(v) && !results_->has(kept_identity(prompt, v));
}

void Session::write_tokens(const Prompt& prompt) {
  std::vector<Token> read = prompt.context;
  const auto& question = prompt.turns.front().question;
  read.insert(read.end(), question.begin(), question.end() - 1);
  Json line;
  line["kind"] = "tokens";
  line["prompt"] = prompt.id;
  line["task"] = prompt.task;
  line["question"] = "known";
  for (const Token token : read) line["texts"].push_back(tokenizer_->decode({&token, 1}));
  line["facts"] = prompt.facts;
  add(line);
}

void Session::write(const Prompt& prompt, const Outcome& outcome, bool picture) {
  const bool full = outcome.variant == nullptr;
  for (const bool known : {true, false}) {
    // The full cache's answer does not depend on when the question is read.
    if (!full && known != outcome.known) continue;
    for (std::size_t t = 0; t < outcome.answers.size(); ++t) {
      const Turn& turn = prompt.turns[t];
      const Answer& answer = outcome.answers[t];
      Json line = answer_identity(prompt, t, outcome.variant, known);
      line["answer"] = turn.answer;
      line["output"] = answer.output;
      line["score"] = answer.score;
      line["correct"] = answer.correct;
      add_cut(line, outcome.cut);
      line["fact_rows"] = turn.fact_rows;
      line["bytes"] = outcome.cut.bytes;
      add(line);
    }
  }
  if (full || !picture || !outcome.known || !pictured(*outcome.variant)) return;
  write_tokens(prompt);
  Json line = kept_identity(prompt, *outcome.variant);
  line["rows"] = outcome.kept;
  add(line);
}

bool Session::run_prompt(const Prompt& prompt, bool picture) {
  bool screened = full_.contains(prompt.id);
  for (std::size_t t = 0; screened && t < prompt.turns.size(); ++t)
    for (const bool known : {true, false})
      screened = screened && results_->has(answer_identity(prompt, t, nullptr, known));
  if (screened && !full_[prompt.id]) return false;
  const auto open = [&](const Variant& v, bool known) {
    return missing(prompt, v, known, picture);
  };
  const auto any = [&] {
    return std::ranges::any_of(variants_,
                               [&](const Variant& v) { return open(v, true) || open(v, false); });
  };
  if (screened && !any()) return true;
  bool right = true;
  runner_->ask(prompt, open, picture, [&](const Outcome& outcome) {
    if (outcome.variant == nullptr)
      right = std::ranges::all_of(outcome.answers, [](const Answer& a) { return a.correct; });
    write(prompt, outcome, picture);
  });
  if (screened && !right) {
    throw std::runtime_error("the full cache no longer answers prompt " + prompt.id +
                             ", as it does in " + results_->path() +
                             ": another build or machine? Give another --out");
  }
  full_[prompt.id] = right;
  worked_ += prompt.length;
  return right;
}

void Session::run_task(std::string_view task, const Size& size) {
  std::int32_t used = 0, drawn = 0;
  std::size_t fact_rows = 0, turns = 0;
  const double before = done_;
  const std::string name = std::string(task) + " " + std::to_string(size.length);
  // Drawing ends when it is certain that the full cache answers less than half.
  while (used < size.prompts && drawn - used <= size.prompts) {
    program::check_interrupt();
    show(name + ", prompt " + std::to_string(used + 1) + " of " + std::to_string(size.prompts));
    const Prompt prompt = generator_->make(task, size.length, drawn, size.prompts);
    const bool picture = used == 0 && pictures_ < pictured_tasks.size() &&
                         std::ranges::find(pictured_tasks, task) != pictured_tasks.end();
    ++drawn;
    if (!run_prompt(prompt, picture)) continue;
    ++used;
    done_ += size.length;
    for (const Turn& turn : prompt.turns) fact_rows += turn.fact_rows, ++turns;
  }
  done_ = before + static_cast<double>(size.length) * size.prompts;
  const bool dropped = used < size.prompts;
  const double facts = turns == 0 ? 0 : static_cast<double>(fact_rows) / static_cast<double>(turns);
  Json line;
  line["kind"] = "task";
  line["task"] = task;
  line["length"] = size.length;
  line["wanted"] = size.prompts;
  line["drawn"] = drawn;
  line["answered"] = used;
  line["used"] = dropped ? 0 : used;
  line["dropped"] = dropped;
  line["fact_rows"] = facts;
  add(line);
  std::string text = name + ": the full cache answers " + std::to_string(used) + " of " +
                     std::to_string(drawn) + " drawn";
  if (dropped) {
    text += "; dropped";
  } else {
    text += "; the facts need " + std::to_string(std::lround(facts)) + " rows, kept are";
    for (const double r : suite_->removed)
      text += " " + std::to_string(std::lround((1 - r) * size.length));
  }
  say(text);
}

void Session::run_samples(const Size& size) {
  constexpr std::array<const char*, 2> kinds{"perplexity", "long_perplexity"};
  const auto samples = generator_->samples(size.length, size.samples);
  std::size_t far_tokens = 0, tokens = 0;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    program::check_interrupt();
    show("perplexity " + std::to_string(size.length) + ", sample " + std::to_string(i + 1) +
         " of " + std::to_string(samples.size()));
    const std::string id = "sample-" + std::to_string(size.length) + "-" + std::to_string(i) +
                           "-of-" + std::to_string(samples.size());
    const auto open = [&](const Variant* v) {
      return std::ranges::any_of(kinds, [&](const char* kind) {
        return !results_->has(sample_identity(kind, id, size.length, v));
      });
    };
    done_ += size.length;
    if (!open(nullptr) &&
        std::ranges::none_of(variants_, [&](const Variant& v) { return open(&v); }))
      continue;
    runner_->predict(
        samples[i],
        [&](const Variant& v) { return open(&v); },
        [&](const Predicted& p, const std::vector<bool>& far) {
          for (const char* kind : kinds) {
            double sum = 0;
            std::int64_t count = 0;
            for (std::size_t t = 0; t < far.size(); ++t)
              if (kind == kinds[0] || far[t]) sum += p.log_probability[t], ++count;
            Json line = sample_identity(kind, id, size.length, p.variant);
            line["predictions"] = count;
            line["log_probability"] = sum;
            add_cut(line, p.cut);
            line["bytes"] = p.cut.bytes;
            add(line);
          }
          if (p.variant != nullptr) return;
          far_tokens += static_cast<std::size_t>(std::ranges::count(far, true));
          tokens += far.size();
        });
    worked_ += size.length;
  }
  if (tokens > 0) {
    say("perplexity " + std::to_string(size.length) + ": " + std::to_string(far_tokens) + " of " +
        std::to_string(tokens) + " tokens are long-range");
  }
}

}  // namespace evaluate
