// SPDX-License-Identifier: Apache-2.0
#include <kvtrim/score/window.hpp>

#include "answers.hpp"
#include "program/console.hpp"

using namespace llama_example;  // context.hpp, score_tap.hpp, prompt_window.hpp: yours to copy

static void run(const std::string& file, const std::string& text) {
  // Once: a context without flash attention and with one pool of cells, and what listens to it.
  const llama_model_ptr model = load_model(file);
  const std::int32_t layers = llama_model_n_layer(model.get());
  llama_context_params params = context_params(2048, 1, {.scores = true});
  ScoreTap tap(2048, 1, layers);
  params.cb_eval = ScoreTap::callback, params.cb_eval_user_data = &tap;
  const llama_context_ptr context = make_context(model.get(), params, {.scores = true});
  kvtrim::RowTable rows({layers, llama_model_n_head_kv(model.get()), 1, 2048});
  PromptWindow window;
  tap.on_written = [&](auto tokens) { (void)rows.append(static_cast<int>(tokens.size())); };
  tap.on_scores = [&](const LayerScores& scores) { window.keep(scores); };

  // Around each llama_decode: where its tokens go, and whether their scores are wanted.
  const auto decode = [&](std::span<llama_token> ids, bool scores) {
    std::vector<Written> batch;
    for (std::size_t i = 0; i < ids.size(); ++i)
      batch.push_back({0, kvtrim::Position{rows.next_position() + static_cast<int>(i)}});
    tap.expect(batch, scores);
    const auto tokens = llama_batch_get_one(ids.data(), static_cast<int>(ids.size()));
    tap.finish(llama_decode(context.get(), tokens));
  };
  auto ids = tokens_of(llama_model_get_vocab(model.get()), text, true);
  decode(std::span(ids).first(368), false);
  decode(std::span(ids).subspan(368, 32), true);

  // After the prompt: one set of rows for all layers and KV heads; llama.cpp is told what goes.
  using Policy = kvtrim::PageSelector<kvtrim::WindowParams>;
  const Policy policy({.unit = kvtrim::PageUnit::per_group, .budget = 100, .sinks = 4});
  const auto plan = rows.plan(policy, {.scores = window.scores(policy.scorer(), rows)});
  const auto status = lc::for_each_evicted_range(plan, {}, [&](lc::PositionRange gone) {
    const auto memory = llama_get_memory(context.get());
    if (!llama_memory_seq_rm(memory, 0, gone.begin, gone.end)) throw std::runtime_error("seq_rm");
    tap.map().remove(0, gone);
  });
  if (!usable(status) || !usable(rows.commit(plan).status)) throw std::runtime_error("refused");
  decode(std::span(ids).subspan(400, 1), false);  // the newest position stayed: decoding goes on
  std::printf("100 of 400 rows stay, and a new one: %d cells\n", tap.map().used());
}

int main(int argc, char** argv) {
  quiet();
  return program::run("in_your_program", [&] {
    if (argc != 3) throw std::runtime_error("usage: in_your_program model.gguf text.txt");
    return run(argv[1], program::read_file(argv[2])), 0;
  });
}
