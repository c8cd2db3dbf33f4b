// SPDX-License-Identifier: Apache-2.0
#pragma once

// The command-line options that all programs share: the model, and each field of the context that can be wrong.

#include <kvtrim/policy/needs.hpp>

#include <CLI/CLI.hpp>

#include <cstdint>
#include <map>
#include <string>

#include "context.hpp"

namespace llama_example {

struct ContextOptions {
  std::string model;
  std::int32_t cells = 0, threads = 0;
  std::string flash_attention = "auto", type_k = "f16", type_v = "f16";
  bool unified = true, swa_full = true;

  void add(CLI::App& app) {
    const auto types = CLI::IsMember({"f16", "f32", "q8_0", "q4_0"});
    app.add_option("--model", model, "GGUF file")->required();
    app.add_option("--cells", cells, "n_ctx; 0: as many as the work needs")
        ->check(CLI::Range(0, 1 << 24))
        ->capture_default_str();
    app.add_option("--threads", threads, "threads; 0: all cores")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
    app.add_option(
           "--flash-attn", flash_attention, "flash_attn_type; auto: on unless scores are read")
        ->check(CLI::IsMember({"auto", "on", "off"}))
        ->capture_default_str();
    app.add_option("--type-k", type_k, "type_k")->check(types)->capture_default_str();
    app.add_option("--type-v", type_v, "type_v")->check(types)->capture_default_str();
    app.add_option("--kv-unified", unified, "kv_unified")->capture_default_str();
    app.add_option("--swa-full", swa_full, "swa_full")->capture_default_str();
  }

  /// Parameters of a context of `--cells`, or otherwise `wanted` cells.
  [[nodiscard]] llama_context_params params(std::int32_t wanted,
                                            std::int32_t sequences,
                                            const kvtrim::Needs& needs) const {
    static const std::map<std::string, ggml_type> types{{"f16", GGML_TYPE_F16},
                                                        {"f32", GGML_TYPE_F32},
                                                        {"q8_0", GGML_TYPE_Q8_0},
                                                        {"q4_0", GGML_TYPE_Q4_0}};
    llama_context_params p = context_params(
        cells > 0 ? cells : wanted, sequences, {.scores = needs.window > 0 || needs.accumulate});
    if (flash_attention == "on") p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    if (flash_attention == "off") p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    p.type_k = types.at(type_k), p.type_v = types.at(type_v);
    p.kv_unified = unified, p.swa_full = swa_full;
    if (threads > 0) p.n_threads = p.n_threads_batch = threads;
    return p;
  }
};

}  // namespace llama_example
