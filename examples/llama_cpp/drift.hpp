// SPDX-License-Identifier: Apache-2.0
#pragma once

// `llama_memory_seq_add` rotates stored keys in place and rounds them to the cache's type each time. Keys of layer 0 depend on
// token and position alone, so what they should be can be had by decoding the same tokens where they were moved to.

#include <kvtrim/engine/llama_cpp.hpp>

#include <ggml-backend.h>
#include <ggml.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "context.hpp"

namespace llama_example {

/// Reads layer 0's keys of the tokens that were decoded last.
class KeyReader {
 public:
  static bool callback(ggml_tensor* node, bool ask, void* self) {
    auto& reader = *static_cast<KeyReader*>(self);
    const bool ours = node->op == GGML_OP_SET_ROWS && node->src[2] != nullptr &&
                      kvtrim::llama_cpp::layer_of(node->src[2]->name, "cache_k_l") == 0;
    if (ours && !ask) reader.read(node);
    return ours || !ask;
  }
  /// Cells of the last micro-batch.
  std::vector<std::int64_t> cells;
  /// Keys of `watched`, as they are now, [watched, features].
  std::vector<float> keys;
  std::vector<std::int64_t> watched;

 private:
  void read(const ggml_tensor* node) {
    cells.resize(static_cast<std::size_t>(node->src[1]->ne[0]));
    ggml_backend_tensor_get(node->src[1], cells.data(), 0, cells.size() * sizeof(std::int64_t));
    const ggml_tensor* cache = node->src[2];
    const auto features = static_cast<std::size_t>(cache->ne[0]);
    keys.resize(watched.size() * features);
    std::vector<std::uint8_t> row(cache->nb[1]);
    for (std::size_t i = 0; i < watched.size(); ++i) {
      ggml_backend_tensor_get(
          cache, row.data(), static_cast<std::size_t>(watched[i]) * cache->nb[1], row.size());
      float* to = keys.data() + i * features;
      if (cache->type == GGML_TYPE_F16) {
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row.data()), to, cache->ne[0]);
      } else {
        std::copy_n(reinterpret_cast<const float*>(row.data()), features, to);
      }
    }
  }
};

/// Largest and mean relative error of a key of layer 0 after so many rotations by one position, K in f16 or f32.
struct Drift {
  double mean = 0, largest = 0;
};
[[nodiscard]] inline Drift drift_of(llama_model* model,
                                    llama_context_params params,
                                    ggml_type type,
                                    std::int32_t rotations,
                                    std::int32_t step) {
  constexpr std::int32_t tokens = 64;
  KeyReader reader;
  params.cb_eval = KeyReader::callback, params.cb_eval_user_data = &reader;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  const llama_token word = llama_vocab_bos(llama_model_get_vocab(model));
  // Decodes n tokens of a sequence from a position on; the keys of `watched` are read then.
  const auto decode = [&](llama_context* context, llama_seq_id s, llama_pos first, std::int32_t n) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    for (std::int32_t i = 0; i < n; ++i) {
      batch.token[i] = word + i, batch.pos[i] = first + i, batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = s, batch.logits[i] = i + 1 == n ? 1 : 0;
    }
    batch.n_tokens = n;
    const int rc = llama_decode(context, batch);
    llama_batch_free(batch);
    if (rc != 0) throw std::runtime_error("llama_decode returned " + std::to_string(rc));
  };
  const auto keys_in = [&](ggml_type t, std::int32_t first, std::int32_t turns) {
    params.type_k = t;
    const llama_context_ptr context = make_context(model, params, {.in_cache = true});
    const llama_memory_t memory = llama_get_memory(context.get());
    reader.watched.clear();
    decode(context.get(), 0, first, tokens);
    reader.watched = reader.cells;
    for (std::int32_t i = 0, at = first; i <= turns; ++i, at -= step) {
      decode(context.get(), 1, 0, 1);  // any decode applies the shift, and shows the keys
      llama_memory_seq_rm(memory, 1, 0, 1);
      if (i < turns) llama_memory_seq_add(memory, 0, at, at + tokens, -step);
    }
    return reader.keys;
  };
  const auto moved = keys_in(type, rotations * step, rotations);
  const auto fresh = keys_in(GGML_TYPE_F32, 0, 0);
  Drift drift;
  const std::size_t features = fresh.size() / tokens;
  for (std::size_t t = 0; t < tokens; ++t) {
    double error = 0, norm = 0;
    for (std::size_t f = t * features; f < (t + 1) * features; ++f) {
      const double want = static_cast<double>(fresh[f]), got = static_cast<double>(moved[f]);
      error += (got - want) * (got - want), norm += want * want;
    }
    const double relative = std::sqrt(error / norm);
    drift.mean += relative / tokens;
    drift.largest = std::max(drift.largest, relative);
  }
  return drift;
}

inline int print_drift(llama_model* model, const llama_context_params& params) {
  std::printf("relative error of a key of layer 0, mean (largest) of 64 keys\n");
  std::printf("rotations by 1 position  K f16                 K f32\n");
  for (const std::int32_t n : {0, 1, 3, 10, 100, 1000}) {
    const Drift half = drift_of(model, params, GGML_TYPE_F16, n, 1);
    const Drift full = drift_of(model, params, GGML_TYPE_F32, n, 1);
    std::printf(
        "%23d  %.1e (%.1e)  %.1e (%.1e)\n", n, half.mean, half.largest, full.mean, full.largest);
    std::fflush(stdout);
  }
  const Drift half = drift_of(model, params, GGML_TYPE_F16, 3, 512);
  const Drift full = drift_of(model, params, GGML_TYPE_F32, 3, 512);
  std::printf("%23s  %.1e (%.1e)  %.1e (%.1e)\n",
              "3 rotations by 512",
              half.mean,
              half.largest,
              full.mean,
              full.largest);
  return 0;
}

}  // namespace llama_example
