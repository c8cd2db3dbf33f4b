// SPDX-License-Identifier: Apache-2.0
#pragma once

// A suite from its first prompt to its last: what is in the results file already is not done again.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program/console.hpp"
#include "results.hpp"
#include "runner.hpp"
#include "suite.hpp"

namespace evaluate {

/// Positions that the longest prompt or sample of a suite takes.
[[nodiscard]] std::size_t longest(const Suite& suite);

/// Runs a suite.
class Session {
 public:
  /// All must outlive it.
  Session(const Suite& suite,
          const Generator& generator,
          const engine::Tokenizer& tokenizer,
          std::span<const Variant> variants,
          Runner& runner,
          Results& results);

  /// \throws Interrupted after Ctrl-C: the results so far are in the file
  void run();

 private:
  void run_task(std::string_view task, const Size& size);
  void run_samples(const Size& size);
  /// \returns whether the full cache answers the prompt
  bool run_prompt(const Prompt& prompt, bool picture);
  [[nodiscard]] bool missing(const Prompt& prompt,
                             const Variant& v,
                             bool known,
                             bool picture) const;
  [[nodiscard]] bool pictured(const Variant& v) const;
  void write(const Prompt& prompt, const Outcome& outcome, bool picture);
  void write_tokens(const Prompt& prompt);
  void add(const Json& line) {
    if (!results_->has(line)) results_->add(line);
  }
  void show(const std::string& what);
  void say(const std::string& line);

  const Suite* suite_;
  const Generator* generator_;
  const engine::Tokenizer* tokenizer_;
  std::span<const Variant> variants_;
  Runner* runner_;
  Results* results_;
  std::map<std::string, bool>
      full_;  // prompts that the full cache was asked, and whether it answered every turn
  std::size_t pictures_ = 0;
  program::Progress progress_;
  program::Stopwatch watch_;
  double total_ = 0, done_ = 0,
         worked_ = 0;  // tokens of prompts; worked_: not those that were in the file
};

/// The tables at the end.
void print_tables(const Results& results, const Suite& suite);

}  // namespace evaluate
