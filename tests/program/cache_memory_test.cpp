// SPDX-License-Identifier: Apache-2.0

// The program `cache_memory`, started as a user does, and the shapes of models that it reads.

#include "program/model_shapes.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "llama_engine/llama_weights.hpp"
#include "program/sizes.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using Catch::Matchers::ContainsSubstring;
using kvtrim::LayerShape;
using program::read_config_json;
using program_test::Arguments;
using program_test::Folder;
using program_test::Result;
using program_test::run_program;

namespace {

Result cache_memory(const Arguments& arguments) {
  return run_program(KVTRIM_CACHE_MEMORY, arguments);
}

// The lines that `--json` prints: the model's, and each policy's by its SPEC.
struct Lines {
  nlohmann::json model;
  std::map<std::string, nlohmann::json> policies;

  explicit Lines(Arguments arguments) {
    arguments.emplace_back("--json");
    const Result r = cache_memory(arguments);
    INFO(r.err);
    REQUIRE(r.status == 0);
    std::istringstream in(r.out);
    for (std::string text; std::getline(in, text);) {
      const auto line = nlohmann::json::parse(text);
      if (line.at("kind") == "memory_model") model = line;
      if (line.at("kind") == "memory_policy") policies[line.at("policy")] = line;
    }
  }
};

void refused(const Arguments& arguments, const std::string& words) {
  const Result r = cache_memory(arguments);
  INFO(r.err);
  CHECK(r.status == 1);
  CHECK(r.out.empty());
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK_THAT(r.err, ContainsSubstring(words));
}

}  // namespace

TEST_CASE("cache_memory: Llama-3-70B for 8 users of 131,072 tokens, and what eight GPUs hold",
          "[program][paper]") {
  CHECK_THAT(cache_memory({}).out,
             ContainsSubstring("8 streams of 131,072 tokens: 343,597,383,680 B (320.00 GiB)"));
  const Lines lines({});
  CHECK(lines.model["bytes"] == 343'597'383'680);
  CHECK(lines.policies.at("full")["fit_steady"] == 12);
  CHECK(lines.policies.at("full")["fit_one_in_prefill"] == 12);
  for (const char* policy : {"streaming", "h2o", "snapkv", "page"}) {
    INFO(policy);
    CHECK(lines.policies.at(policy)["kept_rows"] == 13'107);
    CHECK(lines.policies.at(policy)["fit_steady"] == 127);
    CHECK(lines.policies.at(policy)["fit_one_in_prefill"] == 118);
  }
}

TEST_CASE("cache_memory: the pool of the headline holds 8 full streams, or 65", "[program]") {
  const Lines lines({"--model",
                     "SmolLM2-135M",
                     "--dtype",
                     "f32",
                     "--memory",
                     "765MiB",
                     "--context",
                     "2048",
                     "--generate",
                     "128",
                     "--policy",
                     "full",
                     "page:budget=224"});
  CHECK(lines.policies.at("full")["fit_one_in_prefill"] == 8);
  CHECK(lines.policies.at("full")["running_pages"] == 136);
  CHECK(lines.policies.at("page:budget=224")["running_pages"] == 15);
  CHECK(lines.policies.at("page:budget=224")["fit_one_in_prefill"] == 65);
}

TEST_CASE("cache_memory: windows and latents", "[program]") {
  // 29 of 34 layers see 1,024 rows only.
  const Lines gemma({"--model", "Gemma-3-4B", "--streams", "1", "--policy", "full"});
  CHECK(gemma.model["bytes"] == 2LL * 2 * 4 * 256 * (5 * 131'072 + 29 * 1'024));
  CHECK(gemma.policies.at("full")["running_bytes"] == gemma.model["bytes"]);
  const Lines deepseek({"--model", "DeepSeek-V3", "--streams", "1", "--policy", "full"});
  CHECK(deepseek.model["bytes"] == 61LL * 576 * 2 * 131'072);
  const Lines short_context(
      {"--model", "Mistral-7B-v0.1", "--context", "100", "--streams", "1", "--policy", "full"});
  CHECK(short_context.model["bytes"] == 100 * 32LL * 8 * 256 * 2);
}

TEST_CASE("cache_memory: a GGUF file is read as the engine reads it", "[program]") {
  const Folder folder;
  const std::string path = program_test::write_model(folder, "m.gguf", program_test::tiny_model());
  const engine::LlamaShape shape = engine::read_llama_shape(engine::GgufFile(path));
  const std::vector<LayerShape> expected{
      {shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim, 0}};
  CHECK(program::model_shape(path).kinds == expected);
  CHECK(Lines({"--model", path, "--policy", "full"}).model["model"] == path);
  refused({"--model", folder.with("text.gguf", "no model")}, "not a GGUF file");
}

TEST_CASE("cache_memory: config.json, with what its class assumes where it says nothing",
          "[program]") {
  const Folder folder;
  const auto kinds = [&](const std::string& text) {
    return read_config_json(folder.with("config.json", text)).kinds;
  };
  using Kinds = std::vector<LayerShape>;
  CHECK(kinds(R"({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                  "hidden_size": 8192, "sliding_window": null})") == Kinds{{80, 8, 128, 128, 0}});
  CHECK(kinds(R"({"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48})") ==
        Kinds{{2, 6, 8, 8, 0}});
  CHECK(kinds(R"({"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48,
                  "head_dim": 16})") == Kinds{{2, 6, 16, 16, 0}});
  // Mistral 7B v0.1; Qwen2.5 72B, whose window is switched off, and on.
  CHECK(kinds(R"({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                  "hidden_size": 4096, "sliding_window": 4096})") ==
        Kinds{{32, 8, 128, 128, 4096}});
  CHECK(kinds(R"({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                  "hidden_size": 8192, "sliding_window": 131072, "max_window_layers": 70,
                  "use_sliding_window": false})") == Kinds{{80, 8, 128, 128, 0}});
  CHECK(kinds(R"({"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                  "hidden_size": 8192, "sliding_window": 131072, "max_window_layers": 70,
                  "use_sliding_window": true})") ==
        Kinds{{70, 8, 128, 128, 0}, {10, 8, 128, 128, 131'072}});
  // Gemma 3: 4B leaves its heads out, 27B does not; a newer form lists the layers.
  CHECK(kinds(R"({"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34,
                  "hidden_size": 2560, "sliding_window": 1024}})") ==
        program::model_shape("Gemma-3-4B").kinds);
  CHECK(kinds(R"({"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62,
                  "hidden_size": 5376, "head_dim": 128, "num_attention_heads": 32,
                  "num_key_value_heads": 16, "sliding_window": 1024}})") ==
        program::model_shape("Gemma-3-27B").kinds);
  CHECK(kinds(R"({"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8,
                  "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention",
                  "sliding_attention"]})") == Kinds{{1, 2, 4, 4, 0}, {2, 2, 4, 4, 9}});
  CHECK(kinds(R"({"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512,
                  "num_attention_heads": 128, "qk_rope_head_dim": 64, "hidden_size": 7168})") ==
        program::model_shape("DeepSeek-V3").kinds);
}

TEST_CASE("cache_memory: a config.json that is no model is one line that says why",
          "[program][fault]") {
  const Folder folder;
  const auto no_model = [&](const std::string& text, const std::string& why) {
    refused({"--model", folder.with("config.json", text)}, why);
  };
  no_model("", "no JSON object");
  no_model("{\"num_hidden_layers\": ", "no JSON object");
  no_model("[1, 2]", "no JSON object");
  no_model(R"({"do_resize": true})", "no model's configuration: num_hidden_layers is missing");
  no_model(R"({"num_hidden_layers": 4})", "num_attention_heads is missing");
  no_model(R"({"num_hidden_layers": 4, "num_attention_heads": 4})", "hidden_size is missing");
  no_model(R"({"num_hidden_layers": "4"})", "num_hidden_layers is \"4\", expected 1 to 2^24");
  no_model(R"({"num_hidden_layers": 0})", "num_hidden_layers is 0");
  no_model(R"({"num_hidden_layers": 2, "num_attention_heads": 9, "hidden_size": 4})",
           "hidden_size is below num_attention_heads 9");
  no_model(R"({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 4,
               "layer_types": ["full_attention"]})",
           "layer_types does not list 2 layers");
  no_model(R"({"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 4,
               "layer_types": ["linear_attention"]})",
           "layer type \"linear_attention\" is not known");
  no_model(R"({"num_hidden_layers": 16777216, "num_attention_heads": 16777216, "head_dim": 1})",
           "B a token is no model's");
  no_model(R"({"num_hidden_layers": 1, "kv_lora_rank": 512})", "qk_rope_head_dim is missing");
  no_model(R"({"text_config": {"model_type": 7}})", "num_hidden_layers is missing");
  refused({"--model", folder.file("none.json")}, "cannot read");
}

TEST_CASE("cache_memory: what cannot be is refused with its numbers", "[program][fault]") {
  refused({"--model", "GPT-5"}, "unknown model 'GPT-5'; known are Llama-3-8B, ");
  refused({"--policy", "lru"}, "unknown policy 'lru'");
  refused({"--policy", "snapkv:kernel=4"}, "kernel 4 must be odd");
  refused({"--policy", "adakv", "--tables", "layer"},
          "'adakv' needs a page table per head, but the pool has one per layer");
  refused({"--policy", "pyramidkv", "--tables", "group"}, "needs a page table per layer");
  refused({"--context", "2147483647", "--generate", "1"},
          "--context and --generate together are 2147483648 tokens");
  refused({"--removed", "1.5"}, "--removed 1.5");
  refused({"--memory", "many"}, "--memory 'many' is no size");
  refused({"--memory", "8xGiB"}, "is no size");
  refused({"--memory", "8 80GiB"}, "unknown unit ' 80GiB'");
  refused({"--memory", "-1GiB"}, "not within 0 and 2^62");
  refused({"--weights", "1e99"}, "not within 0 and 2^62");
  refused({"--streams", "2147483647", "--context", "2147483647"}, "does not fit 63 bits");
  refused({"--streams", "2147483647", "--context", "1", "--generate", "16777216"},
          "does not fit 63 bits");
  CHECK(cache_memory({"--policy", "adakv", "--tables", "head"}).status == 0);
  const Lines none({"--memory", "1GiB", "--policy", "full"});  // less than the weights
  CHECK(none.policies.at("full")["fit_steady"] == 0);
  for (const Arguments& wrong : {Arguments{"--context", "0"},
                                 {"--page-size", "0"},
                                 {"--streams", "0"},
                                 {"--dtype", "f64"},
                                 {"--json", "--markdown"}}) {
    const Result r = cache_memory(wrong);
    INFO(wrong.front());
    CHECK(r.status != 0);
    CHECK_THAT(r.err, ContainsSubstring(wrong.front()));
  }
}

TEST_CASE("cache_memory: --markdown prints a table with as many cells in every line", "[program]") {
  const Result r = cache_memory({"--markdown"});
  REQUIRE(r.status == 0);
  std::istringstream in(r.out);
  std::int32_t lines = 0;
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("|")) continue;
    ++lines;
    CHECK(std::count(line.begin(), line.end(), '|') == 8);
  }
  CHECK(lines == 2 + 7);
}

TEST_CASE("sizes: bytes as people write them", "[program]") {
  CHECK(program::parse_bytes("", "140e9") == 140'000'000'000);
  CHECK(program::parse_bytes("", "8x80GiB") == 687'194'767'360);
  CHECK(program::parse_bytes("", "0.5kB") == 500);
  CHECK(program::grouped(0) == "0");
  CHECK(program::grouped(-123'456) == "-123,456");
  CHECK(program::grouped(1'234'567) == "1,234,567");
}
