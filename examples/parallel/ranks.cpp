// SPDX-License-Identifier: Apache-2.0
// A real model over MPI ranks: the same prompts, policies and tokens as in one process, held against what that one computed.

#include "mpi_ranks.hpp"

#include <kvtrim/parallel/mpi.hpp>

#include <omp.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/console.hpp"
#include "program/eval_data.hpp"
#include "program/evictor.hpp"
#include "program/forks.hpp"
#include "program/policy_spec.hpp"
#include "program/waiting.hpp"
#include "ranked_evictor.hpp"
#include "reference.hpp"

namespace {

using kvtrim::SequenceId;
using parallel::Comparison;
using program::Token;

constexpr std::int32_t page_size = 16;
constexpr std::size_t prompt_tokens = 112;
constexpr std::size_t answer_tokens = 7;  // of a needle prompt
constexpr double least_margin = 1e-2, most_difference = 1e-3;

/// A short prompt: a part of a text in perplexity.jsonl.
struct Part {
  std::size_t text, begin;
};
/// Those after which one process is sure of every token, under every policy (`least_margin`); README.md has their margins.
constexpr Part parts[]{
    {3, 300}, {4, 800}, {0, 150}, {5, 300}, {5, 200}, {5, 400}, {2, 200}, {0, 0}};
constexpr std::size_t questions[]{0, 5, 10, 15};  // of those with 1,024 tokens in needle.jsonl

struct Options {
  std::string model, by, record, compare;
  std::int32_t stripe = 16, threads = 1;
  std::vector<Part> texts;
  std::size_t needles = 0, tokens = 0;
};

std::vector<program::PolicySpec> policies(std::int32_t rows) {
  // Sums that ranks may add up in any order; one process adds them up in the same way.
  const std::string size = "sums=exact,budget=" + std::to_string(rows);
  return {program::PolicySpec("full"),
          program::PolicySpec("snapkv:config=maxima," + size),
          program::PolicySpec("h2o:" + size),
          program::PolicySpec("page:" + size)};
}

class MpiDriver final : public parallel::Driver {
 public:
  explicit MpiDriver(MPI_Comm communicator) : communicator_(communicator) {}
  [[nodiscard]] kvtrim::Rank rank() const override { return communicator_.rank(); }
  void exchange(const kvtrim::Round& round) override {
    if (kvtrim::exchange(communicator_, round) != kvtrim::Status::ok)
      throw std::runtime_error("a rank did not arrive");
  }

 private:
  kvtrim::MpiCommunicator communicator_;
};

/// A model, its cache and its evictor, for prompts of one length under all policies.
class Session {
 public:
  Session(engine::LlamaModel& model,
          const engine::Split& split,
          parallel::Driver* driver,
          std::vector<program::PolicySpec> specs,
          std::size_t rows,
          std::size_t prompts)
      : model_(model),
        specs_(std::move(specs)),
        needs_(needs_of(specs_, split)),
        cache_(program::fork_cache(
            model, needs_, "f32", page_size, rows, prompts * specs_.size() + 1)),
        evictor_(model, cache_, needs_),
        forks_(model, cache_, evictor_),
        ranked_(model, cache_, evictor_, split, driver) {}

  /// Reads a prompt once, and cuts a copy of it by each policy; its last token is read after that.
  void read(const std::string& name, std::span<const Token> prompt) {
    const SequenceId base = forks_.read(prompt.first(prompt.size() - 1));
    for (std::size_t p = 0; p < specs_.size(); ++p) {
      texts_.emplace_back().text = name;
      texts_.back().policy = specs_[p].text();
      sequences_.push_back(forks_.fork(base));
      next_.push_back(prompt.back());
      cut(p, {&sequences_.back(), 1});
    }
    cache_.destroy(base);
  }

  /// Generates `steps` tokens of all texts together. `keep_size`: policies that go on to evict do so after each.
  void generate(parallel::Reference& reference, std::size_t steps, bool keep_size) {
    for (std::size_t step = 0; step < steps; ++step) {
      std::vector<engine::Segment> segments;
      for (std::size_t i = 0; i < sequences_.size(); ++i)
        segments.push_back({sequences_[i], {&next_[i], 1}});
      program::Forks::check(
          model_.forward(cache_, segments, engine::LogitRows::last, evictor_.observer()),
          "forward");
      for (std::size_t i = 0; i < sequences_.size(); ++i)
        next_[i] = reference.row(texts_[i], model_.logits(static_cast<Eigen::Index>(i)));
      for (std::size_t p = 0; keep_size && p < specs_.size(); ++p) {
        if (specs_[p].acts_once()) continue;
        std::vector<SequenceId> of_policy;
        for (std::size_t i = p; i < sequences_.size(); i += specs_.size())
          of_policy.push_back(sequences_[i]);
        cut(p, of_policy);
      }
    }
  }

  /// Forgets all texts, and returns them.
  std::vector<Comparison> finish() {
    for (const SequenceId s : sequences_) cache_.destroy(s);
    sequences_.clear();
    next_.clear();
    return std::exchange(texts_, {});
  }

  [[nodiscard]] const parallel::Traffic& traffic() const { return ranked_.traffic(); }
  [[nodiscard]] double cut_seconds() const { return cut_seconds_; }

 private:
  // Over ranks that share the context, heads of one layer keep other numbers of rows: each has a table.
  static kvtrim::Needs needs_of(const std::vector<program::PolicySpec>& specs,
                                const engine::Split& split) {
    kvtrim::Needs needs;
    for (const auto& spec : specs)
      needs = kvtrim::merge(needs, program::needs_of(spec.make(1024, kvtrim::SinkForm::exact)));
    if (split.by_context()) needs.scope = kvtrim::TableScope::head;
    return needs;
  }

  void cut(std::size_t p, std::span<const SequenceId> sequences) {
    const program::Stopwatch watch;
    const std::int32_t rows = ranked_.rows(sequences.front());
    const std::int32_t keep = specs_[p].rows_to_keep(rows, 0);
    ranked_.cut(sequences, specs_[p].make(keep, kvtrim::SinkForm::exact), keep);
    cut_seconds_ += watch.seconds();
  }

  engine::LlamaModel& model_;
  std::vector<program::PolicySpec> specs_;
  kvtrim::Needs needs_;
  kvtrim::PagedCache cache_;
  program::Evictor evictor_;
  program::Forks forks_;
  parallel::RankedEvictor ranked_;
  std::vector<Comparison> texts_;  // prompt after prompt, one per policy
  std::vector<SequenceId> sequences_;
  std::vector<Token> next_;
  double cut_seconds_ = 0;
};

int run(const Options& o) {
  const bool split = !o.by.empty();
  omp_set_num_threads(o.threads);
  parallel::MpiRanks ranks(MPI_COMM_WORLD);
  MPI_Comm integers = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &integers);
  MPI_Comm_set_errhandler(integers, MPI_ERRORS_RETURN);
  MpiDriver driver(integers);
  if (!split && ranks.size() != 1)
    throw std::runtime_error(std::to_string(ranks.size()) + " ranks need --split");
  const bool talks = ranks.rank() == 0;
  engine::Split how;
  if (split)
    how = {
        &ranks, o.by == "heads" ? engine::Split::By::heads : engine::Split::By::context, o.stripe};

  const program::Stopwatch watch;
  const engine::GgufFile file(o.model);
  const engine::Tokenizer tokenizer(file);
  engine::LlamaModel model(file, how);
  parallel::Reference reference(!talks             ? ""
                                : o.record.empty() ? o.compare
                                                   : o.record,
                                !o.record.empty());
  if (talks) {
    std::printf("%s: %d ranks, %d threads each, model read in %.1f s\n",
                split ? ("split by " + o.by).c_str() : "one process",
                ranks.size(),
                o.threads,
                watch.seconds());
    std::fflush(stdout);
  }
  const auto samples = program::read_samples(KVTRIM_EVAL_DATA "/perplexity.jsonl", 0);
  const auto prompts = program::read_needles(KVTRIM_EVAL_DATA "/needle.jsonl", 1024, 0);

  bool good = true;
  // Prints what `result` says of each text; `is_same`: whether that is as in one process.
  const auto show = [&](const std::vector<Comparison>& texts, auto&& is_same, auto&& result) {
    for (const Comparison& c : texts) {
      const bool same = c.difference <= most_difference && is_same(c);
      good = good && same;
      if (!talks) continue;
      std::printf("%-14s %-32s %9.4f  %10.2e  %s%s\n",
                  c.text.c_str(),
                  c.policy.c_str(),
                  c.margin,
                  c.difference,
                  result(c).c_str(),
                  same ? "" : "  DIFFERS");
    }
    std::fflush(stdout);
  };
  const auto columns = [&](const char* result) {
    if (talks) std::printf("\n%-14s %-32s    margin  difference  %s\n", "prompt", "policy", result);
  };

  Session shorts(model,
                 how,
                 split ? &driver : nullptr,
                 policies(64),
                 prompt_tokens + o.tokens,
                 o.texts.size());
  for (const Part& part : o.texts) {
    if (part.text >= samples.size() || part.begin + prompt_tokens > samples[part.text].ids.size())
      throw std::runtime_error("perplexity.jsonl has no prompt of " +
                               std::to_string(prompt_tokens) + " tokens at " +
                               std::to_string(part.text) + " " + std::to_string(part.begin));
    shorts.read("text " + std::to_string(part.text) + "+" + std::to_string(part.begin),
                std::span(samples[part.text].ids).subspan(part.begin, prompt_tokens));
  }
  const double read_seconds = watch.seconds();
  const std::int64_t sent_before = ranks.sent();
  shorts.generate(reference, o.tokens, true);
  const auto steps = static_cast<double>(o.tokens);
  const double step_bytes = static_cast<double>(ranks.sent() - sent_before) / steps;
  const double seconds = watch.seconds() - read_seconds;
  const auto texts = shorts.finish();
  columns("tokens equal");
  show(
      texts,
      [](const Comparison& c) { return c.equal == c.steps; },
      [](const Comparison& c) {
        return std::to_string(c.equal) + " of " + std::to_string(c.steps);
      });
  for (const Comparison& c : texts) {
    if (talks && c.margin < least_margin) {
      good = false;
      std::printf("%s under %s: a margin of %.4f is below %.2f\n",
                  c.text.c_str(),
                  c.policy.c_str(),
                  c.margin,
                  least_margin);
    }
  }
  if (talks && split) {
    const auto& t = shorts.traffic();
    std::printf(
        "a step of %zu texts: %.1f ms with its evictions, %.0f KiB of the engine's from each rank; "
        "%lld evictions: %.1f ms, %.1f rounds and %.0f KiB from each rank on average\n",
        texts.size(),
        1000 * seconds / steps,
        step_bytes / 1024,
        static_cast<long long>(t.cuts),
        1000 * shorts.cut_seconds() / static_cast<double>(t.cuts),
        static_cast<double>(t.rounds) / static_cast<double>(t.cuts),
        static_cast<double>(t.bytes) / static_cast<double>(t.cuts) / 1024);
  }

  if (o.needles > 0) columns("found (one process)");
  Session longs(model, how, split ? &driver : nullptr, policies(256), 1024 + answer_tokens, 1);
  for (const std::size_t n : std::span(questions).first(o.needles)) {
    std::vector<Token> prompt = prompts[n].context;
    prompt.insert(prompt.end(), prompts[n].question.begin(), prompts[n].question.end());
    longs.read(prompts[n].id, prompt);
    longs.generate(reference, answer_tokens, false);
    const auto found = [&](const std::vector<Token>& tokens) {
      return tokenizer.decode(tokens).find(prompts[n].answer) != std::string::npos;
    };
    // A wrong answer's tokens may be a matter of the last bit; whether it is right must not be.
    show(
        longs.finish(),
        [&](const Comparison& c) { return found(c.tokens) == found(c.expected); },
        [&](const Comparison& c) {
          return std::string(found(c.tokens) ? "yes" : "no") + " (" +
                 (found(c.expected) ? "yes" : "no") + ")";
        });
  }
  if (talks)
    std::printf(
        "%.1f s: %s\n", watch.seconds(), good ? "as in one process" : "NOT as in one process");
  // Only the first rank has compared.
  int failed = good ? 0 : 1;
  MPI_Bcast(&failed, 1, MPI_INT, 0, MPI_COMM_WORLD);
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  program::wait_asleep(argv);
  Options o;
  CLI::App app(
      "A model split over MPI ranks, evicting by snapkv, h2o and page, against one process.");
  app.add_option("--model", o.model, "GGUF file of a Llama model")->required();
  app.add_option("--split", o.by, "what the ranks share; without it: one process")
      ->check(CLI::IsMember({"heads", "context"}));
  app.add_option("--stripe",
                 o.stripe,
                 "context: tokens to each rank in turn, a multiple of the pages' rows")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  auto* record =
      app.add_option("--record", o.record, "write what one process computes to this file");
  app.add_option("--compare", o.compare, "the file that one process wrote")->excludes(record);
  std::vector<std::pair<std::size_t, std::size_t>> texts;
  app.add_option(
      "--texts",
      texts,
      "short prompts, each a text in perplexity.jsonl and the token where it begins there; "
      "without: the eight that the program knows");
  app.add_option("--tokens", o.tokens, "tokens after each short prompt")
      ->check(CLI::Range(std::size_t{1}, std::size_t{1024}))
      ->default_val(std::size_t{64});
  app.add_option("--needles", o.needles, "needle prompts, of those that the program knows")
      ->check(CLI::Range(std::size_t{0}, std::size(questions)))
      ->default_val(std::size(questions));
  app.add_option("--threads", o.threads, "of each rank")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  for (const auto& [text, begin] : texts) o.texts.push_back({text, begin});
  if (texts.empty()) o.texts.assign(std::begin(parts), std::end(parts));
  MPI_Init(&argc, &argv);
  bool finished = false;
  const int status = program::run("ranks", [&] {
    const int failed = run(o);
    finished = true;
    return failed;
  });
  if (!finished) MPI_Abort(MPI_COMM_WORLD, status);  // the other ranks must not wait for this one
  MPI_Finalize();
  return status;
}
