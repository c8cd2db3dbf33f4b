// SPDX-License-Identifier: Apache-2.0

// Continuous batching with the real model. Exit code 77 without it, as in model_test.cpp.
#include "batch/scheduler.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "batch/report.hpp"
#include "batch/request.hpp"
#include "catch.hpp"
#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/console.hpp"
#include "program/evictor.hpp"
#include "program/policy_spec.hpp"

namespace {

using batch::Outcome;
using batch::Request;
using batch::Scheduler;
using Round = batch::Scheduler::Round;

std::string model_path() {
  const char* path = std::getenv("KVTRIM_MODEL");
  return path != nullptr && *path != '\0' ? path : KVTRIM_MODEL_DEFAULT;
}

}  // namespace

TEST_CASE(
    "batch: the memory of 2 full streams of 512 tokens holds 8, which say what one alone says",
    "[batch][model]") {
  const engine::GgufFile file(model_path());
  const engine::Tokenizer tokenizer(file);
  engine::LlamaModel model(file);
  const auto requests =
      batch::draw_requests(tokenizer, program::read_file(KVTRIM_LICENSE), "LICENSE", 512, 8, 96, 5);
  const program::PolicySpec full("full"), page("page:budget=88");

  auto params = model.cache_params();
  params.scope = kvtrim::TableScope::head;
  params.max_rows = 512 + 96;
  params.page_size = 8;
  params.pages = 2 * 76 * 90;  // 607 rows: 76 pages
  params.max_sequences = 8;
  batch::Footprint footprint{&full, params, model.rope(), 0, 128};
  CHECK(footprint.streams(requests) == 2);
  footprint.policy = &page;
  CHECK(footprint.streams(requests) == 8);  // 7 x 12 + 64 of 152 pages

  const auto run = [&](std::int32_t streams, std::span<const Request> list) {
    auto own = params;
    own.max_sequences = streams;
    kvtrim::PagedCache cache(own);
    program::Evictor evictor(model,
                             cache,
                             program::needs_of(page.make(88, kvtrim::SinkForm::pages)),
                             {},
                             Scheduler::recorder_slots(page, streams, false));
    batch::Settings settings;
    settings.streams = streams;
    Scheduler scheduler(model, cache, evictor, page, settings, list);
    for (Round round = Round::worked; round != Round::over;) {
      round = scheduler.round();
      REQUIRE(round != Round::stuck);
      CHECK(cache.pool().in_use() <= scheduler.reserved_pages());
      CHECK(scheduler.reserved_pages() <= params.pages);
    }
    CHECK(scheduler.counters().streams == streams);
    CHECK(cache.pool().in_use() == 0);
    return scheduler.outcomes();
  };
  const auto together = run(8, requests);
  int right = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    CHECK(together[i].end == Outcome::End::done);
    CHECK(together[i].tokens.size() == 96);
    right += batch::right(requests[i], batch::text_of(together[i], tokenizer)).get<bool>() ? 1 : 0;
  }
  std::printf("%d of 8 answers right\n", right);
  CHECK(right >= 6);
  // Steps of at most 16 rows give every stream the same bits.
  std::vector<Request> two{requests[0], requests[5]};
  for (Request& r : two) r.max_tokens = 24;
  const auto alone = run(1, two);
  for (const std::size_t i : {0U, 1U}) {
    const auto& tokens = together[i == 0 ? 0 : 5].tokens;
    CHECK(alone[i].tokens == std::vector(tokens.begin(), tokens.begin() + 24));
  }
}
