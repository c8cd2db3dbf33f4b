// SPDX-License-Identifier: Apache-2.0
// What the programs here rest on, with a real model ($KVTRIM_MODEL or the project's) and a real llama.cpp: every row's cell is
// the right one after evictions and refills, and what is wrong is refused by name.

#include <unistd.h>

#include <kvtrim/policy/page_selector.hpp>
#include <kvtrim/policy/streaming_sink.hpp>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "../../tests/catch.hpp"
#include "../../tests/llama_engine/gguf_builder.hpp"
#include "answers.hpp"
#include "policies.hpp"

using namespace llama_example;
using Catch::Matchers::ContainsSubstring;

namespace {

const kvtrim::Needs sums = kvtrim::needs(kvtrim::PageSelector<kvtrim::AccumulateParams>());

std::string model_path() {
  const char* own = std::getenv("KVTRIM_MODEL");
  return own != nullptr && *own != '\0' ? own : KVTRIM_MODEL_DEFAULT;
}
llama_model* model() {
  static const llama_model_ptr loaded = (quiet(), load_model(model_path()));
  return loaded.get();
}
std::vector<llama_token> words(std::int32_t n, std::int32_t seed) {
  std::vector<llama_token> ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back(1000 + (i * 7919 + seed * 104729) % 20000);
  return ids;
}
std::vector<Token> batch_of(const std::vector<llama_token>& ids, llama_seq_id s) {
  std::vector<Token> out;
  for (const llama_token id : ids) out.push_back({id, s, false});
  return out;
}
std::vector<std::int32_t> positions(const Session& session, llama_seq_id s) {
  std::vector<std::int32_t> out;
  for (const kvtrim::Position p : session.table(s).positions()) out.push_back(raw(p));
  return out;
}
// Sinks and the last rows, as positions.
std::vector<std::int32_t> expected(std::int32_t sinks, std::int32_t first, std::int32_t end) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(sinks + end - first));
  std::iota(out.begin(), out.begin() + sinks, 0);
  std::iota(out.begin() + sinks, out.end(), first);
  return out;
}
// What the last query of each layer and head pays to each row, as the tap hands it over.
std::vector<float> last_query(Session& session, llama_seq_id s, llama_token id) {
  std::vector<float> seen;
  const auto observe = session.tap()->on_scores;
  session.tap()->on_scores = [&](const LayerScores& scores) {
    observe(scores);
    seen.insert(seen.end(), scores.data, scores.data + scores.heads * scores.queries * scores.rows);
  };
  const Token one{id, s, false};
  session.decode({&one, 1}, true);
  session.tap()->on_scores = observe;
  return seen;
}

}  // namespace

TEST_CASE("rows keep their cells: evicted, refilled by other sequences, evicted again") {
  // In `crowd`, holes of sequence 0 are filled by 1 and 2, and the other way round. In `alone`, they are filled at once by a
  // sequence of no interest, so that position p of sequence 0 is in cell p: there no map is needed.
  Session crowd(model(), context_params(512, 3, {.scores = true}), {.needs = sums});
  Session alone(model(), context_params(512, 2, {.scores = true}), {.needs = sums});
  std::int32_t tokens = 0;  // of sequence 0
  const auto both = [&](std::int32_t n, std::int32_t seed) {
    const auto batch = batch_of(words(n, seed), 0);
    crowd.decode(batch, true), alone.decode(batch, true);
    tokens += n;
  };
  const auto cut = [&](std::int32_t recent) {
    const kvtrim::StreamingSink policy({.sinks = 4, .recent = recent});
    crowd.evict(policy, 0), alone.evict(policy, 0);
    CHECK(positions(crowd, 0) == expected(4, tokens - recent, tokens));
    alone.decode(batch_of(words(tokens - alone.rows(), 9), 1));
  };
  both(100, 1);
  crowd.decode(batch_of(words(60, 2), 1));
  cut(30);
  crowd.decode(batch_of(words(90, 3), 2));  // 66 of them in the holes
  crowd.evict(kvtrim::StreamingSink({.sinks = 2, .recent = 10}), 1);
  CHECK(positions(crowd, 1) == expected(2, 50, 60));
  both(80, 4);  // 48 of them in the holes of sequence 1
  cut(40);
  crowd.decode(batch_of(words(50, 5), 1));
  both(20, 6);
  std::vector<std::int32_t> kept = expected(4, 140, 200);
  CHECK(positions(crowd, 0) == kept);
  const auto crowded = crowd.tap()->map().rows(0), ordered = alone.tap()->map().rows(0);
  CHECK_FALSE(std::is_sorted(crowded.begin(), crowded.end()));  // the order of cells is lost
  CHECK(std::ranges::equal(ordered, kept));

  // Layer 0's queries and keys depend on token and position alone; later layers differ by rounding.
  const auto got = last_query(crowd, 0, 1234), want = last_query(alone, 0, 1234);
  REQUIRE(got.size() == want.size());
  const std::size_t layer = got.size() / static_cast<std::size_t>(llama_model_n_layer(model()));
  double first = 0, sum = 0, total = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (i < layer) first = std::max(first, error);
    sum += error, total += static_cast<double>(got[i]);
  }
  const double heads = static_cast<double>(got.size()) / (4 + 60 + 1);
  CHECK(first < 1e-4);
  CHECK(sum / heads < 0.05);                              // of 1 that a query pays
  CHECK(total / heads == Catch::Approx(1).margin(1e-3));  // nothing is paid to any other cell
  // By sums: the same rows, wherever they lie, up to rounding.
  const kvtrim::PageSelector<kvtrim::AccumulateParams> heavy(
      {.unit = kvtrim::PageUnit::per_group, .budget = 24, .sinks = 2, .window = 8});
  CHECK(crowd.evict(heavy, 0).status == Status::ok);
  CHECK(alone.evict(heavy, 0).status == Status::ok);
  std::vector<std::int32_t> same;
  std::ranges::set_intersection(positions(crowd, 0), positions(alone, 0), std::back_inserter(same));
  CHECK(positions(crowd, 0).size() == 24);
  CHECK(same.size() >= 22);
}

TEST_CASE("renumbered positions: the map follows llama_memory_seq_add") {
  llama_context_params params = context_params(256, 2, {.scores = true});
  Session session(model(), params, {.needs = sums, .in_cache = true});
  const kvtrim::StreamingSink policy({.sinks = 4, .recent = 20});
  for (std::int32_t round = 0; round < 6; ++round) {
    session.decode(batch_of(words(60, round), 0), true);
    session.evict(policy, 0);
    session.decode(batch_of(words(9, round), 1));
    CHECK(positions(session, 0) == expected(4, 4, 24));
    CHECK(llama_memory_seq_pos_max(llama_get_memory(session.context()), 0) == 23);
  }
  CHECK(session.tap()->map().used() == 24 + 54);
  CHECK(session.tap()->map().used() == session.rows());
}

TEST_CASE("a map that was not told is found out by the mask") {
  Session session(model(), context_params(256, 1, {.scores = true}), {.needs = sums});
  session.decode(batch_of(words(20, 1), 0));
  session.tap()->map().remove(0, {5, 6});
  CHECK_THROWS_WITH(session.decode(batch_of(words(1, 2), 0)),
                    ContainsSubstring("position 20 contradicts the cell map in column 5"));
}

TEST_CASE("fields of the context that exclude what is asked for are named") {
  const auto refused = [&](auto change, const char* field, const Use& use = {.scores = true}) {
    llama_context_params p = context_params(512, 2, use);
    change(p);
    CHECK_THROWS_WITH(make_context(model(), p, use), ContainsSubstring(field));
  };
  using Params = llama_context_params;
  refused([](Params& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_AUTO; },
          "flash_attn_type: is auto");
  refused([](Params& p) { p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; },
          "flash_attn_type: is enabled");
  refused([](Params& p) { p.kv_unified = false; },
          "kv_unified: is false, which divides n_ctx of 512");
  refused([](Params& p) { p.type_v = GGML_TYPE_Q8_0; }, "type_v: is q8_0");
  refused([](Params& p) { p.type_k = GGML_TYPE_Q4_0; }, "type_k: is q4_0", {});
  refused([](Params& p) { p.n_ctx = 0; }, "n_ctx: is 0");
  refused([](Params& p) { p.n_seq_max = 1000; }, "llama.cpp cannot make the context");
  llama_context_params p = context_params(512, 1, {.scores = true});
  p.n_ubatch = 16;
  const kvtrim::Needs window = kvtrim::needs(kvtrim::PageSelector<>({.scores = {.window = 32}}));
  CHECK_THROWS_WITH(Session(model(), p, {.needs = window}), ContainsSubstring("n_ubatch: is 16"));
}

TEST_CASE("a callback that never shows the probabilities says what to switch off") {
  llama_context_params p = context_params(256, 1, {});
  p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  ScoreTap tap(256, 1, llama_model_n_layer(model()));
  p.cb_eval = ScoreTap::callback, p.cb_eval_user_data = &tap;
  const llama_context_ptr context(llama_init_from_model(model(), p));
  REQUIRE(context);
  auto ids = words(4, 1);
  const std::vector<Written> batch{{0, kvtrim::Position{0}},
                                   {0, kvtrim::Position{1}},
                                   {0, kvtrim::Position{2}},
                                   {0, kvtrim::Position{3}}};
  tap.expect(batch, true);
  const int rc = llama_decode(context.get(), llama_batch_get_one(ids.data(), 4));
  CHECK(rc == 0);
  CHECK_THROWS_WITH(tap.finish(rc),
                    ContainsSubstring("never shown kq_soft_max-0") &&
                        ContainsSubstring("LLAMA_FLASH_ATTN_TYPE_DISABLED"));
}

TEST_CASE("what does not fit is refused with the numbers, and nothing is lost") {
  Session session(model(), context_params(256, 2, {}), {.needs = {}});
  CHECK_THROWS_WITH(session.prompt(0, words(300, 1)),
                    ContainsSubstring("the prompt has 300 tokens, but there are 256 cells"));
  CHECK_THROWS_WITH(session.prompt(0, {}), ContainsSubstring("no token"));
  CHECK_THROWS_WITH(session.decode(batch_of(words(1, 1), 2)),
                    ContainsSubstring("n_seq_max: is 2, but there is a sequence 2"));
  CHECK_THROWS_WITH(session.table(-1), ContainsSubstring("sequence -1"));
  session.decode(batch_of(words(200, 1), 0));
  CHECK(session.try_decode(batch_of(words(57, 2), 1)) == 1);
  CHECK_THROWS_WITH(session.decode(batch_of(words(57, 2), 1)),
                    ContainsSubstring("of 256 cells 200 hold rows"));
  CHECK(session.try_decode(batch_of(words(56, 2), 1)) == 0);
  CHECK(session.rows() == 256);
}

TEST_CASE("policies that a cell cannot serve are refused with the reason") {
  for (const char* spec : {"snapkv",
                           "h2o",
                           "adakv",
                           "keydiff",
                           "page:score=keydiff,unit=group",
                           "page:score=surprisal,unit=group",
                           "streaming:form=exact"})
    CHECK_THROWS_WITH(needs_of(program::PolicySpec(spec)),
                      ContainsSubstring(spec) && ContainsSubstring("cannot be used here"));
  for (const char* spec : {"page", "page:unit=head", "page:unit=layer,score=h2o"})
    CHECK_THROWS_WITH(needs_of(program::PolicySpec(spec)),
                      ContainsSubstring("budget per layer or KV head"));
  Session session(model(), context_params(256, 1, {.scores = true}), {.needs = sums});
  session.decode(batch_of(words(40, 1), 0), true);
  CHECK_THROWS_WITH(
      session.evict(kvtrim::PageSelector<>({.unit = kvtrim::PageUnit::per_group, .budget = 20}), 0),
      ContainsSubstring("the window's queries saw a prompt of 0 rows"));
}

// A user's policy that protects no recent row.
struct OldestStay {
  static constexpr std::string_view name = "oldest_stay";
  kvtrim::Demand demand(const kvtrim::DemandInput&) const noexcept { return {8, {8, 0}}; }
  kvtrim::Removal removal() const noexcept { return kvtrim::Removal::stable_pack; }
  kvtrim::NoScores scorer() const noexcept { return {}; }
};
static_assert(kvtrim::Policy<OldestStay>);

TEST_CASE("the newest position stays, whatever a policy says") {
  Session session(model(), context_params(256, 1, {}), {});
  session.decode(batch_of(words(40, 1), 0));
  CHECK_THROWS_WITH(session.evict(OldestStay(), 0), ContainsSubstring("the newest position 39"));
  CHECK(session.rows() == 40);
  session.decode(batch_of(words(1, 2), 0));
  CHECK(session.rows() == 41);
}

TEST_CASE("files that are no model, and models whose memory is recurrent, are refused by name") {
  quiet();
  CHECK_THROWS_WITH(load_model("no-such-file.gguf"),
                    ContainsSubstring("cannot load no-such-file.gguf"));
  CHECK_THROWS_WITH(load_model(__FILE__), ContainsSubstring("cannot load"));

  const auto zeros = [](std::size_t n) { return std::vector<float>(n, 0.0F); };
  engine_test::GgufBuilder mamba;  // one layer: width 8, inner 16, convolution 4, state 4, rank 2
  mamba.string("general.architecture", "mamba")
      .string("tokenizer.ggml.model", "none")
      .u32("mamba.vocab_size", 11)
      .u32("mamba.context_length", 64)
      .u32("mamba.embedding_length", 8)
      .u32("mamba.feed_forward_length", 0)
      .u32("mamba.attention.head_count", 0)
      .u32("mamba.block_count", 1)
      .u32("mamba.ssm.conv_kernel", 4)
      .u32("mamba.ssm.inner_size", 16)
      .u32("mamba.ssm.state_size", 4)
      .u32("mamba.ssm.time_step_rank", 2)
      .f32("mamba.attention.layer_norm_rms_epsilon", 1e-5F)
      .tensor("token_embd.weight", {8, 11}, zeros(88))
      .tensor("output_norm.weight", {8}, zeros(8))
      .tensor("blk.0.attn_norm.weight", {8}, zeros(8))
      .tensor("blk.0.ssm_in.weight", {8, 32}, zeros(256))
      .tensor("blk.0.ssm_conv1d.weight", {4, 16}, zeros(64))
      .tensor("blk.0.ssm_conv1d.bias", {16}, zeros(16))
      .tensor("blk.0.ssm_x.weight", {16, 10}, zeros(160))
      .tensor("blk.0.ssm_dt.weight", {2, 16}, zeros(32))
      .tensor("blk.0.ssm_dt.bias", {16}, zeros(16))
      .tensor("blk.0.ssm_a", {4, 16}, zeros(64))
      .tensor("blk.0.ssm_d", {16}, zeros(16))
      .tensor("blk.0.ssm_out.weight", {16, 8}, zeros(128));
  const auto path = std::filesystem::temp_directory_path() /
                    ("kvtrim-mamba-" + std::to_string(getpid()) + ".gguf");
  const engine_test::Bytes bytes = mamba.bytes();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  CHECK_THROWS_WITH(load_model(path.string()),
                    ContainsSubstring("architecture 'mamba' is recurrent"));
  std::filesystem::remove(path);
}
