// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/score/window.hpp>

#include "answers.hpp"
#include "program/console.hpp"

using namespace llama_example;  // context.hpp, score_tap.hpp, prompt_window.hpp: yours to copy

static int run(const std::string& file, const std::string& text) {
  // Which rows stay: one set for all layers and KV heads, by what the prompt's last 32 queries attend to.
  const kvtrim::PageSelector<> policy({.scores = {.window = 32, .rows = kvtrim::Reduction::max},
                                       .unit = kvtrim::PageUnit::per_group,
                                       .budget = 100,
                                       .sinks = 4,
                                       .window = 32});
  // Once: a context without flash attention and with one pool of cells, and what listens to it.
  const llama_model_ptr model = load_model(file);
  llama_context_params params = context_params(2048, 1, {.scores = true});
  ScoreTap tap(2048, 1, llama_model_n_layer(model.get()));
  params.cb_eval = ScoreTap::callback, params.cb_eval_user_data = &tap;
  const llama_context_ptr context = make_context(model.get(), params, {.scores = true});
  kvtrim::RowTable table(
      {llama_model_n_layer(model.get()), llama_model_n_head_kv(model.get()), 1, 2048});
  PromptWindow window;
  tap.on_written = [&](auto tokens) { (void)table.append(static_cast<int>(tokens.size())); };
  tap.on_scores = [&](const LayerScores& scores) { window.keep(scores); };
  // Around each llama_decode: where its tokens go, and whether their scores are wanted.
  const auto decode = [&](std::span<llama_token> ids, bool scores) {
    std::vector<Written> batch;
    for (int i = 0; i < static_cast<int>(ids.size()); ++i)
      batch.push_back({0, kvtrim::Position{table.next_position() + i}});
    tap.expect(batch, scores);
    tap.finish(
        llama_decode(context.get(), llama_batch_get_one(ids.data(), static_cast<int>(ids.size()))));
  };
  auto ids = tokens_of(llama_model_get_vocab(model.get()), text, true);
  ids.resize(400);
  decode(std::span(ids).first(368), false);
  decode(std::span(ids).last(32), true);
  // After the prompt: plan, tell llama.cpp what goes, commit. The newest position stays, so decoding goes on.
  const auto plan = table.plan(policy, {.scores = window.scores(policy.scorer(), table)});
  const auto status = lc::for_each_evicted_range(plan, {}, [&](lc::PositionRange gone) {
    if (!llama_memory_seq_rm(llama_get_memory(context.get()), 0, gone.begin, gone.end))
      throw std::runtime_error("seq_rm");
    tap.map().remove(0, gone);
  });
  if (status != kvtrim::Status::ok || table.commit(plan).status != kvtrim::Status::ok) return 1;
  decode(std::span(ids).last(1), false);
  std::printf("%d of %d rows and cells stay, and a new one\n", tap.map().used() - 1, 400);
  return tap.map().used() == 101 ? 0 : 1;
}

int main(int argc, char** argv) {
  quiet();
  return program::run("in_your_program",
                      [&] { return argc == 3 ? run(argv[1], program::read_file(argv[2])) : 2; });
}
