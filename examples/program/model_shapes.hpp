// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a model keeps of each token: by its name, from its GGUF file, or from its config.json. Layers that see a sliding window
// only and layers that see everything are kept apart, since only the latter grow.

#include <kvtrim/cache/memory.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "console.hpp"
#include "llama_engine/gguf.hpp"
#include "spec_values.hpp"

namespace program {

/// A model as far as its KV cache goes.
struct ModelShape {
  std::string name;
  std::vector<kvtrim::LayerShape>
      kinds;  ///< of its layers: those that see everything, those with a window
};

namespace detail {

// `sliding` of the layers have the window.
inline ModelShape shape_of(std::string name,
                           std::int32_t layers,
                           std::int32_t kv_heads,
                           std::int32_t key_dim,
                           std::int32_t value_dim,
                           std::int32_t window = 0,
                           std::int32_t sliding = 0) {
  ModelShape model{std::move(name), {}};
  if (layers > sliding) model.kinds.push_back({layers - sliding, kv_heads, key_dim, value_dim, 0});
  if (sliding > 0) model.kinds.push_back({sliding, kv_heads, key_dim, value_dim, window});
  return model;
}
// All but each `period`-th layer slide.
constexpr std::int32_t sliding_layers(std::int32_t layers, std::int32_t period) {
  return layers - layers / period;
}

}  // namespace detail

/// The models that are known by name; the numbers are those of their public config.json.
[[nodiscard]] inline const std::vector<ModelShape>& known_models() {
  using detail::shape_of, detail::sliding_layers;
  static const std::vector<ModelShape> models{
      shape_of("Llama-3-8B", 32, 8, 128, 128),
      shape_of("Llama-3-70B", 80, 8, 128, 128),
      shape_of("Llama-3.1-405B", 126, 8, 128, 128),
      shape_of("Mistral-7B-v0.1", 32, 8, 128, 128, 4096, 32),
      shape_of("Mistral-7B", 32, 8, 128, 128),
      shape_of("Qwen2.5-7B", 28, 4, 128, 128),
      shape_of("Qwen2.5-72B", 80, 8, 128, 128),
      shape_of("Qwen3-8B", 36, 8, 128, 128),
      shape_of("Gemma-3-4B", 34, 4, 256, 256, 1024, sliding_layers(34, 6)),
      shape_of("Gemma-3-12B", 48, 8, 256, 256, 1024, sliding_layers(48, 6)),
      shape_of("Gemma-3-27B", 62, 16, 128, 128, 1024, sliding_layers(62, 6)),
      shape_of("DeepSeek-V3", 61, 1, 576, 0),
      shape_of("SmolLM2-135M", 30, 3, 64, 64),
  };
  return models;
}

/// Reads a Hugging Face config.json. Where it leaves a field out, what the model's class assumes: as many KV heads as heads,
/// heads that share the hidden size, and of Gemma 3 its own numbers.
///
/// \throws std::runtime_error if it is no JSON, no model's configuration, or a model whose cache this does not know
[[nodiscard]] inline ModelShape read_config_json(const std::string& path) {
  const auto fail = [&](const std::string& why) { throw std::runtime_error(path + ": " + why); };
  nlohmann::json config = nlohmann::json::parse(read_file(path), nullptr, false);
  if (config.is_discarded() || !config.is_object()) fail("no JSON object");
  if (config.contains("text_config") && config["text_config"].is_object()) {
    config = nlohmann::json(config["text_config"]);  // of a model that sees pictures too
  }
  const auto is_set = [&](const char* key) {
    return config.contains(key) && !config[key].is_null();
  };
  const auto number = [&](const char* key,
                          std::optional<std::int64_t> otherwise,
                          std::int64_t least = 1) -> std::int32_t {
    if (!is_set(key)) {
      if (!otherwise) fail(std::string("no model's configuration: ") + key + " is missing");
      return static_cast<std::int32_t>(*otherwise);
    }
    const bool whole = config[key].is_number_integer();
    const std::int64_t value = whole ? config[key].get<std::int64_t>() : -1;
    if (value < least || value > (1 << 24)) {
      fail(std::string(key) + " is " + config[key].dump() + ", expected " + std::to_string(least) +
           " to 2^24");
    }
    return static_cast<std::int32_t>(value);
  };
  const bool gemma3 = is_set("model_type") && config["model_type"] == "gemma3_text";
  const std::int32_t layers = number("num_hidden_layers", {});
  if (is_set("kv_lora_rank")) {
    const std::int32_t latent = number("kv_lora_rank", {}) + number("qk_rope_head_dim", {});
    return detail::shape_of(path, layers, 1, latent, 0);
  }
  const auto ours = [&](std::int64_t value) {
    return gemma3 ? std::optional<std::int64_t>(value) : std::nullopt;
  };
  const std::int32_t heads = number("num_attention_heads", ours(8));
  const std::int32_t kv_heads = number("num_key_value_heads", gemma3 ? 4 : heads);
  const std::int32_t dim =
      is_set("head_dim") || gemma3 ? number("head_dim", 256) : number("hidden_size", {}) / heads;
  if (dim < 1) fail("hidden_size is below num_attention_heads " + std::to_string(heads));
  std::int32_t sliding = 0;
  if (is_set("layer_types")) {
    const nlohmann::json& types = config["layer_types"];
    if (!types.is_array() || types.size() != static_cast<std::size_t>(layers))
      fail("layer_types does not list " + std::to_string(layers) + " layers");
    for (const nlohmann::json& type : types) {
      if (type != "full_attention" && type != "sliding_attention")
        fail("layer type " + type.dump() + " is not known; known are full and sliding attention");
      sliding += type == "sliding_attention" ? 1 : 0;
    }
  } else if (gemma3) {
    sliding =
        detail::sliding_layers(layers,
                               number(is_set("_sliding_window_pattern") ? "_sliding_window_pattern"
                                                                        : "sliding_window_pattern",
                                      6));
  } else if (is_set("sliding_window") &&
             (!is_set("use_sliding_window") || config["use_sliding_window"] == true)) {
    // Of Qwen, the first max_window_layers see everything.
    const std::int32_t first = is_set("use_sliding_window") ? number("max_window_layers", 0, 0) : 0;
    sliding = std::max(0, layers - first);
  }
  const std::int32_t window = sliding > 0 ? number("sliding_window", ours(4096)) : 0;
  return detail::shape_of(path, layers, kv_heads, dim, dim, window, sliding);
}

/// Reads the shape from a GGUF file's keys; its weights are not looked at.
///
/// \throws std::runtime_error if the file is not sound, or is of a model whose cache this does not know
[[nodiscard]] inline ModelShape read_gguf_shape(const std::string& path) {
  const engine::GgufFile file(path);
  const std::string name = file.get<std::string>("general.architecture");
  const auto number = [&](const char* key, std::optional<std::int32_t> otherwise) {
    const std::string full = name + "." + key;
    if (otherwise && !file.has(full)) return *otherwise;
    const std::int64_t value = file.get<std::int64_t>(full);
    if (value < 1 || value > (1 << 24))
      file.fail("key " + full + " is " + std::to_string(value) + ", expected 1 to 2^24");
    return static_cast<std::int32_t>(value);
  };
  const std::int32_t layers = number("block_count", {});
  if (file.has(name + ".attention.kv_lora_rank")) {
    const std::int32_t latent =
        number("attention.kv_lora_rank", {}) + number("rope.dimension_count", {});
    return detail::shape_of(path, layers, 1, latent, 0);
  }
  const std::int32_t heads = number("attention.head_count", {});
  const std::int32_t kv_heads = number("attention.head_count_kv", heads);
  const std::int32_t key_dim = file.has(name + ".attention.key_length")
                                   ? number("attention.key_length", {})
                                   : std::max(1, number("embedding_length", {}) / heads);
  const std::int32_t value_dim = number("attention.value_length", key_dim);
  std::int32_t window = 0, sliding = 0;
  if (file.has(name + ".attention.sliding_window")) {
    if (name != "gemma3") file.fail("which layers of '" + name + "' slide is not known");
    window = number("attention.sliding_window", {});
    sliding = detail::sliding_layers(layers, 6);
  }
  return detail::shape_of(path, layers, kv_heads, key_dim, value_dim, window, sliding);
}

/// The shape of a model: of a file that ends in .gguf or .json, or by name.
///
/// \throws std::runtime_error as `read_config_json` and `read_gguf_shape`, or if no model has that name; the text lists them
[[nodiscard]] inline ModelShape model_shape(const std::string& model) {
  if (model.ends_with(".gguf")) return read_gguf_shape(model);
  if (model.ends_with(".json")) return read_config_json(model);
  std::vector<std::string> names;
  for (const ModelShape& m : known_models()) {
    if (m.name == model) return m;
    names.push_back(m.name);
  }
  throw std::runtime_error("unknown model '" + model + "'; known are " + listed(names) +
                           ", or a file that ends in .gguf or .json");
}

}  // namespace program
