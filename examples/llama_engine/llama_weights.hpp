// SPDX-License-Identifier: Apache-2.0
#pragma once

// The hyperparameters and parameters of a Llama model, read from a GGUF file. Everything a file can get wrong is found here.

#include <Eigen/Core>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "dequant.hpp"
#include "gguf.hpp"
#include "linear.hpp"
#include "split.hpp"

namespace engine {

/// What the metadata of a Llama model says.
struct LlamaShape {
  std::int32_t layers = 0;
  std::int32_t embedding = 0;     ///< features of a token between layers
  std::int32_t feed_forward = 0;  ///< features inside the feed-forward part
  std::int32_t heads = 0;         ///< query heads
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t rope_dims = 0;  ///< the first features of a head that are rotated
  std::int32_t vocabulary = 0;
  std::int32_t context = 0;  ///< rope positions the model was made for
  float rms_epsilon = 0;
  std::vector<double> frequencies;  ///< [rope_dims / 2] radians per position; scaling applied
};

/// Reads the hyperparameters.
///
/// \throws std::runtime_error if the architecture is not llama, a key is missing or out of range, or the rope scaling is unknown
[[nodiscard]] inline LlamaShape read_llama_shape(const GgufFile& file) {
  if (const auto& name = file.get<std::string>("general.architecture"); name != "llama") {
    file.fail("architecture '" + name + "' is not supported; known is llama");
  }
  const auto count = [&](const char* key, std::optional<std::int32_t> missing) {
    const std::string name = std::string("llama.") + key;
    if (missing && !file.has(name)) return *missing;
    const std::int64_t n = file.get<std::int64_t>(name);
    if (n < 1 || n > (1 << 24)) {
      file.fail("key " + name + " is " + std::to_string(n) + ", expected 1 to 2^24");
    }
    return static_cast<std::int32_t>(n);
  };
  LlamaShape shape;
  shape.layers = count("block_count", {});
  shape.embedding = count("embedding_length", {});
  shape.feed_forward = count("feed_forward_length", {});
  shape.heads = count("attention.head_count", {});
  shape.kv_heads = count("attention.head_count_kv", shape.heads);
  if (shape.heads % shape.kv_heads != 0) {
    file.fail(std::to_string(shape.heads) + " query heads are no multiple of " +
              std::to_string(shape.kv_heads) + " KV heads");
  }
  if (!file.has("llama.attention.key_length") && shape.embedding % shape.heads != 0) {
    file.fail("embedding length " + std::to_string(shape.embedding) + " is no multiple of " +
              std::to_string(shape.heads) + " heads");
  }
  shape.head_dim = count("attention.key_length", shape.embedding / shape.heads);
  if (count("attention.value_length", shape.head_dim) != shape.head_dim) {
    file.fail("keys and values of different lengths are not supported");
  }
  shape.rope_dims = count("rope.dimension_count", shape.head_dim);
  if (shape.rope_dims > shape.head_dim || shape.rope_dims % 2 != 0) {
    file.fail("llama.rope.dimension_count is " + std::to_string(shape.rope_dims) +
              ", expected an even number up to " + std::to_string(shape.head_dim));
  }
  shape.context = count("context_length", {});
  shape.rms_epsilon =
      static_cast<float>(file.get<double>("llama.attention.layer_norm_rms_epsilon"));
  const auto embeddings = file.tensors().find("token_embd.weight");
  if (embeddings == file.tensors().end() || embeddings->second.shape.size() != 2) {
    file.fail("missing tensor token_embd.weight, expected shape " +
              std::to_string(shape.embedding) + " x vocabulary");
  }
  if (embeddings->second.shape[1] > (1U << 24U)) file.fail("the vocabulary is over 2^24");
  shape.vocabulary = static_cast<std::int32_t>(embeddings->second.shape[1]);

  double stretch = 1;
  if (const auto* scaling = file.find<std::string>("llama.rope.scaling.type");
      scaling != nullptr && *scaling != "none") {
    if (*scaling != "linear") {
      file.fail("rope scaling '" + *scaling + "' is not supported; known are none, linear");
    }
    stretch = file.get<double>("llama.rope.scaling.factor");
  }
  const double* base = file.find<double>("llama.rope.freq_base");
  for (std::int32_t i = 0; i < shape.rope_dims; i += 2) {
    const double power = -static_cast<double>(i) / shape.rope_dims;
    shape.frequencies.push_back(std::pow(base != nullptr ? *base : 10000.0, power) / stretch);
  }
  // Llama 3.1 and later: a divisor for each frequency.
  if (file.tensors().contains("rope_freqs.weight")) {
    const std::array<std::uint64_t, 1> expected{shape.frequencies.size()};
    const GgufTensor& tensor = file.tensor("rope_freqs.weight", expected);
    std::vector<float> divisors(shape.frequencies.size());
    dequantise(tensor.type, tensor.bytes, divisors);
    for (std::size_t i = 0; i < divisors.size(); ++i) shape.frequencies[i] /= double{divisors[i]};
  }
  for (const double frequency : shape.frequencies) {
    if (!std::isfinite(frequency)) file.fail("a rope frequency is not finite");
  }
  return shape;
}

/// The parameters, as f32.
struct LlamaWeights {
  struct Layer {
    Eigen::RowVectorXf attention_norm, feed_forward_norm;
    Matrix query, key, value, attention_out, gate, up, down;
  };
  Matrix embedding;              ///< [vocabulary, embedding]
  std::optional<Matrix> output;  ///< [vocabulary, embedding]; absent: the embedding serves
  Eigen::RowVectorXf output_norm;
  std::vector<Layer> layers;
};

/// Finds and dequantises all parameters.
///
/// \throws std::runtime_error if a tensor is missing, of another shape, or not part of a Llama model as this engine knows it
[[nodiscard]] inline LlamaWeights read_llama_weights(const GgufFile& file,
                                                     const LlamaShape& shape) {
  LlamaWeights weights;
  struct Job {
    const GgufTensor* tensor;
    std::span<float> to;
  };
  std::vector<Job> jobs;
  std::set<std::string> known{"rope_freqs.weight"};
  const auto find = [&](const std::string& name, std::initializer_list<std::int64_t> dims) {
    std::vector<std::uint64_t> expected;
    for (const std::int64_t n : dims) expected.push_back(static_cast<std::uint64_t>(n));
    known.insert(name);
    return &file.tensor(name, expected);
  };
  const auto matrix = [&](const std::string& name, std::int64_t out, std::int64_t in, Matrix& to) {
    const GgufTensor* tensor = find(name, {in, out});
    to.resize(out, in);
    jobs.push_back({tensor, {to.data(), static_cast<std::size_t>(to.size())}});
  };
  const auto vector = [&](const std::string& name, std::int64_t size, Eigen::RowVectorXf& to) {
    const GgufTensor* tensor = find(name, {size});
    to.resize(size);
    jobs.push_back({tensor, {to.data(), static_cast<std::size_t>(to.size())}});
  };
  const std::int32_t width = shape.embedding;
  const std::int64_t queries = std::int64_t{shape.heads} * shape.head_dim;
  const std::int64_t keys = std::int64_t{shape.kv_heads} * shape.head_dim;
  matrix("token_embd.weight", shape.vocabulary, width, weights.embedding);
  vector("output_norm.weight", width, weights.output_norm);
  if (file.tensors().contains("output.weight")) {
    matrix("output.weight", shape.vocabulary, width, weights.output.emplace());
  }
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    // One by one, so that a wrong layer count stops at the first missing tensor.
    const std::string block = "blk." + std::to_string(l) + ".";
    if (!file.tensors().contains(block + "attn_norm.weight")) {
      static_cast<void>(find(block + "attn_norm.weight", {width}));
    }
    weights.layers.emplace_back();
  }
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    LlamaWeights::Layer& layer = weights.layers[static_cast<std::size_t>(l)];
    vector(block + "attn_norm.weight", width, layer.attention_norm);
    matrix(block + "attn_q.weight", queries, width, layer.query);
    matrix(block + "attn_k.weight", keys, width, layer.key);
    matrix(block + "attn_v.weight", keys, width, layer.value);
    matrix(block + "attn_output.weight", width, queries, layer.attention_out);
    vector(block + "ffn_norm.weight", width, layer.feed_forward_norm);
    matrix(block + "ffn_gate.weight", shape.feed_forward, width, layer.gate);
    matrix(block + "ffn_up.weight", shape.feed_forward, width, layer.up);
    matrix(block + "ffn_down.weight", width, shape.feed_forward, layer.down);
  }
  // Ignoring biases or experts would not fail but produce nonsense.
  for (const auto& [name, tensor] : file.tensors()) {
    if (!known.contains(name))
      file.fail("tensor " + name + " is not part of a model this engine knows");
  }
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    dequantise(jobs[i].tensor->type, jobs[i].tensor->bytes, jobs[i].to);
  }
  return weights;
}

/// Leaves of the parameters, and of the shape, what one rank has of a model that is split by heads: its KV heads with their
/// query heads, and a part of the feed-forward features. Products with the output matrices are then to be added up.
///
/// \throws std::invalid_argument if the ranks do not divide the KV heads
inline void keep_heads(LlamaShape& shape, LlamaWeights& weights, const Ranks& ranks) {
  const std::int32_t size = ranks.size();
  if (shape.kv_heads % size != 0) {
    throw std::invalid_argument("engine::LlamaModel: " + std::to_string(shape.kv_heads) +
                                " KV heads cannot be split over " + std::to_string(size) +
                                " ranks");
  }
  const Eigen::Index queries = Eigen::Index{shape.heads} / size * shape.head_dim;
  const Eigen::Index keys = Eigen::Index{shape.kv_heads} / size * shape.head_dim;
  const Eigen::Index begin = Eigen::Index{shape.feed_forward} * ranks.rank() / size;
  const Eigen::Index inner = Eigen::Index{shape.feed_forward} * (ranks.rank() + 1) / size - begin;
  const auto rows = [](Matrix& m, Eigen::Index first, Eigen::Index n) {
    m = Matrix(m.middleRows(first, n));
  };
  const auto columns = [](Matrix& m, Eigen::Index first, Eigen::Index n) {
    m = Matrix(m.middleCols(first, n));
  };
  for (LlamaWeights::Layer& layer : weights.layers) {
    rows(layer.query, ranks.rank() * queries, queries);
    rows(layer.key, ranks.rank() * keys, keys);
    rows(layer.value, ranks.rank() * keys, keys);
    columns(layer.attention_out, ranks.rank() * queries, queries);
    rows(layer.gate, begin, inner);
    rows(layer.up, begin, inner);
    columns(layer.down, begin, inner);
  }
  shape.heads /= size;
  shape.kv_heads /= size;
  shape.feed_forward = static_cast<std::int32_t>(inner);
}

}  // namespace engine
