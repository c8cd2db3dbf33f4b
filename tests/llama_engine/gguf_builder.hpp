// SPDX-License-Identifier: Apache-2.0
#pragma once

// Writes small GGUF files into memory: valid ones and, with `head`, invalid ones.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llama_engine/gguf.hpp"
#include "llama_engine/tokenizer.hpp"

namespace engine_test {

using Bytes = std::vector<std::byte>;

/// Appends little-endian fields.
class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    const auto* p = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), p, p + sizeof(T));
    return *this;
  }
  Writer& raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Writer& string(const std::string& text) {
    number(std::uint64_t{text.size()});
    return raw(std::as_bytes(std::span(text)));
  }
  [[nodiscard]] const Bytes& bytes() const { return bytes_; }
  [[nodiscard]] std::size_t size() const { return bytes_.size(); }

 private:
  Bytes bytes_;
};

/// Magic number, version and the two counts.
inline Writer head(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
  Writer out;
  out.raw(std::as_bytes(std::span("GGUF", 4))).number(version).number(tensors).number(keys);
  return out;
}

/// A file from its keys and tensors. It ends with the last byte of the last tensor.
class GgufBuilder {
 public:
  GgufBuilder& u32(const std::string& key, std::uint32_t value) {
    keys_[key] = Writer().number(std::uint32_t{4}).number(value).bytes();
    return *this;
  }
  GgufBuilder& f32(const std::string& key, float value) {
    keys_[key] = Writer().number(std::uint32_t{6}).number(value).bytes();
    return *this;
  }
  GgufBuilder& boolean(const std::string& key, bool value) {
    keys_[key] = Writer().number(std::uint32_t{7}).number(std::uint8_t{value}).bytes();
    return *this;
  }
  GgufBuilder& string(const std::string& key, const std::string& value) {
    keys_[key] = Writer().number(std::uint32_t{8}).string(value).bytes();
    return *this;
  }
  GgufBuilder& strings(const std::string& key, const std::vector<std::string>& values) {
    Writer out;
    out.number(std::uint32_t{9}).number(std::uint32_t{8}).number(std::uint64_t{values.size()});
    for (const std::string& value : values) out.string(value);
    keys_[key] = out.bytes();
    return *this;
  }
  GgufBuilder& i32s(const std::string& key, const std::vector<std::int32_t>& values) {
    Writer out;
    out.number(std::uint32_t{9}).number(std::uint32_t{5}).number(std::uint64_t{values.size()});
    for (const std::int32_t value : values) out.number(value);
    keys_[key] = out.bytes();
    return *this;
  }
  GgufBuilder& tensor(const std::string& name,
                      const std::vector<std::uint64_t>& shape,
                      const std::vector<float>& values) {
    tensors_[name] = {shape, values};
    return *this;
  }
  GgufBuilder& without(const std::string& name) {
    keys_.erase(name);
    tensors_.erase(name);
    return *this;
  }

  [[nodiscard]] Bytes bytes() const {
    Writer out = head(tensors_.size(), keys_.size());
    for (const auto& [key, value] : keys_) out.string(key).raw(value);
    std::uint64_t offset = 0;
    for (const auto& [name, tensor] : tensors_) {
      out.string(name).number(static_cast<std::uint32_t>(tensor.shape.size()));
      for (const std::uint64_t n : tensor.shape) out.number(n);
      out.number(std::uint32_t{0}).number(offset);
      offset = padded(offset + tensor.values.size() * sizeof(float));
    }
    for (const auto& [name, tensor] : tensors_) {
      while (out.size() % alignment != 0) out.number(std::uint8_t{0});
      out.raw(std::as_bytes(std::span(tensor.values)));
    }
    return out.bytes();
  }
  [[nodiscard]] engine::GgufFile file() const { return {"test.gguf", bytes()}; }
  [[nodiscard]] const std::vector<float>& values(const std::string& name) const {
    return tensors_.at(name).values;
  }
  [[nodiscard]] bool has_tensor(const std::string& name) const { return tensors_.contains(name); }

 private:
  static constexpr std::size_t alignment = 32;
  static std::uint64_t padded(std::uint64_t n) {
    return (n + alignment - 1) / alignment * alignment;
  }

  struct Tensor {
    std::vector<std::uint64_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, Bytes> keys_;
  std::map<std::string, Tensor> tensors_;
};

/// All 256 bytes, then what `merges` make, then two special tokens: "<s>" and "<s>x".
inline GgufBuilder vocabulary(const std::vector<std::string>& merges,
                              const std::string& pre = "gpt-2") {
  std::vector<std::string> tokens;
  for (const std::string& character : engine::detail::byte_characters())
    tokens.push_back(character);
  for (const std::string& merge : merges) {
    const std::size_t space = merge.find(' ');
    tokens.push_back(merge.substr(0, space) + merge.substr(space + 1));
  }
  std::vector<std::int32_t> types(tokens.size(), 1);
  tokens.insert(tokens.end(), {"<s>", "<s>x"});
  types.insert(types.end(), {3, 4});
  GgufBuilder builder;
  builder.string("tokenizer.ggml.model", "gpt2")
      .string("tokenizer.ggml.pre", pre)
      .strings("tokenizer.ggml.tokens", tokens)
      .i32s("tokenizer.ggml.token_type", types)
      .strings("tokenizer.ggml.merges", merges)
      .u32("tokenizer.ggml.eos_token_id", 256);
  return builder;
}

/// A Llama model of 2 layers with random parameters: 3 KV heads of 2 query heads each, of which 6 of 8 features rotate.
inline GgufBuilder tiny_llama() {
  constexpr std::uint64_t width = 12;
  constexpr std::uint64_t inner = 20;
  constexpr std::uint64_t queries = 48;
  constexpr std::uint64_t keys = 24;
  constexpr std::uint64_t vocabulary = 11;
  std::mt19937 random(7);
  const auto values = [&](std::uint64_t n, float centre) {
    std::vector<float> result;
    for (std::uint64_t i = 0; i < n; ++i) {
      result.push_back(centre + static_cast<float>(random() % 2001) / 1000.0F - 1.0F);
    }
    return result;
  };
  GgufBuilder builder;
  builder.string("general.architecture", "llama")
      .u32("llama.block_count", 2)
      .u32("llama.embedding_length", width)
      .u32("llama.feed_forward_length", inner)
      .u32("llama.attention.head_count", 6)
      .u32("llama.attention.head_count_kv", 3)
      .u32("llama.attention.key_length", 8)
      .u32("llama.attention.value_length", 8)
      .u32("llama.rope.dimension_count", 6)
      .u32("llama.context_length", 200)
      .f32("llama.rope.freq_base", 100.0F)
      .f32("llama.attention.layer_norm_rms_epsilon", 1e-5F)
      .tensor("token_embd.weight", {width, vocabulary}, values(width * vocabulary, 0))
      .tensor("output_norm.weight", {width}, values(width, 1));
  for (const std::string block : {"blk.0.", "blk.1."}) {
    builder.tensor(block + "attn_norm.weight", {width}, values(width, 1))
        .tensor(block + "attn_q.weight", {width, queries}, values(width * queries, 0))
        .tensor(block + "attn_k.weight", {width, keys}, values(width * keys, 0))
        .tensor(block + "attn_v.weight", {width, keys}, values(width * keys, 0))
        .tensor(block + "attn_output.weight", {queries, width}, values(width * queries, 0))
        .tensor(block + "ffn_norm.weight", {width}, values(width, 1))
        .tensor(block + "ffn_gate.weight", {width, inner}, values(width * inner, 0))
        .tensor(block + "ffn_up.weight", {width, inner}, values(width * inner, 0))
        .tensor(block + "ffn_down.weight", {inner, width}, values(width * inner, 0));
  }
  return builder;
}

}  // namespace engine_test
