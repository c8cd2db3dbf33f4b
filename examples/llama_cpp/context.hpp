// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model and a context of llama.cpp in which rows can be evicted: what must be asked for, and what is wrong if it is not.

#include <ggml.h>
#include <llama-cpp.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace llama_example {

/// What the context will be used for.
struct Use {
  bool scores = false;    ///< a policy reads attention
  bool in_cache = false;  ///< positions are renumbered by llama_memory_seq_add
};

/// Value of a key of the GGUF file; empty: it has none.
[[nodiscard]] inline std::string meta(const llama_model* model, const char* key) {
  std::array<char, 256> text{};
  return llama_model_meta_val_str(model, key, text.data(), text.size()) < 0 ? "" : text.data();
}

/// Loads a GGUF file.
/// \throws std::runtime_error if llama.cpp cannot load it, or its memory is not one of keys and values that stay
[[nodiscard]] inline llama_model_ptr load_model(const std::string& path) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  llama_model_ptr model(llama_model_load_from_file(path.c_str(), params));
  if (!model) throw std::runtime_error("llama.cpp cannot load " + path + " (see above)");
  const std::string architecture = meta(model.get(), "general.architecture");
  if (llama_model_is_recurrent(model.get()) || llama_model_is_hybrid(model.get())) {
    throw std::runtime_error(
        path + ": the memory of architecture '" + architecture +
        "' is recurrent: it has a state instead of rows, and none can be evicted");
  }
  if (!llama_model_has_decoder(model.get()))
    throw std::runtime_error(path + ": architecture '" + architecture + "' has no decoder");
  return model;
}

/// \throws std::invalid_argument if the parameters do not serve the use; the text names the field
inline void check_context(const llama_context_params& p, const llama_model* model, const Use& use) {
  const auto refuse = [](std::string_view field, const std::string& why) {
    throw std::invalid_argument(std::string(field) + ": " + why);
  };
  if (use.scores && p.flash_attn_type != LLAMA_FLASH_ATTN_TYPE_DISABLED) {
    refuse("flash_attn_type",
           std::string("is ") + llama_flash_attn_type_name(p.flash_attn_type) +
               ", but the policy reads kq_soft_max, which flash attention does not compute: use "
               "LLAMA_FLASH_ATTN_TYPE_DISABLED");
  }
  if (!p.kv_unified && p.n_seq_max > 1) {
    refuse("kv_unified",
           "is false, which divides n_ctx of " + std::to_string(p.n_ctx) + " cells by n_seq_max " +
               std::to_string(p.n_seq_max) + ": what one sequence frees serves no other; use true");
  }
  for (const auto& [field, type] : {std::pair{"type_k", p.type_k}, {"type_v", p.type_v}}) {
    if (type == GGML_TYPE_F16 || type == GGML_TYPE_F32) continue;
    refuse(field,
           std::string("is ") + ggml_type_name(type) +
               ", but must be f16 or f32: a quantised V needs flash attention, which shows no "
               "probabilities, and quantised keys are not rotated in place without loss");
  }
  if (use.in_cache && llama_model_n_swa(model) > 0 && !p.swa_full) {
    refuse("swa_full",
           "is false: the sliding layers then have fewer cells than the others, and "
           "llama_memory_seq_add cannot shift them; use true");
  }
  if (p.n_ctx == 0) refuse("n_ctx", "is 0; say how many cells there are");
}

/// Makes a context.
/// \throws std::invalid_argument as `check_context`; also where the model's memory cannot be shifted, but must be
/// \throws std::runtime_error if llama.cpp refuses
[[nodiscard]] inline llama_context_ptr make_context(llama_model* model,
                                                    const llama_context_params& params,
                                                    const Use& use) {
  check_context(params, model, use);
  llama_context_ptr context(llama_init_from_model(model, params));
  if (!context) throw std::runtime_error("llama.cpp cannot make the context (see above)");
  if (use.in_cache && !llama_memory_can_shift(llama_get_memory(context.get()))) {
    throw std::invalid_argument("the memory of architecture '" +
                                meta(model, "general.architecture") +
                                "' cannot be shifted (llama_memory_can_shift): keep positions");
  }
  return context;
}

/// Parameters of a context of so many cells and sequences; every field that matters here is stated.
[[nodiscard]] inline llama_context_params context_params(std::int32_t cells,
                                                         std::int32_t sequences,
                                                         const Use& use) {
  llama_context_params p = llama_context_default_params();
  p.n_ctx = static_cast<std::uint32_t>(cells);
  p.n_seq_max = static_cast<std::uint32_t>(sequences);
  p.n_batch = p.n_ubatch = 512;
  p.n_threads = p.n_threads_batch =
      static_cast<std::int32_t>(std::max(1U, std::thread::hardware_concurrency()));
  p.flash_attn_type = use.scores ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
  p.kv_unified = true;  // one pool of cells for all sequences
  p.swa_full = true;    // sliding layers keep what they no longer see, until it is evicted
  p.type_k = p.type_v = GGML_TYPE_F16;
  return p;
}

/// Lets llama.cpp print warnings and errors only.
inline void quiet() {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        static bool shown = false;  // of the line that goes on
        if (level != GGML_LOG_LEVEL_CONT) shown = level == GGML_LOG_LEVEL_ERROR;
        if (shown) std::fputs(text, stderr);
      },
      nullptr);
}

}  // namespace llama_example
