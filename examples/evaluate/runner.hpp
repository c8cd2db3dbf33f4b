// SPDX-License-Identifier: Apache-2.0
#pragma once

// A prompt's questions, under all policies and sizes: one prefill, and a fork for each.

#include <kvtrim/cache/paged_cache.hpp>
#include <kvtrim/core/types.hpp>
#include <kvtrim/observe/recorder.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llama_engine/gguf.hpp"
#include "llama_engine/llama.hpp"
#include "llama_engine/tokenizer.hpp"
#include "program/evictor.hpp"
#include "program/forks.hpp"
#include "program/policy_spec.hpp"
#include "suite.hpp"

namespace evaluate {

/// A policy at one size.
struct Variant {
  program::PolicySpec spec;
  std::optional<double> removed;  ///< none: the SPEC gives a budget
};

/// What all variants need to have observed.
/// \throws std::invalid_argument if a SPEC has bad values, or two do not go together
[[nodiscard]] kvtrim::Needs needs_of(std::span<const Variant> variants);

/// What a cut left.
struct Cut {
  double rows_before = 0, rows = 0;  ///< mean over layers and KV heads
  std::int64_t bytes = 0;
};

/// An answer to a turn.
struct Answer {
  std::string output;
  double score = 0;
  bool correct = false;
};

/// The result of one variant, or of the full cache.
struct Outcome {
  const Variant* variant = nullptr;  ///< none: the full cache
  bool known = false;                ///< whether the first question was read before the cut
  Cut cut;
  std::vector<Answer> answers;  ///< of each turn
  std::vector<std::vector<std::string>>
      kept;  ///< if asked for: bits of [layer][KV head], as the results file has them
};

/// Log-probabilities of a sample's tokens.
struct Predicted {
  const Variant* variant = nullptr;
  Cut cut;
  std::vector<double> log_probability;
};

struct RunnerParams {
  std::string cache_type = "f32", filters;
  std::int32_t page_size = 16;
  std::size_t longest = 0;  ///< tokens of a prompt or sample, questions and answers included
  bool expect_full =
      false;  ///< the answer that is expected is the full cache's own, whatever it is
};

/// Runs prompts through a model.
///
/// \par Thread-safety
/// one thread, which uses all OpenMP threads
class Runner {
 public:
  /// \throws std::invalid_argument if a policy needs what the model or the parameters do not give
  Runner(const engine::GgufFile& file,
         const engine::Tokenizer& tokenizer,
         std::span<const Variant> variants,
         const RunnerParams& params);

  [[nodiscard]] const engine::LlamaModel& model() const noexcept { return model_; }

  /// What is still to be done for a prompt: the known question, or the later one.
  using Missing = std::function<bool(const Variant&, bool known)>;
  using Report = std::function<void(const Outcome&)>;

  /// Asks the full cache first; if it answers all turns, all variants that are missing, with the question read after the cut, then
  /// before.
  ///
  /// \param missing  which variants to run
  /// \param kept     whether outcomes with a known question say which rows were kept
  /// \param report   gets the outcomes, the full cache's first
  /// \throws Interrupted after Ctrl-C; what was reported is complete
  void ask(const Prompt& prompt, const Missing& missing, bool kept, const Report& report);

  /// Predicts a sample's tokens after its prefill.
  ///
  /// \param missing  which variants to run
  /// \param report   gets the outcomes, the full cache's first, and whether each predicted token is long-range
  void predict(const program::Sample& sample,
               const std::function<bool(const Variant&)>& missing,
               const std::function<void(const Predicted&, const std::vector<bool>&)>& report);

 private:
  static constexpr std::size_t together = 16;  // forks at a time: more would only take memory

  Cut cut(kvtrim::SequenceId s, const Variant& variant);
  [[nodiscard]] Cut uncut(kvtrim::SequenceId s) const;
  std::vector<std::vector<std::string>> kept_rows(kvtrim::SequenceId s, std::size_t tokens);
  std::vector<std::vector<Answer>> answer(const Prompt& prompt,
                                          const program::Forks::Ids& forks,
                                          std::span<const Token> first);
  std::vector<Answer> copy(const Turn& turn,
                           std::size_t index,
                           const program::Forks::Ids& forks,
                           std::span<const Token> rest);
  void ask_variants(const Prompt& prompt,
                    kvtrim::SequenceId base,
                    std::span<const Token> first,
                    bool known,
                    const Missing& missing,
                    bool kept,
                    const Report& report);
  std::vector<bool> long_range(const program::Sample& sample, const std::vector<double>& whole);

  std::span<const Variant> variants_;
  bool expect_full_;
  const engine::Tokenizer* tokenizer_;
  engine::LlamaModel model_;
  kvtrim::PagedCache cache_;
  program::Evictor evictor_;
  program::Forks forks_;
  // With expect_full, by turn.
  std::vector<std::string> full_texts_;
  std::vector<std::vector<Token>> full_copies_;
};

/// Whether `text` has `word` with no letter or digit right beside it.
[[nodiscard]] bool has_word(const std::string& text, const std::string& word);

/// Hexadecimal digits, four positions each, the highest bit for the first.
/// \throws std::logic_error if a position is not within 0 and `tokens` - 1
[[nodiscard]] std::string bits_of(std::span<const std::int32_t> positions, std::size_t tokens);

}  // namespace evaluate
