// SPDX-License-Identifier: Apache-2.0
#pragma once

// Byte-level BPE from a GGUF file's own vocabulary and merges. Text is cut into pieces by the pre-tokenizer's patterns, each
// byte of a piece becomes a token (a printable character stands for it in the vocabulary), then neighbours are merged, lowest
// rank first, leftmost among equals. Bytes that are not UTF-8 match no pattern: a run of them is a piece of its own, so any
// input is encoded, and comes back from decode() byte for byte if the vocabulary has a token for each byte.

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <queue>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gguf.hpp"

namespace engine {

using Token = std::int32_t;

namespace detail {

/// A compiled pattern over UTF-8 text with Unicode classes.
class Pattern {
 public:
  explicit Pattern(const char* text) {
    int error = 0;
    PCRE2_SIZE where = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text),
                              PCRE2_ZERO_TERMINATED,
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF,
                              &error,
                              &where,
                              nullptr));
    if (!code_) throw std::runtime_error("engine: PCRE2 refuses the pattern " + std::string(text));
    // Without JIT support the same pattern is interpreted: slower, same pieces.
    static_cast<void>(pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE));
    match_.reset(pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    if (!match_) throw std::bad_alloc();
  }

  /// Appends the matches, and what lies between them, to `pieces`: joined they are `text` again.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const {
    std::size_t done = 0;
    while (done < text.size()) {
      const int found = pcre2_match(code_.get(),
                                    reinterpret_cast<PCRE2_SPTR>(text.data()),
                                    text.size(),
                                    done,
                                    0,
                                    match_.get(),
                                    nullptr);
      if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
        throw std::runtime_error("engine: PCRE2 match error " + std::to_string(found));
      }
      const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match_.get());
      const std::size_t begin = found < 0 ? text.size() : range[0];
      const std::size_t end = found < 0 ? text.size() : range[1];
      if (begin > done) pieces.push_back(text.substr(done, begin - done));
      if (end > begin) pieces.push_back(text.substr(begin, end - begin));
      done = end > done ? end : text.size();
    }
  }

 private:
  struct Free {
    void operator()(pcre2_code* p) const { pcre2_code_free(p); }
    void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
  std::unique_ptr<pcre2_match_data, Free> match_;
};

inline constexpr const char* gpt2_pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

inline void append_utf8(std::string& out, std::uint32_t point) {
  // The characters that stand for bytes lie below U+0144: one or two bytes each.
  if (point < 0x80U) {
    out += static_cast<char>(point);
  } else {
    out += static_cast<char>(0xC0U | (point >> 6U));
    out += static_cast<char>(0x80U | (point & 0x3FU));
  }
}

/// The character that stands for each byte: itself if it is printable Latin-1, otherwise the next one from U+0100 on.
[[nodiscard]] inline std::array<std::string, 256> byte_characters() {
  std::array<std::string, 256> characters;
  std::uint32_t next = 0x100U;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 0x20U && byte < 0x7FU) || (byte > 0xA0U && byte != 0xADU);
    append_utf8(characters[byte], printable ? byte : next++);
  }
  return characters;
}

}  // namespace detail

/// Cuts text into the pieces within which tokens may be merged.
///
/// \par Thread-safety
/// one thread
class PreTokenizer {
 public:
  /// \param name  as the key `tokenizer.ggml.pre` has it: smollm, gpt-2, llama-bpe
  /// \throws std::runtime_error if the name is unknown; the message lists the known ones
  explicit PreTokenizer(const std::string& name) {
    if (name == "smollm") {
      patterns_.emplace_back(R"(\p{N})");
      patterns_.emplace_back(detail::gpt2_pattern);
    } else if (name == "gpt-2") {
      patterns_.emplace_back(detail::gpt2_pattern);
    } else if (name == "llama-bpe") {
      patterns_.emplace_back(detail::llama3_pattern);
    } else {
      throw std::runtime_error("unknown pre-tokenizer '" + name +
                               "'; known are smollm, gpt-2, llama-bpe");
    }
  }

  /// The pieces in order; joined they are `text`. Each pattern cuts the pieces left by the one before it.
  [[nodiscard]] std::vector<std::string_view> split(std::string_view text) const {
    std::vector<std::string_view> pieces{text};
    for (const detail::Pattern& pattern : patterns_) {
      std::vector<std::string_view> finer;
      for (const std::string_view piece : pieces) pattern.split(piece, finer);
      pieces = std::move(finer);
    }
    return pieces;
  }

 private:
  std::vector<detail::Pattern> patterns_;
};

/// Text to tokens and back.
///
/// \par Thread-safety
/// one thread
class Tokenizer {
 public:
  /// \throws std::runtime_error if the file has no byte-level BPE vocabulary, or one that contradicts itself
  explicit Tokenizer(const GgufFile& file) : splitter_(pre_tokenizer(file)) {
    using Strings = std::vector<std::string>;
    if (const auto& model = file.get<std::string>("tokenizer.ggml.model"); model != "gpt2") {
      file.fail("tokenizer model '" + model + "' is not supported; known is gpt2 (byte-level BPE)");
    }
    whole_pieces_first_ = file.get<std::string>("tokenizer.ggml.pre") == "llama-bpe";
    texts_ = file.get<Strings>("tokenizer.ggml.tokens");
    if (texts_.empty() || texts_.size() > 0x7FFFFFFFU) file.fail("the vocabulary is empty or huge");
    for (std::size_t i = 0; i < texts_.size(); ++i) ids_.emplace(texts_[i], static_cast<Token>(i));
    read_types(file);
    read_merges(file);
    for (std::size_t byte = 0; byte < 256; ++byte) {
      byte_of_.emplace(characters_[byte], static_cast<char>(byte));
      byte_tokens_[byte] = find(characters_[byte]);
    }
    bos_ = special_id(file, "tokenizer.ggml.bos_token_id");
    eos_ = special_id(file, "tokenizer.ggml.eos_token_id");
    unknown_ = special_id(file, "tokenizer.ggml.unknown_token_id");
    const bool* add_bos = file.find<bool>("tokenizer.ggml.add_bos_token");
    add_bos_ = add_bos != nullptr && *add_bos && bos_ >= 0;
  }

  [[nodiscard]] std::size_t vocabulary() const noexcept { return texts_.size(); }
  /// The token that ends a turn or text; -1 if the file names none.
  [[nodiscard]] Token eos() const noexcept { return eos_; }
  /// The token a prompt starts with; -1 if the file names none.
  [[nodiscard]] Token bos() const noexcept { return bos_; }
  /// Whether the file asks for bos() in front of a prompt; encode() does not put it there.
  [[nodiscard]] bool add_bos() const noexcept { return add_bos_; }
  /// The token of exactly this vocabulary entry; -1 if there is none.
  [[nodiscard]] Token find(std::string_view entry) const {
    const auto it = ids_.find(std::string(entry));
    return it == ids_.end() ? -1 : it->second;
  }
  /// Whether generation ends at this token: the file's end token, or a text's end in any vocabulary of this family.
  [[nodiscard]] bool ends_text(Token token) const {
    return token >= 0 && (token == eos_ || token == find("<|endoftext|>") ||
                          token == find("<|im_end|>") || token == find("<|eot_id|>"));
  }

  /// Encodes text.
  ///
  /// \param text           any bytes; see the top of the file for those that are not UTF-8
  /// \param parse_special  whether the text of a control or user-defined token becomes that token
  /// \throws std::runtime_error if a byte has no token and the file names no unknown token
  /// \par Ties
  /// the special token that starts first; among those, the longest
  /// \par Complexity
  /// O(n log n) in the longest piece
  [[nodiscard]] std::vector<Token> encode(std::string_view text, bool parse_special) const {
    std::vector<Token> tokens;
    std::vector<std::size_t> next(parse_special ? specials_.size() : 0, 0);
    std::size_t done = 0;
    while (done < text.size()) {
      std::size_t begin = text.size();
      const Token* match = nullptr;
      for (std::size_t s = 0; s < next.size(); ++s) {
        const std::string& special = texts_[static_cast<std::size_t>(specials_[s])];
        // A position that was found stays valid until the text before it is done.
        if (next[s] <= done) next[s] = text.find(special, done);
        if (next[s] < begin) {
          begin = next[s];
          match = &specials_[s];
        }
        if (next[s] == std::string_view::npos) next[s] = text.size();
      }
      encode_plain(text.substr(done, begin - done), tokens);
      done = begin;
      if (match != nullptr) {
        tokens.push_back(*match);
        done += texts_[static_cast<std::size_t>(*match)].size();
      }
    }
    return tokens;
  }

  /// The bytes that the tokens stand for, special tokens as they are written.
  ///
  /// \throws std::runtime_error if an id is outside the vocabulary
  [[nodiscard]] std::string decode(std::span<const Token> tokens) const {
    std::string text;
    for (const Token token : tokens) {
      if (token < 0 || static_cast<std::size_t>(token) >= texts_.size()) {
        throw std::runtime_error("engine::Tokenizer: token " + std::to_string(token) +
                                 " is outside the vocabulary of " + std::to_string(texts_.size()));
      }
      const std::string& entry = texts_[static_cast<std::size_t>(token)];
      if (is_special_[static_cast<std::size_t>(token)]) {
        text += entry;
      } else {
        append_bytes(entry, text);
      }
    }
    return text;
  }

 private:
  struct Merge {
    std::int32_t rank;
    Token result;
  };
  /// A possible merge of the symbol at `left` with the one after it; stale once either has changed.
  struct Candidate {
    std::int32_t rank;
    std::int32_t left;
    std::int32_t right;
    std::uint64_t pair;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };

  static PreTokenizer pre_tokenizer(const GgufFile& file) {
    try {
      return PreTokenizer(file.get<std::string>("tokenizer.ggml.pre"));
    } catch (const std::runtime_error& error) {
      const std::string what = error.what();
      if (what.starts_with(file.name())) throw;
      file.fail(what);
    }
  }

  static std::uint64_t pair_key(Token a, Token b) {
    return (std::uint64_t{static_cast<std::uint32_t>(a)} << 32U) | static_cast<std::uint32_t>(b);
  }

  Token special_id(const GgufFile& file, const std::string& key) const {
    const std::int64_t* id = file.find<std::int64_t>(key);
    if (id == nullptr) return -1;
    if (*id < 0 || *id >= static_cast<std::int64_t>(texts_.size())) {
      file.fail("key " + key + " is " + std::to_string(*id) + ", outside the vocabulary of " +
                std::to_string(texts_.size()));
    }
    return static_cast<Token>(*id);
  }

  void read_types(const GgufFile& file) {
    const auto& types = file.get<std::vector<std::int64_t>>("tokenizer.ggml.token_type");
    if (types.size() != texts_.size()) {
      file.fail("tokenizer.ggml.token_type has " + std::to_string(types.size()) +
                " entries for a vocabulary of " + std::to_string(texts_.size()));
    }
    constexpr std::int64_t control = 3;
    constexpr std::int64_t user_defined = 4;
    is_special_.resize(texts_.size());
    for (std::size_t i = 0; i < types.size(); ++i) {
      is_special_[i] = types[i] == control || types[i] == user_defined;
      if (is_special_[i] && !texts_[i].empty()) specials_.push_back(static_cast<Token>(i));
    }
    // The longest first: the first of those that start at the same place wins.
    std::sort(specials_.begin(), specials_.end(), [&](Token a, Token b) {
      const std::size_t length_a = texts_[static_cast<std::size_t>(a)].size();
      const std::size_t length_b = texts_[static_cast<std::size_t>(b)].size();
      return length_a != length_b ? length_a > length_b : a < b;
    });
  }

  void read_merges(const GgufFile& file) {
    const auto& merges = file.get<std::vector<std::string>>("tokenizer.ggml.merges");
    merges_.reserve(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      const std::string& merge = merges[i];
      const std::size_t space = merge.find(' ', 1);
      const Token a = space == std::string::npos ? -1 : find(merge.substr(0, space));
      const Token b = space == std::string::npos ? -1 : find(merge.substr(space + 1));
      const Token ab = a < 0 || b < 0 ? -1 : find(merge.substr(0, space) + merge.substr(space + 1));
      if (ab < 0) {
        file.fail("merge " + std::to_string(i) + " '" + merge +
                  "' is not two entries of the vocabulary that make a third");
      }
      merges_.emplace(pair_key(a, b), Merge{static_cast<std::int32_t>(i), ab});
    }
  }

  void encode_plain(std::string_view text, std::vector<Token>& tokens) const {
    for (const std::string_view piece : splitter_.split(text)) encode_piece(piece, tokens);
  }

  void encode_piece(std::string_view piece, std::vector<Token>& tokens) const {
    std::vector<Token> symbols;
    for (const char c : piece) {
      const auto byte = static_cast<unsigned char>(c);
      const Token token = byte_tokens_[byte] >= 0 ? byte_tokens_[byte] : unknown_;
      if (token < 0) {
        throw std::runtime_error("engine::Tokenizer: byte " + std::to_string(int{byte}) +
                                 " has no token, and the file names no unknown token");
      }
      symbols.push_back(token);
    }
    if (whole_pieces_first_) {
      std::string entry;
      for (const char c : piece) entry += characters_[static_cast<unsigned char>(c)];
      if (const Token whole = find(entry); whole >= 0) symbols.assign(1, whole);
    }
    merge(symbols);
    for (const Token symbol : symbols) {
      if (symbol >= 0) tokens.push_back(symbol);
    }
  }

  /// Merges in place: a symbol that went into its left neighbour becomes -1.
  void merge(std::vector<Token>& symbols) const {
    const auto n = static_cast<std::int32_t>(symbols.size());
    std::vector<std::int32_t> before(symbols.size());
    std::vector<std::int32_t> after(symbols.size());
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto at = [&](std::int32_t i) -> Token& { return symbols[static_cast<std::size_t>(i)]; };
    const auto push = [&](std::int32_t left, std::int32_t right) {
      if (left < 0 || right >= n) return;
      const std::uint64_t pair = pair_key(at(left), at(right));
      if (const auto it = merges_.find(pair); it != merges_.end()) {
        queue.push({it->second.rank, left, right, pair});
      }
    };
    for (std::int32_t i = 0; i < n; ++i) {
      before[static_cast<std::size_t>(i)] = i - 1;
      after[static_cast<std::size_t>(i)] = i + 1;
      push(i, i + 1);
    }
    while (!queue.empty()) {
      const auto [rank, left, right, pair] = queue.top();
      queue.pop();
      if (at(left) < 0 || at(right) < 0 || pair_key(at(left), at(right)) != pair) continue;
      at(left) = merges_.at(pair).result;
      at(right) = -1;
      const std::int32_t follow = after[static_cast<std::size_t>(right)];
      after[static_cast<std::size_t>(left)] = follow;
      if (follow < n) before[static_cast<std::size_t>(follow)] = left;
      push(before[static_cast<std::size_t>(left)], left);
      push(left, follow);
    }
  }

  /// A character of the entry that stands for no byte is kept as it is.
  void append_bytes(const std::string& entry, std::string& text) const {
    for (std::size_t i = 0; i < entry.size();) {
      std::size_t length = 1;
      while (i + length < entry.size() &&
             (static_cast<unsigned char>(entry[i + length]) & 0xC0U) == 0x80U) {
        ++length;
      }
      const std::string character = entry.substr(i, length);
      const auto it = byte_of_.find(character);
      if (it != byte_of_.end()) {
        text += it->second;
      } else {
        text += character;
      }
      i += length;
    }
  }

  PreTokenizer splitter_;
  bool whole_pieces_first_ = false;  // Llama 3: a piece that is in the vocabulary is not merged
  bool add_bos_ = false;
  std::vector<std::string> texts_;
  std::vector<bool> is_special_;
  std::vector<Token> specials_;
  std::unordered_map<std::string, Token> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::array<std::string, 256> characters_ = detail::byte_characters();
  std::unordered_map<std::string, char> byte_of_;
  std::array<Token, 256> byte_tokens_{};
  Token bos_ = -1;
  Token eos_ = -1;
  Token unknown_ = -1;
};

}  // namespace engine
