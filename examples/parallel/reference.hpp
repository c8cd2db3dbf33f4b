// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one process computed, row of logits after row, in a file; a run over ranks computes the same rows in the same order
// and is held against it.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama_engine/sampling.hpp"

namespace parallel {

/// What is known of one text under one policy.
struct Comparison {
  std::string text, policy;
  double margin = std::numeric_limits<double>::infinity();  ///< least, of the two highest logits
  double difference = 0;  ///< greatest, of a logit from one process's
  std::int32_t steps = 0;
  std::int32_t equal = 0;  ///< tokens that are one process's, before the first that is not
  std::vector<std::int32_t> tokens, expected;
};

/// Writes rows of logits, or compares with those of a file.
class Reference {
 public:
  /// \param path   empty: nothing is written, nothing compared (the ranks but the first)
  /// \param write  whether this is the one process
  /// \throws std::runtime_error if the file cannot be opened
  Reference(const std::string& path, bool write) : path_(path), write_(write) {
    if (path.empty()) return;
    file_.open(path, std::ios::binary | (write ? std::ios::out | std::ios::trunc : std::ios::in));
    if (!file_) throw std::runtime_error("cannot open " + path);
  }

  /// One more row of a text.
  /// \returns the likeliest token
  /// \throws std::runtime_error if the file ends, is of another model or other prompts, or cannot be written
  std::int32_t row(Comparison& of, std::span<const float> logits) {
    const std::int32_t token = engine::greedy_token(logits);
    of.tokens.push_back(token);
    ++of.steps;
    if (path_.empty()) return token;
    Head head{key(of), static_cast<std::int64_t>(logits.size())};
    std::span<const float> own = logits;
    if (write_) {
      file_.write(reinterpret_cast<const char*>(&head), sizeof(head));
      file_.write(reinterpret_cast<const char*>(logits.data()),
                  static_cast<std::streamsize>(logits.size_bytes()));
    } else {
      Head found;
      file_.read(reinterpret_cast<char*>(&found), sizeof(found));
      if (!file_ || found.key != head.key || found.count != head.count)
        throw std::runtime_error(path_ + " is not of this model, these prompts and policies");
      row_.resize(logits.size());
      file_.read(reinterpret_cast<char*>(row_.data()),
                 static_cast<std::streamsize>(logits.size_bytes()));
      own = row_;
    }
    if (!file_) throw std::runtime_error("cannot read or write " + path_);
    const std::int32_t expected = engine::greedy_token(own);
    of.expected.push_back(expected);
    if (of.equal + 1 < of.steps) return token;  // the texts have parted
    of.margin = std::min(of.margin, margin(own, expected));
    for (std::size_t i = 0; i < own.size(); ++i)
      of.difference = std::max(of.difference, std::abs(double{own[i]} - double{logits[i]}));
    of.equal += token == expected ? 1 : 0;
    return token;
  }

 private:
  struct Head {
    std::uint64_t key = 0;
    std::int64_t count = 0;
  };

  static std::uint64_t key(const Comparison& of) {  // FNV-1a
    std::uint64_t hash = 0xCBF2'9CE4'8422'2325;
    for (const char c : of.text + "/" + of.policy + "/" + std::to_string(of.steps))
      hash = (hash ^ static_cast<std::uint8_t>(c)) * 0x100'0000'01B3;
    return hash;
  }
  static double margin(std::span<const float> logits, std::int32_t best) {
    float second = -std::numeric_limits<float>::infinity();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      if (static_cast<std::int32_t>(i) != best) second = std::max(second, logits[i]);
    }
    return double{logits[static_cast<std::size_t>(best)]} - double{second};
  }

  std::string path_;
  bool write_;
  std::fstream file_;
  std::vector<float> row_;
};

}  // namespace parallel
