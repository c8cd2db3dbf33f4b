// SPDX-License-Identifier: Apache-2.0
// Four times the sequences in the same cells: prompts are admitted one after another, each is cut before the next one comes,
// then all are decoded together. Compared with the full cache, and with the policy where each prompt is alone.

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "answers.hpp"
#include "options.hpp"
#include "policies.hpp"
#include "program/console.hpp"
#include "program/eval_data.hpp"

namespace {

using namespace llama_example;

struct Options : ContextOptions {
  std::vector<std::string> prompts;
  std::string policy =
      "page:unit=group,window=32,sinks=4,rows=max,group=max,pool=max,kernel=15,columns=all";
  std::int32_t tokens = 1024, rows = 160, steps = 64;
  std::size_t limit = 0;
};

// A prompt is read up to its last token, from which the answer goes on.
std::vector<llama_token> read_part(const program::Needle& n) {
  std::vector<llama_token> ids = n.context;
  ids.insert(ids.end(), n.question.begin(), n.question.end() - 1);
  return ids;
}
std::size_t count(const std::vector<bool>& flags) {
  return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), true));
}

// Each prompt alone: with the full cache, and with the policy.
void run_alone(const Options& o,
               llama_model* model,
               const program::PolicySpec& spec,
               const kvtrim::Needs& needs,
               const std::vector<program::Needle>& prompts,
               std::vector<bool>& full,
               std::vector<bool>& cut) {
  Session session(model, o.params(2 * (o.tokens + o.steps), 2, needs), {.needs = needs});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    program::check_interrupt();
    session.prompt(0, read_part(prompts[i]));
    for (const bool evicts : {false, true}) {
      const llama_seq_id s = 1;
      session.fork(0, s);
      if (evicts) evict(session, spec, s, o.rows);
      const auto answer = generate(
          session, {&s, 1}, {&prompts[i].question.back(), 1}, static_cast<std::size_t>(o.steps));
      (evicts ? cut : full).push_back(says(session.vocab(), answer.front(), prompts[i].answer));
      session.end(s);
    }
    session.end(0);
    std::printf("alone %zu/%zu: right with the full cache %zu, with the policy %zu\n",
                i + 1,
                prompts.size(),
                count(full),
                count(cut));
    std::fflush(stdout);
  }
}

// The prompt at which llama.cpp has no room left, if nothing is evicted; 0: they all fit.
std::size_t first_refused(Session& session, const std::vector<program::Needle>& prompts) {
  std::size_t refused = 0;
  for (std::size_t i = 0; i < prompts.size() && refused == 0; ++i) {
    std::vector<Token> batch;
    for (const auto part : {&prompts[i].context, &prompts[i].question})
      for (const llama_token id : *part) batch.push_back({id, static_cast<llama_seq_id>(i), false});
    batch.back().logits = true;
    if (session.try_decode(batch) != 0) refused = i + 1;
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) session.end(static_cast<llama_seq_id>(i));
  return refused;
}

int run(const Options& o) {
  program::catch_interrupt();
  quiet();
  const program::PolicySpec spec(o.policy);
  const kvtrim::Needs needs = needs_of(spec);
  std::vector<program::Needle> prompts;
  for (const std::string& file : o.prompts) {
    const auto more = program::read_needles(file, o.tokens, o.limit);
    prompts.insert(prompts.end(), more.begin(), more.end());
  }
  const llama_model_ptr model = load_model(o.model);
  const auto n = static_cast<std::int32_t>(prompts.size());
  std::vector<bool> full, alone, together;
  run_alone(o, model.get(), spec, needs, prompts, full, alone);

  const std::int32_t wanted = 8 * (o.tokens + o.steps);  // eight full ones
  llama_context_params params = o.params(wanted, n, needs);
  params.n_batch = std::max(params.n_batch, static_cast<std::uint32_t>(o.tokens));
  Session session(model.get(), params, {.needs = needs});
  const std::int32_t cells = session.cells();
  const auto fit = static_cast<std::size_t>(cells / o.tokens);
  const std::size_t refused = first_refused(session, prompts);
  std::printf("\n%d cells hold %zu prompts of %d tokens; ", cells, fit, o.tokens);
  std::printf(
      refused == 0 ? "llama_decode took all %zu\n" : "llama_decode returned 1 at prompt %zu\n",
      refused == 0 ? prompts.size() : refused);
  if (refused != (prompts.size() > fit ? fit + 1 : 0))
    throw std::runtime_error("the count of cells does not foretell what llama.cpp does");

  std::vector<llama_seq_id> sequences(prompts.size());
  std::iota(sequences.begin(), sequences.end(), 0);
  std::vector<llama_token> firsts;
  std::int32_t peak = 0;
  for (const llama_seq_id s : sequences) {
    program::check_interrupt();
    const program::Needle& prompt = prompts[static_cast<std::size_t>(s)];
    session.prompt(s, read_part(prompt));
    peak = std::max(peak, session.rows());
    evict(session, spec, s, o.rows);
    firsts.push_back(prompt.question.back());
    std::printf("admitted %d of %d: %d of %d cells hold rows\n", s + 1, n, session.rows(), cells);
    std::fflush(stdout);
  }
  const program::Stopwatch watch;
  const auto answers =
      generate(session, sequences, firsts, static_cast<std::size_t>(o.steps), true);
  const double seconds = watch.seconds();
  peak = std::max(peak, session.rows());
  std::size_t decoded = 0, differ = 0;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    decoded += answers[i].size();
    together.push_back(says(session.vocab(), answers[i], prompts[i].answer));
    differ += together[i] != alone[i];
  }
  std::int32_t highest = 0;
  for (const llama_seq_id s : sequences)
    for (const std::int32_t cell :
         session.tap() ? session.tap()->map().rows(s) : std::span<const std::int32_t>{})
      highest = std::max(highest, cell + 1);
  std::printf(
      "\n%d sequences together in %d cells, %d rows each after the prompt\n", n, cells, o.rows);
  std::printf("right: full cache %zu, policy alone %zu, together %zu; %zu differ from alone\n",
              count(full),
              count(alone),
              count(together),
              differ);
  std::printf("peak: %d cells; %zu tokens decoded, %.2f ms per token; highest used cell %d\n",
              peak,
              decoded,
              1000 * seconds / static_cast<double>(decoded),
              highest);
  std::printf(
      "llama.cpp's attention runs over all cells up to the highest used one, whatever is evicted "
      "below it.\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app("Many sequences in few cells of llama.cpp, by kvtrim.");
  o.add(app);
  app.add_option("--prompts", o.prompts, "needle prompts, JSON lines of token ids; several files")
      ->required();
  app.add_option("--tokens", o.tokens, "length of the prompts")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  app.add_option("--limit", o.limit, "maximum number of prompts of each file; 0: all")
      ->capture_default_str();
  app.add_option("--policy", o.policy, "SPEC, as for evaluate")->capture_default_str();
  app.add_option("--rows", o.rows, "rows of a sequence after its prompt")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", o.steps, "tokens to decode")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return program::run("llama_streams", [&] { return run(o); });
}
