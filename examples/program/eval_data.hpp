// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "console.hpp"
#include "strict.hpp"

namespace program {

using Token = std::int32_t;

/// A text with a fact hidden in it, and the question for it.
struct Needle {
  std::string id;
  std::int32_t tokens = 0;  ///< context and question
  std::string answer;
  std::vector<Token> context;
  std::vector<Token> question;
};
inline void from_json(const nlohmann::json& line, Needle& n) {
  n.id = line.at("id").get<std::string>();
  n.tokens = strict<std::int32_t>(line.at("tokens"));
  n.answer = line.at("answer").get<std::string>();
  n.context = strict<std::vector<Token>>(line.at("context"));
  n.question = strict<std::vector<Token>>(line.at("question"));
}

/// A text to be predicted from its beginning.
struct Sample {
  std::vector<Token> ids;
  std::size_t prefill = 0;
};

namespace detail {

/// Calls f(json) for each line of a file; errors name the line.
template <class F>
void for_each_json_line(const std::string& path, F f) {
  std::istringstream in(read_file(path));
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    if (line.empty()) continue;
    try {
      f(nlohmann::json::parse(line));
    } catch (const std::exception& error) {
      throw std::runtime_error(path + " line " + std::to_string(number) + ": " + error.what());
    }
  }
}

}  // namespace detail

/// Reads prompts as JSON lines with `id, tokens, answer, context, question`.
///
/// \param tokens  only prompts of this length; 0: all
/// \param limit   maximum number; 0: all
/// \throws std::runtime_error if the file cannot be read, a line is not a prompt, or none is left
[[nodiscard]] inline std::vector<Needle> read_needles(const std::string& path,
                                                      std::int32_t tokens,
                                                      std::size_t limit) {
  std::vector<Needle> needles;
  detail::for_each_json_line(path, [&](const nlohmann::json& line) {
    auto n = line.get<Needle>();
    if (n.context.empty() || n.question.empty() || n.answer.empty()) {
      throw std::runtime_error("context, question or answer is empty");
    }
    if (const std::size_t length = n.context.size() + n.question.size();
        n.tokens < 0 || static_cast<std::size_t>(n.tokens) != length) {
      throw std::runtime_error("tokens is " + std::to_string(n.tokens) +
                               ", but context and question have " + std::to_string(length));
    }
    if ((tokens == 0 || n.tokens == tokens) && (limit == 0 || needles.size() < limit))
      needles.push_back(std::move(n));
  });
  if (needles.empty()) {
    throw std::runtime_error(path + " has no prompt" +
                             (tokens == 0 ? "" : " of " + std::to_string(tokens) + " tokens"));
  }
  return needles;
}

/// Reads samples as JSON lines with `prefill, ids`.
///
/// \param limit  maximum number; 0: all
/// \throws std::runtime_error if the file cannot be read, a line is not a sample, or there is none
[[nodiscard]] inline std::vector<Sample> read_samples(const std::string& path, std::size_t limit) {
  std::vector<Sample> samples;
  detail::for_each_json_line(path, [&](const nlohmann::json& line) {
    Sample s;
    s.ids = strict<std::vector<Token>>(line.at("ids"));
    // Signed: -1 would be a size that overflows.
    const auto prefill = strict<std::int64_t>(line.at("prefill"));
    if (prefill < 1 || prefill > static_cast<std::int64_t>(s.ids.size()) - 2) {
      throw std::runtime_error("prefill " + std::to_string(prefill) + " of " +
                               std::to_string(s.ids.size()) +
                               " ids leaves nothing to read or to predict");
    }
    s.prefill = static_cast<std::size_t>(prefill);
    if (limit == 0 || samples.size() < limit) samples.push_back(std::move(s));
  });
  if (samples.empty()) throw std::runtime_error(path + " has no sample");
  return samples;
}

/// Cuts `count` evenly spaced samples of `prefill + next` tokens out of a text: the first at its beginning, the last at its end.
/// \throws std::runtime_error if the text is too short, prefill or count is 0, or next below 2
[[nodiscard]] inline std::vector<Sample> cut_samples(std::span<const Token> text,
                                                     std::size_t prefill,
                                                     std::size_t next,
                                                     std::size_t count) {
  const std::size_t length = prefill + next;
  if (prefill < 1 || next < 2 || count < 1) {
    throw std::runtime_error(
        "--prefill must be at least 1, --next at least 2, --samples at least 1");
  }
  if (text.size() < length) {
    throw std::runtime_error("the text has " + std::to_string(text.size()) +
                             " tokens, but --prefill and --next ask for " + std::to_string(length));
  }
  std::vector<Sample> samples;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = count == 1 ? 0 : (text.size() - length) * i / (count - 1);
    const auto part = text.subspan(begin, length);
    samples.push_back({{part.begin(), part.end()}, prefill});
  }
  return samples;
}

}  // namespace program
