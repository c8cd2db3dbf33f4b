// SPDX-License-Identifier: Apache-2.0
#pragma once

// What comes next where a model does not choose: the tokens of a file, and how well the model foresaw them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "eval_data.hpp"
#include "llama_engine/tokenizer.hpp"
#include "strict.hpp"

namespace program {

/// The tokens of a text file, or of JSON lines with `ids`, one after the other, if the name ends in .jsonl.
/// \throws std::runtime_error if the file cannot be read or has no token, or a line has no ids of the vocabulary; it is named
[[nodiscard]] inline std::vector<Token> read_tokens(const std::string& path,
                                                    const engine::Tokenizer& tokenizer) {
  std::vector<Token> tokens;
  if (!path.ends_with(".jsonl")) {
    tokens = tokenizer.encode(read_file(path), false);
  } else {
    detail::for_each_json_line(path, [&](const nlohmann::json& line) {
      for (const nlohmann::json& id : line.at("ids")) {
        const auto token = strict<std::int64_t>(id);
        if (token < 0 || static_cast<std::size_t>(token) >= tokenizer.vocabulary()) {
          throw std::runtime_error("token " + std::to_string(token) +
                                   " is outside the vocabulary of " +
                                   std::to_string(tokenizer.vocabulary()));
        }
        tokens.push_back(static_cast<Token>(token));
      }
    });
  }
  if (tokens.empty()) throw std::runtime_error(path + " has no token");
  return tokens;
}

/// Mean surprisal of the tokens so far, as a perplexity.
class Perplexity {
 public:
  /// \param surprisal  of one more token, in nats
  void add(double surprisal) {
    sum_ += surprisal;
    ++count_;
  }
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  /// \pre `count()` is not 0
  [[nodiscard]] double value() const { return std::exp(sum_ / static_cast<double>(count_)); }

 private:
  double sum_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace program
